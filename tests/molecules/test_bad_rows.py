import csv

from pyg_dynbatch.datasets import BadMolecule, write_error_report
from pyg_dynbatch.molecules.files import summary_of

BAD = BadMolecule(3, "mine.csv:5", 'C("\n', "an open, bracket", 2)


def test_report_is_read_back_as_it_was(tmp_path):
    none = BadMolecule(4, "mine.csv:6", None, "no text")
    path = write_error_report(tmp_path / "deep" / "errors.csv", [BAD, none])
    with path.open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert rows[0] == {
        "row": "3",
        "where": "mine.csv:5",
        "smiles": 'C("\n',
        "reason": "an open, bracket",
        "atom": "2",
    }
    assert rows[1]["smiles"] == rows[1]["atom"] == ""
    assert [file.name for file in path.parent.iterdir()] == ["errors.csv"]


def test_complaint_names_all():
    message = BAD.complaint("MoleculeFile")
    assert message.startswith("MoleculeFile: row 3 cannot be used.")
    assert "an open, bracket (atom 2), in 'C(\"\\n'" in message
    assert "where:    mine.csv:5" in message
    assert 'bad="skip"' in message and 'bad="blank"' in message
    assert "(200 characters)" in BadMolecule(0, "", "C" * 200, "long").complaint("x")


def test_summary():
    assert summary_of([BAD] * 2, 3000) == (
        "2 of 3,000 rows cannot be used; the first: row 3 (mine.csv:5): an open, bracket"
    )
