"""Count what is installed, per folder of the package: ``python -m benchmarks.size``."""

import ast
import io
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "pyg_dynbatch"
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


@dataclass(frozen=True)
class Size:
    """What a set of files contains: Python, and the lines of all others, such as C."""

    files: int
    lines: int  # blank ones included
    code: int  # without docstrings and comments
    docstrings: int
    comments: int  # lines with nothing but a comment
    longest_file: int
    longest_function: int  # without its docstring
    not_python: int


def size_of(paths: Iterable[Path]) -> Size:
    """Count what files contain."""
    texts = [(path.suffix == ".py", path.read_text(encoding="utf-8")) for path in paths]
    counts = [_counts(text) for is_python, text in texts if is_python]
    lines, code, docstrings, comments, functions = zip(*counts, strict=True) if counts else [()] * 5
    totals = sum(lines), sum(code), sum(docstrings), sum(comments)
    longest = max(lines, default=0), max(functions, default=0)
    others = sum(len(text.splitlines()) for is_python, text in texts if not is_python)
    return Size(len(counts), *totals, *longest, others)


def sizes(package: Path = PACKAGE) -> dict[str, Size]:
    """Count every folder of a package, the files beside them, the whole, and the benchmarks."""
    # Found, not listed, so that nothing can be left out.
    installed = [path for path in package.rglob("*") if path.is_file()]
    installed = [path for path in installed if path.suffix not in (".pyc", ".so", ".pyd")]
    slices: dict[str, list[Path]] = {}
    for path in installed:
        folder, *inside = path.relative_to(package).parts
        slices.setdefault(folder if inside else "other files", []).append(path)
    found = {name: size_of(slices[name]) for name in sorted(slices)}
    found["installed"] = size_of(installed)
    found["benchmarks"] = size_of((ROOT / "benchmarks").glob("*.py"))
    return found


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of the body of a function without its docstring."""
    body = function.body
    if ast.get_docstring(function) is not None and len(body) > 1:
        body = body[1:]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


def _counts(text: str) -> tuple[int, int, int, int, int]:
    tree = ast.parse(text)
    docs: set[int] = set()
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            docs.update(range(value.lineno, (value.end_lineno or 0) + 1))
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= docs
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [num_lines(node) for node in ast.walk(tree) if isinstance(node, functions)]
    longest = max(bodies, default=0)
    return len(text.splitlines()), len(code), len(docs), len(comments - code), longest


def main() -> None:
    """Print the table."""
    names = ("files", "lines", "code", "docstrings", "comments", "longest file", "function")
    print(f"{'':12}", *(f"{name:>12}" for name in (*names, "not Python")))
    for name, size in sizes().items():
        print(f"{name:12}", *(f"{value:12,}" for value in vars(size).values()))


if __name__ == "__main__":
    main()
