"""Check a block expression, register its operations, and write its tracer."""

from collections.abc import Iterable
from typing import Any

from pyg_dynbatch.blocks.block import Block
from pyg_dynbatch.blocks.code import Code, Model, packed
from pyg_dynbatch.blocks.result_types import (
    BroadcastSequenceType,
    PyObjectType,
    ResultType,
    SequenceType,
    TensorType,
    TupleType,
    VoidType,
    repeated,
)
from pyg_dynbatch.blocks.site import Recipe
from pyg_dynbatch.blocks.tracer import Tracer
from pyg_dynbatch.blocks.typed import wake
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.operation import Operations

SPLIT_LINEAR, MERGE_EQUAL = "split_linear", "merge_equal"
PASSES = (SPLIT_LINEAR, MERGE_EQUAL)
"""All rewrites: a linear layer on a concatenation with a broadcast part is split; equal calls on
equal constants are made once a mini-batch."""


def checked_passes(passes: Iterable[str]) -> tuple[str, ...]:
    """Refuses rewrites that do not exist.

    Raises:
        ValueError: For an unknown name.

    Example:
        >>> checked_passes(["merge_equal"])
        ('merge_equal',)
    """
    found = tuple(passes)
    unknown = [name for name in found if name not in PASSES]
    if unknown:
        raise ValueError(
            mismatch(
                f"Compiler: unknown pass {unknown[0]!r}",
                expected=f"some of {', '.join(map(repr, PASSES))}",
                got=repr(unknown[0]),
            )
        )
    return found


def compile_block(
    root: Block,
    operations: Operations,
    passes: Iterable[str] = PASSES,
    *,
    keeps_result: bool = False,
) -> Tracer:
    """Writes the tracer of a block and registers what it calls.

    Args:
        root: The block; an input type that nothing says is a host object.
        operations: Takes up the operations.
        passes: The rewrites to make.
        keeps_result: Let traced examples carry what the root gave, host objects and all.

    Returns:
        The tracer.

    Raises:
        TypeError: If a type cannot be inferred, or a block is not complete.
    """
    if root.input_type is None:
        root.set_input_type(PyObjectType())
    reached = _reached(root)
    wake(*reached)
    for block in reached:
        block._check()
    for block in reached:
        block._known("input")
        block._known("output")
    model = Model(operations, SPLIT_LINEAR in passes)
    code = Code(model, "root")
    code.block = root
    _write_root(code, root)
    model.finish()
    kind = root._known("output")
    return Tracer(_recipe(model, [code, *model.functions.values()], kind, keeps_result))


def _reached(root: Block) -> list[Block]:
    """The block and all inside, those behind forward declarations too, each once."""
    found: dict[int, Block] = {}
    left = [root]
    while left:
        for block in left.pop().walk():
            if id(block) in found:
                continue
            found[id(block)] = block
            target = getattr(block, "target", None)
            if isinstance(target, Block) and id(target) not in found:
                left.append(target)
    return list(found.values())


def _write_root(code: Code, root: Block) -> None:
    """Writes the function of the root, whose input may be of any type but arrives as one object."""
    value = lifted(code, root._known("input"), "x_")
    result = code.emit(root, value)
    code.line(f"yield None, {packed(result)}")
    code.lines.insert(0, "    def root(x_):")
    code.origin.insert(0, ("Root", False))


def lifted(code: Code, wanted: ResultType, source: str) -> Any:
    """Writes lines that read a value of any type off a host object."""
    if isinstance(wanted, TensorType):
        return code.record_constant(wanted, source)
    if isinstance(wanted, VoidType):
        return "None"
    if isinstance(wanted, BroadcastSequenceType):
        value = code.fresh("x")
        code.line(f"{value} = {code.model.name_of(repeated)}({source})")
        return lifted(code, wanted.element_type, value)
    if isinstance(wanted, TupleType):
        names = tuple(code.fresh("x") for _ in wanted)
        code.line(f"({', '.join(names)}{',' if names else ''}) = {source}")
        return tuple(lifted(code, item, name) for item, name in zip(wanted, names, strict=True))
    if isinstance(wanted, SequenceType):
        found, element = code.fresh("s"), code.fresh("x", varying=True)
        code.line(f"{found} = []")
        with code.loop(element, source):
            code.line(f"{found}.append({packed(lifted(code, wanted.element_type, element))})")
        return found
    name = code.fresh("x")
    code.line(f"{name} = {source}")
    return name


def _recipe(model: Model, codes: list[Code], result_type: ResultType, keeps_result: bool) -> Recipe:
    free = list(model.free.values())
    metrics = range(len(model.metrics))
    data = [n for n, site in enumerate(model.sites) if site.kind in ("constant", "input")]
    head = [
        "def begin():",
        f"    C = {free}; P = {list(range(len(free)))}",
        "    L = C.__len__; E = C.extend; A = C.append; S = P.append",
        *(f"    z{site} = {place}" for place, site in enumerate(free)),
        *(f"    D{site} = []; d{site} = D{site}.append" for site in data),
        *(f"    M{n} = []; m{n} = M{n}.append; N{n} = []; n{n} = N{n}.append" for n in metrics),
        *(f"    {name} = {{}}" for name in model.dictionaries),
    ]
    lines, origin = list(head), [("Root", False)] * len(head)
    for code in codes:
        lines += code.lines
        origin += code.origin
    items = ", ".join(f"{site}: D{site}" for site in data)
    rows, labels = ("".join(f"{letter}{n}, " for n in metrics) for letter in "MN")
    lines.append(f"    return C, P, {{{items}}}, ({rows}), ({labels}), root")
    origin.append(("Root", False))
    names: dict[str, Any] = model.named
    return Recipe(
        "\n".join(lines) + "\n",
        origin,
        names,
        tuple(model.sites),
        tuple(model.signatures),
        tuple(model.row_types),
        {name: model.metric_types[name] for name in model.metrics},
        result_type,
        keeps_result,
    )
