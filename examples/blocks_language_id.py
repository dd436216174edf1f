"""Identify the language of a sentence: from characters to words, from words to the sentence.

    python examples/blocks_language_id.py

All words of all sentences of a mini-batch are computed in parallel, whatever their length.
"""

import torch
from torch import nn

from pyg_dynbatch import blocks as td

LANGUAGES = {
    "English": "the cat sleeps on the chair|where is the next station|we would like some bread"
    "|she reads the old book|this house has three doors|I know that the water is cold"
    "|the children play in the garden|what do you think about this|he went there with his brother"
    "|they should have called before|nothing is wrong with the light|my friend works at night",
    "German": "die Katze schläft auf dem Stuhl|wo ist der nächste Bahnhof|wir möchten etwas Brot"
    "|sie liest das alte Buch|dieses Haus hat drei Türen|ich weiß dass das Wasser kalt ist"
    "|die Kinder spielen im Garten|was denkst du darüber|er ging mit seinem Bruder dorthin"
    "|sie hätten vorher anrufen sollen|mit dem Licht ist nichts|mein Freund arbeitet nachts",
    "French": "le chat dort sur la chaise|où est la prochaine gare|nous voudrions du pain"
    "|elle lit le vieux livre|cette maison a trois portes|je sais que cette eau est froide"
    "|les enfants jouent dans le jardin|que penses-tu de cela|il y est allé avec son frère"
    "|ils auraient dû appeler avant|la lumière est très bien|mon ami travaille la nuit",
    "Finnish": "kissa nukkuu tuolilla|missä on seuraava asema|haluaisimme vähän leipää"
    "|hän lukee vanhaa kirjaa|tässä talossa on kolme ovea|tiedän että vesi on kylmää"
    "|lapset leikkivät puutarhassa|mitä ajattelet tästä|hän meni sinne veljensä kanssa"
    "|heidän olisi pitänyt soittaa ennen|valossa ei ole mitään vikaa|ystäväni on yöllä töissä",
}
HELD_OUT = 3  # sentences per language that are not used for training

# Functional unit: the model and its loss.


def last_state(width_in: int, width_out: int) -> td.Block:
    """Return the last hidden state of an LSTM along a sequence."""
    lstm = td.ScopedLayer(nn.LSTMCell(width_in, width_out))
    return td.RNN(lstm) >> td.GetItem(1) >> td.GetItem(0)


def language_model(characters: int, words: int, classes: int) -> td.Block:
    """Return the loss of a sentence with its language, and the scores of all languages."""
    letter = td.InputTransform(ord) >> td.Scalar("int64") >> td.Embedding(512, characters)
    word = td.InputTransform(list) >> td.Map(letter) >> last_state(characters, words)
    sentence = td.InputTransform(str.split) >> td.Map(word) >> last_state(words, words)
    scores = sentence >> td.FC(classes, activation=None)
    loss = td.Function(lambda s, y: nn.functional.cross_entropy(s, y, reduction="none"))
    return (scores, td.Scalar("int64")) >> td.AllOf(loss, td.GetItem(0))


# End of the functional unit.


def main() -> None:
    """Train on some sentences of four languages, and predict the language of others."""
    torch.manual_seed(0)
    train = []
    test = []
    for number, text in enumerate(LANGUAGES.values()):
        said = text.split("|")
        test += [(sentence, number) for sentence in said[:HELD_OUT]]
        single = " ".join(said[HELD_OUT:]).split()  # words are short sentences
        train += [(sentence, number) for sentence in said[HELD_OUT:] + single]
    model = td.Compiler(language_model(16, 48, len(LANGUAGES)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batch = model.collate(train)
    print(f"{len(train)} sentences and words, {len(batch.steps)} batched calls")
    for _ in range(50):
        loss = model(batch).output[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        found = model(test).output[1].argmax(1).tolist()
    for (sentence, _), guess in list(zip(test, found, strict=True))[::HELD_OUT]:
        print(f"{list(LANGUAGES)[guess]}: {sentence}")
    hits = sum(guess == wanted for guess, (_, wanted) in zip(found, test, strict=True))
    print(f"loss {loss.item():.3f}, right on new sentences: {hits} of {len(test)}")


if __name__ == "__main__":
    main()
