"""Show a block with the types on its wires, its schedule, and the calls one example makes."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyg_dynbatch.blocks.block import Block
from pyg_dynbatch.blocks.code import Recipe
from pyg_dynbatch.blocks.tracing import Traced, merge_traced
from pyg_dynbatch.blocks.types import shown
from pyg_dynbatch.core.operation import Ragged
from pyg_dynbatch.core.program import RESULT
from pyg_dynbatch.core.schedule import Schedule


@dataclass(frozen=True)
class BlockDrawing:
    """A block and all blocks inside, with the types on their wires.

    Args:
        label: What it is, and its key in the block around.
        input_type: Type on its input wire, as text.
        output_type: Type on its output wire, as text.
        children: The blocks directly inside.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> print(td.drawing_of(td.Map(td.Scalar()) >> td.Sum()))
        Pipe: object -> float32[]
        ├─ Map: object -> [float32[]]
        │  └─ Scalar: object -> float32[]
        └─ Sum: [float32[]] -> float32[]
    """

    label: str
    input_type: str
    output_type: str
    children: tuple["BlockDrawing", ...]

    def lines(self) -> Iterator[str]:
        """One line per block, children indented below it."""
        left: list[tuple[BlockDrawing, str, str]] = [(self, "", "")]
        while left:
            one, first, rest = left.pop()
            yield f"{first}{one.label}: {one.input_type} -> {one.output_type}"
            last = len(one.children) - 1
            for number in range(last, -1, -1):
                bend, line = ("└─ ", "   ") if number == last else ("├─ ", "│  ")
                left.append((one.children[number], rest + bend, rest + line))

    def __str__(self) -> str:
        return "\n".join(self.lines())


def drawing_of(block: Block) -> BlockDrawing:
    """Describe a block with the types on its wires, as far as they are known.

    Args:
        block: The block; a declared block is drawn where its declaration is resolved.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> print(drawing_of(td.Scalar()))
        Scalar: object -> float32[]
    """
    parent = block.parent
    key = parent._key_of(block) if parent is not None else ""
    declared = f" = {block._declaration._label()}" if block._declaration is not None else ""
    label, children = f"{key} {block._label()}{declared}".strip(), map(drawing_of, block.children)
    return BlockDrawing(label, shown(block.input_type), shown(block.output_type), tuple(children))


class ExplainedCall(NamedTuple):
    """One call of an example.

    Args:
        number: Its number.
        operation: Name of the operation.
        arguments: What each argument is: ``call 3``, ``constant``, ``row 2``.
        path: The block that makes the call.
    """

    number: int
    operation: str
    arguments: tuple[str, ...]
    path: str

    def __str__(self) -> str:
        arguments = ", ".join(self.arguments)
        return f"call {self.number}: {self.operation}({arguments})  {self.path}"


def explained(recipe: Recipe, traced: Traced) -> list[ExplainedCall]:
    """List the calls of a traced example; see :meth:`Compiler.explain`."""
    merged, site = merge_traced(recipe, [traced])
    calls = merged.call_signature.size
    # Those of each call and place, of which only ragged arguments have several.
    arguments: dict[tuple[int, int], list[str]] = defaultdict(list)
    reads = zip(merged.read_call, merged.read_argument, merged.read_value, strict=True)
    for call, place, value in reads:
        arguments[int(call), int(place)].append(_value_text(merged, int(value)))
    found = []
    for call in range(calls):
        signature = recipe.signatures[merged.call_signature[call]]
        texts = []
        for place, wanted in enumerate(signature.inputs):
            mine = arguments[call, place]
            texts.append(f"[{', '.join(mine)}]" if isinstance(wanted, Ragged) else mine[0])
        path = recipe.sites[site[call]].path
        found.append(ExplainedCall(call, signature.name, tuple(texts), path))
    return found


def _value_text(merged: Any, value: int) -> str:
    kind, place = int(merged.value_kind[value]), int(merged.value_place[value])
    if kind == RESULT:
        slot = int(merged.value_slot[value])
        several = len(merged.signatures[merged.call_signature[place]].outputs) > 1
        return f"call {place}" + (f".{slot}" if several else "")
    (constants,) = merged.constant_rows(int(merged.value_type[value])) or (None,)
    if constants is None:
        return f"row {place}"
    row = constants[place].tolist()
    text = str(row)
    return text if len(text) <= 20 else f"{text[:17]}..."


def schedule_text(schedule: Schedule, width: int = 40) -> str:
    """Draw a schedule: one line per step, as long as the step has rows.

    Args:
        schedule: For instance ``compiler.collate(examples).schedule``.
        width: Length of the longest bar.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> compiler = td.Compiler.create(td.Map(td.Scalar()) >> td.Sum())
        >>> print(schedule_text(compiler.collate([[1.0, 2.0], [3.0, 4.0]]).schedule))
        step 0  sum  ████████████████████████████████████████ 2
    """
    names = [schedule.signatures[step.operation].name for step in schedule.steps]
    sizes: Sequence[int] = [step.size for step in schedule.steps]
    longest, most = max(map(len, names), default=0), max(sizes, default=1)
    return "\n".join(
        f"step {number}  {name:<{longest}}  {'█' * max(1, width * size // most)} {size}"
        for number, (name, size) in enumerate(zip(names, sizes, strict=True))
    )
