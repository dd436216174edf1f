"""Run ``predict`` and ``featurize`` on files of molecules."""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pyg_dynbatch import __version__
from pyg_dynbatch.console import OneLineArguments, check_outputs
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.files import existing, sha256_of
from pyg_dynbatch.molecules.features.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.files.build import ERRORS, FeaturizeOptions, build_store
from pyg_dynbatch.molecules.files.read import (
    FORMATS,
    SMILES_COLUMN,
    RawMolecule,
    TableOptions,
    format_of,
    read_molecules,
)
from pyg_dynbatch.molecules.files.store import HEADER
from pyg_dynbatch.molecules.nets.properties import MoleculePropertyModel
from pyg_dynbatch.molecules.work.predict import MoleculePredictor, PredictionFiles, predict_file


def add_input(parser: argparse.ArgumentParser) -> None:
    """Add the options for the molecules to read."""
    add = parser.add_argument
    formats = ", ".join(sorted(set(FORMATS.values())))
    add("--input", required=True, metavar="FILE", help="CSV, TSV, SMILES or SDF; - for stdin")
    add("--format", help=f"{formats} (default: by the suffix; smi for stdin)")
    text = "column of the SMILES (default: that of the training, or smiles)"
    add("--smiles-column", metavar="NAME", help=text)
    add("--sep", metavar="CHARACTER", help="between cells (default: a comma; a tab in tsv files)")
    add("--name-column", metavar="NAME", help="column of the names")


def read_input(
    options: argparse.Namespace, targets: list[str] | None = None
) -> Iterator[RawMolecule]:
    """Open the records that the options name."""
    return read_molecules(
        options.input,
        target_columns=targets,
        name_column=options.name_column,
        format=options.format or ("smi" if options.input == "-" else None),
        table=TableOptions(
            smiles_column=options.smiles_column,
            sep=options.sep,
            decimal=getattr(options, "decimal", "."),
            missing=tuple(getattr(options, "missing", ())),
        ),
    )


def _at_least(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers that are not less."""

    def read_int(text: str) -> int:
        if (number := int(text)) < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {number}")
        return number

    return read_int


def _predict_parser() -> argparse.ArgumentParser:
    parser = OneLineArguments(
        "pyg-dynbatch predict",
        "Predict molecules with one or several checkpoints: one row out for every record in, in "
        "the same order, after the columns of the input; a record that is not a molecule gets an "
        "empty prediction and its reason. If it is killed, the same command continues. For a "
        "checkpoint of trees the input is a file of trees: --checkpoint CKPT --help lists the "
        "options.",
    )
    add = parser.add_argument
    add("--checkpoint", nargs="+", required=True, metavar="CKPT", help="several are averaged")
    add("--max-atoms", type=int, metavar="N", help="larger molecules are bad (default: as trained)")
    text = "their numbers, if trained with a FeatureFile: CSV, or .npy in the order of the input"
    add("--features", metavar="FILE", help=text)
    add("--device", default="cpu", help="cpu, cuda, ... (default: cpu)")
    add_input(parser)
    add("--output", default="-", metavar="FILE", help="CSV file; - for stdout (default)")
    add("--narrow", action="store_true", help="of the input, keep only row, name and SMILES")
    zero = _at_least(0)
    add("--dropout", type=zero, default=0, metavar="N", help="passes with dropout, for a deviation")
    add("--fingerprints", metavar="FILE", help="also write fingerprints, .npy or .csv")
    add("--workers", type=zero, default=0, metavar="N", help="processes that read molecules")
    text = "pairs of atoms in a batch"
    add("--max-pairs", type=_at_least(1), default=200_000, metavar="N", help=text)
    return parser


def run_molecule_predict(argv: list[str], checkpoint: Mapping[str, Any]) -> int:
    """Run ``predict`` on a stream of molecules; the first checkpoint may be read already."""
    parser = _predict_parser()
    options = parser.parse_args(argv)
    paths, written = options.checkpoint, (options.output, options.fingerprints)
    if options.smiles_column is None:
        options.smiles_column = _trained_column(checkpoint, options)
    check_outputs("predict", written, [options.input, options.features, *paths])
    first = MoleculePropertyModel.from_checkpoint(checkpoint, paths[0]) if checkpoint else paths[0]
    names = ("device", "dropout", "max_pairs", "max_atoms", "features")
    given = {name: getattr(options, name) for name in names}
    predictor = MoleculePredictor([first, *paths[1:]], records=options.input, **given)
    files = PredictionFiles(*written, identity=_identity(options))
    narrow = (options.input, options.narrow, options.workers)
    predict_file(partial(read_input, options), predictor, files, *narrow)
    if files.bad == files.rows:
        raise _no_molecule("predict", options.input, files.bad, files.reason)
    more = f"; the first bad one is {files.reason}" if files.bad else ""
    good = files.rows - files.bad
    print(f"predicted {good:,} of {files.rows:,} records{more}", file=sys.stderr)
    for path in written:
        if path not in (None, "-"):
            print(f"written: {path}", file=sys.stderr)
    return 0


def _trained_column(checkpoint: Mapping[str, Any], options: argparse.Namespace) -> str | None:
    """Return the column of SMILES that the model was trained on, if its data module named one."""
    is_table = options.input != "-" and format_of(options.input, options.format) in ("csv", "tsv")
    if not is_table:
        return None
    states = (state for state in checkpoint.values() if isinstance(state, Mapping))
    return next((state[SMILES_COLUMN] for state in states if SMILES_COLUMN in state), None)


def _no_molecule(command: str, where: str, bad: int, reason: str) -> ValueError:
    got = f"{bad:,} bad records, the first {reason}" if bad else "no records"
    what = f"{command}: no record is a molecule"
    return mismatch(ValueError, what, "at least one", got, where=where)


def _identity(options: argparse.Namespace) -> dict[str, str] | None:
    """Return the facts in which a run must equal the killed one that it continues."""
    if options.output == "-" or not Path(options.input).is_file():
        return None
    passed = ("workers", "output", "checkpoint", "input")
    given = {name: value for name, value in vars(options).items() if name not in passed}
    identity = {f"--{name.replace('_', '-')}": str(value) for name, value in given.items()}
    identity["--input"] = sha256_of(options.input)
    if options.features is not None:
        identity["--features"] = sha256_of(existing(options.features, "a file"))
    identity["--checkpoint"] = " ".join(map(sha256_of, options.checkpoint))
    return {**identity, "version": __version__}


def _featurize_parser() -> argparse.ArgumentParser:
    parser = OneLineArguments(
        "pyg-dynbatch featurize",
        "Describe the molecules of a file once, in a folder of files that any number of processes "
        "can map into memory. If it is interrupted, the same command continues.",
    )
    add = parser.add_argument
    add_input(parser)
    add("--output", required=True, metavar="FOLDER", help="where the packed molecules go")
    add("--targets", nargs="+", default=[], metavar="NAME", help="columns of labels to keep")
    add("--missing", nargs="+", default=[], metavar="TEXT", help="cells that are missing labels")
    add("--decimal", default=".", metavar="CHARACTER", help="before decimals (default: a point)")
    add("--atoms", default="kearnes", help="atom features: kearnes or deepchem")
    add("--pairs", default="kearnes", help="pair features: kearnes or deepchem")
    text = "descriptors of whole molecules: rdkit, morgan (default: none)"
    add("--descriptors", nargs="+", metavar="NAME", help=text)
    add("--fragments", default="all", help="all or largest")
    steps = ("neutral", "tautomer")
    add("--standardize", nargs="+", choices=steps, default=[], help="steps before featurizing")
    add("--explicit-hydrogens", action="store_true", help="treat hydrogens as atoms")
    add("--max-atoms", type=int, default=1000, metavar="N", help="larger molecules are bad rows")
    text = "bad rows (default: skip)"
    add("--bad", choices=("skip", "blank", "raise"), default="skip", help=text)
    add("--workers", type=int, default=0, metavar="N", help="processes")
    text = "records saved together (default: 4096)"
    add("--block-size", type=int, default=4_096, metavar="N", help=text)
    add("--force", action="store_true", help="featurize everything again")
    return parser


def run_featurize(argv: list[str]) -> int:
    """Run ``featurize``."""
    options = _featurize_parser().parse_args(argv)
    written = [Path(options.output, name) for name in ("", HEADER, ERRORS)]
    check_outputs("featurize", written, [options.input])
    names = ("explicit_hydrogens", "fragments", "standardize", "max_atoms", "descriptors")
    chosen = {name: getattr(options, name) for name in ("atoms", "pairs", *names)}
    featurizer = MoleculeFeaturizer(**chosen)
    numbers = (options.bad, options.workers, options.block_size)
    given = FeaturizeOptions(*numbers, force=options.force)
    folder, names = Path(options.output), options.targets
    records = read_input(options, names)
    store = build_store(folder, records, featurizer, task_names=names, options=given)
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    each = size / max(1, len(store))
    print(f"{len(store):,} molecules, {len(store.errors):,} bad rows, {each:,.0f} bytes each")
    print(f"featurizer: {featurizer.digest}")
    print(f"packed molecules: {folder}")
    if store.errors:
        print(f"bad rows: {folder / ERRORS}")
    return 0
