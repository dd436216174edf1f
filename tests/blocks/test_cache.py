"""Traced examples in a file: read again, refused by other models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pyg_dynbatch import blocks as td
from tests.blocks.test_compiler import TREES, sentence
from tests.core.helpers import message


def test_a_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = td.Compiler(sentence())
    file = tmp_path / "deep" / "train.pt"
    first_time = td.TracedExamples(model.tracer, TREES, file)
    assert len(first_time) == 4
    monkeypatch.delattr(td.Tracer, "__call__")
    again = td.TracedExamples(td.Compiler(sentence()).tracer, TREES, str(file))
    for kept, traced in zip(again, first_time, strict=True):
        assert kept.code.dtype == traced.code.dtype == np.int32
        assert kept.code.tolist() == traced.code.tolist()
    assert torch.equal(model(list(again)).output, model(list(first_time)).output)
    assert [path.name for path in file.parent.iterdir()] == ["train.pt"]


def test_everything_in_a_recording_is_kept(tmp_path: Path) -> None:
    pair = td.AllOf(td.GetItem(0) >> td.Scalar(), td.GetItem(1))
    each = td.Map(pair >> td.Metric("m")) >> td.Void()
    other = td.Map(td.GetItem(0) >> td.Scalar("int64") >> td.Metric("n")) >> td.Void()
    read = td.Map(td.GetItem(0) >> td.InputRow("x", 2)) >> td.Sum()
    model = td.Compiler(td.AllOf(each, other, read, td.Length()) >> td.Slice(start=2))
    examples = [[(1, "a"), (2, ("b", 2.5))], [], [(3, None)], [(4, {"c": [None, True]})]]
    rows = {"x": torch.randn(12, 2)}
    expected = model(examples, rows)
    for _ in range(2):
        traced = td.TracedExamples(model.tracer, examples, tmp_path / "traced")
        found = model(list(traced), rows)
        assert all(map(torch.equal, expected.output_tensors, found.output_tensors))
        assert found.metric_labels == expected.metric_labels
        for name in ("m", "n"):
            assert torch.equal(expected.metric_tensors[name], found.metric_tensors[name])
            assert torch.equal(expected.metric_examples[name], found.metric_examples[name])
        assert len(td.TracedExamples(model.tracer, [], tmp_path / "empty")) == 0


def test_a_file_of_another_model_is_refused_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "traced"
    model, other = (td.Compiler(td.Map(td.Scalar()) >> each) for each in (td.Sum(), td.Max()))
    td.TracedExamples(model.tracer, [[1.0]], file)
    written = file.read_bytes()
    for tracer, examples in ((other.tracer, [[1.0]]), (model.tracer, [[1.0], [2.0]])):
        text = message(ValueError, td.TracedExamples, tracer, examples, file)
        assert "of another model" in text and str(file) in text and "delete it" in text
    assert file.read_bytes() == written


@pytest.mark.parametrize("content", [b"my notes", b"", "weights", "half"])
def test_a_damaged_or_foreign_file_is_an_error_that_names_it(tmp_path: Path, content: Any) -> None:
    file = tmp_path / "traced"
    model = td.Compiler(td.Map(td.Scalar()) >> td.Sum())
    if content == "weights":
        torch.save(model.state_dict(), file)
    elif content == "half":
        td.TracedExamples(model.tracer, [[1.0]], file)
        file.write_bytes(file.read_bytes()[:200])
    else:
        file.write_bytes(content)
    before = file.read_bytes()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of torch, of many kinds
        td.TracedExamples(model.tracer, [[1.0]], file)
    assert caught.value.__notes__ == [f"  where:    {file}"]
    assert file.read_bytes() == before
