"""The case of JSON documents: its page and its example run on small data."""

import gzip
import json
import runpy
import sys

import pytest

from tests.test_docs import ROOT, fenced


def test_the_code_on_the_page_runs(capsys: pytest.CaptureFixture) -> None:
    text = (ROOT / "docs" / "cases" / "json.md").read_text(encoding="utf-8")
    namespace: dict[str, object] = {}
    for block in fenced(text, "python"):
        exec(compile(block, "json.md", "exec"), namespace)
    shown = capsys.readouterr().out.strip()
    assert shown.startswith("4 documents\n") and f"```\n{shown}\n```" in text


@pytest.mark.parametrize("name", ["mutagenesis", pytest.param("recipes", marks=pytest.mark.long)])
def test_the_example_runs_on_small_data(name, samples, tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    lines = (samples / "documents.jsonl").read_text(encoding="utf-8").splitlines()
    label = {"mutagenesis": "mutagenic", "recipes": "cuisine"}[name]
    documents = [{"id": n, **json.loads(line)} for n, line in enumerate(lines * 2)]
    documents = [{**one, label: one["kind"]} for one in documents]
    if name == "recipes":
        text, file = "\n".join(map(json.dumps, documents)), "recipes.jsonl.gz"
    else:
        text, file = json.dumps(documents), "mutagenesis.json.gz"
    (tmp_path / file).write_bytes(gzip.compress(text.encode()))
    figure = tmp_path / "figure.svg"
    words = [name, "--folder", str(tmp_path), "--seeds", "1", "--epochs", "2"]
    monkeypatch.setattr(sys, "argv", ["json_documents.py", *words, "--figure", str(figure)])
    runpy.run_path(str(ROOT / "examples" / "cases" / "json_documents.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "inferred network: accuracy 1.000" in shown and "bag of paths: accuracy 1.000" in shown
    assert "<svg" in figure.read_text(encoding="utf-8")
