"""Models in blocks are short: counted as Looks et al. (2017), Appendix C, counted theirs.

Only the functional unit counts, between two comments of each example; imports, files, printing
and the drawing of data stay outside. Of it, lines of code count: no blank lines, comments or
docstrings, as in the program cloc. A line longer than 80 columns counts twice.
"""

import ast
import io
import math
import tokenize

import pytest

from tests.example_files import FOLDER

COLUMNS = 80
BEGIN, END = "# Functional unit: ", "# End of the functional unit."

# What is counted, the lines with Fold and without (Table 3 of the paper), and our own bound.
LIMITS = {
    "blocks_attention": ("feed-forward attention", 26, 71, 26),
    "blocks_tree_lstm": ("binary Tree-LSTM, one epoch", 119, 219, 60),
    "blocks_weave": ("weave module", 32, 44, 16),
}
# Not counted in the paper.
OTHERS = {
    "blocks_sentiment": ("Fold's sentiment model, six metrics", 76),
    "blocks_text": ("four text pipelines", 20),
    "blocks_language_id": ("characters, words, sentence", 16),
    "blocks_calculator": ("sign of expressions", 20),
}
UNSEEN = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def functional_unit(text: str) -> str:
    """What stands between the two comments."""
    _, _, rest = text.partition(f"\n{BEGIN}")
    unit, end, _ = rest.partition(f"\n{END}\n")
    assert end, "the functional unit is not marked"
    return unit.partition("\n")[2]


def docstring_lines(text: str) -> set[int]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    found = [node.body[0] for node in nodes if node.body and ast.get_docstring(node) is not None]
    return {line for node in found for line in range(node.lineno, (node.end_lineno or 0) + 1)}


def count(text: str) -> int:
    """Lines of code, each as many times as it fills 80 columns."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    seen = [t for t in tokens if t.type not in UNSEEN and t.type != tokenize.ENDMARKER]
    lines = {n for t in seen for n in range(t.start[0], t.end[0] + 1)} - docstring_lines(text)
    split = text.splitlines()
    return sum(math.ceil(len(split[n - 1]) / COLUMNS) for n in lines)


def counted(name: str) -> int:
    return count(functional_unit((FOLDER / f"{name}.py").read_text(encoding="utf-8")))


def test_counter_counts_as_it_says() -> None:
    text = '''"""A file."""
import os  # one


def f(x):
    """Says something,

    at length.
    """
    # A comment.
    y = (
        x,
    )
    return f"""
{y}"""
'''
    # import, def, three of the tuple, two of the returned string.
    assert count(text) == 7
    assert count("x = 1  " + "#" * 80) == 2
    assert count("x = (" + "1 + " * 20 + "1)\n\n\n") == 2


def test_unit_lies_between_its_marks() -> None:
    assert functional_unit(f"a\n{BEGIN}all.\nb\nc\n{END}\nd\n") == "b\nc"
    with pytest.raises(AssertionError, match="not marked"):
        functional_unit("a\nb\n")


def test_every_block_example_is_counted() -> None:
    found = sorted(path.stem for path in FOLDER.glob("blocks_*.py"))
    assert found == sorted([*LIMITS, *OTHERS])


@pytest.mark.parametrize("name", LIMITS)
def test_models_of_the_paper_are_shorter_than_with_fold(name: str) -> None:
    _, fold, original, ours = LIMITS[name]
    lines = counted(name)
    assert lines <= ours <= fold < original
    # A unit that says nothing would be short too.
    assert lines > 10


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_stay_short(name: str) -> None:
    assert 8 < counted(name) <= OTHERS[name][1]


def test_units_hold_no_imports_and_print_nothing() -> None:
    for name in [*LIMITS, *OTHERS]:
        unit = ast.parse(functional_unit((FOLDER / f"{name}.py").read_text(encoding="utf-8")))
        nodes = list(ast.walk(unit))
        assert not [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
        assert not [n for n in nodes if isinstance(n, ast.Name) and n.id in ("print", "open")]
