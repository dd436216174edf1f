"""Run ``explain``: pictures, tables and a page of what predictions rest on."""

import argparse
import csv
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pyg_dynbatch.core.errors import OneLineArguments, mismatch
from pyg_dynbatch.core.files import refuse_overwriting, whole_file
from pyg_dynbatch.featurizers import MoleculeError, RawMolecule, parse_mol_block
from pyg_dynbatch.featurizers.molecule_drawing import atom_labels, draw_attributions, write_picture
from pyg_dynbatch.training.molecule_explain import Explanation, explain
from pyg_dynbatch.training.molecule_html import Card, HtmlReport
from pyg_dynbatch.training.molecule_predict import add_input, read_input
from pyg_dynbatch.training.molecule_predictor import MoleculePredictor
from pyg_dynbatch.training.molecule_stream import named_columns

REPORT, ATOMS, PAIRS = "report.html", "atoms.csv", "pairs.csv"

_METHODS = ("leave_one_out", "gradient")
_ATOM_COLUMNS = ("atom", "element", "leave_one_out", "gradient")
_PAIR_COLUMNS = ("first", "second", "bonds", "gradient")


def _parser() -> argparse.ArgumentParser:
    parser = OneLineArguments(
        "pyg-dynbatch explain",
        "Say which atoms and pairs of atoms predictions rest on: pictures, tables, and one page "
        "with all of it. Numbers are in the units of the property, log-odds for classes.",
    )
    add = parser.add_argument
    add("--checkpoint", nargs="+", required=True, metavar="CKPT", help="several are averaged")
    add_input(parser, required=False)
    add("--smiles", nargs="+", metavar="SMILES", help="molecules, instead of --input")
    add("--output", required=True, metavar="FOLDER", help="where pictures, tables and page go")
    add("--task", metavar="NAME", help="the property (default: the first)")
    add("--label", type=int, default=1, help="the class, of several (default: 1)")
    add("--method", choices=_METHODS, default=_METHODS[0], help="what colours the atoms")
    add("--pairs", type=int, default=5, metavar="N", help="strongest pairs to draw (default: 5)")
    add("--picture", choices=("svg", "png"), default="svg", help="kind of the pictures")
    add("--most", type=int, default=100, metavar="N", help="records to explain (default: 100)")
    add("--max-atoms", type=int, metavar="N", help="larger molecules are bad (default: as trained)")
    add("--device", default="cpu", help="cpu, cuda, ... (default: cpu)")
    return parser


def run_explain(argv: list[str]) -> int:
    """Runs ``explain``.

    Args:
        argv: The options.

    Returns:
        The exit code, 0.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a checkpoint, the input or an option cannot be used, or no record is a
            molecule.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if (options.input is None) == (options.smiles is None):
        parser.error("the following arguments are required: --input or --smiles, not both")
    if options.most < 1 or options.pairs < 0:
        parser.error("expected 1 or more for --most and 0 or more for --pairs")
    written = [Path(options.output, name) for name in ("", REPORT, ATOMS, PAIRS)]
    refuse_overwriting("explain", written, [options.input, *options.checkpoint])
    predictor = MoleculePredictor(options.checkpoint, options.device, max_atoms=options.max_atoms)
    records = _given(options.smiles) if options.smiles else read_input(options)
    writer = _Writer(predictor, options)
    explained, bad = writer.run(islice(records, options.most))
    left = next(iter(records), None)
    if not explained:
        raise ValueError(
            mismatch(
                "explain: no record is a molecule",
                expected="one molecule or more",
                got=f"{len(bad):,} bad records, the first {bad[0]}" if bad else "no records",
                where=options.input or "--smiles",
            )
        )
    print(f"explained {explained:,} molecules, {len(bad):,} bad records")
    if left is not None:
        print(f"stopped after {options.most:,} records; --most N explains more")
    for what, name in (("report", REPORT), ("atoms", ATOMS), ("pairs", PAIRS)):
        print(f"{f'{what}:':<9} {Path(options.output) / name}")
    return 0


def _given(texts: list[str]) -> Iterator[RawMolecule]:
    for number, text in enumerate(texts):
        yield RawMolecule(number, f"--smiles {number + 1}", smiles=text)


class _Writer:
    """Explains records one by one and writes what is found."""

    def __init__(self, predictor: MoleculePredictor, options: argparse.Namespace) -> None:
        self.predictor = predictor
        self.options = options
        self.featurizer = predictor.featurizer
        self.folder = Path(options.output)
        self.task = options.task or predictor.schema.task_names[0]
        self.bad: list[str] = []
        self.explained = 0

    def run(self, records: Iterable[RawMolecule]) -> tuple[int, list[str]]:
        """Explains all records.

        Args:
            records: The records.

        Returns:
            How many were explained, and what was wrong with the others.
        """
        prepared = map(self._prepared, records)
        leading = []
        for item in prepared:
            leading.append(item)
            if not isinstance(item[1], MoleculeError):
                break
        else:  # nothing to write
            return 0, [f"{record.where}: {error.reason}" for record, error in leading]
        with ExitStack() as stack:
            opened = {
                name: stack.enter_context(
                    whole_file(self.folder / name, newline="", encoding="utf-8")
                )
                for name in (REPORT, ATOMS, PAIRS)
            }
            atoms, pairs = csv.writer(opened[ATOMS]), csv.writer(opened[PAIRS])
            atoms.writerow(["row", *_ATOM_COLUMNS])
            pairs.writerow(["row", *_PAIR_COLUMNS])
            report = HtmlReport(opened[REPORT], self.task, self._facts(), _ATOM_COLUMNS)
            for record, given in chain(leading, prepared):
                report.add(self._one(record, given, atoms, pairs))
            report.finish()
        return self.explained, self.bad

    def _facts(self) -> list[tuple[str, str]]:
        schema = self.predictor.schema
        unit = "log-odds" if schema.kind != "regression" else "units of the property"
        colour = "the prediction loses without the atom"
        if self.options.method == "gradient":
            colour = "the gradient times the features of the atom gives"
        return [
            ("checkpoints", ", ".join(map(str, self.options.checkpoint))),
            ("colour of an atom", f"what {colour}, in {unit}"),
            ("lines", "gradient times features of the strongest pairs of atoms"),
        ]

    def _prepared(self, record: RawMolecule) -> tuple[RawMolecule, Any]:
        """Gives the record with its molecule, for pictures and for the model, or what is wrong."""
        try:
            given = parse_mol_block(record.block or "") if record.smiles is None else record.smiles
            return record, (self.featurizer.prepare(given), self.featurizer(given))
        except MoleculeError as error:
            return record, error

    def _one(self, record: RawMolecule, given: Any, atoms: Any, pairs: Any) -> Card:
        title = record.name or f"row {record.row}"
        if isinstance(given, MoleculeError):
            self.bad.append(f"{record.where}: {given.reason}")
            return Card(title, record.smiles or "", problem=given.reason)
        mol, molecule = given
        found = explain(self.predictor, molecule, self.task, self.options.label)
        labels = atom_labels(mol)
        rows = [
            (str(atom), element, f"{found.leave_one_out[i]:.6g}", f"{found.gradient[i]:.6g}")
            for i, (atom, element) in enumerate(labels)
        ]
        atoms.writerows([record.row, *row] for row in rows)
        ends = found.pair_index.T.tolist()
        bonds = found.pair_bonds.tolist()
        for (first, second), far, value in zip(ends, bonds, found.pair_gradient, strict=True):
            places = [labels[first][0], labels[second][0]]
            pairs.writerow([record.row, *places, far, f"{value:.6g}"])
        self.explained += 1
        picture = self._draw(record, mol, found)
        return Card(title, record.smiles or "", picture, self._predictions(molecule), rows)

    def _draw(self, record: RawMolecule, mol: Any, found: Explanation) -> str:
        values = found.gradient if self.options.method == "gradient" else found.leave_one_out
        shown = found.strongest_pairs(self.options.pairs)
        of = "" if self.predictor.schema.kind == "regression" else "log-odds of "
        caption = f"{of}{self.task}: {found.value:.4g}"
        for kind in {"svg", self.options.picture}:
            content = draw_attributions(mol, values, shown, caption=caption, format=kind)
            if kind == self.options.picture:
                write_picture(self.folder / f"row_{record.row:06d}.{kind}", content)
            if kind == "svg":
                page = content.decode()
        return page

    def _predictions(self, molecule: Any) -> list[tuple[str, str]]:
        found = self.predictor.predict([molecule])
        values = torch.from_numpy(found.values)
        deviation = None if found.deviation is None else torch.from_numpy(found.deviation)
        named = named_columns(values, deviation, self.predictor.schema)
        return [(name, f"{np.asarray(column[0]).item():.4g}") for name, column in named]
