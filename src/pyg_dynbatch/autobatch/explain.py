"""Say how a batch was run: steps, rows, flushes, and what did not batch and why."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyg_dynbatch.autobatch.cache import MOST_INTEGERS
from pyg_dynbatch.autobatch.fibers import take_turns
from pyg_dynbatch.autobatch.session import Session


@dataclass(frozen=True)
class OperationUse:
    """How the calls of one signature were run.

    Args:
        name: Path of the module, or name of the function.
        signature: Its types.
        calls: Number of calls.
        steps: Number of batched calls that made them.
        way: ``"direct"`` (the call itself), ``"fast"`` (a form of the table), ``"vmap"``,
            ``"one by one"``, ``"ragged"``, or ``"rows"`` (loops, branches and stacks); of sentences
            of any length ``"positions"``, ``"packed"``, ``"padded"`` or ``"per length"``.
        where: Line of the first call.
        within: Operation in whose steps all its calls run, or ``""``: results are read there only.
    """

    name: str
    signature: str
    calls: int
    steps: int
    way: str
    where: str
    within: str = ""


@dataclass(frozen=True)
class Explanation:
    """How a batch was run; ``print`` it.

    Args:
        examples: Number of examples.
        steps: Number of batched calls.
        calls: Number of calls that were recorded.
        lower_bound: Fewest steps with one operation per step, summed over flushes.
        flushes: Number of times that recorded calls were run: those that reads need, at last all.
        reads: Lines at which values were read, and how often.
        operations: The operations, most steps first.
        remarks: What did not batch or was not kept, and why.
        replayed: Number of examples that were not recorded, with ``cache=True``.
        kept: Number of integers that are kept for this mode of the model, of at most
            ``MOST_INTEGERS``.
    """

    examples: int
    steps: int
    calls: int
    lower_bound: int
    flushes: int
    reads: dict[str, int]
    operations: tuple[OperationUse, ...]
    remarks: tuple[str, ...]
    replayed: int = 0
    kept: int = 0

    def __str__(self) -> str:
        mean = self.calls / max(self.steps, 1)
        lines = [
            f"{self.examples} examples, {self.calls} calls in {self.steps} steps "
            f"({mean:.1f} calls per step; lower bound {self.lower_bound} steps), "
            f"{self.flushes} flushes"
        ]
        if self.kept:
            lines.append(
                f"  {self.replayed} of {self.examples} examples replayed, "
                f"{self.kept:,} of at most {MOST_INTEGERS:,} integers kept"
            )
        lines += [
            f"  {op.name:24} {op.calls:7} calls {op.steps:5} steps  {op.way:7} {op.signature}"
            + (f"  in the steps of {op.within}" if op.within else "")
            for op in self.operations
        ]
        lines += [f"  read {count} times at {line}" for line, count in self.reads.items()]
        return "\n".join([*lines, *(f"  ! {remark}" for remark in self.remarks)])


def explain(session: Session, examples: int) -> Explanation:
    """Collect the statistics of a session that has ended."""
    calls: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    within: defaultdict[str, set[str]] = defaultdict(set)
    table = session.table
    operations = []
    for schedule in session.schedules:
        for step in schedule.steps:
            numbers = schedule.program_of(step).operations
            *others, last = (schedule.signatures[number].name for number in numbers)
            for name in (*others, last):
                calls[name] += step.size
                steps[name] += 1
                within[name].add("" if name == last else last)
    inside: dict[str, str] = {}  # what runs through torch.vmap inside of loops and branches
    for site in table.sites:
        if site.signature is not None and calls[name := site.signature.name]:
            types = str(site.signature).removeprefix(name)
            way = site.examined.way  # type: ignore[union-attr]
            hosts = within[name]
            host = "" if "" in hosts else " and ".join(sorted(hosts))
            operation = OperationUse(name, types, calls[name], steps[name], way, site.where, host)
            operations.append(operation)
            for spec in site.spec.parts():  # type: ignore[union-attr]
                inner: Any = table.by_spec[spec]
                if inner is not site and inner.examined.way == "vmap":
                    inside[f"{inner.signature.name} in {name}"] = inner.where
    operations.sort(key=lambda op: (-op.steps, op.name))
    return Explanation(
        examples,
        sum(len(schedule.steps) for schedule in session.schedules),
        sum(calls.values()),
        sum(schedule.stats().lower_bound for schedule in session.schedules),
        session.flushes,
        {f"{file}:{line}": count for (file, line), count in session.reads.most_common()},
        tuple(operations),
        tuple(_remarks(session, operations, examples, inside)),
        session.replayed,
        table.cache.size,
    )


def _remarks(
    session: Session, operations: Sequence[OperationUse], examples: int, inside: Mapping[str, str]
) -> list[str]:
    remarks = []
    if not operations and examples > 1:
        remarks.append(
            "nothing was recorded, so nothing was batched: functions of tensors of the example and "
            "of parameters run at once, until a module of the model is called"
        )
    if session.reads and not take_turns():
        remarks.append(
            "every read runs calls at once, since greenlet is not installed: "
            "in the checkout, pip install -e '.[fibers]'"
        )
    mapped = {op.name: op.where for op in operations if op.way == "vmap"} | {**inside}
    for name, where in mapped.items():
        remarks.append(
            f"{name} runs through torch.vmap, which is slower than a form of the table ({where})"
        )
    for op in operations:
        if op.way == "one by one":
            remarks.append(
                f"{op.name} runs on one row after the other: neither the table nor torch.vmap has "
                f"a batched form ({op.where})"
            )
    variants: dict[str, list[OperationUse]] = {}
    for op in operations:
        variants.setdefault(op.name.split(" ")[0], []).append(op)
        if op.calls > 1 and op.steps == op.calls and examples > 1:
            remarks.append(f"{op.name}: every one of {op.calls} calls is its own step ({op.where})")
    for name, found in variants.items():
        if len(found) > 4 and sum(op.calls for op in found) < 4 * len(found) * examples:
            remarks.append(
                f"{name} has {len(found)} signatures, which never share a step: static arguments "
                f"or shapes differ from call to call ({found[0].where})"
            )
    for module, (where, reason) in session.table.opened.items():
        name = session.table.path.get(id(module), type(module).__name__)
        remarks.append(f"{name} is recorded call by call: {reason} ({where})")
    for reason, count in session.refusals.most_common():
        remarks.append(f"{count} examples are recorded each time: {reason}")
    return remarks
