"""The shape of the code: functions, depth of inheritance, documentation, imports at start."""

import ast
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import pyg_dynbatch
from benchmarks.size import num_lines

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "pyg_dynbatch").rglob("*.py"))
DOORS = (
    *("autobatch", "blocks", "compat.tree_lstm", "data", "datasets", "lightning", "loader"),
    *("models", "nn", "testing"),
)
# Names of Fold and of PyG for two different things.
SHARED_NAMES = ["TensorType", "Collater"]

MAX_LINES_OF_FUNCTION = 60
MAX_PARAMETERS = 8
MAX_NESTING = 4
MAX_INHERITANCE = 3

# Every exception carries its reason; an exception that is no longer needed fails.
MORE_PARAMETERS = {
    "core/definitions.py:check": "the fields of the struct in C",
    "core/definitions.py:choose": "the fields of the struct in C",
    "core/definitions.py:merge": "the fields of the struct in C",
    "core/definitions.py:order": "the fields of the struct in C",
    "core/definitions.py:place": "the fields of the struct in C",
    "molecules/featurizer.py:MoleculeFeaturizer.__init__": "keys of the configs",
    "molecules/models.py:WeaveNet.__init__": "every argument is a key of the configs",
    "nn/recursive.py:RecursiveLayer.forward": "two ways to call a layer, and what it returns",
    "trees/models.py:TreeClassifier.__init__": "every argument is a key of the configs",
}
LONGER: dict[str, str] = {}
NO_EXAMPLE = {
    "autobatch.AutoBatch": "autobatch, whose example has one, makes it",
    "autobatch.Emitted": "emit, whose example has some, makes it",
    "autobatch.Explanation": "AutoBatch.explain, whose example has one, makes it",
    "autobatch.Schedule": "made by AutoBatch.collate only",
    "blocks.ResultType": "an interface; every type is an example",
    "datasets.ColumnsDataset": "an interface; every data set is an example",
    "datasets.MoleculeDataset": "an interface; every data set of molecules is an example",
    "nn.RecursiveCell": "an interface; every cell is an example",
    "lightning.MoleculeDataModule": "an interface; every data module is an example",
    "lightning.DataModule": "an interface; every data module is an example",
    "lightning.TreeData": "an interface; every data module of trees is an example",
}
# The name of a class or alias, unlike a constant and most type variables.
CAPITALIZED = re.compile(r"_*[A-Z]\w*[a-z]\w*")

# Folders and hosts of one machine, which mean nothing on any other.
STRANGE = re.compile(
    r"(?<![\w.])/(?:home|root|tmp|work|Users)/|localhost:\d|artifactory|/simple/?\b|find-links"
)
# RDKit frees the rings with the molecule, so a temporary molecule must not be asked for them.
FREED_RINGS = re.compile(r"\)\s*\.GetRing" r"Info\(")
UNFINISHED = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|X" r"XX)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT / "src" / "pyg_dynbatch").as_posix()


def functions(path: Path) -> Iterator[tuple[str, Function]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, Function):
            yield f"{name_of(path)}:{node.name}", node


def num_parameters(node: Function) -> int:
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([argument for argument in given if argument.arg not in ("self", "cls")])


def nesting(node: ast.AST) -> int:
    """Levels of blocks inside a function; ``elif`` is no deeper than its ``if``."""
    blocks = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef | ast.Lambda):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child) + (isinstance(child, blocks) and not is_elif))
    return deepest


def check(found: set[str], excused: dict[str, str]) -> None:
    assert sorted(found - set(excused)) == []
    assert sorted(set(excused) - found) == [], "these exceptions are no longer needed"
    assert all(reason.strip() for reason in excused.values())


def test_functions_are_short() -> None:
    everything = [pair for path in SOURCES for pair in functions(path)]
    check({name for name, node in everything if num_lines(node) > MAX_LINES_OF_FUNCTION}, LONGER)


def test_functions_take_few_parameters() -> None:
    found = set()
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Module | ast.ClassDef):
                continue
            for function in node.body:
                if isinstance(function, Function) and num_parameters(function) > MAX_PARAMETERS:
                    owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
                    found.add(f"{name_of(path)}:{owner}{function.name}")
    check(found, MORE_PARAMETERS)


def test_functions_are_flat() -> None:
    everything = [pair for path in SOURCES for pair in functions(path)]
    assert {name: nesting(node) for name, node in everything if nesting(node) > MAX_NESTING} == {}


def test_inheritance_is_shallow() -> None:
    bases: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]

    def depth(name: str, seen: tuple[str, ...] = ()) -> int:
        ours = [base for base in bases[name] if base in bases and base not in (name, *seen)]
        return max((1 + depth(base, (*seen, name)) for base in ours), default=0)

    assert {name: depth(name) for name in bases if depth(name) > MAX_INHERITANCE} == {}


def types_defined_in(tree: ast.Module) -> Iterator[str]:
    """Names of all classes, and of the aliases and named tuples that are assigned in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        if isinstance(statement.value, ast.Call) and "TypeVar" in ast.unparse(statement.value.func):
            continue
        for target in targets:
            if isinstance(target, ast.Name) and CAPITALIZED.fullmatch(target.id):
                yield target.id


def test_a_name_is_that_of_one_class_or_alias() -> None:
    counts = Counter(name for path in SOURCES for name in types_defined_in(tree_of(path)))
    several = {name: count for name, count in counts.items() if count > 1}
    assert several == dict.fromkeys(SHARED_NAMES, 2)


def test_classes_and_aliases_are_found() -> None:
    text = """
class Rows: ...
if True:
    class _Rows: ...
Rows = tuple[int, ...]
Rows: TypeAlias = list
Names = namedtuple("Names", "a b")
LIMIT = 5
Item = TypeVar("Item")
"""
    found = Counter(types_defined_in(ast.parse(text)))
    assert found == {"Rows": 3, "_Rows": 1, "Names": 1}


def test_every_file_says_why_it_exists() -> None:
    assert [name_of(path) for path in SOURCES if not ast.get_docstring(tree_of(path))] == []


def test_nothing_is_left_unfinished() -> None:
    found = [name_of(path) for path in SOURCES if UNFINISHED.search(path.read_text("utf-8"))]
    assert found == []


def test_no_ring_information_outlives_its_molecule() -> None:
    folders = ("src", "tests", "docs", "examples", "benchmarks")
    files = [path for name in folders for path in (ROOT / name).rglob("*.[pm][yd]")]
    files.append(ROOT / "README.md")
    assert not [path for path in files if FREED_RINGS.search(path.read_text(encoding="utf-8"))]


def test_no_name_of_a_machine() -> None:
    patterns = ("src/**/*", "examples/*", "configs/*", "docs/**/*", "benchmarks/*", "*.md", "*.txt")
    texts = [
        path
        for pattern in patterns
        for path in ROOT.glob(pattern)
        if path.is_file() and path.suffix in (".py", ".md", ".yaml", ".txt", ".json", ".toml")
        if "generated" not in path.parts
    ]
    found = {
        path.relative_to(ROOT).as_posix(): hit.group()
        for path in texts
        if (hit := STRANGE.search(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize("room", DOORS)
def test_public_names_are_documented_with_an_example(room: str) -> None:
    module = importlib.import_module(f"pyg_dynbatch.{room}")
    names = getattr(module, "__all__", [])
    objects = {f"{room}.{name}": getattr(module, name) for name in names}
    documented = {
        name: value
        for name, value in objects.items()
        if inspect.isclass(value) or inspect.isfunction(value)
    }
    assert [name for name, value in documented.items() if not value.__doc__] == []
    without = {name for name, value in documented.items() if ">>>" not in value.__doc__}
    check(without, {n: why for n, why in NO_EXAMPLE.items() if n.startswith(f"{room}.")})


def test_every_public_name_is_in_one_place() -> None:
    modules = [importlib.import_module(f"pyg_dynbatch.{room}") for room in DOORS]
    places = Counter(name for module in (pyg_dynbatch, *modules) for name in module.__all__)
    assert [name for name, count in places.items() if count > 1] == SHARED_NAMES


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "src" / "pyg_dynbatch" / "py.typed").is_file()


def test_rooms_are_attributes() -> None:
    assert set(pyg_dynbatch._NAMESPACES) == set(DOORS)
    assert pyg_dynbatch.nn is importlib.import_module("pyg_dynbatch.nn")


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        pyg_dynbatch.nothing  # noqa: B018
    assert set(pyg_dynbatch.__all__) <= set(dir(pyg_dynbatch))
