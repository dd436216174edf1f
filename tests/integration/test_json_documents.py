"""The case of JSON documents: its page and its example run on small data."""

import gzip
import importlib
import json
import runpy
import sys
from typing import Any

import pytest

from tests.test_docs import ROOT, fenced

CASES = ROOT / "examples" / "cases"


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
    words = [name, "--folder", str(tmp_path), "--seeds", "1", "--epochs", "4"]
    words += ["--models", "linear", "--json", str(tmp_path / "rows.json")]
    monkeypatch.setattr(sys, "argv", ["json_documents.py", *words, "--figure", str(figure)])
    monkeypatch.syspath_prepend(str(CASES))
    runpy.run_path(str(CASES / "json_documents.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "inferred network: accuracy 1.000" in shown and "linear: accuracy 1.000" in shown
    assert "<svg" in figure.read_text(encoding="utf-8")
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert set(rows) == {"inferred network", "linear"} and rows["linear"]["accuracy"] == [1.0]


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(CASES))
    return importlib.import_module("json_policies")


ALLOWED = {"Effect": "Allow", "Principal": "*", "Action": ["s3:Get*"], "Resource": ["*"]}


@pytest.mark.parametrize(
    ("changes", "public"),
    [
        ([{}], True),
        ([{"Principal": {"AWS": ["x", "*"]}}], True),
        ([{"Principal": {"Service": "*"}}], False),
        ([{"Action": ["s3:PutObject"]}], False),
        ([{"Resource": ["arn:aws:s3:::logs/*"]}], False),
        ([{"Condition": {"Bool": {"aws:SecureTransport": "true"}}}], False),
        ([{}, {"Effect": "Deny"}], False),
        ([{}, {"Effect": "Deny", "Condition": {}}], True),
        ([{"Effect": "Deny"}], False),
    ],
)
def test_policies_are_evaluated_by_the_rule(policies: Any, changes: Any, public: bool) -> None:
    statements = [ALLOWED | change for change in changes]
    assert policies.is_public({"Statement": statements}) == public


def test_half_of_the_policies_are_public(policies: Any) -> None:
    drawn = policies.draw_policies(20, 0)
    assert drawn == policies.draw_policies(20, 0) != policies.draw_policies(20, 1)
    assert [each["public"] for each in drawn] == [policies.is_public(each) for each in drawn]
    assert sum(each["public"] for each in drawn) == 10
