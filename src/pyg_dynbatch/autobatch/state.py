"""What recorded calls take for granted of their model: that it stays as it is until they run."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only

from pyg_dynbatch.autobatch.lazy import Lazy, NeedsPython, unseen
from pyg_dynbatch.autobatch.recorder import Snapshot
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.operation import HOOKS

_INTERNAL = set(vars(nn.Module())) - {"training"}
_HELD = "_parameters", "_buffers", "_modules"
_CONTAINERS = list, deque, dict
ListOrDict = list[Any] | deque[Any] | dict[Any, Any]
"""A container that a module has as an attribute."""


class Conditions(NamedTuple):
    """What a scheduled batch takes for granted of its model, whatever the weights."""

    modules: tuple[tuple[str, str, int], ...]  # path, class, number of hooks
    parameters: tuple[tuple[str, torch.dtype, torch.Size | None], ...]
    training: tuple[bool, ...]
    autocast: tuple[torch.dtype, ...]
    default: torch.dtype
    has_gradients: bool

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> "Conditions":
        """Describe a model by its modules, and its parameters and buffers."""
        devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        return cls(
            modules=tuple(
                (path, type(module).__qualname__, _num_hooks(module))
                for path, module in modules.items()
            ),
            parameters=tuple(
                (name, tensor.dtype, None if is_lazy(tensor) else tensor.shape)
                for name, tensor in tensors.items()
            ),
            training=tuple(module.training for module in modules.values()),
            autocast=tuple(map(torch.get_autocast_dtype, devices)),
            default=torch.get_default_dtype(),
            has_gradients=torch.is_grad_enabled(),
        )

    def check(self, recorded: "Conditions") -> None:
        """Raise an error if a batch was collated under other conditions."""
        if recorded.has_gradients:  # such a batch runs without gradients, too
            recorded = recorded._replace(has_gradients=self.has_gradients)
        if self == recorded:
            return
        names_and_hints = (
            ("the modules or their hooks", "the same model or a copy of it"),
            ("the shapes or dtypes of parameters", "a copy of the model; or collate again"),
            ("the training mode", "model.train() or model.eval() before both"),
            ("autocast", "torch.autocast around collate(), too"),
            ("the default dtype", "torch.set_default_dtype before both, in workers too"),
            ("the gradient mode", "collate() outside of torch.no_grad"),
        )
        for (name, hint), mine, theirs in zip(names_and_hints, self, recorded, strict=True):
            if mine != theirs:
                problem = f"autobatch: since a batch was collated, {name} changed"
                expected = _difference(theirs, mine)
                got = _difference(mine, theirs)
                raise mismatch(ValueError, problem, expected, got, hint=hint)


class WatchedModule:
    """A module of the model, and what it was when a call of it was recorded.

    judge() when its signature is new → take() at the first call of a batch → is_same() at further
    calls, and before all of them run
    """

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self.module = module
        self.snapshot = Snapshot()  # of the same; faster
        self._facts: dict[str, Any] = {}
        self._counted: list[Tensor] = []  # whose changes torch counts
        self._versions: list[int] = []
        self._judged: Snapshot | None = None  # of its attributes, once it has been judged
        self._attributes: dict[str, Any] = {}

    def judge(self) -> None:
        """Take the attributes that decide what the module calls."""
        self._judged = Snapshot()
        self._judged.take((vars(self.module),), (), ())
        self._attributes = vars(self.module).copy()

    def is_as_judged(self) -> bool:
        """Return whether no attribute has another value than when the module was judged."""
        if self._judged is None or self._judged.same():
            return True
        before = self._attributes
        now = vars(self.module)
        for name in {**before, **now}.keys() - _INTERNAL:
            are_tensors = isinstance(before.get(name), Tensor) and isinstance(now.get(name), Tensor)
            if not are_tensors and not _is_same(before, now, name):
                return False
        self.judge()  # with equal objects
        return True

    def take(self) -> None:
        """Take the module as it is."""
        self._facts = self._facts_now()
        self._counted = [tensor for _, tensor in _counted(self.module)]
        self._versions = [tensor._version for tensor in self._counted]

        # C compares the items of dictionaries, the sizes of containers, and types of tensors.
        own = vars(self.module)
        dictionaries = (own, *(own[name] for name in _HELD))
        hooks = [own[name] for name in HOOKS]
        containers = (*hooks, *_containers(self.module).values())
        parameters = tuple(tensor for tensor in self._counted if isinstance(tensor, nn.Parameter))
        self.snapshot.take(dictionaries, containers, parameters)

    def is_same(self) -> bool:
        """Return whether nothing of the module has been replaced, or changed in place."""
        if self.snapshot.same() and self.is_unchanged_in_place():
            return True
        return not self._changed()

    def is_unchanged_in_place(self) -> bool:
        """Return whether no parameter or buffer has been changed in place."""
        return [tensor._version for tensor in self._counted] == self._versions

    def error(self, where: str) -> RuntimeError:
        """Create the error for what has changed."""
        return changed(f"{self.path}.{self._changed()[0]}", where)

    def _facts_now(self) -> dict[str, Any]:
        """Return what the module holds now.

        ``"weight"`` is which tensor it holds, ``"weight itself"`` what can change of it in place.
        """
        own = vars(self.module)
        facts = {name: value for name, value in own.items() if name not in _INTERNAL}
        for dictionary in _HELD:
            facts.update(own[dictionary])

        facts["hooks"] = tuple(len(own[name]) for name in HOOKS)
        for name, container in _containers(self.module).items():
            facts[f"{name} itself"] = len(container)
        tensors = {**own["_parameters"], **own["_buffers"]}
        for name, tensor in tensors.items():
            if tensor is not None and not isinstance(tensor, Lazy):
                facts[f"{name} itself"] = tensor.requires_grad, tensor.dtype, _version(tensor)
        return facts

    def _changed(self) -> list[str]:
        before = self._facts
        now = self._facts_now()
        names = [name for name in {**before, **now} if not _is_same(before, now, name)]
        return [name.removesuffix(" itself") for name in names]


class _Held(NamedTuple):
    """A dictionary of a module, and what it was."""

    prefix: str  # path of the module
    held: dict[str, Any]
    copy: dict[str, Any]


class Baseline:
    """A model as it was at some time.

    Not seen are attributes of other objects, what is inside of containers except for the last item,
    and changes of tensors that torch does not count (``.data``, ``numpy()``).
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.held = list[_Held]()
        self._marks = list[tuple[str, ListOrDict, int, object]]()  # of containers, by name
        self._snapshot = Snapshot()  # of all dictionaries
        for path, module in modules.items():
            prefix = f"{path}." if path else ""
            own = vars(module)
            for held in (own, *(own[name] for name in _HELD)):
                self.held.append(_Held(prefix, held, held.copy()))
            for name, container in _containers(module).items():
                self._marks.append((prefix + name, container, *_mark(container)))
        self._snapshot.take(tuple(each.held for each in self.held), (), ())

    @property
    def is_current(self) -> bool:
        """Whether the model is still as it was."""
        return not self.changed()

    def changed(self) -> str:
        """Name something that has changed; empty if nothing has."""
        if self._snapshot.same():
            return self._changed_container()
        for prefix, held, copy in self.held:
            for name in {**copy, **held}:
                if name not in _INTERNAL and held.get(name, self) is not copy.get(name, self):
                    return prefix + name
        return self._changed_container()

    def _changed_container(self) -> str:
        for name, container, size, last in self._marks:
            size_now, last_now = _mark(container)
            if size_now != size or last_now is not last:
                return name
        return ""

    def holding(self) -> list[tuple[_Held, str]]:
        """List where the model holds recorded values."""
        if self.is_current and not self._marks:
            return []
        holding = list[tuple[_Held, str]]()
        for each in self.held:
            for name, value in sorted(each.held.items()):
                if name not in _INTERNAL and holds_values(value):
                    holding.append((each, name))
        return holding


class Look(NamedTuple):
    """A model as it was, and how often its parameters and buffers had been changed in place."""

    held: Baseline
    versions: dict[str, int]


class State:
    """What a model holds: as calls that were recorded found it, and as examples left it.

    start() → call(), use(), turn_ends() while examples are recorded → check() → calls are run →
    take_changes() → ...
    → kept(), replace() at last → restore() in any case
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.watched = {path: WatchedModule(path, module) for path, module in modules.items()}
        self.waiting = set[int]()  # examples that wait for values
        self._modules = modules
        self._called = set[WatchedModule]()  # by recorded calls of this batch
        self._used: dict[str, tuple[Tensor, int]] = {}  # by functions, with their versions
        self._before = Baseline(modules)  # when the batch began
        self._now = self._before  # after the last turn

    def start(self) -> None:
        """Take everything as it is."""
        self.waiting.clear()
        self._used.clear()
        for watched in self._called:
            watched.snapshot.drop()
        self._called.clear()
        self._before = self._take_baseline()

    def _take_baseline(self) -> Baseline:
        """Take the model as it is now, unless that is known."""
        if not self._now.is_current:
            self._now = Baseline(self._modules)
        return self._now

    def inside(self, path: str) -> list[WatchedModule]:
        """List a module and all inside."""
        prefix = f"{path}."
        return [each for name, each in self.watched.items() if f"{name}.".startswith(prefix)]

    def call(self, called: Iterable[WatchedModule], where: Callable[[], str]) -> None:
        """Raise an error if a module has changed since an earlier call that has not been run."""
        for watched in called:
            if watched in self._called and not watched.is_same():
                raise watched.error(where())
            if not watched.is_as_judged():
                path = watched.path
                problem = f"autobatch: the model changes an attribute of {path!r} before its calls"
                expected = "the attributes with which its calls were met first"
                hint = "pass what differs as an argument, or change it outside of the model"
                raise mismatch(RuntimeError, problem, expected, where=where(), hint=hint)
            self._called.add(watched)
            watched.take()

    def is_as_judged(self) -> bool:
        """Return whether modules would be judged as before."""
        return all(watched.is_as_judged() for watched in self.watched.values())

    def use(self, name: str, tensor: Tensor) -> None:
        """Note a parameter or buffer among the arguments of a recorded call."""
        self._used.setdefault(name, (tensor, _version(tensor)))

    def check(self, where: str) -> None:
        """Raise an error if something has changed that recorded calls read when they are run."""
        for watched in self._called:
            if not watched.is_same():
                raise watched.error(where)
        for name, (tensor, version) in self._used.items():
            if _version(tensor) != version:
                raise changed(name, where)

    def take_changes(self) -> None:
        """Take what modules changed of themselves when their recorded calls were run.

        Calls that are recorded from now on find it so.
        """
        for name, (tensor, _) in self._used.items():
            self._used[name] = tensor, _version(tensor)
        for watched in self._called:
            if not (watched.snapshot.same() and watched.is_unchanged_in_place()):
                watched.take()
        self._take_baseline()

    def turn_ends(self, example: int | None) -> None:
        """Raise an error if an example changed what others, which wait, may use."""
        if self._now.is_current:
            return
        if others := self.waiting - {example}:
            problem = (
                f"autobatch: examples that take turns share {self._now.changed()!r} of the model"
            )
            expected = "the state of an example in local variables, passed on as arguments"
            got = f"changed by a turn, while example {min(others)} waits for a value"
            where = f"example {example}"
            raise mismatch(RuntimeError, problem, expected, got, where=where)
        self._take_baseline()

    def look(self) -> Look:
        """Take everything as it is now."""
        with unseen():
            held = self._now if self._now.is_current else Baseline(self._modules)
            return Look(held, self._versions())

    def changed_since(self, before: Look) -> str:
        """Return the name of something that has changed since, or ``""``."""
        with unseen():
            if name := before.held.changed():
                return name
            versions = self._versions()
        for name, version in before.versions.items():
            if versions[name] != version:
                return name
        return ""

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raise NeedsPython if anything changes inside, where calls are recorded."""
        before = self.look()
        yield
        if name := self.changed_since(before):
            raise NeedsPython(f"it changes {name!r} of the model")

    @contextmanager
    def untouched(self, module: str, where: str) -> Iterator[None]:
        """Raise an error if a module that is tried on a twin changes the model itself."""
        before = self.look()
        try:
            yield
        finally:
            if name := self.changed_since(before):
                problem = (
                    f"autobatch: {module} changes {name!r} of the model, which is no part of it"
                )
                expected = "a module that changes only what it holds"
                hint = "change it in the forward of the model that is batched"
                raise mismatch(RuntimeError, problem, expected, where=where, hint=hint)

    def _versions(self) -> dict[str, int]:
        versions: dict[str, int] = {}
        for path, module in self._modules.items():
            for name, tensor in _counted(module):
                versions[f"{path}.{name}".lstrip(".")] = tensor._version
        return versions

    # What the model keeps of recorded values.

    def kept(self) -> list[Lazy]:
        """List the recorded values that attributes, buffers and parameters of the model hold."""
        values = list[Lazy]()
        for each, name in self._before.holding():
            for leaf in tree_leaves(each.held[name]):
                if type(leaf) is Lazy:
                    values.append(leaf)
                elif holds_values(leaf):
                    problem = (
                        f"autobatch: {each.prefix + name!r} of the model holds recorded values"
                    )
                    expected = "tensors, or lists, tuples and dicts of them"
                    hint = "return them"
                    raise mismatch(TypeError, problem, expected, type(leaf).__name__, hint=hint)
        return values

    def replace(self, computed: Iterable[Tensor]) -> None:
        """Replace what :meth:`kept` has listed."""
        rows = iter(computed)
        for each, name in self._before.holding():
            value = each.held[name]
            filled = tree_map_only(Lazy, lambda _: next(rows), value)
            if isinstance(value, dict):  # which others may refer to
                value.clear()
                value.update(filled)
            elif isinstance(value, list | deque):
                value.clear()
                value.extend(filled)
            else:
                each.held[name] = filled

    def restore(self) -> None:
        """Let the model hold no recorded value when a call has ended or failed."""
        for (_, held, earlier), name in self._before.holding():
            value = held[name]
            if name not in earlier:
                del held[name]
            elif value is not earlier[name]:
                held[name] = earlier[name]
            elif isinstance(value, dict):
                recorded = [key for key, item in value.items() if holds_values((key, item))]
                for key in recorded:
                    del value[key]
            elif isinstance(value, list | deque):
                kept = [item for item in value if not holds_values(item)]
                value.clear()
                value.extend(kept)


def changed(name: str, where: str) -> RuntimeError:
    """Create the error for a change of what recorded calls read."""
    problem = f"autobatch: {name!r} was changed while the model was recorded"
    got = "calls that read it are run later, and would all find its last value"
    hint = "change it outside the model, in a submodule that is not opened, or use a new tensor"
    return mismatch(RuntimeError, problem, got=got, where=where, hint=hint)


def holds_values(value: object, depth: int = 3) -> bool:
    """Return whether an object is a recorded value or, as far as can be seen, holds one."""
    if type(value) is Lazy:
        return True
    if not depth or isinstance(value, type | nn.Module | Tensor):
        return False
    items = [*getattr(value, "__dict__", {}).values()]
    if isinstance(value, Mapping):
        items += value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        items += value
    return any(holds_values(item, depth - 1) for item in items)


def _mark(container: ListOrDict) -> tuple[int, object]:
    """Return a cheap sign that a container has changed; other objects in a dict may be a cache."""
    if not container:
        return 0, None
    if isinstance(container, dict):
        last = container[next(reversed(container))]
        return (len(container), last) if type(last) is Lazy else (0, None)
    return len(container), container[-1]


def _is_same(before: Mapping[str, Any], now: Mapping[str, Any], name: str) -> bool:
    """Return whether an attribute is the same object, or an equal plain value."""
    if name not in before or name not in now:
        return False
    old = before[name]
    new = now[name]
    is_plain = type(old) is type(new) and isinstance(old, int | float | str | tuple)
    return old is new or (is_plain and bool(old == new))


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; -1 if that is not counted."""
    if isinstance(tensor, Lazy) or is_lazy(tensor) or tensor.is_inference():
        return -1
    return tensor._version


def _counted(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """List the parameters and buffers of one module whose changes torch counts, by name."""
    own = vars(module)
    for name, tensor in (*own["_parameters"].items(), *own["_buffers"].items()):
        if isinstance(tensor, Tensor) and _version(tensor) >= 0:
            yield name, tensor


def _containers(module: nn.Module) -> dict[str, ListOrDict]:
    """Return the lists and dicts that a module has as attributes, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _INTERNAL and type(value) in _CONTAINERS
    }


def _difference(these: object, others: object) -> str:
    """Describe the first item that differs."""
    if not isinstance(these, tuple) or not isinstance(others, tuple):
        return str(these)
    pairs = zip_longest(these, others, fillvalue="nothing")
    return str(next(one for one, other in pairs if one != other))


def _num_hooks(module: nn.Module) -> int:
    return sum(len(getattr(module, kind)) for kind in HOOKS)
