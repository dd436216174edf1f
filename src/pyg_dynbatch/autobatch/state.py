"""What recorded calls take for granted of their model: its structure, and that it stays."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice, zip_longest
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only

from pyg_dynbatch.autobatch.lazy import Lazy, unseen
from pyg_dynbatch.autobatch.recorder import Snapshot
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.listing import NeedsPython
from pyg_dynbatch.core.operation import HOOKS

_INTERNAL = set(vars(nn.Module())) - {"training"}


class Conditions(NamedTuple):
    """What a scheduled batch takes for granted of its model, whatever the weights."""

    modules: tuple[tuple[str, str], ...]
    parameters: tuple[tuple[str, torch.dtype, torch.Size | None], ...]
    training: tuple[bool, ...]
    autocast: tuple[torch.dtype, ...]
    default: torch.dtype

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> "Conditions":
        """Describe a model by its modules, and its parameters and buffers."""
        devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        return cls(
            tuple((path, type(part).__qualname__) for path, part in modules.items()),
            tuple((n, t.dtype, None if is_lazy(t) else t.shape) for n, t in tensors.items()),
            tuple(part.training for part in modules.values()),
            tuple(map(torch.get_autocast_dtype, devices)),
            torch.get_default_dtype(),
        )

    def check(self, recorded: "Conditions") -> None:
        """Raise an error if a batch was collated under other conditions."""
        if self == recorded:
            return
        parts = (
            ("the modules", "the same model or a copy of it"),
            ("the shapes or dtypes of parameters", "a copy of the model; or collate again"),
            ("the training mode", "model.train() or model.eval() before both"),
            ("autocast", "torch.autocast around collate(), too"),
            ("the default dtype", "torch.set_default_dtype before both, in workers too"),
        )
        pairs = zip(parts, self, recorded, strict=True)
        name, hint, mine, theirs = next((*p, a, b) for p, a, b in pairs if a != b)
        what = f"autobatch: since a batch was collated, {name} changed"
        raise mismatch(ValueError, what, _difference(theirs, mine), _difference(mine, theirs),
                       hint=hint)  # fmt: skip


def _difference(these: Any, others: Any) -> str:
    """Describe the first item that differs."""
    if not isinstance(these, tuple):
        return str(these)
    pairs = zip_longest(these, others, fillvalue="nothing")
    return str(next(one for one, other in pairs if one != other))


class _Held:
    """Attributes, buffers or parameters of a module, as they were when last looked at."""

    def __init__(self, prefix: str, values: dict[str, Any], among: Sequence[Snapshot]) -> None:
        self.prefix, self.current, self.among = prefix, values, among
        self.seen: dict[str, Any] = {}
        self.snapshot = Snapshot()  # of the same
        self.marks: dict[str, tuple[int, Any]] = {}  # of what can change without being replaced
        self.tensors: list[Tensor] | None = []  # what is marked, if these are tensors only
        self.versions: list[int] = []
        self.first, self.touched = self.seen, set[str]()  # since the call of the model began

    def start(self) -> None:
        """Take everything as it is."""
        self.changed()
        self.first = self.seen
        self.touched.clear()

    def changed(self) -> list[str]:
        """Return the names of what has changed since the last look."""
        tensors = self.tensors
        if tensors is not None and self.snapshot.same():  # noqa: SIM102 - most have none
            if not tensors or [tensor._version for tensor in tensors] == self.versions:
                return []
        now, names = self.current, list[str]()
        if len(now) != len(self.seen) or not all(map(is_, now.values(), self.seen.values())):
            every = [name for name in now.keys() | self.seen.keys() if name not in _INTERNAL]
            names = [name for name in every if now.get(name, self) is not self.seen.get(name, self)]
            self.seen, before = now.copy(), self.marks
            self.marks = {n: mark for n in every if (mark := _mark(now.get(n))) is not None}
            self.marks.update((n, mark) for n, mark in before.items() if n not in names)
        for name, (number, last) in self.marks.items():
            found: Any = _mark(now[name])
            if found[0] != number or found[1] is not last:
                self.marks[name] = found
                names.append(name)
        marked = [now[name] for name in self.marks]
        self.tensors = marked if all(isinstance(each, Tensor) for each in marked) else None
        self.versions = [number for number, _ in self.marks.values()]
        self.touched.update(names)
        self.snapshot.take((now,), (), ())
        for snapshot in self.among if names else ():
            snapshot.drop()
        return [self.prefix + name for name in names]

    def differing(self, seen: Mapping[str, Any], marks: Mapping[str, tuple[int, Any]]) -> list[str]:
        """Return the names of what differs from an earlier look."""
        names = [n for n in seen.keys() | self.seen.keys() if n not in _INTERNAL]
        return [
            name
            for name in names
            if self.seen.get(name, self) is not seen.get(name, self)
            or not all(map(is_, self.marks.get(name, ()), marks.get(name, ())))
        ]

    def restore(self, name: str, before: Mapping[str, Any], marks: Mapping[str, Any]) -> None:
        """Give an attribute its earlier value; take new or recorded items out of a container."""
        value = self.current.get(name)
        if name not in before:
            del self.current[name]
        elif name not in self.current or value is not before[name]:
            self.current[name] = before[name]
        elif isinstance(value, dict):
            for key in [key for key, item in value.items() if holds_values((key, item))]:
                del value[key]
        elif isinstance(value, list | deque):
            size = marks[name][0] if name in marks else len(value)
            kept = [item for item in islice(value, size) if not holds_values(item)]
            value.clear()
            value.extend(kept)


class Part:
    """A module that recorded calls read, and what it was when the first was recorded."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.held, self.size = path, vars(module), -1
        self.snapshot = Snapshot()
        self.start()
        self.snapshot.drop()  # until a call is recorded

    def start(self) -> None:
        """Take the module as it is."""
        if len(self.held) != self.size:
            kept = "_parameters", "_modules", *HOOKS
            self.names = [*kept, *(name for name in self.held if name not in _INTERNAL)]
            self.read, self.size = itemgetter(*self.names), len(self.held)
        self.values = self.read(self.held)
        self.parameters, self.children, *self.hooks = self.values[: 2 + len(HOOKS)]
        self.stamp = self._stamp()
        parameters = tuple(p for p in self.parameters.values() if p is not None)
        dicts = self.held, self.parameters, self.children
        self.snapshot.take(dicts, tuple(self.hooks), parameters)

    def _stamp(self) -> list[Any]:
        # A module may be cast, which replaces the data of a parameter, and cast back.
        values = self.parameters.values()
        found = [p if p is None else (id(p), p.requires_grad, p.dtype) for p in values]
        return [*found, *self.children.values(), *map(len, self.hooks)]

    def is_same(self) -> bool:
        """Return whether no attribute, parameter, child or hook has been replaced."""
        if self.snapshot.same():
            return True
        try:
            same = len(self.held) == self.size and self.read(self.held) == self.values
        except Exception:  # noqa: BLE001 - attributes that are missing, or cannot be compared
            return False
        return same and self._stamp() == self.stamp

    def error(self, where: str) -> RuntimeError:
        """Create the error for what has been replaced."""
        before = zip(self.names, self.values, strict=True)
        names = [name for name, value in before if self.held.get(name) is not value]
        names += {n for n in self.held if n not in _INTERNAL}.difference(self.names)
        parts = *self.parameters, *self.children
        named = zip_longest(parts, self._stamp(), self.stamp, fillvalue="hooks")
        names += [str(name) for name, now, before in named if now != before]
        return changed(f"{self.path}.{names[0]}", where)


def changed(name: str, where: str) -> RuntimeError:
    """Create the error for a change of what recorded calls read."""
    what = f"autobatch: {name!r} was changed while the model was recorded"
    got = "calls that read it are run later, and would all find its last value"
    hint = "change it outside the model, in a submodule that is not opened, or use a new tensor"
    return mismatch(RuntimeError, what, got=got, where=where, hint=hint)


def holds_values(value: Any, depth: int = 3) -> bool:
    """Return whether an object is a recorded value or, as far as can be seen, holds one."""
    if type(value) is Lazy:
        return True
    if not depth or isinstance(value, type | nn.Module | Tensor):
        return False
    parts = [*getattr(value, "__dict__", {}).values()]
    if isinstance(value, list | tuple | set | frozenset | deque | Mapping):
        parts += value.values() if isinstance(value, Mapping) else value
    return any(holds_values(part, depth - 1) for part in parts)


def _mark(value: Any) -> tuple[int, Any] | None:
    """Return a cheap sign that a value has changed; None if it cannot change."""
    if type(value) is Lazy or is_lazy(value):
        return None
    if isinstance(value, Tensor):
        return None if value.is_inference() else (value._version, None)
    if isinstance(value, list | deque):
        return len(value), value[-1] if value else None
    if isinstance(value, dict):  # other objects in a dict may be a cache, which all share
        last = value[next(reversed(value))] if value else None
        return (len(value), last) if type(last) is Lazy else (0, None)
    return None


class Look(NamedTuple):
    """A model as it was at one time."""

    held: list[tuple[_Held, dict[str, Any], dict[str, tuple[int, Any]]]]  # with values and marks
    versions: list[int]  # of its tensors


class Watch:
    """Notice that a model changes while its examples are recorded.

    Not seen are attributes of other objects, what is inside containers except for the last item,
    and changes of tensors that torch does not count (``.data``, ``numpy()``).
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.held, self.parameters, others = list[_Held](), list[_Held](), list[_Held]()
        self.own, self.whole = Snapshot(), Snapshot()  # of `held`, and of `every`
        self.marked, self.tensors = self.held, list[Tensor]()  # of these, and of those
        among = self.own, self.whole
        for path, part in modules.items():
            prefix = f"{path}." if path else ""
            is_own = not type(part).__module__.startswith("torch.")
            (self.held if is_own else others).append(_Held(prefix, vars(part), among))
            others += [_Held(prefix, part._modules, among)] if part._modules else []
            self.held += [_Held(prefix, part._buffers, among)] if part._buffers else []
            own = part._parameters
            self.parameters += [_Held(prefix, own, among)] if own else []
        self.every = [*self.held, *self.parameters, *others]
        self.parts = {path: Part(path, part) for path, part in modules.items()}
        self.called = set[Part]()  # by recorded calls
        self.waiting: set[int] = set()  # examples that wait for values
        self.writers: dict[str, int | None] = {}  # what has changed, and the last example that did

    def start(self) -> None:
        """Take everything as it is."""
        self.writers.clear()
        self.waiting.clear()
        for part in self.called:
            part.snapshot.drop()
        self.called.clear()
        for held in self.every:
            held.start()

    def turn_ends(self, example: int | None) -> None:
        """Raise an error if an example changed again what others, which wait, may use."""
        unchanged = self.own.same()
        watched = self.marked if unchanged else self.held
        names = [name for held in watched for name in held.changed()]
        if not unchanged:
            self.own.take(tuple(held.current for held in self.held), (), ())
            self.marked = [held for held in self.held if held.marks]
        for name in names:
            others = [each for each in self.waiting if each != example]
            if others and name in self.writers:
                what = f"autobatch: examples that take turns share {name!r} of the model"
                wanted = "the state of an example in local variables, passed on as arguments"
                got = f"changed by several turns, while example {others[0]} waits for a value"
                raise mismatch(RuntimeError, what, wanted, got, where=f"example {example}")
            self.writers[name] = example

    @contextmanager
    def ignored(self, example: int | None) -> Iterator[None]:
        """Ignore what changes inside, where modules are called on rows of several examples."""
        self.turn_ends(example)
        self._check_parts()
        yield
        for held in self.held:
            held.changed()
        for part in self.called:
            if not part.snapshot.same():
                part.start()

    @contextmanager
    def examined(self, example: int | None) -> Iterator[None]:
        """Undo what changes inside, on random rows; raise NeedsPython, as each call changes it."""
        with self.ignored(example):
            self._note_parameters(example)
            before = [(held, held.changed(), held.seen, held.marks.copy()) for held in self.every]
            try:
                yield
            finally:
                names = [(each, name) for each in before for name in each[0].changed()]
                for (held, _, seen, marks), name in names:
                    held.restore(name.removeprefix(held.prefix), seen, marks)
        if names:
            raise NeedsPython(f"it changes {names[0][1]!r} of the model")

    @contextmanager
    def unchanged(self, example: int | None) -> Iterator[None]:
        """Raise NeedsPython if anything changes inside, where calls are recorded."""
        before = self.look(example)
        yield
        if name := self.changed_since(before, example):
            raise NeedsPython(f"it changes {name!r} of the model")

    def look(self, example: int | None) -> "Look":
        """Take everything as it is now."""
        with unseen():
            self.turn_ends(example)
            self._note_parameters(example)
            if not self.whole.same():
                for held in self.every:
                    held.changed()
                self.whole.take(tuple(held.current for held in self.every), (), ())
                self.tensors = [each for held in self.every for each in held.tensors or ()]
            seen = [(held, held.seen, held.marks.copy()) for held in self.every]
            return Look(seen, [tensor._version for tensor in self.tensors])

    def changed_since(self, before: "Look", example: int | None) -> str:
        """Return the name of something that an example has changed since, or ``""``."""
        with unseen():
            self.turn_ends(example)
            self._note_parameters(example)
            changed = [n for held in self.every if held.tensors is None for n in held.changed()]
            versions = [tensor._version for tensor in self.tensors]
            if self.whole.same() and versions == before.versions and not changed:
                return ""
            for held, seen, marks in before.held:
                held.changed()
                if names := held.differing(seen, marks):
                    return held.prefix + names[0]
            return ""

    def kept(self) -> list[Lazy]:
        """List the recorded values that attributes, buffers and parameters of the model hold."""
        found = list[Lazy]()
        for held, name in self._holding():
            for leaf in tree_leaves(held.current[name]):
                if type(leaf) is Lazy:
                    found.append(leaf)
                elif holds_values(leaf):
                    what = f"autobatch: {held.prefix + name!r} of the model holds recorded values"
                    wanted, hint = "tensors, or lists, tuples and dicts of them", "return them"
                    raise mismatch(TypeError, what, wanted, type(leaf).__name__, hint=hint)
        return found

    def replace(self, computed: Iterable[Tensor]) -> None:
        """Replace what :meth:`kept` has listed."""
        rows = iter(computed)
        for held, name in self._holding():
            value = held.current[name]
            found = tree_map_only(Lazy, lambda _: next(rows), value)
            if isinstance(value, list | dict | deque):  # which others may refer to
                value.clear()
                value.update(found) if isinstance(value, dict) else value.extend(found)
            else:
                held.current[name] = found

    def restore(self) -> None:
        """Let the model hold no recorded value when a call has ended or failed."""
        for held, name in self._holding():
            held.restore(name, held.first, {})

    def _holding(self) -> list[tuple[_Held, str]]:
        for held in self.every:
            held.changed()
        names = ((held, name) for held in self.every for name in sorted(held.touched))
        return [(held, name) for held, name in names if holds_values(held.current.get(name))]

    def _note_parameters(self, example: int | None) -> None:
        self.writers.update((n, example) for held in self.parameters for n in held.changed())

    def inside(self, path: str) -> list[Part]:
        """List a module and all inside."""
        return [part for name, part in self.parts.items() if f"{name}.".startswith(f"{path}.")]

    def call(self, parts: Iterable[Part], where: Callable[[], str]) -> None:
        """Raise an error if a module has changed since an earlier call that has not been run."""
        for part in parts:
            if part in self.called:
                if not part.is_same():
                    raise part.error(where())
                part.start()  # as objects that are equal may be others
            else:
                self.called.add(part)
                part.start()
                for name in part.names if self.writers else ():  # set before all calls
                    self.writers.pop(f"{part.path}.{name}", None)

    def _check_parts(self) -> None:
        for part in self.called:
            if not part.is_same():
                raise part.error("")

    def check(self, example: int | None, read: Callable[[], Collection[str]]) -> None:
        """Raise an error if something has changed that recorded calls read when they are run.

        Args:
            example: The current one.
            read: Lists the modules that are called, and the parameters and buffers.
        """
        self.turn_ends(example)
        self._check_parts()
        self._note_parameters(example)
        names = read() if self.writers else ()
        for name, by in self.writers.items():
            parts = name.split(".")
            if any(".".join(parts[: n + 1]) in names for n in range(len(parts))):
                raise changed(name, "" if by is None else f"example {by}")
