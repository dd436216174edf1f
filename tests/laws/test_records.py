"""Law: a file of molecules has the records that csv and RDKit find, in any writing."""

import csv
import gzip
import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rdkit import Chem, rdBase

from pyg_dynbatch.molecules.read import RawMolecule, TableOptions, read_molecules
from tests.strategies import few

ENDS = st.sampled_from(["\n", "\r\n", "\r"])
MARKS = st.sampled_from(["", "\ufeff"])
EMPTY_LINES = st.integers(0, 2)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records") / "file"


def write(file: Path, suffix: str, text: str, end: str = "\n", mark: str = "") -> Path:
    """Write a text with other line ends, compressed if the suffix says so."""
    path = file.with_suffix(suffix)
    raw = (mark + text.replace("\n", end)).encode()
    path.write_bytes(gzip.compress(raw) if suffix.endswith(".gz") else raw)
    return path


def read(path: Path, **options) -> list[RawMolecule]:
    """Read all records, of which there may be none."""
    try:
        return list(read_molecules(path, **options))
    except ValueError as error:
        if "contains no molecules" in str(error) or "the file is empty" in str(error):
            return []
        raise


CELLS = st.text(alphabet='aC 1,;"\t\n\N{MINUS SIGN}é\u2028\x0b', max_size=5)
TABLES = st.integers(1, 3).flatmap(
    lambda width: st.lists(st.lists(CELLS, min_size=width, max_size=width), min_size=1)
)


@given(
    TABLES,
    st.sampled_from([",", ";", "\t"]),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    st.sampled_from([".csv", ".csv.gz"]),
    ENDS, MARKS, EMPTY_LINES,
)  # fmt: skip
@few(60)
def test_records_of_tables_are_those_of_csv(
    file: Path, table, sep, quoting, suffix, end, mark, empty
) -> None:
    written = io.StringIO(newline="")
    writer = csv.writer(written, delimiter=sep, quoting=quoting, lineterminator="\n")
    starts = []
    for cells in [["smiles", "b", "c"][: len(table[0])], *table]:
        starts.append(written.getvalue().count("\n") + 1)
        writer.writerow(cells)
        written.write("\n" * empty)
    path = write(file, suffix, written.getvalue(), end, mark)
    records = read(path, table=TableOptions(sep=sep))
    assert [[*raw.source[1]] for raw in records] == table
    assert [raw.row for raw in records] == [*range(len(table))]
    assert [raw.smiles for raw in records] == [cells[0].strip() for cells in table]
    assert [raw.where for raw in records] == [f"{path}:{start}" for start in starts[1:]]


@given(st.text(alphabet='C,"\n\r ', max_size=30), st.sampled_from(["smiles", "smiles,y"]))
@few(200)
def test_any_table_has_the_records_of_csv_or_is_refused(file: Path, text: str, header: str) -> None:
    text = f"{header}\n{text}"
    path = write(file, ".csv", text)
    with_one_end = text.replace("\r\n", "\n").replace("\r", "\n")
    *rows, last = csv.reader(io.StringIO(f"{with_one_end}\nlast", newline="\n"))
    _, *expected = [cells for cells in rows if cells]
    is_open = last != ["last"]  # within a quoted cell
    columns = header.count(",") + 1
    if is_open or any(len(cells) != columns for cells in expected):
        with pytest.raises(ValueError, match=r"number of cells|never closed"):
            read(path)
    else:
        assert [[*raw.source[1]] for raw in read(path)] == expected


def block(smiles: str, name: str) -> str:
    mol = Chem.MolFromSmiles(smiles)
    mol.SetProp("_Name", name)
    return Chem.MolToMolBlock(mol)


LINES_OF_VALUES = st.lists(st.text(alphabet="a<>$ 1é", min_size=1, max_size=6), max_size=2)
VALUES = st.one_of(
    st.sampled_from(["$$$$", "> <y>", ">5 <100", "M  END"]), LINES_OF_VALUES.map("\n".join)
)
FIELDS = st.lists(st.tuples(st.sampled_from(["y", "_id", "a b", "IC50 (>10)"]), VALUES), max_size=3)

MOLECULES = st.tuples(st.sampled_from(["CO", "N", "c1ccccc1", "[Na+].[Cl-]"]), FIELDS)


@given(
    st.lists(MOLECULES, min_size=1),
    st.sampled_from([".sdf", ".sdf.gz"]),
    st.sampled_from(["", "$$$$", "$$$$\n", "$$$$\n\n \n"]),
    ENDS, MARKS,
)  # fmt: skip
@few(60)
def test_records_of_sdf_files_are_those_of_rdkit(
    file: Path, molecules, suffix, last, end, mark
) -> None:
    texts = []
    for row, (smiles, fields) in enumerate(molecules):
        data = [f">  <{name}>  \n{value}\n\n" for name, value in fields]
        texts.append("".join([block(smiles, f"é{row}"), *data]))
    text = "$$$$\n".join(texts)
    path = write(file, suffix, text + last, end, mark)
    records = read(path)
    assert [raw.row for raw in records] == [*range(len(molecules))]
    assert [raw.name for raw in records] == [f"é{row}" for row in range(len(molecules))]
    assert not any(raw.fault for raw in records)
    canonical = [Chem.CanonSmiles(smiles) for smiles, _ in molecules]
    assert [raw.text() for raw in records] == canonical
    # The last of two values counts, as in RDKit.
    assert [raw.extra for raw in records] == [dict(fields) for _, fields in molecules]
    for raw, mol in zip(records, by_rdkit(text), strict=True):
        assert {name: mol.GetProp(name) for name in raw.extra} == raw.extra
    start = 1
    for raw, own in zip(records, texts, strict=True):
        assert raw.where == f"{path}:{start}"
        start += own.count("\n") + 1


def by_rdkit(text: str) -> list[Chem.Mol | None]:
    with rdBase.BlockLogs():
        stream = io.BytesIO(text.encode())
        return list(Chem.ForwardSDMolSupplier(stream, sanitize=False, removeHs=False))


PIECES = [
    *block("CO", "first").splitlines(keepends=True), block("N", "second"), block("CC", "third"),
    "$$$$\n", "$$$$\n", "$$$$\n", "$$$$ \n", " $$$$\n", "\n", "\n", " \n", "M  END\n", "text\n",
    "> <y>\n", "> <y>\n1\n\n", ">\n", "> <z> (1)\n", "> <>\n2\n\n", "\ttext\n",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=12), ENDS, st.booleans())
@few(200)
def test_any_sdf_file_has_the_records_of_rdkit(
    file: Path, pieces, end: str, is_ended: bool
) -> None:
    text = "".join(pieces)
    if not is_ended:
        text = text.removesuffix("\n")
    path = write(file, ".sdf", text, end)
    records = read(path)
    expected = without_blank_record(by_rdkit(text), text)
    assert len(records) == len(expected)
    for raw, mol in zip(records, expected, strict=True):
        if not raw.fault:
            with rdBase.BlockLogs():
                own = Chem.MolFromMolBlock(raw.block, sanitize=False, removeHs=False)
            assert (own is None) == (mol is None)
            assert mol is None or Chem.MolToSmiles(own) == Chem.MolToSmiles(mol)
            assert raw.block is not None and "\n$$$$" not in raw.block


def without_blank_record(mols: list[Chem.Mol | None], text: str) -> list[Chem.Mol | None]:
    """Leave out what RDKit makes of blank lines at the end, which are no record."""
    tail = text.rpartition("$$$$")[2].partition("\n")[2] if "$$$$" in text else text
    if tail.strip() or len(mols) <= len(by_rdkit(text.removesuffix(tail))):
        return mols
    return mols[:-1]


BLANKS = st.sampled_from([" ", "\t", "  ", " \t"])
NAMES = st.text(alphabet='a1 é|,"#\u2028', max_size=5).map(lambda name: name.strip("|# \u2028"))
SMILES = st.sampled_from(["CO", "N", "C(", "[Na+].[Cl-]", ""])
EXTENSIONS = st.sampled_from(["", "", " |&1:1|", "\t|$a;b$| "])
LINES = st.lists(st.tuples(SMILES, EXTENSIONS, BLANKS, NAMES), min_size=1)
NO_RECORDS = st.lists(st.sampled_from(["\n", " \t\n", "# CO\n", " #\n"]), max_size=2).map("".join)
HEADERS = st.sampled_from(["", "smiles\n", "SMILES name\n", "Smiles\tname\n"])


@given(HEADERS, LINES, NO_RECORDS, st.sampled_from([".smi", ".smiles", ".txt.gz"]), ENDS, MARKS)
@few(60)
def test_records_of_smiles_files_are_their_lines(
    file: Path, header: str, lines, between: str, suffix: str, end: str, mark
) -> None:
    text = between + header
    expected = []
    for smiles, extension, blank, name in lines:
        if smiles == "":  # a line that begins with a tab has an empty SMILES
            extension, blank = "", "\t"
        if smiles or name:
            number = text.count("\n") + 1
            parts = [smiles, *extension.split()]
            expected.append((number, " ".join(parts), name or None))
        text += f" {smiles}{extension}{blank}{name}\n{between}"
    path = write(file, suffix, text, end, mark)
    records = read(path)
    assert [raw.row for raw in records] == [*range(len(expected))]
    assert [(raw.where, raw.smiles, raw.name) for raw in records] == [
        (f"{path}:{number}", smiles, name) for number, smiles, name in expected
    ]


@given(st.text(alphabet="Cs#| \t\n\r", max_size=30), ENDS)
@few(200)
def test_any_smiles_file_has_a_record_per_line(file: Path, text: str, end: str) -> None:
    path = write(file, ".smi", text, end)
    lines = [line.lstrip(" ") for line in re.split(r"[\r\n]", text)]
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    records = read(path)
    assert len(records) == len(lines)
    for raw, line in zip(records, lines, strict=True):
        # Nothing of a line is lost, and a molecule is what comes before the first blank.
        assert "".join(f"{raw.smiles}{raw.name or ''}".split()) == "".join(line.split())
        first = re.split(r"[ \t]", line)[0]
        assert raw.smiles is not None
        assert raw.smiles == first or re.fullmatch(re.escape(first) + r" \|.*\|", raw.smiles)


OF_LATIN_1 = {
    ".smi": "CO one\n\nCN twé\nCC three\n",
    ".csv": 'smiles,name\nCO,"one\n"\nCN,"twé"\n',
    ".tsv": "smiles\tname\n\nCN\ttwé\n",
    ".sdf": f"{block('CO', 'one')}$$$$\n{block('CN', 'twé')}$$$$\n",
}


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16"])
@pytest.mark.parametrize("suffix", OF_LATIN_1)
def test_another_encoding_is_refused_in_its_line(
    file: Path, suffix: str, encoding: str, end: str
) -> None:
    text = OF_LATIN_1[suffix]
    path = file.with_suffix(suffix)
    path.write_bytes(text.replace("\n", end).encode(encoding))
    number = 1 if encoding == "utf-16" else text[: text.index("é")].count("\n") + 1
    with pytest.raises(ValueError, match="the text is not UTF-8") as caught:
        read(path)
    assert f"{path}:{number}:" in str(caught.value)


# RDKit reads on over these lines $$$$; more than one molecule may be in the record, which is bad.
NO_END = {
    "no empty line after a value": "> <y>\n1\n$$$$\n",
    "a field without a name": "> 25\n1\n\n$$$$\n",
}


@pytest.mark.parametrize("data", NO_END.values(), ids=NO_END)
def test_a_record_without_an_end_is_bad(file: Path, data: str) -> None:
    text = block("CO", "first") + data + block("N", "second") + "> <z>\n2\n\n$$$$\n"
    (record,) = read(write(file, ".sdf", text))
    assert len(by_rdkit(text)) == 1
    line = block("CO", "").count("\n") + data.count("\n")
    assert f"no end of the record at $$$$ in line {line}" in record.fault
    assert record.extra == {}
    with pytest.raises(ValueError, match="RDKit finds no end"):
        record.text()
