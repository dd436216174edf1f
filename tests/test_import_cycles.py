"""No file of the package imports itself through others, not even inside a function."""

import ast
from pathlib import Path

import pyg_dynbatch

ROOT = Path(pyg_dynbatch.__file__).parent


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def statements(tree: ast.AST) -> list[ast.stmt]:
    """All statements, also inside functions, but for what only type checkers read."""
    found: list[ast.stmt] = []
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        found += [child] if isinstance(child, ast.stmt) else []
        found += statements(child)
    return found


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """The modules that a file imports; a name taken from a package counts as its module."""
    found: set[str] = set()
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in modules else node.module)
    return (found & modules) - {name_of(path)}


def cycles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Groups of files that reach each other."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        waiting = list(graph[start])
        while waiting:
            module = waiting.pop()
            if module not in seen:
                seen.add(module)
                waiting += graph[module]
        reached[start] = seen
    groups = (
        frozenset(other for other in reached[module] if module in reached[other])
        for module in graph
    )
    return {group for group in groups if group}


def test_files_import_each_other_in_one_direction() -> None:
    paths = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}
    graph = {name: imports_of(path, set(paths)) for name, path in paths.items()}
    assert cycles(graph) == set()


def test_imports_inside_functions_are_seen() -> None:
    source = """
if TYPE_CHECKING:
    from package import annotations
def f():
    if True:
        from package import inside
"""
    found = [ast.unparse(node) for node in statements(ast.parse(source))]
    assert "from package import inside" in found
    assert "from package import annotations" not in found


def test_cycles_of_a_graph() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "c"}}
    assert cycles(graph) == {frozenset("bc")}
