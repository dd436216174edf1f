"""The example of related sentences reads both forms of the data, and learns from pairs."""

import random
import re
from pathlib import Path

import pytest
import torch

from tests.example_files import defined_in

ANIMALS = ["cats", "dogs", "birds"]
VERBS = ["see", "chase"]


def draw_pairs(count: int, seed: int) -> list[tuple[list[str], list[str], float]]:
    """Draw pairs that are more related if they have the same verb, and the same subject."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(count):
        first = [rng.choice(ANIMALS), rng.choice(VERBS), rng.choice(ANIMALS)]
        second = [rng.choice(ANIMALS), rng.choice(VERBS), rng.choice(ANIMALS)]
        score = 1.5 + 2.5 * (first[1] == second[1]) + 0.5 * (first[0] == second[0])
        pairs.append((first, second, score))
    return pairs


def write_folder(folder: Path) -> None:
    for seed, (split, count) in enumerate({"train": 150, "dev": 40, "test": 40}.items()):
        pairs = draw_pairs(count, seed)
        (folder / split).mkdir()
        for number, name in enumerate("ab"):
            # The last token stands outside the tree, as punctuation does.
            tokens = "\n".join(" ".join([*pair[number], "."]) for pair in pairs)
            (folder / split / f"{name}.toks").write_text(tokens)
            (folder / split / f"{name}.parents").write_text("\n".join(["2 0 2 -1"] * count))
        (folder / split / "sim.txt").write_text("\n".join(str(score) for *_, score in pairs))


def write_tables(folder: Path) -> None:
    for seed, name in enumerate(defined_in("sick")["SPLITS"].values()):
        lines = ["pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment"]
        for number, (first, second, score) in enumerate(draw_pairs(20, seed)):
            sentences = f'"{" ".join(first)}.\t{" ".join(second)}'
            lines.append(f"{number}\t{sentences}\t{score}\tNEUTRAL")
        (folder / name).write_text("\n".join(lines))


def test_it_learns_from_pairs_of_trees(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_folder(tmp_path)
    defined_in("sick")["main"]([str(tmp_path), "--epochs", "2", "--width", "20"])
    found = re.search(r"test pearson (\S+), spearman (\S+), mse (\S+)", capsys.readouterr().out)
    assert found is not None
    pearson, spearman, error = map(float, found.groups())
    assert pearson > 0.9 and spearman > 0.6 and error < 0.3


def test_it_reads_the_published_tables_as_chains(tmp_path: Path) -> None:
    write_tables(tmp_path)
    vectors = tmp_path / "vectors.txt"
    vectors.write_text("\n".join(f"{word} {len(word)} 1 2" for word in [*ANIMALS, *VERBS]))
    defined_in("sick")["main"]([str(tmp_path), "--epochs", "1", "--vectors", str(vectors)])


def test_both_trees_of_a_pair_are_one_example(samples: Path) -> None:
    names = defined_in("sick")
    pair, _ = names["read_folder"](samples / "sick" / "train")
    words = [word for sentence in pair.sentences for word in sentence.words]
    example = names["forest"](pair, names["Vocabulary"].from_words(words))
    # The full stop of the second sentence is in no tree.
    assert example.num_nodes == len(words) - 1 == 9
    assert example.root_index.tolist() == [2, 8]
    torch.testing.assert_close(example.target, torch.tensor([[0, 0, 0, 0.8, 0.2]]))
    torch.testing.assert_close(names["mean_grade"](example.target.log()), example.score)


def test_missing_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"SICK_train\.txt"):
        defined_in("sick")["main"]([str(tmp_path)])
