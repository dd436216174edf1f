"""Vectors of single words from a sentence encoder; the encoder itself is stood in for."""

import sys
import types
from pathlib import Path

import pytest
import torch

from pyg_dynbatch.data import Vocabulary, sentence_vectors
from pyg_dynbatch.trees.vectors import DEFAULT_MODEL, find_model


class Encoder:
    """Gives each text the numbers of its first two characters, at length one."""

    seen: list[str] = []

    def __init__(self, model: str, device: str) -> None:
        self.model = model

    def encode(self, texts: list[str], **options: object) -> torch.Tensor:
        Encoder.seen += texts
        rows = [[float(ord(text[0])), float(ord(text[-1]))] for text in texts]
        return torch.nn.functional.normalize(torch.tensor(rows), dim=1)


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> type[Encoder]:
    module = types.ModuleType("sentence_transformers")
    module.SentenceTransformer = Encoder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    monkeypatch.setattr(Encoder, "seen", [])
    return Encoder


def test_every_word_gets_its_scaled_vector(encoder: type[Encoder], capsys) -> None:
    vocabulary = Vocabulary(["-LRB-", "film", "1\\/2"])
    vectors = sentence_vectors(vocabulary, "some/model", scale=6.0, batch_size=2)
    assert encoder.seen == ["(", "film", "1/2"]
    torch.testing.assert_close(vectors.matrix[1:].norm(dim=1), torch.full((3,), 6.0))
    torch.testing.assert_close(vectors.matrix[0], vectors.matrix[1:].mean(dim=0))
    assert vectors.found.tolist() == [False, True, True, True]
    assert not vectors.matrix.is_inference()
    assert capsys.readouterr() == ("", "encoding with some/model: 3 of 3 words in 0 s\n")


def test_the_cache_saves_the_encoder(
    encoder: type[Encoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache.pt"
    first = sentence_vectors(Vocabulary(["a", "b"]), "m/x", cache=cache)
    second = sentence_vectors(Vocabulary(["c", "b"]), "m/x", cache=cache)
    assert encoder.seen == ["a", "b", "c"]
    assert torch.equal(second.matrix[2], first.matrix[2])
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    third = sentence_vectors(Vocabulary(["c", "a"]), "m/x", cache=cache, scale=2.0)
    assert torch.equal(third.matrix[2], 2.0 * first.matrix[1])
    with pytest.raises(ImportError) as caught:
        sentence_vectors(Vocabulary(["new"]), "m/x", cache=cache)
    assert "the package sentence-transformers is missing" in str(caught.value)
    assert "pip install 'pyg_dynbatch[sentence]'" in str(caught.value)


def test_a_cache_of_another_model_is_refused(encoder: type[Encoder], tmp_path: Path) -> None:
    cache = tmp_path / "cache.pt"
    sentence_vectors(Vocabulary(["a"]), "m/x", cache=cache)
    with pytest.raises(ValueError, match=r"made with another model[\s\S]*m/y[\s\S]*m/x"):
        sentence_vectors(Vocabulary(["a"]), "m/y", cache=cache)


def test_a_damaged_cache_is_refused(tmp_path: Path) -> None:
    cache = tmp_path / "cache.pt"
    cache.write_bytes(b"half")
    with pytest.raises(ValueError, match="sentence_vectors: the file cannot be read"):
        sentence_vectors(Vocabulary(["a"]), cache=cache)


def test_finds_models_in_folders_and_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "carries_model" / "model"
    model.mkdir(parents=True)
    (model / "modules.json").write_text("[]")
    (model.parent / "__init__.py").write_text("")
    assert find_model(str(model)) == find_model(str(model.parent)) == str(model)
    monkeypatch.syspath_prepend(tmp_path)
    assert find_model("carries-model") == str(model)
    assert find_model("owner/name") == "owner/name"
    assert find_model("no-such-package") == "no-such-package"


def test_a_folder_without_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("")
    with pytest.raises(ValueError, match=r"holds no sentence-transformers model[\s\S]*readme.txt"):
        find_model(str(tmp_path))


def test_the_packaged_model() -> None:
    pytest.importorskip("sentence_transformers")
    if find_model(DEFAULT_MODEL) == DEFAULT_MODEL:
        pytest.skip(f"the package {DEFAULT_MODEL} is not installed")
    vectors = sentence_vectors(Vocabulary(["good", "great", "table"]))
    assert vectors.width == 384
    good, great, table = vectors.matrix[1:]
    assert float(good @ great) > float(good @ table)
