"""Law: what a user calls leaves the process as it was: filters, options, random state, dtype."""

import logging
import os
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch

from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.models import TreeClassifier, TreeSchema, load, predict
from tests.training.helpers import SIZES, listops, tree_files

TEXTS = ["(2 (0 good) (1 fun))", "(0 good", "(1 bad)"]


def state_of_the_process() -> dict[str, Any]:
    numpy_state = np.random.get_state(legacy=False)
    return {
        "warnings": list(warnings.filters),
        "showwarning": warnings.showwarning,
        "argv": list(sys.argv),
        "path": list(sys.path),
        "hooks": (sys.excepthook, sys.displayhook),
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "recursion": sys.getrecursionlimit(),
        "python": random.getstate(),
        "numpy": str(numpy_state),
        "torch": torch.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "logging": (logging.root.level, list(logging.root.handlers)),
    }


def model() -> TreeClassifier:
    with torch.random.fork_rng(devices=[]):
        schema = tree_files(Path()).schema
        return TreeClassifier(schema, **SIZES)


def loads(folder: Path) -> None:
    load(folder / "a.ckpt")


def predicts(folder: Path) -> None:
    predict([model(), model()], TEXTS, batch_size=2)


def reads_a_file(folder: Path) -> None:
    predict(model(), folder / "test.txt", nodes=True)


def opens_data_sets(folder: Path) -> None:
    listops(folder / "listops").prepare_data()
    tree_files(folder, root=str(folder / "processed")).setup("fit")


def passes_with_its_own_generator(folder: Path) -> None:
    # Without one, torch's loaders draw a seed for workers in every pass, and so do ours.
    generator = torch.Generator()
    dataset = tree_files(folder).dataset("train")
    for shuffle in (True, False):
        loader = DataLoader(dataset, batch_size=5, shuffle=shuffle, generator=generator)
        assert len(list(loader)) > 1


def saves(folder: Path) -> None:
    model().save(folder / "b.ckpt")


CALLS: list[Callable[[Path], None]] = [
    loads,
    predicts,
    reads_a_file,
    opens_data_sets,
    passes_with_its_own_generator,
    saves,
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # These checks draw elements of lists from Python's random numbers.
    jaxtyping.config.update("jaxtyping_disable", True)
    monkeypatch.chdir(tmp_path)
    model().save("a.ckpt")
    return tmp_path


@pytest.mark.parametrize("call", CALLS)
def test_a_call_leaves_the_process_as_it_was(call: Callable[[Path], None], folder: Path) -> None:
    before = state_of_the_process()
    call(folder)
    after = state_of_the_process()
    for name, value in before.items():
        assert after[name] == value, name


def test_failed_calls_leave_it_too(folder: Path) -> None:
    (folder / "text.ckpt").write_text("none")
    other = TreeClassifier(TreeSchema(9, 5), **SIZES)
    known = model().train()
    before = state_of_the_process()
    with pytest.raises(ValueError, match="not a checkpoint"):
        load(folder / "text.ckpt")
    with pytest.raises(ValueError, match="different"):
        predict([known, other], TEXTS)
    with pytest.raises(IndexError):
        predict(known, [known.schema.entry(TEXTS[0]).data.update({"token": torch.full((3,), 99)})])
    assert state_of_the_process() == before
    assert known.training
