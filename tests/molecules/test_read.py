"""Files of molecules, read as a stream."""

import gzip
from pathlib import Path

import pytest
from rdkit import Chem

from pyg_dynbatch.molecules.chemistry import rdkit_data_folder, smiles_of_block
from pyg_dynbatch.molecules.read import BadMolecule, RawMolecule, TableOptions, read_molecules

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
    found = list(read_molecules(path, target_columns=["logP"]))
    assert [raw.smiles for raw in found] == ["CO", "O", "[Na+].[Cl-]", "C", "N", ""]
    assert [raw.targets for raw in found] == [(-0.77,), (15.0,), (None,), (None,), (None,), (None,)]
    assert [raw.row for raw in found] == [0, 1, 2, 3, 4, 5]
    assert [raw.where for raw in found] == [f"{path}:{line}" for line in (2, 3, 4, 5, 6, 9)]
    assert found[0].extra == {"name": "methanol", "kind": "alcohol"}
    assert found[4].extra["name"] == "two\nlines"
    assert all(raw.block is None for raw in found)


@pytest.mark.parametrize(("name", "empty"), [("a.csv", ","), ("a.csv", '" ",""'), ("a.tsv", "\t")])
def test_a_line_of_empty_cells_is_a_record(tmp_path: Path, name: str, empty: str) -> None:
    text = "smiles,y\nCC,1\n\nE\nCO,2\n".replace(",", "," if name == "a.csv" else "\t")
    path = write(tmp_path, name, text.replace("E", empty))
    found = [
        (raw.row, raw.smiles, *raw.targets) for raw in read_molecules(path, target_columns=["y"])
    ]
    assert found == [(0, "CC", 1.0), (1, "", None), (2, "CO", 2.0)]


def test_a_named_column_of_smiles(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "mol,Class,pIC50\nCC,1,0.5\n")
    table = TableOptions(smiles_column="mol")
    (raw,) = read_molecules(path, target_columns=["pIC50", "Class"], table=table)
    source = (["mol", "Class", "pIC50"], ["CC", "1", "0.5"])
    assert raw == RawMolecule(0, f"{path}:2", smiles="CC", targets=(0.5, 1.0), source=source)


COLUMNS = [
    ("mol,y", {}, "no columns are named 'smiles'"),
    ("mol,y", {"table": TableOptions("SMILES")}, "no columns are named 'SMILES'"),
    ("smiles,y", {"target_columns": ["z"]}, "no columns are named 'z'"),
    ("smiles;y", {}, "'smiles;y'"),
    ("smiles,y,y", {"target_columns": ["y"]}, "2 columns are named 'y'"),
    ("smiles,smiles,y", {}, "2 columns are named 'smiles'"),
]


@pytest.mark.parametrize(("header", "options", "words"), COLUMNS)
def test_a_column_is_there_once(tmp_path: Path, header: str, options: dict, words: str) -> None:
    path = write(tmp_path, "a.csv", f"{header}\n")
    with pytest.raises(ValueError, match=words) as caught:
        list(read_molecules(path, **options))
    assert f"{path}:1" in str(caught.value)


def test_of_other_columns_with_one_name_the_first_is_used(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "smiles,y,y,z\nCC,1,2,3\n")
    (raw,) = read_molecules(path, target_columns=["z"])
    assert raw.targets == (3.0,) and raw.extra == {"y": "1"}


NO_LABELS = ["high", "?", "1.2.3", "1 2", "1_000", "<0.5", "> 10", "1,5", "-inf", "1e39"]


@pytest.mark.parametrize("text", NO_LABELS)
def test_a_label_is_a_number_or_missing(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, "a.csv", f'smiles,y\nCC,1\nCO,"{text}"\n')
    with pytest.raises(ValueError, match="'y' is not a number") as caught:
        list(read_molecules(path, target_columns=["y"]))
    assert repr(text) in str(caught.value) and f"{path}:3" in str(caught.value)
    table = TableOptions(missing=(text.upper(),))
    (_, raw) = read_molecules(path, target_columns=["y"], table=table)
    assert raw.targets == (None,)


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
        with pytest.raises(ValueError, match="not a number"):
            list(records)
    else:
        assert [raw.targets for raw in records] == [(number,)]


def test_a_record_of_another_length(tmp_path: Path) -> None:
    for record in ("CC", "CC,1,2"):
        path = write(tmp_path, "a.csv", f"smiles,y\nCO,1\n{record}\n")
        with pytest.raises(ValueError, match="number of cells") as caught:
            list(read_molecules(path))
        assert f"{path}:3" in str(caught.value)


def test_a_quote_that_is_never_closed_swallows_no_records(tmp_path: Path) -> None:
    for more in ("", "\nCC,1,b\nCC,1,c\n", "\n" + "CC,1\n" * 40_000):
        path = write(tmp_path, "a.csv", f'smiles,y,z\nCO,1,"a{more}')
        with pytest.raises(ValueError, match="cannot be read") as caught:
            list(read_molecules(path))
        assert f"{path}:2" in str(caught.value)
    path = write(tmp_path, "a.csv", 'smiles,y,z\nCO,1,"a\nb"\nCC,1,"c"')
    assert [raw.extra["z"] for raw in read_molecules(path)] == ["a\nb", "c"]


def test_empty_files(tmp_path: Path) -> None:
    for name in ("a.smi", "a.sdf", "a.csv"):
        for text in ("", "\n\n", "smiles,y\n" if name == "a.csv" else " \n"):
            with pytest.raises(ValueError, match="no molecules|file is empty"):
                list(read_molecules(write(tmp_path, name, text)))
    with pytest.raises(FileNotFoundError, match="c.csv"):
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
    smiles = [smiles_of_block(raw.block) for raw in found]
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
    with pytest.raises(ValueError, match="no record has the field 'y'"):
        list(read_molecules(write(tmp_path, "a.sdf", sdf()), target_columns=["y", "logP"]))


def test_bad_records_are_yielded_like_others(tmp_path: Path) -> None:
    path = write(tmp_path, "a.sdf", "nonsense\n\n\n\n$$$$\n" + sdf())
    found = list(read_molecules(path))
    assert len(found) == 4 and found[0].name == "nonsense"
    assert found[0].block is not None
    path = write(tmp_path, "a.smi", "CX(\nCO\n")
    assert [raw.smiles for raw in read_molecules(path)] == ["CX(", "CO"]


WRONG_ARGUMENTS = [
    ("a.xlsx", {}, "a.xlsx"),
    ("a.csv", {"format": "mol2"}, "'mol2'"),
    ("a.smi", {"target_columns": ["y"]}, "no labels"),
]


@pytest.mark.parametrize(("name", "options", "word"), WRONG_ARGUMENTS)
def test_wrong_arguments_are_refused(tmp_path: Path, name: str, options: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        list(read_molecules(write(tmp_path, name, "CO\n"), **options))


def test_files_that_come_with_rdkit() -> None:
    path = rdkit_data_folder() / "NCI" / "first_200.props.sdf"
    found = list(read_molecules(path, target_columns=["AMW"]))
    assert len(found) == 200
    assert all(raw.targets[0] is not None for raw in found)
    smiles = rdkit_data_folder() / "NCI" / "first_5K.smi"
    named = [bool(raw.smiles and raw.name) for raw in read_molecules(smiles)]
    assert len(named) > 4900 and all(named)


def test_complaints() -> None:
    message = BadMolecule(3, "mine.csv:5", "C" * 200, "an open, bracket", 2).complaint("Reader")
    assert message.startswith("Reader: row 3")
    for words in ("an open, bracket (atom 2)", "mine.csv:5", "(200 characters)"):
        assert words in message
