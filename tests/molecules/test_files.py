"""Files of molecules, read as a stream."""

import gzip
import io
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import jsonargparse
import pytest
from rdkit import Chem

from pyg_dynbatch.data import RawMolecule, TableOptions, read_molecules
from pyg_dynbatch.lightning import MoleculeFileData
from pyg_dynbatch.molecules.features.rdkit_access import parse_mol_block, rdkit_data_folder
from pyg_dynbatch.molecules.files.read import BadMolecule, summary_of, write_error_report
from pyg_dynbatch.molecules.work.commands import run_featurize
from tests.console import rows_of

TABLE = """name,SMILES, logP,kind
methanol,CO ,-0.77,alcohol
"water, pure", O,1.5e1,
salt,[Na+].[Cl-],,x
none,C,NaN,x
"two
lines",N,NA,x

bad,,nan,x
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    raw = text.encode()
    path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return path


@pytest.mark.parametrize("name", ["a.csv", "a.CSV", "a.csv.gz", "a.tsv", "a.tab.gz"])
def test_tables(tmp_path: Path, name: str) -> None:
    text = TABLE
    if "csv" not in name.lower():
        text = text.replace('"water, pure"', "water; pure").replace(",", "\t")
    path = write(tmp_path, name, text)
    found = list(read_molecules(path, target_columns=["logP"], name_column="name"))
    assert [raw.smiles for raw in found] == ["CO", "O", "[Na+].[Cl-]", "C", "N", ""]
    assert [raw.targets for raw in found] == [(-0.77,), (15.0,), (None,), (None,), (None,), (None,)]
    assert [raw.row for raw in found] == [0, 1, 2, 3, 4, 5]
    assert [raw.where for raw in found] == [f"{path}:{line}" for line in (2, 3, 4, 5, 6, 9)]
    assert found[1].name in ("water, pure", "water; pure") and found[4].name == "two\nlines"
    assert found[0].extra == {"kind": "alcohol"} and found[1].extra == {"kind": ""}
    assert all(raw.block is None for raw in found)


@pytest.mark.parametrize(("name", "empty"), [("a.csv", ","), ("a.csv", '" ",""'), ("a.tsv", "\t")])
def test_a_line_of_empty_cells_is_a_record(tmp_path: Path, name: str, empty: str) -> None:
    text = "smiles,y\nCC,1\n\nE\nCO,2\n".replace(",", "," if name == "a.csv" else "\t")
    path = write(tmp_path, name, text.replace("E", empty))
    found = [
        (raw.row, raw.smiles, *raw.targets) for raw in read_molecules(path, target_columns=["y"])
    ]
    assert found == [(0, "CC", 1.0), (1, "", None), (2, "CO", 2.0)]


def test_many_columns_of_labels_leave_the_others(tmp_path: Path) -> None:
    labels = [f"y{i}" for i in range(50)]
    path = write(tmp_path, "a.csv", ",".join(["b", "smiles", *labels, "a"]) + "\n0" + ",C" * 52)
    table = TableOptions(missing=("c",))
    (raw,) = read_molecules(path, name_column="y3", target_columns=labels, table=table)
    assert list(raw.extra.items()) == [("b", "0"), ("a", "C")]


def test_a_named_column_of_smiles(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "mol,Class,pIC50\nCC,1,0.5\n")
    table = TableOptions(smiles_column="mol")
    (raw,) = read_molecules(path, target_columns=["pIC50", "Class"], table=table)
    source = (["mol", "Class", "pIC50"], ["CC", "1", "0.5"])
    assert raw == RawMolecule(0, f"{path}:2", smiles="CC", targets=(0.5, 1.0), source=source)


MISSING_COLUMNS = [
    ({}, "'smiles'"),
    ({"table": TableOptions("SMILES")}, "'SMILES'"),
    ({"table": TableOptions("mol"), "target_columns": ["y", "z", "p"]}, "'z', 'p'"),
    ({"table": TableOptions("mol"), "name_column": "id"}, "'id'"),
]


@pytest.mark.parametrize(("options", "wrong"), MISSING_COLUMNS)
def test_a_missing_column_is_named_with_those_there_are(tmp_path, options, wrong):
    path = write(tmp_path, "a.csv", "mol,y\nCC,1\n")
    message = rf"column {wrong} not found\.\n +expected: one of: 'mol', 'y'\n[\s\S]*a\.csv:1"
    with pytest.raises(ValueError, match=message):
        list(read_molecules(path, **options))


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ";"), ("a.csv", "\t"), ("a.tsv", ",")])
def test_another_separator_is_said(tmp_path: Path, name: str, separator: str) -> None:
    path = write(tmp_path, name, f"smiles{separator}y\nCC{separator}1\n")
    words = rf"'smiles' not found[\s\S]*{re.escape(f'sep={separator!r}')}"
    with pytest.raises(ValueError, match=words):
        list(read_molecules(path))
    (raw,) = read_molecules(path, target_columns=["y"], table=TableOptions(sep=separator))
    assert (raw.smiles, raw.targets) == ("CC", (1.0,))


def test_of_repeated_columns_the_first_is_used(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "smiles,y,y,z\nCC,1,2,3\n")
    assert len(list(read_molecules(path, target_columns=["z"]))) == 1
    with pytest.warns(UserWarning, match=r"several columns are named 'y'; the first is used"):
        (raw,) = read_molecules(path, target_columns=["z", "y"])
    assert raw.targets == (3.0, 1.0)
    path = write(tmp_path, "b.csv", "smiles,Smiles\nCC,1\n")
    with pytest.warns(UserWarning, match="several columns are named 'smiles', 'Smiles'"):
        (raw,) = read_molecules(path)
    assert raw.smiles == "CC"


NO_LABELS = {
    "high": "not a number",
    "?": "not a number",
    "1.2.3": "not a number",
    "1 2": "not a number",
    "1_000": "not a number",
    **dict.fromkeys(["<0.5", "> 10", "≤3", "~7"], "a censored value"),
    "1,5": "a number with a decimal comma",
    "-inf": "beyond float32",
    "1e39": "beyond float32",
}


@pytest.mark.parametrize("text", NO_LABELS)
def test_what_is_no_label_is_said(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, "a.csv", f'smiles,y\nCC,1\nCO,"{text}"\n')
    got = re.escape(repr(text))
    words = rf"a label of 'y' is {NO_LABELS[text]}\.[\s\S]*got: +{got}[\s\S]*a\.csv:3"
    with pytest.raises(ValueError, match=words) as caught:
        list(read_molecules(path, target_columns=["y"]))
    # What may be a measurement is not to be discarded.
    assert ("missing=" in str(caught.value)) == (text in ("high", "?"))
    assert ("decimal" in str(caught.value)) == (text == "1,5")
    table = TableOptions(missing=(text.upper(),))
    (_, raw) = read_molecules(path, target_columns=["y"], table=table)
    assert raw.targets == (None,)


HINTED = {
    "decimal": 'smiles,y\nCC,1\nCO,"2,5"\n',
    "missing": "smiles,y\nCC,1\nCO,it's?\n",
    "sep": "smiles|y\nCC|1\nCO|2\n",
    "smiles_column": "NAME,y\nCC,1\nCO,2\n",
}


@pytest.mark.parametrize("name", HINTED)
def test_the_options_of_a_hint_are_those_of_the_caller(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, "a.csv", HINTED[name])
    with pytest.raises(ValueError) as caught:
        list(read_molecules(path, target_columns=["y"]))
    words = shlex.split(str(caught.value).rpartition("try:")[2].partition(", TableOptions")[0])
    of_fit = words.index("(fit),")
    of_commands = words.index("(predict," if "(predict," in words else "(featurize)")
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(MoleculeFileData, "data.init_args")
    options = ["--data.init_args.file", str(path), "--data.init_args.targets", '["y"]']
    parsed = parser.parse_args([*options, *words[of_fit - 2 : of_fit]])
    data = parser.instantiate(parsed).data.init_args
    assert len(data.molecules) == 2
    told = ["--input", str(path), "--output", str(tmp_path / "packed"), "--targets", "y"]
    assert run_featurize([*told, *words[of_commands - 2 : of_commands]]) == 0


@pytest.mark.parametrize(
    ("sep", "decimal", "cell", "number"),
    [
        (";", ",", "1,5", 1.5),
        ("\t", ",", "\N{MINUS SIGN}1,5e3", -1500.0),
        (",", ".", "\N{MINUS SIGN}0.25", -0.25),
        (",", ",", '"2,5"', 2.5),
        (";", ",", "1.5", None),
        (";", ",", "1.000,5", None),
    ],
)
def test_decimals(tmp_path: Path, sep: str, decimal: str, cell: str, number: float | None) -> None:
    path = write(tmp_path, "a.csv", f"smiles{sep}y\nCO{sep}{cell}\n")
    records = read_molecules(path, target_columns=["y"], table=TableOptions(None, sep, decimal))
    if number is None:
        with pytest.raises(ValueError, match="'y' is not a number"):
            list(records)
    else:
        assert [raw.targets for raw in records] == [(number,)]


@pytest.mark.parametrize("options", [{"sep": ", "}, {"sep": ""}, {"decimal": ""}])
def test_separators_are_one_character(options: dict) -> None:
    with pytest.raises(ValueError, match=f"{[*options][0]} is not one character"):
        TableOptions(**options)


def test_a_record_of_another_length(tmp_path: Path) -> None:
    for record, number in (("CC", 1), ("CC,1,2", 3)):
        path = write(tmp_path, "a.csv", f"smiles,y\nCO,1\n{record}\n")
        with pytest.raises(ValueError, match=rf"2: smiles, y\n +got: +{number}: CC[\s\S]*a\.csv:3"):
            list(read_molecules(path))


def test_a_quote_that_is_never_closed_swallows_no_records(tmp_path: Path) -> None:
    for text in ('smiles,y,z\nCO,1,"a\nCC,1,b\nCC,1,c\n', 'smiles,y,z\nCO,1,"a'):
        path = write(tmp_path, "a.csv", text)
        with pytest.raises(ValueError, match=r"cannot be read[\s\S]*never closed[\s\S]*a\.csv:2"):
            list(read_molecules(path))
    path = write(tmp_path, "a.csv", 'smiles,y\nCO,1\nCC,"1\n' + "CC,1\n" * 40_000)
    with pytest.raises(ValueError, match=r"the table cannot be read[\s\S]*quotes[\s\S]*a\.csv:3"):
        list(read_molecules(path))
    path = write(tmp_path, "a.csv", 'smiles,y,z\nCO,1,"a\nb"\nCC,1,"c"')
    assert [raw.extra["z"] for raw in read_molecules(path)] == ["a\nb", "c"]


def test_empty_files(tmp_path: Path) -> None:
    none = r"the file contains no molecules[\s\S]*one \w+ record"
    empty = r"the file is empty[\s\S]*names the columns[\s\S]*b\.csv"
    kinds = [("a.smi", none), ("a.sdf", none), ("b.csv", empty)]
    cases = [(*kind, text) for kind in kinds for text in ("", "\n\n")]
    for name, words, text in [*cases, ("a.csv", none, "smiles,y\n")]:
        with pytest.raises(ValueError, match=words):
            list(read_molecules(write(tmp_path, name, text)))
    with pytest.raises(
        FileNotFoundError, match=r"c\.csv: there is no such[\s\S]*a csv file of mol"
    ):
        list(read_molecules(tmp_path / "c.csv"))


def test_lists_of_smiles(tmp_path: Path) -> None:
    text = "\ufeffCCO ethanol, pure\n\n# a comment\nC\tmethane\nCO\nN |$a$| ammonia |x\n  O  \n"
    path = write(tmp_path, "a.smi", text)
    found = [(raw.row, raw.smiles, raw.name, raw.where) for raw in read_molecules(path)]
    assert found == [
        (0, "CCO", "ethanol, pure", f"{path}:1"),
        (1, "C", "methane", f"{path}:4"),
        (2, "CO", None, f"{path}:5"),
        (3, "N |$a$|", "ammonia |x", f"{path}:6"),
        (4, "O", None, f"{path}:7"),
    ]


@pytest.mark.parametrize(
    "head", ["smiles\n", "SMILES name\n", "smiles\tid\n", "# from a vendor\n\nSMILES ID\n"]
)
def test_a_line_of_column_names_is_no_molecule(tmp_path: Path, head: str) -> None:
    path = write(tmp_path, "a.txt.gz", f"{head}CO a\nsmiles b\n")
    assert [(raw.row, raw.smiles) for raw in read_molecules(path)] == [(0, "CO"), (1, "smiles")]


def sdf() -> str:
    records = []
    for smiles, fields in (
        ("CCO", {"logP": "-0.3", "note": "two\nlines"}),
        ("[Na+].[Cl-]", {"logP": "NA"}),
        ("c1ccccc1", {"other": "1"}),
    ):
        mol = Chem.MolFromSmiles(smiles)
        mol.SetProp("_Name", f"name of {smiles}")
        data = "".join(f">  <{name}>  (1)\n{value}\n\n" for name, value in fields.items())
        records.append(Chem.MolToMolBlock(mol) + data)
    return "$$$$\n".join(records)


@pytest.mark.parametrize("end", ["", "$$$\n", "   $$$$\n"])
def test_a_record_without_an_end_takes_no_field_of_the_next(tmp_path: Path, end: str) -> None:
    blocks = [Chem.MolToMolBlock(Chem.MolFromSmiles(text)) for text in ("CC", "CO")]
    text = f"{blocks[0]}{end}{blocks[1]}> <y>\n2\n\n$$$$\n"
    (raw,) = read_molecules(write(tmp_path, "a.sdf", text))
    assert "after M  END" in raw.fault
    assert raw.extra == {}


def test_sdf(tmp_path: Path) -> None:
    path = write(tmp_path, "a.sdf.gz", sdf())
    found = list(read_molecules(path, target_columns=["logP"]))
    smiles = [Chem.MolToSmiles(parse_mol_block(raw.block)) for raw in found]
    assert smiles == ["CCO", "[Cl-].[Na+]", "c1ccccc1"]
    assert [raw.targets for raw in found] == [(-0.3,), (None,), (None,)]
    names = [f"name of {s}" for s in ("CCO", "[Na+].[Cl-]", "c1ccccc1")]
    assert [raw.name for raw in found] == names
    assert [raw.extra for raw in found] == [{"note": "two\nlines"}, {}, {"other": "1"}]
    assert all(raw.smiles is None for raw in found)
    first = sdf().splitlines().index("$$$$") + 2
    assert [raw.where for raw in found][:2] == [f"{path}:1", f"{path}:{first}"]


def test_values_that_look_like_the_head_of_a_field(tmp_path: Path) -> None:
    fields = ">  <MIC>  (1)\n>5 <100\n\n> 25 <IC50 (>10)> DT12\n<7>\n\n> <y>\n2\n\n"
    path = write(tmp_path, "a.sdf", Chem.MolToMolBlock(Chem.MolFromSmiles("CO")) + fields)
    (raw,) = read_molecules(path, target_columns=["y"])
    assert raw.extra == {"MIC": ">5 <100", "IC50 (>10)": "<7>"} and raw.targets == (2.0,)


def test_a_field_that_no_record_has(tmp_path: Path) -> None:
    path = write(tmp_path, "a.sdf", sdf())
    words = r"no record has the field 'y'[\s\S]*'logP', 'note', 'other'"
    with pytest.raises(ValueError, match=words):
        list(read_molecules(path, target_columns=["y", "logP"]))


def test_bad_records_are_yielded_like_others(tmp_path: Path) -> None:
    path = write(tmp_path, "a.sdf", "nonsense\n\n\n\n$$$$\n" + sdf())
    found = list(read_molecules(path))
    assert len(found) == 4 and found[0].name == "nonsense"
    assert found[0].block is not None
    path = write(tmp_path, "a.smi", "CX(\nCO\n")
    assert [raw.smiles for raw in read_molecules(path)] == ["CX(", "CO"]


def test_standard_input_is_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.BytesIO(b"smiles,y\n" + b"CO,1\n" * 10_000)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stream))
    records = read_molecules("-", format="csv", target_columns=["y"])
    assert stream.tell() == 0
    first = next(records)
    assert (first.where, first.smiles, first.targets) == ("standard input:2", "CO", (1.0,))
    assert stream.tell() < 10_000
    assert sum(1 for _ in records) == 9_999


WRONG_ARGUMENTS = [
    ("-", {}, r"the format is unknown[\s\S]*--format csv"),
    ("a.xlsx", {}, r"the format is unknown[\s\S]*csv, sdf, smi, tsv[\s\S]*a\.xlsx"),
    ("a.csv", {"format": "mol2"}, r"the format is unknown[\s\S]*'mol2'"),
    ("a.smi", {"target_columns": ["y"]}, r"smi files have no labels[\s\S]*got: +y"),
    ("a.smi", {"table": TableOptions("y")}, "smi files have no columns of SMILES"),
    ("a.sdf", {"table": TableOptions(sep=";")}, "sdf files have no columns of SMILES"),
    ("a.sdf", {"name_column": "y"}, "sdf files have no columns of SMILES"),
]


@pytest.mark.parametrize(("path", "options", "message"), WRONG_ARGUMENTS)
def test_wrong_arguments_are_refused_at_once(path: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_molecules(path, **options)


def test_a_string_is_not_a_list_of_columns() -> None:
    with pytest.raises(TypeError, match=r"one text, not a list[\s\S]*target_columns=\['logP'\]"):
        read_molecules("a.csv", target_columns="logP")


def test_the_molecules_that_come_with_rdkit() -> None:
    path = rdkit_data_folder() / "NCI" / "first_200.props.sdf"
    found = list(read_molecules(path, target_columns=["AMW"]))
    assert len(found) == 200
    assert all(raw.targets[0] is not None for raw in found)
    smiles = rdkit_data_folder() / "NCI" / "first_5K.smi"
    named = [bool(raw.smiles and raw.name) for raw in read_molecules(smiles)]
    assert len(named) > 4900 and all(named)


BAD = BadMolecule(3, "mine.csv:5", 'C("\n', "an open, bracket", 2)


def test_report_is_read_back_as_it_was(tmp_path):
    none = BadMolecule(4, "mine.csv:6", None, "no text")
    path = write_error_report(tmp_path / "deep" / "errors.csv", [BAD, none])
    rows = rows_of(path)
    cells = ["3", "mine.csv:5", 'C("\n', "an open, bracket", "2"]
    assert rows[0] == dict(zip(("row", "where", "smiles", "reason", "atom"), cells, strict=True))
    assert rows[1]["smiles"] == rows[1]["atom"] == ""
    assert [file.name for file in path.parent.iterdir()] == ["errors.csv"]


def test_complaints_and_summaries():
    message = BAD.complaint("MoleculeFile")
    assert message.startswith("MoleculeFile: row 3 cannot be used.")
    for words in ("an open, bracket (atom 2), in 'C(\"\\n'", "where:    mine.csv:5", 'bad="skip"'):
        assert words in message
    assert "(200 characters)" in BadMolecule(0, "", "C" * 200, "long").complaint("x")
    first = "the first: row 3 (mine.csv:5): an open, bracket"
    assert summary_of(BAD, 2, 3000) == f"2 of 3,000 rows cannot be used; {first}"
