"""Law: what a user calls leaves the process as it was: filters, options, random state, dtype.

The calls are those for trees and for molecules; RDKit's log and options belong to the process.
"""

import csv
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rdkit import Chem, rdBase

from pyg_dynbatch.data import MoleculeFeaturizer, MorganCounts, read_molecules
from pyg_dynbatch.datasets import MoleculeFile
from pyg_dynbatch.loader import DataLoader, MoleculeLoader
from pyg_dynbatch.models import MoleculeModel, TreeClassifier, TreeSchema, load, predict
from tests.molecules.molecules import DESCRIBED, molecule_csv, opened, trained
from tests.training.helpers import SIZES, listops, tree_files

TEXTS = ["(2 (0 good) (1 fun))", "(0 good", "(1 bad)"]
# The last ones are no molecules: RDKit would print why.
SMILES = ["CCO", "c1ccccc1C(F)=CF", "C(", "c1cccc1"]


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
        "cells": csv.field_size_limit(),
        "rdkit log": rdBase.LogStatus(),
        "rdkit logger": (logging.getLogger("rdkit").level, logging.getLogger("rdkit").handlers[:]),
        "rdkit stereo": (
            Chem.GetUseLegacyStereoPerception(),
            Chem.GetAllowNontetrahedralChirality(),
        ),
        "rdkit pickles": int(Chem.GetDefaultPickleProperties()),
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


def loads_molecules(folder: Path) -> None:
    load(folder / "seed1" / "last.ckpt", MoleculeModel)


def predicts_molecules(folder: Path) -> None:
    models = [opened(folder), opened(folder)]
    faults = predict(models, SMILES, batch_size=2)["fault"].tolist()
    assert [bool(fault) for fault in faults] == [False, False, True, True]


def predicts_a_file_of_molecules(folder: Path) -> None:
    predict(opened(folder), folder / "regression.csv")


def reads_molecules(folder: Path) -> None:
    assert len(list(read_molecules(folder / "regression.csv", target_columns=["first"]))) == 32


def reads_molecules_of_an_sdf_file(folder: Path) -> None:
    assert len(list(read_molecules(folder / "mine.sdf"))) == 2


def leaves_a_file_of_molecules_half_read(folder: Path) -> None:
    for name in ("regression.csv", "mine.sdf"):
        records = read_molecules(folder / name)
        before = state_of_the_process()
        next(records)
        assert state_of_the_process() == before


def opens_files_of_molecules(folder: Path) -> None:
    featurizers = [
        MoleculeFeaturizer(fragments="largest", standardize=["neutral", "tautomer"]),
        DESCRIBED,
        MoleculeFeaturizer(descriptors=MorganCounts()),
    ]
    for number, featurizer in enumerate(featurizers):
        root = folder / f"processed{number}" if number else None
        path = folder / "broken.csv"
        dataset = MoleculeFile(path, root, featurizer, ["y"], bad="skip")
        assert (len(dataset), len(dataset.errors)) == (2, 2)


def passes_over_molecules_with_its_own_generator(folder: Path) -> None:
    dataset = MoleculeFile(folder / "regression.csv", target_columns=["first", "second"])
    for shuffle in (True, False):
        loader = MoleculeLoader(
            dataset, dataset.pair_table, 5, shuffle, pair_set=2, generator=torch.Generator()
        )
        assert len(list(loader)) > 1


CALLS: list[Callable[[Path], None]] = [
    loads,
    predicts,
    reads_a_file,
    opens_data_sets,
    passes_with_its_own_generator,
    saves,
    loads_molecules,
    predicts_molecules,
    predicts_a_file_of_molecules,
    reads_molecules,
    reads_molecules_of_an_sdf_file,
    leaves_a_file_of_molecules_half_read,
    opens_files_of_molecules,
    passes_over_molecules_with_its_own_generator,
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model().save("a.ckpt")
    trained(tmp_path)
    molecule_csv(tmp_path)
    cells = [f"{smiles},{number}" for number, smiles in enumerate(SMILES)]
    Path("broken.csv").write_text("\n".join(["smiles,y", *cells]) + "\n")
    blocks = [Chem.MolToMolBlock(Chem.MolFromSmiles(smiles)) for smiles in SMILES[:2]]
    Path("mine.sdf").write_text("".join(f"{block}$$$$\n" for block in blocks))
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


def test_failed_calls_for_molecules_leave_it_too(folder: Path) -> None:
    known = opened(folder).train()
    before = state_of_the_process()
    with pytest.raises(ValueError, match=r"(?s)row 2 cannot be used.*broken\.csv:4"):
        MoleculeFile(folder / "broken.csv", target_columns=["y"])
    with pytest.raises(ValueError, match="none"):
        list(read_molecules(folder / "regression.csv", target_columns=["none"]))
    with pytest.raises(FileNotFoundError, match="no such file"):
        predict(known, folder / "nothing.csv")
    assert state_of_the_process() == before
    assert known.training
