"""Show a block with the types on its wires, its schedule, and the calls of one example."""

from collections import Counter
from collections.abc import Sequence

from pyg_dynbatch.blocks.block import Block
from pyg_dynbatch.blocks.code import CompiledSource
from pyg_dynbatch.core.operation import Ragged
from pyg_dynbatch.core.recording import INPUT, DecodedRecord, Recording, records_of
from pyg_dynbatch.core.steps import Steps
from pyg_dynbatch.core.types import RowType


def drawing_of(block: Block) -> str:
    """Draw a block and all blocks inside, with the types on their wires as far as they are known.

    Args:
        block: The block; a declared block is drawn where its declaration is resolved.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> print(td.drawing_of(td.Map(td.Scalar()) >> td.Sum()))
        Pipe: object -> float32[]
        ├─ Map: object -> [float32[]]
        │  └─ Scalar: object -> float32[]
        └─ Sum: [float32[]] -> float32[]
    """
    lines = []
    waiting = [(block, "", "")]  # each with what is in front of its line, and of those below
    while waiting:
        shown, front, below = waiting.pop()
        lines.append(f"{front}{_label_of(shown)}: {_types_of(shown)}")
        bend = "└─ "
        line = "   "
        for child in reversed(shown.children):
            waiting.append((child, below + bend, below + line))
            bend = "├─ "
            line = "│  "
    return "\n".join(lines)


def _label_of(block: Block) -> str:
    key = "" if block.parent is None else block.parent._key_of(block)
    declared = "" if block._declaration is None else f" = {block._declaration._label()}"
    return f"{key} {block._label()}{declared}".strip()


def _types_of(block: Block) -> str:
    kinds = (block.input_type, block.output_type)
    return " -> ".join("?" if kind is None else str(kind) for kind in kinds)


def schedule_text(schedule: Steps, width: int = 40) -> str:
    """Draw a schedule: one line per step, as long as the step has rows.

    Args:
        schedule: For instance ``compiler.collate(examples)``.
        width: Length of the longest bar.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> compiler = td.Compiler(td.Map(td.Scalar()) >> td.Sum())
        >>> print(schedule_text(compiler.collate([[1.0, 2.0], [3.0, 4.0]])))
        step 0  sum  ████████████████████████████████████████ 2
    """
    names = [schedule.name_of(step) for step in schedule.steps]
    longest_name = max(map(len, names), default=0)
    largest = max((step.size for step in schedule.steps), default=1)
    lines = []
    for number, (name, step) in enumerate(zip(names, schedule.steps, strict=True)):
        bar = "█" * max(1, width * step.size // largest)
        lines.append(f"step {number}  {name:<{longest_name}}  {bar} {step.size}")
    return "\n".join(lines)


def explained(source: CompiledSource, recording: Recording) -> list[str]:
    """List the calls of a recorded example; see :meth:`Compiler.explain`."""
    lines: list[str] = []
    name_of: dict[int, str] = {}  # of each value
    constants_seen = Counter[int]()  # of each site
    records = list(records_of(recording.sites, recording.code))
    values_read = _values_read(records, recording)
    for begin, number, arguments, _ in records:
        kind, results, signature = recording.sites[number]
        if kind == INPUT:
            name_of[begin] = f"row {arguments[0][0]}"
        elif signature is None:
            row = recording.constants_of(number)[0][constants_seen[number]]
            name_of[begin] = _shortened(str(row.tolist()))
            constants_seen[number] += 1
        elif arguments or begin in values_read:
            name = f"call {len(lines)}"
            for slot in range(len(results)):
                name_of[begin + slot] = f"{name}.{slot}" if len(results) > 1 else name
            texts = [
                _argument_text(argument_type, values, name_of)
                for argument_type, values in zip(signature.inputs, arguments, strict=True)
            ]
            call = f"{signature.name}({', '.join(texts)})"
            lines.append(f"{name}: {call}  {source.sites[number].path}")
    return lines


def _values_read(records: Sequence[DecodedRecord], recording: Recording) -> set[int]:
    """The values that calls and outputs read."""
    values: set[int] = set()
    for record in records:
        for argument in record.arguments:
            values.update(argument)
    for output in recording.outputs.values():
        values.update(output.tolist())
    return values


def _argument_text(kind: RowType | Ragged, values: Sequence[int], name_of: dict[int, str]) -> str:
    names = [name_of[value] for value in values]
    return f"[{', '.join(names)}]" if isinstance(kind, Ragged) else names[0]


def _shortened(text: str) -> str:
    return text if len(text) <= 20 else f"{text[:17]}..."
