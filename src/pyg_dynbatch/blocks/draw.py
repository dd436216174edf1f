"""Show a block with the types on its wires, its schedule, and the calls of one example."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pyg_dynbatch.blocks.block import Block
from pyg_dynbatch.blocks.code import CompiledSource
from pyg_dynbatch.blocks.tracing import Traced, merge_traced
from pyg_dynbatch.core.operation import Ragged
from pyg_dynbatch.core.program import RESULT
from pyg_dynbatch.core.steps import Steps


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
    lines, left = [], [(block, "", "")]
    while left:
        one, first, rest = left.pop()
        key = one.parent._key_of(one) if one.parent is not None else ""
        declared = f" = {one._declaration._label()}" if one._declaration is not None else ""
        types = ["?" if kind is None else str(kind) for kind in (one.input_type, one.output_type)]
        label = f"{key} {one._label()}{declared}".strip()
        lines.append(f"{first}{label}: {' -> '.join(types)}")
        bend, line = "└─ ", "   "
        for child in reversed(one.children):
            left.append((child, rest + bend, rest + line))
            bend, line = "├─ ", "│  "
    return "\n".join(lines)


def explained(source: CompiledSource, traced: Traced) -> list[str]:
    """List the calls of a traced example; see :meth:`Compiler.explain`."""
    merged, site = merge_traced(source, [traced])
    # The values read by each argument of each call: several if it is ragged.
    values: dict[tuple[int, int], list[str]] = defaultdict(list)
    reads = zip(merged.read_call, merged.read_argument, merged.read_value, strict=True)
    for call, argument, value in reads:
        values[int(call), int(argument)].append(_value_text(merged, int(value)))
    lines = []
    for call, number in enumerate(merged.call_signature):
        signature, texts = source.signatures[number], []
        for argument, wanted in enumerate(signature.inputs):
            mine = values[call, argument]
            texts.append(f"[{', '.join(mine)}]" if isinstance(wanted, Ragged) else mine[0])
        path = source.sites[site[call]].path
        lines.append(f"call {call}: {signature.name}({', '.join(texts)})  {path}")
    return lines


def _value_text(merged: Any, value: int) -> str:
    kind, place = int(merged.value_kind[value]), int(merged.value_index[value])
    if kind == RESULT:
        slot = int(merged.value_slot[value])
        several = len(merged.signatures[merged.call_signature[place]].outputs) > 1
        return f"call {place}" + (f".{slot}" if several else "")
    (constants,) = merged.constant_rows(int(merged.value_type[value])) or (None,)
    if constants is None:
        return f"row {place}"
    text = str(constants[place].tolist())
    return text if len(text) <= 20 else f"{text[:17]}..."


def schedule_text(schedule: Steps, width: int = 40) -> str:
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
