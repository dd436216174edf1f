"""Run ``predict``, ``featurize`` and ``explain`` on files of molecules."""

import argparse
import csv
import html
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, islice
from pathlib import Path
from string import Template
from typing import Any

from pyg_dynbatch import __version__
from pyg_dynbatch.console import OneLineArguments, check_outputs
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.files import atomic_file, existing, sha256_of
from pyg_dynbatch.molecules.data import MoleculeData
from pyg_dynbatch.molecules.features.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.features.rdkit_access import MoleculeError, parse_mol_block
from pyg_dynbatch.molecules.files.build import ERRORS, FeaturizeOptions, build_store
from pyg_dynbatch.molecules.files.read import FORMATS, RawMolecule, read_molecules
from pyg_dynbatch.molecules.files.store import HEADER
from pyg_dynbatch.molecules.nets.properties import MoleculePropertyModel
from pyg_dynbatch.molecules.work.explain import (
    Explanation,
    atom_labels,
    draw_attributions,
    explain,
    write_picture,
)
from pyg_dynbatch.molecules.work.predict import (
    MoleculePredictor,
    PredictionFiles,
    named_columns,
    predict_file,
)


def add_input(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add the options for the molecules to read."""
    add = parser.add_argument
    formats = ", ".join(sorted(set(FORMATS.values())))
    add("--input", required=required, metavar="FILE", help="CSV, TSV, SMILES or SDF; - for stdin")
    add("--format", help=f"{formats} (default: by the suffix; smi for stdin)")
    add("--smiles-column", metavar="NAME", help="column of the SMILES (default: smiles)")
    add("--name-column", metavar="NAME", help="column of the names")


def read_input(
    options: argparse.Namespace, targets: list[str] | None = None, keep_source: bool = False
) -> Iterator[RawMolecule]:
    """Open the records that the options name."""
    return read_molecules(
        options.input,
        smiles_column=options.smiles_column,
        target_columns=targets,
        name_column=options.name_column,
        format=options.format or ("smi" if options.input == "-" else None),
        missing=getattr(options, "missing", ()),
        keep_source=keep_source,
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options for the checkpoints and what they compute from."""
    add = parser.add_argument
    add("--checkpoint", nargs="+", required=True, metavar="CKPT", help="several are averaged")
    add("--max-atoms", type=int, metavar="N", help="larger molecules are bad (default: as trained)")
    text = "their numbers, if trained with a FeatureFile: CSV, or .npy in the order of the input"
    add("--features", metavar="FILE", help=text)
    add("--device", default="cpu", help="cpu, cuda, ... (default: cpu)")


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
        "checkpoint of trees or JSON documents the input is a file of these: --checkpoint CKPT "
        "--help lists the options.",
    )
    add = parser.add_argument
    _add_model(parser)
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


REPORT, ATOMS, PAIRS = "report.html", "atoms.csv", "pairs.csv"

_METHODS = {
    "leave_one_out": "what the prediction loses without the atom",
    "gradient": "the gradient times the features of the atom",
}
_ATOM_COLUMNS = ("atom", "element", *_METHODS)


def _explain_parser() -> argparse.ArgumentParser:
    parser = OneLineArguments(
        "pyg-dynbatch explain",
        "Show which atoms and pairs of atoms predictions rely on: pictures, tables, and one page "
        "with all of them. Numbers are in the units of the property, log-odds for classes. For a "
        "checkpoint of JSON documents, parts of documents are explained: --checkpoint CKPT --help "
        "lists those options.",
    )
    add = parser.add_argument
    _add_model(parser)
    add_input(parser, required=False)
    add("--smiles", nargs="+", metavar="SMILES", help="molecules, instead of --input")
    add("--output", required=True, metavar="FOLDER", help="where pictures, tables and page go")
    add("--task", metavar="NAME", help="the property (default: the first)")
    add("--label", type=int, default=1, help="the class, of several (default: 1)")
    add("--method", choices=_METHODS, default="leave_one_out", help="what colors the atoms")
    text = "strongest pairs to draw (default: 5)"
    add("--pairs", type=_at_least(0), default=5, metavar="N", help=text)
    add("--picture", choices=("svg", "png"), default="svg", help="kind of the pictures")
    text = "records to explain (default: 100)"
    add("--most", type=_at_least(1), default=100, metavar="N", help=text)
    return parser


_HEAD = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>$title</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; }
.molecules { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, 26rem); }
.molecule { border: 1px solid #ccc; padding: .8rem; overflow-wrap: anywhere; }
.molecule svg { max-width: 100%; height: auto; }
h2 { font-size: 1rem; }
td, th { padding: .1rem .6rem .1rem 0; text-align: right; }
.bad { color: #8a3b00; }
</style>
</head>
<body>
<h1>$title</h1>
$facts<div class="molecules">
""")


def run_explain(argv: list[str]) -> int:
    """Run ``explain``."""
    parser = _explain_parser()
    options = parser.parse_args(argv)
    if (options.input is None) == (options.smiles is None):
        parser.error("the following arguments are required: --input or --smiles, not both")
    written = [Path(options.output, name) for name in ("", REPORT, ATOMS, PAIRS)]
    check_outputs("explain", written, [options.input, options.features, *options.checkpoint])
    names = ("device", "max_atoms", "features")
    model: dict[str, Any] = {name: getattr(options, name) for name in names}
    predictor = MoleculePredictor(options.checkpoint, records=options.input, **model)
    given = (
        RawMolecule(number, f"--smiles {number + 1}", smiles=text)
        for number, text in enumerate(options.smiles or ())
    )
    records = given if options.smiles else read_input(options)
    writer = _Writer(predictor, options)
    writer.run(islice(records, options.most))
    print(f"explained {writer.explained:,} molecules, {writer.bad:,} bad records")
    if next(iter(records), None) is not None:
        print(f"stopped after {options.most:,} records; --most N explains more")
    for what, name in (("report", REPORT), ("atoms", ATOMS), ("pairs", PAIRS)):
        print(f"{f'{what}:':<9} {Path(options.output) / name}")
    return 0


class _Writer:
    """Explain records one by one and write each result at once, so that memory does not grow."""

    page: Any
    atoms: Any
    pairs: Any

    def __init__(self, predictor: MoleculePredictor, options: argparse.Namespace) -> None:
        self.predictor = predictor
        self.options = options
        self.featurizer = predictor.featurizer
        self.folder = Path(options.output)
        self.task = options.task or predictor.schema.task_names[0]
        self.unit = "" if predictor.schema.kind == "regression" else "log-odds"
        self.explained = self.bad = 0

    def run(self, records: Iterable[RawMolecule]) -> None:
        """Explain all records; if none is a molecule, nothing is written."""
        prepared = map(self._prepared, records)
        leading = []
        for item in prepared:
            leading.append(item)
            if not isinstance(item[1], MoleculeError):
                break
        else:
            reason = f"{leading[0][0].where}: {leading[0][1].reason}" if leading else ""
            where = self.options.input or "--smiles"
            raise _no_molecule("explain", where, len(leading), reason)
        facts = [
            ("checkpoints", ", ".join(map(str, self.options.checkpoint))),
            ("color of an atom", _METHODS[self.options.method]),
            ("lines", "gradient times features of the strongest pairs of atoms"),
            ("unit of all numbers", self.unit or "that of the property"),
        ]
        with ExitStack() as stack:
            self.page, *tables = (
                stack.enter_context(atomic_file(self.folder / name, newline="", encoding="utf-8"))
                for name in (REPORT, ATOMS, PAIRS)
            )
            self.atoms, self.pairs = map(csv.writer, tables)
            self.atoms.writerow(["row", *_ATOM_COLUMNS])
            self.pairs.writerow(["row", "first", "second", "bonds", "gradient"])
            self.page.write(_HEAD.substitute(title=html.escape(self.task), facts=_table(facts)))
            for record, given in chain(leading, prepared):
                title = html.escape(record.name or f"row {record.row}")
                smiles = html.escape(record.smiles or "")
                start = f"<h2>{title}</h2>\n<p><code>{smiles}</code></p>"
                self.page.write(f'<div class="molecule">\n{start}\n')
                if isinstance(given, MoleculeError):
                    self.bad += 1
                    self.page.write(f'<p class="bad">{html.escape(given.reason)}</p>\n')
                else:
                    self.explained += 1
                    self.page.writelines(self._explain(record, *given))
                self.page.write("</div>\n")
            self.page.write("</div>\n</body>\n</html>\n")

    def _prepared(self, record: RawMolecule) -> tuple[RawMolecule, Any]:
        """Return the record with its molecule, for pictures and for the model, or its error."""
        try:
            given = parse_mol_block(record.block or "") if record.smiles is None else record.smiles
            return record, (self.featurizer.prepare(given), self.featurizer(given))
        except MoleculeError as error:
            return record, error

    def _explain(self, record: RawMolecule, mol: Any, molecule: MoleculeData) -> Iterator[str]:
        """Write the tables and the picture of a molecule, and yield the content of the page."""
        found = explain(self.predictor, molecule, self.task, self.options.label)
        labels = atom_labels(mol)
        rows = [
            (str(atom), element, f"{found.leave_one_out[i]:.9g}", f"{found.gradient[i]:.9g}")
            for i, (atom, element) in enumerate(labels)
        ]
        self.atoms.writerows([record.row, *row] for row in rows)
        ends, bonds = found.pair_index.T.tolist(), found.pair_bonds.tolist()
        for (first, second), far, value in zip(ends, bonds, found.pair_gradient, strict=True):
            numbers = [labels[first][0], labels[second][0]]
            self.pairs.writerow([record.row, *numbers, far, f"{value:.9g}"])
        yield self._draw(record, mol, found)
        given = (self.predictor.schema, self.predictor.sets)
        named = named_columns(self.predictor.predict([molecule]), *given)
        yield _table([(name, f"{column[0]:.9g}") for name, column in named.items()])
        if rows:
            atoms = _table(rows, _ATOM_COLUMNS)
            yield f"<details><summary>atoms</summary>\n{atoms}</details>\n"

    def _draw(self, record: RawMolecule, mol: Any, found: Explanation) -> str:
        """Write the picture of a molecule to a file; return it as SVG for the page."""
        values = getattr(found, self.options.method)
        shown = found.strongest_pairs(self.options.pairs)
        of = f"{self.unit} of " if self.unit else ""
        caption = f"{of}{self.task}: {found.value:.9g}"
        for kind in {"svg", self.options.picture}:
            content = draw_attributions(mol, values, shown, caption=caption, format=kind)
            if kind == self.options.picture:
                write_picture(self.folder / f"row_{record.row:06d}.{kind}", content)
            if kind == "svg":
                page = content.decode()
        return page[page.index("<svg") :]  # without the prologue of a file


def _table(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Write rows of cells as an HTML table."""
    texts = [
        f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in row)}</tr>\n"
        for tag, row in [("th", header), *(("td", row) for row in rows)]
        if row
    ]
    return f"<table>\n{''.join(texts)}</table>\n"
