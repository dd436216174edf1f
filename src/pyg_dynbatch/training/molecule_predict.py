"""Run ``predict`` on a file of molecules, and ``featurize``."""

import argparse
import hashlib
import sys
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

from pyg_dynbatch import __version__
from pyg_dynbatch.core.errors import OneLineArguments, mismatch
from pyg_dynbatch.core.files import refuse_overwriting
from pyg_dynbatch.datasets import FeaturizeOptions, build_store
from pyg_dynbatch.datasets.build import ERRORS
from pyg_dynbatch.datasets.store import HEADER
from pyg_dynbatch.featurizers import MoleculeFeaturizer, RawMolecule, read_molecules
from pyg_dynbatch.featurizers.molecule_files import FORMATS
from pyg_dynbatch.training.molecule_predictor import MoleculePredictor, load_property_task
from pyg_dynbatch.training.molecule_stream import (
    Columns,
    all_columns,
    column_names,
    predict_stream,
    write_stream,
)
from pyg_dynbatch.training.unfinished import Unfinished


def add_input(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Adds the options that say which molecules are read.

    Args:
        parser: Where to add them.
        required: Whether there must be an input.
    """
    add = parser.add_argument
    formats = ", ".join(sorted(set(FORMATS.values())))
    add("--input", required=required, metavar="FILE", help="CSV, TSV, SMILES or SDF; - for stdin")
    add("--format", help=f"{formats} (default: by the suffix; smi for stdin)")
    add("--smiles-column", metavar="NAME", help="column of the SMILES (default: smiles)")
    add("--name-column", metavar="NAME", help="column of the names")


def read_input(
    options: argparse.Namespace, targets: list[str] | None = None, keep_source: bool = False
) -> Iterator[RawMolecule]:
    """Opens the records that the options name.

    Args:
        options: What :func:`add_input` has read.
        targets: Columns of labels.
        keep_source: Whether records keep all their columns.

    Returns:
        The records, as a stream.
    """
    kind = options.format or ("smi" if options.input == "-" else None)
    return read_molecules(
        options.input,
        smiles_column=options.smiles_column,
        target_columns=targets,
        name_column=options.name_column,
        format=kind,
        missing=getattr(options, "missing", ()),
        keep_source=keep_source,
    )


def _predict_parser() -> argparse.ArgumentParser:
    parser = OneLineArguments(
        "pyg-dynbatch predict",
        "Predict molecules with one or several checkpoints: one row out for every record in, in "
        "the same order, behind the columns of the input; a record that is not a molecule gets an "
        "empty prediction and its reason. Killed in between, the same command goes on. A "
        "checkpoint of trees takes a file of bracketed trees, and --help lists its options.",
    )
    add = parser.add_argument
    add("--checkpoint", nargs="+", required=True, metavar="CKPT", help="several are averaged")
    add_input(parser)
    add("--output", default="-", metavar="FILE", help="CSV file; - for stdout (default)")
    add("--narrow", action="store_true", help="of the input, keep only row, name and SMILES")
    add("--dropout", type=int, default=0, metavar="N", help="passes with dropout, for a deviation")
    add("--fingerprints", metavar="FILE", help="also write fingerprints, .npy or .csv")
    add("--workers", type=int, default=0, metavar="N", help="processes that read molecules")
    add("--max-pairs", type=int, default=200_000, metavar="N", help="pairs of atoms in a batch")
    add("--max-atoms", type=int, metavar="N", help="larger molecules are bad (default: as trained)")
    add("--device", default="cpu", help="cpu, cuda, ... (default: cpu)")
    return parser


def run_molecule_predict(argv: list[str], checkpoint: Mapping[str, Any]) -> int:
    """Runs ``predict`` on a stream of molecules.

    Args:
        argv: The options.
        checkpoint: What the first checkpoint holds; empty if there is no such file.

    Returns:
        The exit code, 0.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a checkpoint or the input cannot be used, or no record is a molecule; then
            the output is written all the same.
    """
    parser = _predict_parser()
    options = parser.parse_args(argv)
    for name in ("workers", "dropout"):
        if getattr(options, name) < 0:
            parser.error(f"argument --{name}: expected 0 or more, got {getattr(options, name)}")
    if options.max_pairs < 1:
        parser.error(f"argument --max-pairs: expected 1 or more, got {options.max_pairs}")
    refuse_overwriting(
        "predict", [options.output, options.fingerprints], [options.input, *options.checkpoint]
    )
    first, *others = options.checkpoint
    predictor = MoleculePredictor(
        [load_property_task(first, checkpoint), *others],
        options.device,
        options.dropout,
        options.max_pairs,
        options.max_atoms,
    )
    predicted = column_names(predictor)
    columns, records = _with_columns(options, predicted)
    unfinished = _unfinished(options)
    done = unfinished.counts.rows
    if done:
        print(f"going on after {done:,} records", file=sys.stderr)
    wanted = options.fingerprints is not None
    rows = predict_stream(islice(records, done, None), predictor, options.workers, wanted)
    files = (options.output, options.fingerprints)
    counts = write_stream(rows, predicted, *files, columns, unfinished)
    if counts.bad == counts.rows:
        raise ValueError(
            mismatch(
                "predict: no record is a molecule that can be predicted",
                expected="one molecule or more",
                got=f"{counts.rows:,} bad records, the first {counts.reason}",
                where=options.input,
            )
        )
    said = f"predicted {counts.rows - counts.bad:,} of {counts.rows:,} records"
    more = f"; the first bad one is {counts.reason}" if counts.bad else ""
    print(f"{said}{more}", file=sys.stderr)
    for path in (options.output, options.fingerprints):
        if path not in (None, "-"):
            print(f"written: {path}", file=sys.stderr)
    return 0


def _with_columns(
    options: argparse.Namespace, predicted: list[str]
) -> tuple[Columns, Iterator[RawMolecule]]:
    """Opens the records, and finds and says what becomes of their columns."""
    records = read_input(options, keep_source=not options.narrow)
    first = next(records)
    kept = list(first.source[0])
    if first.smiles is None and not options.narrow:
        if options.input == "-":
            raise ValueError(
                mismatch(
                    "predict: the fields of an SDF are known only at its end",
                    expected="a file, which can be read twice",
                    got="standard input",
                    mend="--narrow, which leaves the fields out",
                )
            )
        every = read_input(options, keep_source=True)
        kept = list(dict.fromkeys(name for record in every for name in record.source[0]))
    own = Columns().own if first.smiles is None or not kept else ("row", "status")
    columns = all_columns(kept, own, predicted)
    for name, shown in zip(columns.kept, columns.shown, strict=True):
        if name != shown:
            print(f"the column {name!r} of the input is written as {shown!r}", file=sys.stderr)
    return columns, chain([first], records)


def _unfinished(options: argparse.Namespace) -> Unfinished:
    """Looks for what a killed run has left; of a stream nothing can be found again."""
    if options.output == "-" or not Path(options.input).is_file():
        return Unfinished()
    passed = ("workers", "output", "checkpoint", "input", "fingerprints")
    given = {name: value for name, value in vars(options).items() if name not in passed}
    identity = {f"--{name.replace('_', '-')}": str(value) for name, value in given.items()}
    identity["--input"] = _hash_of(options.input)
    identity["--checkpoint"] = " ".join(map(_hash_of, options.checkpoint))
    identity["--fingerprints"] = str(options.fingerprints)
    identity["version"] = __version__
    return Unfinished(options.output, options.fingerprints, identity)


def _hash_of(path: str) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _featurize_parser() -> argparse.ArgumentParser:
    parser = OneLineArguments(
        "pyg-dynbatch featurize",
        "Describe the molecules of a file once, in a folder of packed files that any number of "
        "processes can map into memory. Stopped in between, the same command goes on.",
    )
    add = parser.add_argument
    add_input(parser)
    add("--output", required=True, metavar="FOLDER", help="where the packed molecules go")
    add("--targets", nargs="+", default=[], metavar="NAME", help="columns of labels to keep")
    add("--missing", nargs="+", default=[], metavar="TEXT", help="cells that are missing labels")
    add("--atoms", default="kearnes", help="atom features: kearnes or deepchem")
    add("--pairs", default="kearnes", help="pair features: kearnes or deepchem")
    add("--descriptors", help="descriptors of whole molecules: rdkit (default: none)")
    add("--fragments", default="all", help="all or largest")
    add("--explicit-hydrogens", action="store_true", help="make hydrogens atoms")
    add("--max-atoms", type=int, default=1000, metavar="N", help="larger molecules are bad rows")
    add("--bad", default="skip", help="bad rows: skip, blank or raise (default: skip)")
    add("--workers", type=int, default=0, metavar="N", help="processes")
    add("--shard-size", type=int, default=16_384, metavar="N", help="records in a file")
    add("--force", action="store_true", help="make everything anew")
    return parser


def run_featurize(argv: list[str]) -> int:
    """Runs ``featurize``.

    Args:
        argv: The options.

    Returns:
        The exit code, 0.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the input or an option cannot be used, or no row is left.
    """
    options = _featurize_parser().parse_args(argv)
    written = [Path(options.output, name) for name in ("", HEADER, ERRORS)]
    refuse_overwriting("featurize", written, [options.input])
    featurizer = MoleculeFeaturizer(
        options.atoms,
        options.pairs,
        explicit_hydrogens=options.explicit_hydrogens,
        fragments=options.fragments,
        max_atoms=options.max_atoms,
        descriptors=options.descriptors,
    )
    reading = FeaturizeOptions(
        bad=options.bad,
        num_workers=options.workers,
        shard_size=options.shard_size,
        force=options.force,
    )
    store = build_store(
        options.output,
        read_input(options, options.targets),
        featurizer,
        task_names=options.targets,
        options=reading,
    )
    folder = Path(options.output)
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    errors = len(store.errors())
    each = size / max(1, len(store))
    print(f"{len(store):,} molecules, {errors:,} bad rows, {each:,.0f} bytes each")
    print(f"featurizer: {featurizer.digest}")
    print(f"packed molecules: {folder}")
    if errors and (folder / "errors.csv").is_file():
        print(f"bad rows: {folder / 'errors.csv'}")
    return 0
