"""The script for a machine with a GPU: what it refuses, writes, and does with parts that fail."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import BEGIN, END, Part

TINY = ["--tiny", "--device", "cpu"]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page of results in the place of the real one."""
    page = tmp_path / "RESULTS.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(gpu, "RESULTS", page)
    return page


def parts_of(file: Path) -> list[dict[str, Any]]:
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["machine"]["device"] == "cpu"
    parts: list[dict[str, Any]] = content["parts"]
    return parts


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_figures_of_a_gpu_come_from_a_gpu(device: str, results: Path, tmp_path: Path) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    before = results.read_text(encoding="utf-8")
    file = tmp_path / "gpu.json"
    with pytest.raises(SystemExit, match=r"expected: c[\s\S]*got:"):
        gpu.main(["--device", device, "--json", str(file)])
    assert results.read_text(encoding="utf-8") == before and not file.exists()


def test_results_are_written_between_the_marks(results: Path, tmp_path: Path) -> None:
    for text in ("one", "another"):
        gpu._write_results(text, results)
        found = results.read_text(encoding="utf-8")
        assert found == f"before\n{BEGIN}\n\n{text}\n\n{END}\nafter\n"
    other = tmp_path / "other.md"
    other.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match=r"no place for those of a GPU[\s\S]*other\.md"):
        gpu._write_results("text", other)


def test_the_page_of_results_has_the_marks() -> None:
    page = gpu.RESULTS.read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1


def test_parts_that_do_not_end(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Part("wrong", "no_such_benchmark", 60, "", "")
    monkeypatch.setattr(gpu, "PARTS", (Part("slow", "gates", 0.01, "", ""), wrong))
    file = tmp_path / "gpu.json"
    assert gpu.main([*TINY, "--json", str(file)]) == 1
    slow, failed = parts_of(file)
    assert slow["outcome"] == "stopped after 0 s" and not slow["records"]
    assert failed["outcome"] == "failed with exit status 1"
    assert "no_such_benchmark" in failed["output"]
    assert gpu.main([*TINY, "--json", str(file), "--seconds", "0"]) == 1
    assert {part["outcome"] for part in parts_of(file)} == {"not begun, the time was used up"}


def test_all_limits_together_are_within_the_whole() -> None:
    # What is left is for parts that come close to theirs, so a little more is allowed.
    assert sum(part.seconds for part in gpu.PARTS) < 1.2 * gpu.SECONDS


@pytest.mark.long
def test_tiny_sizes_on_any_machine(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = results.read_text(encoding="utf-8")
    file = tmp_path / "gpu.json"
    assert gpu.main([*TINY, "--json", str(file)]) == 0
    parts = parts_of(file)
    assert [part["part"] for part in parts] == [part.name for part in gpu.PARTS]
    assert all(part["records"] for part in parts if part["part"] != "tests")
    assert results.read_text(encoding="utf-8") == before
    shown = capsys.readouterr().out
    for part in ("Table 1", "SST", "molecules", "compiled gates", "autobatch"):
        assert f"| {part} |" in shown
    assert "| fused, bfloat16 |" in shown
