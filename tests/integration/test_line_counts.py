"""Models in blocks are short, counted as in Looks et al. (2017), Appendix C.

Only the functional unit counts, which two comments of each example delimit: no imports, files,
printing or drawing of data. Of the unit, lines of code count: no blank lines, comments or
docstrings, as in the program cloc. A line longer than 80 columns counts twice.
"""

import ast
from pathlib import Path

import pytest

from benchmarks.size import size_of
from tests.example_files import FOLDER

BEGIN, END = "# Functional unit: ", "# End of the functional unit."
# The lines with Fold and without (Table 3 of the paper), and our own limit.
PAPER = {
    "blocks_attention": (26, 71, 26),  # feed-forward attention
    "blocks_tree_lstm": (119, 219, 60),  # binary Tree-LSTM, one epoch
    "blocks_weave": (32, 44, 16),  # weave module
}
# Not counted in the paper.
OTHERS = {
    "blocks_sentiment": 76,  # Fold's sentiment model, six metrics
    "blocks_text": 20,  # four text pipelines
    "blocks_language_id": 16,  # characters, words, sentence
    "blocks_calculator": 20,  # sign of expressions
}


def functional_unit(text: str) -> str:
    """Return the text between the two comments."""
    _, _, rest = text.partition(f"\n{BEGIN}")
    unit, end, _ = rest.partition(f"\n{END}\n")
    assert end, "the functional unit is not marked"
    return unit.partition("\n")[2]


def count(text: str, folder: Path) -> int:
    path = folder / "unit.py"
    path.write_text(text, encoding="utf-8")
    lines = [line for line in text.splitlines() if '"""' not in line]
    return size_of([path]).code + sum(len(line) > 80 for line in lines)


def test_the_unit_is_found_and_counted(tmp_path: Path) -> None:
    text = '"""A docstring."""\n\nx = (\n    1,  # one\n)\n# A comment.\ny = 1' + " + 1" * 20
    assert functional_unit(f"a\n{BEGIN}all.\n{text}\n{END}\nd\n") == text
    assert count(text, tmp_path) == 3 + 2
    with pytest.raises(AssertionError, match="not marked"):
        functional_unit("a\nb\n")


def test_every_block_example_is_counted() -> None:
    found = sorted(path.stem for path in FOLDER.glob("blocks_*.py"))
    assert found == sorted([*PAPER, *OTHERS])


@pytest.mark.parametrize("name", [*PAPER, *OTHERS])
def test_models_stay_short_and_shorter_than_with_fold(name: str, tmp_path: Path) -> None:
    unit = functional_unit((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    # The lower limit fails for a unit that is marked in the wrong lines.
    assert 8 < count(unit, tmp_path) <= OTHERS.get(name, PAPER.get(name, [0])[-1])
    if name in PAPER:
        fold, plain, ours = PAPER[name]
        assert ours <= fold < plain
    nodes = list(ast.walk(ast.parse(unit)))
    assert not [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
    assert not [n for n in nodes if isinstance(n, ast.Name) and n.id in ("print", "open")]
