"""Show a block with the types on its wires, its schedule, and the calls of one example."""

from collections import Counter
from collections.abc import Sequence

from pyg_dynbatch.blocks.block import Block
from pyg_dynbatch.blocks.code import CompiledSource
from pyg_dynbatch.core.operation import Ragged
from pyg_dynbatch.core.recording import INPUT, Recording, records_of
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


def explained(source: CompiledSource, recording: Recording) -> list[str]:
    """List the calls of a recorded example; see :meth:`Compiler.explain`."""
    text, lines, constants = dict[int, str](), list[str](), Counter[int]()
    records = list(records_of(recording.sites, recording.code))
    used = {value for record in records for values in record.arguments for value in values}
    used.update(*(values.tolist() for values in recording.outputs.values()))
    for begin, number, arguments, _ in records:
        kind, results, signature = recording.sites[number]
        if signature is None:
            if kind == INPUT:
                text[begin] = f"row {arguments[0][0]}"
            else:
                row = recording.constants_of(number)[0][constants[number]].tolist()
                constants[number] += 1
                text[begin] = str(row) if len(str(row)) <= 20 else f"{str(row)[:17]}..."
            continue
        if not arguments and begin not in used:
            continue
        name = f"call {len(lines)}"
        for slot in range(len(results)):
            text[begin + slot] = name + (f".{slot}" if len(results) > 1 else "")
        texts = [
            f"[{', '.join(map(text.get, values))}]"  # type: ignore[arg-type]
            if isinstance(wanted, Ragged) else text[values[0]]
            for wanted, values in zip(signature.inputs, arguments, strict=True)
        ]  # fmt: skip
        lines.append(f"{name}: {signature.name}({', '.join(texts)})  {source.sites[number].path}")
    return lines


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
    names = list(map(schedule.name_of, schedule.steps))
    sizes: Sequence[int] = [step.size for step in schedule.steps]
    longest, most = max(map(len, names), default=0), max(sizes, default=1)
    return "\n".join(
        f"step {number}  {name:<{longest}}  {'█' * max(1, width * size // most)} {size}"
        for number, (name, size) in enumerate(zip(names, sizes, strict=True))
    )
