"""A run with batching and one without have the same losses."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench, fidelity, trees
from benchmarks.fidelity import agreement, rounding

SMALL = ["--steps", "3", "--batch", "4", "--units", "6", "--trees", "10"]


@pytest.mark.long
def test_losses_agree_in_all_modes_and_precisions(run, capsys):
    records = run(fidelity, *SMALL, "--modes", "fused", "generic", "engine")
    printed = capsys.readouterr().out
    assert "DO NOT AGREE" not in printed
    assert printed.count(" agree, ") == 6
    losses = [r for r in records if r["phase"] == "loss"]
    assert len(losses) == 2 * 3 * 3
    assert all(r["difference"] < 1e-12 for r in losses if r["case"] == "float64")
    assert all(r["difference"] < 1e-5 for r in losses if r["case"] == "float32")
    summaries = [r for r in records if r["phase"] == "summary"]
    assert all(r["parameter_difference"] < 1e-10 for r in summaries if r["case"] == "float64")
    # The model learns: a comparison of constants would prove nothing.
    fused = [r["loss"] for r in losses if (r["case"], r["mode"]) == ("float64", "fused")]
    assert len(set(fused)) == 3


def test_a_wrong_gradient_is_seen(run, monkeypatch, capsys):
    right = fidelity.Training.backward

    def slightly_wrong(self: fidelity.Training, *given: Any) -> float:
        loss = right(self, *given)
        if self.mode != fidelity.REFERENCE:
            self.model.classifier.bias.grad.mul_(1 + 1e-6)
        return loss

    monkeypatch.setattr(fidelity.Training, "backward", slightly_wrong)
    records = run(fidelity, *SMALL, "--dtypes", "float64", code=1)
    assert "fused and one by one DO NOT AGREE" in capsys.readouterr().out
    first, *others = [r["difference"] for r in records if r["phase"] == "loss"]
    assert first < 1e-12 < max(others)


def test_real_files_with_vectors(run: Any, samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unverified(root: None, split: str, vocabulary: object = "all", raw_dir: Path | None = None):
        return SST(root, split, vocabulary, raw_dir, verify=False)

    SST = trees.SST
    monkeypatch.setattr(trees, "SST", unverified)
    options = ["--raw-dir", str(samples / "sst"), "--vectors", str(samples / "glove.txt")]
    records = run(fidelity, *SMALL, *options, "--dtypes", "float64")
    assert {r["data"] for r in records} == {"sst"}
    assert {r["vectors"] for r in records} == {"glove.txt"}
    assert records[-1]["difference"] < 1e-12


def test_float32_alone_has_no_yardstick(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    records = run(fidelity, *SMALL, "--dtypes", "float32")
    assert rounding(records) is None
    assert agreement(records, records[-1]) == (None, "no limit without float64")
    assert "one by one differ, " in capsys.readouterr().out


def test_float32_is_measured_by_its_own_rounding() -> None:
    def loss(case: str, reference: float) -> dict:
        return {"phase": "loss", "case": case, "step": 1, "reference_loss": reference}

    records = [loss("float64", 100.0), loss("float32", 100.01)]
    assert rounding(records) == pytest.approx(1e-4)
    assert agreement(records, {"case": "float32", "difference": 9e-4})[0]
    assert not agreement(records, {"case": "float32", "difference": 2e-3})[0]


def test_vectors_need_trees_with_words() -> None:
    with pytest.raises(ValueError, match="word vectors for random trees") as caught:
        bench.main(fidelity, [*SMALL, "--vectors", "glove.txt"])
    assert "--raw-dir with trees of words" in str(caught.value)
