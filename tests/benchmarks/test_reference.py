"""The page of reference figures follows from its records, and runs are made once."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import reference


def test_the_page_is_written_from_the_figures() -> None:
    figures = json.loads(reference.FIGURES.read_text(encoding="utf-8"))
    text = reference.PAGE.read_text(encoding="utf-8")
    assert reference.page(text, figures) == text
    for row in reference.ROWS.values():
        assert (reference.ROOT / "docs" / row.page).is_file()
        assert (reference.ROOT / "configs" / row.config).is_file()


@pytest.mark.long
def test_a_row_is_run_once_with_every_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = " ".join(f"--data.recipe.{name} 40" for name in ("train", "val", "test"))
    small = f"{sizes} --data.root {tmp_path} --trainer.max_epochs 1"
    row = reference.ROWS["listops"]
    row = reference.Row(**{**vars(row), "options": small})
    monkeypatch.setattr(reference, "ROWS", {"listops": row})
    monkeypatch.setattr(reference, "SEEDS", (1, 2))
    options = Namespace(data=tmp_path, results=tmp_path / "runs")
    figures = reference.run("listops", options)
    assert len(figures["test"]["accuracy"]) == 2
    capfd.readouterr()
    assert reference.run("listops", options) == figures
    assert "$" not in capfd.readouterr().out
