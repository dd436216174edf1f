"""Say how a batch was run: steps, rows, flushes, and what did not batch and why."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

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
            f"({mean:.1f} calls per step; lower bound of steps {self.lower_bound}), "
            f"flushes: {self.flushes}"
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
    operations = _operations_of(session)
    return Explanation(
        examples=examples,
        steps=sum(len(schedule.steps) for schedule in session.schedules),
        calls=sum(operation.calls for operation in operations),
        lower_bound=sum(schedule.stats().lower_bound for schedule in session.schedules),
        flushes=len(session.schedules),
        reads={f"{file}:{line}": count for (file, line), count in session.reads.most_common()},
        operations=tuple(operations),
        remarks=tuple(_remarks(session, operations, examples)),
        replayed=session.replayed,
        kept=session.table.cache.size,
    )


def _operations_of(session: Session) -> list[OperationUse]:
    """List the operations that a session has run, most steps first."""
    calls: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    hosts: defaultdict[str, set[str]] = defaultdict(set)  # in whose steps an operation runs
    for schedule in session.schedules:
        for step in schedule.steps:
            numbers = schedule.program_of(step).operations
            names = [schedule.signatures[number].name for number in numbers]
            host = names[-1]
            for name in names:
                calls[name] += step.size
                steps[name] += 1
                hosts[name].add("" if name == host else host)

    operations = []
    for site in session.table.sites:
        if site.signature is None or site.examined is None or not calls[site.signature.name]:
            continue
        name = site.signature.name
        is_alone = "" in hosts[name]
        operation = OperationUse(
            name=name,
            signature=str(site.signature).removeprefix(name),
            calls=calls[name],
            steps=steps[name],
            way=site.examined.way,
            where=site.where,
            within="" if is_alone else " and ".join(sorted(hosts[name])),
        )
        operations.append(operation)
    return sorted(operations, key=lambda operation: (-operation.steps, operation.name))


def _mapped_inside(session: Session, operations: Sequence[OperationUse]) -> dict[str, str]:
    """Return what runs through ``torch.vmap`` inside of loops and branches, with its line."""
    names = {operation.name for operation in operations}
    where_of_name: dict[str, str] = {}
    for site in session.table.sites:
        if site.signature is None or site.spec is None or site.signature.name not in names:
            continue
        for spec in site.spec.walk():
            inner = session.table.by_spec[spec]
            if inner is site or inner.signature is None or inner.examined is None:
                continue
            if inner.examined.way == "vmap":
                where_of_name[f"{inner.signature.name} in {site.signature.name}"] = inner.where
    return where_of_name


def _remarks(session: Session, operations: Sequence[OperationUse], examples: int) -> list[str]:
    """Say what did not batch or was not kept, and why."""
    return [
        *_remarks_on_the_batch(session, operations, examples),
        *_remarks_on_ways(session, operations),
        *_remarks_on_steps(operations, examples),
        *_remarks_on_recording(session),
    ]


def _remarks_on_the_batch(
    session: Session, operations: Sequence[OperationUse], examples: int
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
    return remarks


def _remarks_on_ways(session: Session, operations: Sequence[OperationUse]) -> list[str]:
    """Name the operations that run in a slow way."""
    mapped = {
        operation.name: operation.where for operation in operations if operation.way == "vmap"
    }
    mapped |= _mapped_inside(session, operations)
    remarks = [
        f"{name} runs through torch.vmap, which is slower than a form of the table ({where})"
        for name, where in mapped.items()
    ]
    remarks += [
        f"{operation.name} runs on one row after the other: neither the table nor torch.vmap has "
        f"a batched form ({operation.where})"
        for operation in operations
        if operation.way == "one by one"
    ]
    return remarks


def _remarks_on_steps(operations: Sequence[OperationUse], examples: int) -> list[str]:
    """Name the operations whose calls share no step, or few."""
    remarks = []
    for operation in operations:
        calls = operation.calls
        if calls > 1 and operation.steps == calls and examples > 1:
            remarks.append(
                f"{operation.name}: every one of {calls} calls is its own step ({operation.where})"
            )

    variants_of_name: dict[str, list[OperationUse]] = {}
    for operation in operations:
        name, *_ = operation.name.split(" ")  # without what tells signatures of one name apart
        variants_of_name.setdefault(name, []).append(operation)
    for name, variants in variants_of_name.items():
        num_variants = len(variants)
        num_calls = sum(variant.calls for variant in variants)
        if num_variants > 4 and num_calls < 4 * num_variants * examples:
            remarks.append(
                f"{name} has {num_variants} signatures, which never share a step: static arguments "
                f"or shapes differ from call to call ({variants[0].where})"
            )
    return remarks


def _remarks_on_recording(session: Session) -> list[str]:
    """Name the modules that are no single call, and say why examples are not replayed."""
    remarks = []
    for module, (where, reason) in session.table.opened.items():
        name = session.table.path.get(id(module), type(module).__name__)
        remarks.append(f"{name} is recorded call by call: {reason} ({where})")
    for reason, count in session.refusals.most_common():
        remarks.append(f"{count} examples are recorded each time: {reason}")
    return remarks
