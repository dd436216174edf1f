"""Files of JSON documents: what is read, split, kept from the model, and refused."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from pyg_dynbatch.documents.predict import read_documents
from pyg_dynbatch.lightning import DocumentFileData, DocumentPrediction
from pyg_dynbatch.models import DocumentPredictor
from tests.core.helpers import message

DOCUMENTS = [{"y": "ab"[n % 2], "x": n + 0.5, "in": {"y": n}} for n in range(20)]


def written(path: Path, documents: list[Any]) -> str:
    text = "\n".join(map(json.dumps, documents))
    if ".json." in f"{path.name}.":
        text = json.dumps(documents, indent=1)
    (
        path.write_bytes(gzip.compress(text.encode()))
        if path.suffix == ".gz"
        else path.write_text(text)
    )
    return str(path)


def data(path: Path, **options: Any) -> DocumentFileData:
    return DocumentFileData(str(path), "y", **options)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "a.txt"])
def test_every_form_holds_the_same_documents(tmp_path: Path, name: str) -> None:
    found = data(Path(written(tmp_path / name, DOCUMENTS))).documents
    assert {split: len(pairs) for split, pairs in found.items()} == {
        "val": 2,
        "test": 2,
        "train": 16,
    }
    everything = [document for pairs in found.values() for _, document in pairs]
    assert sorted(everything, key=lambda document: document["x"]) == DOCUMENTS


def test_places_name_the_line_or_the_element(tmp_path: Path) -> None:
    lines = data(Path(written(tmp_path / "a.jsonl", DOCUMENTS))).documents["train"]
    array = data(Path(written(tmp_path / "a.json", DOCUMENTS))).documents["train"]
    for place, document in lines:
        assert place == f"{tmp_path / 'a.jsonl'}:{DOCUMENTS.index(document) + 1}"
    for place, document in array:
        assert place == f"{tmp_path / 'a.json'}, $[{DOCUMENTS.index(document)}]"


def test_the_split_is_drawn_by_its_seed(tmp_path: Path) -> None:
    path = Path(written(tmp_path / "a.jsonl", DOCUMENTS))
    first, same, other = (data(path, split_seed=seed).documents for seed in (0, 0, 1))
    assert first == same != other
    given = data(path, test_file=str(path), val_share=0.5).documents
    assert (len(given["train"]), len(given["val"])) == (10, 10)
    assert [document for _, document in given["test"]] == DOCUMENTS


def test_the_label_is_in_no_input(tmp_path: Path) -> None:
    found = data(Path(written(tmp_path / "a.jsonl", DOCUMENTS)), overrides={"$.y": "categories"})
    nodes = found.schema["documents"]["nodes"]
    assert nodes["$.y"]["ignored"] and nodes["$.y"]["kinds"] == {}
    assert not nodes["$.in.y"]["ignored"]  # another key of this name
    assert found.schema["classes"] == ["a", "b"]


def test_classes_keep_their_kinds(tmp_path: Path) -> None:
    labels = [True, "yes", 1, 1.0, "one", 10, 2] * 3
    documents = [{"y": label, "x": n} for n, label in enumerate(labels)]
    found = data(Path(written(tmp_path / "a.jsonl", documents))).schema["classes"]
    assert found == [True, 1, 2, 10, "one", "yes"] and found[0] is True


BAD_FILES = [
    ('{"y": 1}\n{"y": 2', ["a.jsonl:2:", "delimiter"]),
    ('{"y": 1}\n\n{"y": 1, "x": NaN}', ["a.jsonl:3", "NaN"]),
    ('{"y": 1, "x": -1e999}', ["a.jsonl:1", "-1e999", "finite"]),
    ('{"y": 1, "x": ' + "9" * 5000 + "}", ["a.jsonl:1", "999", "1e+150"]),
    ("[" * 9000 + "]" * 9000, ["a.jsonl:1", "at most 4,000 levels of nesting"]),
    ('{"y": 1}\n{"y": 2, "x": {"}": 3, "}": 4}}', ["a.jsonl:2", "the key '}' again"]),
    ("\n \n", ["no documents"]),
    ('{"y": 1}\n{"x": 1}', ["a.jsonl:2", "$.y", "no such key", "option label"]),
    ('{"y": 1}\n{"y": null}', ["a.jsonl:2", "$.y", "null"]),
    ('{"y": 1}\n[1]', ["a.jsonl:2", "array, not an object"]),
    ('{"y": 1}\n' * 9, ["a.jsonl", "1 different labels of 9"]),
    ('{"y": 1}\n{"y": "2"}\n{"y": "1"}', ["a.jsonl:1", "a.jsonl:3", '"1"']),
    ('{"y": "true"}\n{"y": true}', ["a.jsonl:1", "a.jsonl:2", '"true"']),
    ('{"y": 1}\n{"y": "\\ud800"}', ["a.jsonl:2", "\\ud800", "in pairs"]),
    ('{"y": "\\ud83d\\ude00\\\\ud800", "\\uDC00": 1}', ["a.jsonl:1", "\\uDC00"]),
    ('{"y": 1.5}\n{"y": 2.5}\n{"y": 1}', ["3 different labels of 3"]),
]


@pytest.mark.parametrize(("text", "words"), BAD_FILES)
def test_bad_files_are_refused_with_their_line(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    found = message(ValueError, lambda: data(path, val_file=str(path), test_file=str(path)).schema)
    assert all(word in found for word in words), found


def test_an_array_that_is_no_json_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"y": 1},\n {"y": }]')
    assert "a.json:2:8" in message(ValueError, lambda: data(path).documents)


def test_half_of_a_character_in_an_array_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"y": "\\n"},\n {"y": 2,\n "x": "\\ud800x"}]')
    assert "a.json:3" in message(ValueError, lambda: data(path).documents)
    path.write_text('["\\ud83d\\ude00"]')
    assert next(read_documents(path))[1] == "\U0001f600"


def test_a_repeated_key_in_an_array_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"y": "}", "x": {}},\n {"y": 2,\n "x": [{"a\\"b": 1}],\n "y": 3}, {"y": 1}]')
    text = message(ValueError, lambda: data(path).documents)
    assert "a.json:4" in text and "the key 'y' again" in text


def test_four_thousand_levels_are_parsed_wherever_the_reader_is_called(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"in": [' * 2000 + "1" + "]}" * 2000)

    def nested(depth: int) -> Any:
        return nested(depth - 1) if depth else next(read_documents(path))[1]

    document, depth = nested(500), 0
    while document != 1:
        document, depth = document["in"][0], depth + 2
    assert depth == 4000


def test_a_file_that_is_too_small_is_refused(tmp_path: Path) -> None:
    path = Path(written(tmp_path / "a.jsonl", DOCUMENTS[:3]))
    text = message(ValueError, lambda: data(path).documents)
    assert "left for val" in text and "val_share" in text


def test_documents_can_be_nested_a_thousand_levels(tmp_path: Path) -> None:
    text = '{"y": 1, "in": ' * 1000 + "1" + "}" * 1000
    path = tmp_path / "a.jsonl"
    path.write_text(f'{text}\n{{"y": 2}}\n' * 2)
    files = {"val_file": str(path), "test_file": str(path)}
    text = message(ValueError, lambda: data(path, **files).schema)
    assert "64 levels" in text and "a.jsonl:" in text
    nodes = data(path, **files, overrides={"$.in": "like $"}).schema["documents"]["nodes"]
    assert nodes["$.y"]["ignored"]  # at every level


BAD_DRAWS: list[tuple[dict[str, Any], str]] = [
    ({"val_share": -0.5}, "val_share is out of range"),
    ({"test_share": math.nan}, "test_share is out of range"),
    ({"val_share": 0.5, "test_share": 0.5}, "in sum below 1"),
    ({"split_seed": -1}, "split_seed is too small"),
]


@pytest.mark.parametrize(("options", "text"), BAD_DRAWS)
def test_draws_that_leave_no_split_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DocumentFileData("all.jsonl", "y", **options)


@pytest.mark.parametrize("numbers", [("0.1", "0.1"), ("1e-300", "2e-300")])
def test_numbers_that_hardly_differ_are_refused(tmp_path: Path, numbers: tuple[str, str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{{"y": {}}}\n{{"y": {}}}\n'.format(*numbers) * 9, encoding="utf-8")
    with pytest.raises(ValueError, match=r"nothing to learn[\s\S]*{} to {},".format(*numbers)):
        assert DocumentFileData(str(path), "y", overrides={"$.y": "number"}).schema


@pytest.mark.long
def test_documents_of_four_thousand_levels_are_trained(tmp_path: Path) -> None:
    lines = [f'{{"y": {n % 2}, "in": {"[" * 3999}{n}.5{"]" * 3999}}}' for n in range(4)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    files = {"val_file": str(path), "test_file": str(path)}
    found = data(path, **files, overrides={"$.in[]": "like $.in"})
    task = DocumentPrediction(found.schema, width=4)
    trainer = Trainer(accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, logger=False)
    trainer.fit(task, found)
    (saved,) = tmp_path.glob("**/*.ckpt")
    documents = [document for _, document in found.documents["train"]]
    assert len(DocumentPredictor([saved]).predict(documents)["prediction"]) == 4
