"""Record the calls of all examples as integers, and run what was recorded so far (a flush)."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from pyg_dynbatch.autobatch.lazy import ACTIVE, Lazy, active
from pyg_dynbatch.autobatch.operations import RANDOM, ROW, fast_form
from pyg_dynbatch.autobatch.row_law import Examined, ReadsValue, examine
from pyg_dynbatch.core.engine import Engine, Run
from pyg_dynbatch.core.errors import Mismatch, mismatch
from pyg_dynbatch.core.operation import Operations, Ragged, Signature, row_type_of
from pyg_dynbatch.core.policy import Policy
from pyg_dynbatch.core.program import INPUT, RESULT, Program
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.types import TensorType

_STATIC = {
    int, float, complex, bool, str, bytes, type(None), type(...), torch.dtype, torch.device,
    torch.layout, torch.memory_format, torch.Size,
}  # fmt: skip
_INDEX = {int, type(None)}
_LIBRARY = (
    str(Path(__file__).parent),
    str(Path(torch.__file__).parent),
    str(Path(jaxtyping.__file__).parent),
)
_VECTOR = torch._C.TensorBase


@dataclass(frozen=True)
class Shared:
    """A parameter or buffer among the arguments of a call, or a view of one."""

    name: str
    place: tuple[Any, ...] = ()


class Spec:
    """What all calls with one signature have in common; can be pickled without the model.

    Args:
        key: Target (the path of a module, or a function), static arguments and row types.
        target: The first of these.
        template: Positional and keyword arguments, with marks for rows and parameters.
        inputs: Type of each row.
        no_grad: Whether the call was recorded under ``torch.no_grad``.
    """

    __slots__ = ("hashed", "inputs", "key", "no_grad", "target", "template")

    def __init__(self, key: Any, target: Any, template: Any, inputs: Any, no_grad: bool) -> None:
        self.key, self.target, self.template = key, target, template
        self.inputs, self.no_grad, self.hashed = inputs, no_grad, hash(key)

    def __hash__(self) -> int:
        return self.hashed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self.key == other.key

    def __reduce__(self) -> Any:
        return Spec, (self.key, self.target, self.template, self.inputs, self.no_grad)


@dataclass(eq=False)
class Site:
    """All calls with one signature: same target, same static arguments, same row types."""

    number: int
    name: str
    where: str
    kinds: tuple[int, ...] = ()  # row type of each result
    signature: int = -1  # -1 for rows from outside
    single: bool = False
    open: bool = False
    flat: bool = False  # the result is a plain tuple of tensors
    leaves: list[Any] = field(default_factory=list)
    spec: Any = None
    way: str = ""
    spec_of: "Spec | None" = None

    def results(self, session: "Session", first: int) -> Any:
        """Make the lazy results of one call."""
        if self.single:
            return Lazy(session, first, self.kinds[0])
        made = [Lazy(session, number, kind) for number, kind in enumerate(self.kinds, first)]
        if self.flat:
            return tuple(made)
        rest = iter(made)
        leaves = [next(rest) if isinstance(x, TensorType) else x for x in self.leaves]
        return tree_unflatten(leaves, self.spec)


class Table:
    """All signatures that a model has met so far, in one mode (training flags, autocast)."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.path = {id(module): path for path, module in self.modules.items()}
        self.tensors: dict[str, Tensor] = {}
        self.sites: list[Site] = []
        self.by_key: dict[Any, Site] = {}
        self.by_spec: dict[Spec, Site] = {}
        self.row_types: list[TensorType] = []
        self.kind_of: dict[TensorType, int] = {}
        self.external: list[Site] = []  # of each row type, the site of rows from outside
        self.operations = Operations()
        self.engine = Engine(self.operations)
        self.signatures: list[Signature] = []
        self.opened: dict[nn.Module, tuple[str, str]] = {}
        self._arrays: dict[str, np.ndarray] = {}

    def kind(self, row_type: TensorType) -> int:
        """Number a row type."""
        found = self.kind_of.get(row_type)
        if found is None:
            found = self.kind_of[row_type] = len(self.row_types)
            self.row_types.append(row_type)
            site = Site(len(self.sites), "rows", "", (found,), single=True)
            self.sites.append(site)
            self.external.append(site)
        return found

    def site_of(self, spec: Spec, device: torch.device, where: str) -> Site:
        """Find the site of a signature, or examine it and add its site."""
        found = self.by_spec.get(spec)
        return self._build(spec, device, where) if found is None else found

    def _build(self, spec: Spec, device: torch.device, where: str) -> Site:
        module = self.modules[spec.target] if isinstance(spec.target, str) else None
        name = spec.target or _name(module) if isinstance(spec.target, str) else _name(spec.target)
        if any(isinstance(wanted, Ragged) for wanted in spec.inputs):
            leaves = [row_type_of(spec.inputs[-1])]
            examined = Examined(spec.target, "ragged", leaves, tree_flatten(0)[1], False)
            return self.add(spec, name, where, spec.inputs, examined)
        call = _Call(
            spec.target if module is None else module, spec.template, spec.no_grad, self.tensors
        )
        fast = None
        if module is None:
            ranks = [len(row_type.shape or ()) for row_type in spec.inputs]
            args, kwargs = (_resolve(part, self.tensors) for part in spec.template)
            fast = fast_form(spec.target, args, kwargs, ranks)
        recording, ACTIVE.session = active(), None
        try:
            examined = examine(
                call, module, fast, spec.inputs, device, name, where, spec.target in RANDOM
            )
        except ReadsValue:
            if module is None:
                raise
            self.opened[module] = (where, "it reads a value")
            return Site(-1, name, where, open=True)
        except Exception as error:
            if not isinstance(error.args[0] if error.args else "", Mismatch):
                error.add_note(f"  in autobatch: {name}, {where}")
            raise
        finally:
            ACTIVE.session = recording
        if not any(isinstance(leaf, TensorType) for leaf in examined.leaves):
            what = f"autobatch: {name} returns no tensor"
            raise mismatch(TypeError, what, "at least one tensor", examined.leaves, where=where)
        return self.add(spec, name, where, spec.inputs, examined._replace(form=_flat(examined)))

    def add(
        self, spec: Spec, name: str, where: str, inputs: Sequence[Any], examined: Examined
    ) -> Site:
        """Add the site of a new signature."""
        outputs = [leaf for leaf in examined.leaves if isinstance(leaf, TensorType)]
        kinds = tuple(map(self.kind, outputs))
        site = Site(
            len(self.sites), name, where, kinds, len(self.signatures), leaves=examined.leaves,
            spec=examined.spec, way=examined.way,
        )  # fmt: skip
        site.single = len(examined.leaves) == 1 and examined.spec.is_leaf()
        plain = examined.spec.type is tuple and len(kinds) == len(examined.leaves)
        site.flat = plain and all(child.is_leaf() for child in examined.spec.children())
        number, unique = 1, name.replace(".", "/")
        while unique in self.operations:
            number += 1
            unique = f"{name.replace('.', '/')} {number}"
        site.name = unique
        self.signatures.append(
            self.operations.add(examined.form, inputs, outputs, name=unique, random=examined.random)
        )
        self.sites.append(site)
        self.by_spec[spec] = site
        site.spec_of = spec
        return site

    def arrays(self) -> dict[str, np.ndarray]:
        """Tabulate the sites, for decoding."""
        if not self._arrays or len(self._arrays["signature"]) != len(self.sites):
            most = max((len(site.kinds) for site in self.sites), default=1)
            kinds = np.zeros((len(self.sites), max(most, 1)), dtype=np.int64)
            for number, site in enumerate(self.sites):
                kinds[number, : len(site.kinds)] = site.kinds
            self._arrays = {
                "signature": np.array([site.signature for site in self.sites], dtype=np.int64),
                "width": np.array([len(site.kinds) for site in self.sites], dtype=np.int64),
                "kind": kinds,
                "fixed": np.array([_fixed(self, site) for site in self.sites], dtype=np.int64),
                "ragged": np.array([_ragged(self, site) for site in self.sites], dtype=np.int64),
            }
        return self._arrays


def _fixed(table: Table, site: Site) -> int:
    if site.signature < 0:
        return 0
    return sum(not isinstance(i, Ragged) for i in table.signatures[site.signature].inputs)


def _ragged(table: Table, site: Site) -> int:
    return (
        0
        if site.signature < 0
        else len(table.signatures[site.signature].inputs) - _fixed(table, site)
    )


class Session:
    """One call of a model: what its examples have recorded, and the rows computed so far."""

    def __init__(
        self, root: nn.Module, table: Table, device: torch.device, tensors: dict[str, Tensor],
        policy: str | Policy,
    ) -> None:  # fmt: skip
        self.root, self.table, self.device, self.policy = root, table, device, policy
        table.tensors.clear()
        table.tensors.update(tensors)
        self.shared = {id(tensor): name for name, tensor in tensors.items()}
        self.grad = torch.is_grad_enabled()
        self.example: int | None = None
        # Records: the number of a site, then the values it reads. Values are numbered as made.
        self.code: list[int] = []
        self.starts: list[int] = []
        self.count = 0
        self.outside: dict[int, list[Tensor | int | float]] = {}
        self.blocks: dict[int, list[Tensor]] = {}
        self.known: dict[Any, Any] = {}
        # What was computed: for each value its row and its row type.
        self.base = 0
        self.row_of = np.zeros(0, dtype=np.int64)
        self.kind_of = np.zeros(0, dtype=np.int64)
        self.rows = [0] * 0
        self.run: Run | None = None
        self.schedules: list[Schedule] = []
        self.read: dict[int, Tensor] = {}
        self.emitted: dict[str, tuple[list[Any], list[int]]] = {}
        self.reads: Counter[str] = Counter()  # lines that read values
        self.can_run = True
        self.suspend: Callable[[Lazy], None] | None = None

    def emit(self, name: str, value: Any) -> None:
        """Collect a value of the current example."""
        values, examples = self.emitted.setdefault(name, ([], []))
        values.append(value)
        examples.append(self.example or 0)

    # Recording.

    def where(self) -> str:
        """Describe the example and the line of the user's code that is running."""
        example = "" if self.example is None else f"example {self.example}"
        return ", ".join(filter(None, [example, self.line()]))

    def line(self) -> str:
        """Find the line of the user's code that is running."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY):
            frame = frame.f_back  # type: ignore[assignment]
        return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def call(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Any:
        """Record one call of a module or function; ``NotImplemented`` for an open module."""
        key: list[Any] = [target]
        reads: list[int] = []
        for argument in args:
            if type(argument) is Lazy and argument._session is self:
                key.append(argument._kind)
                reads.append(argument._number)
            elif not self._encode(argument, key, reads, target):
                return self._unrecorded(target, argument)
        if kwargs:
            for name, argument in kwargs.items():
                key.append(name)
                if not self._encode(argument, key, reads, target):
                    return self._unrecorded(target, argument)
        if torch.is_grad_enabled() is not self.grad:
            key.append("no_grad")
        key = tuple(key)  # type: ignore[assignment]
        site = self.table.by_key.get(key)
        if site is None:
            if not reads and isinstance(target, nn.Module):
                return NotImplemented
            site = self._new_site(key, target, args, kwargs or {}, reads)
        if site.open:
            return NotImplemented
        return self.record(site, reads)

    def _unrecorded(self, target: Any, argument: Any) -> Any:
        """Leave a module open that takes a Python object; raise for a function."""
        if isinstance(target, nn.Module):
            self.table.opened.setdefault(target, (self.line(), "it takes Python objects"))
            return NotImplemented
        what = f"autobatch: {_name(target)} takes an argument that cannot be recorded"
        wanted = "tensors, numbers, strings, slices, and lists, tuples or dicts of them"
        raise mismatch(TypeError, what, wanted, type(argument).__name__, where=self.where())

    def record(self, site: Site, reads: Sequence[int]) -> Any:
        """Append one record and return its results."""
        self.starts.append(len(self.code))
        self.code.append(site.number)
        self.code += reads
        first = self.count
        self.count = first + len(site.kinds)
        return site.results(self, first)

    def _encode(
        self, argument: Any, key: list[Any], reads: list[int], target: Any, depth: int = 0
    ) -> bool:
        """Append an argument to a key, and its values to the reads; false for Python objects."""
        kind = type(argument)
        if kind is Lazy:
            if argument._session is not self:
                raise self._stale(argument)
            key.append(argument._kind)
            reads.append(argument._number)
        elif kind is tuple or kind is list:
            if depth == 2:  # a tree, rather than a state
                return False
            key.append((kind, len(argument)))
            for item in argument:
                if type(item) is Lazy and item._session is self:
                    key.append(item._kind)
                    reads.append(item._number)
                elif not self._encode(item, key, reads, target, depth + 1):
                    return False
        elif kind in _STATIC:
            key.append((kind, argument))
        elif isinstance(argument, _VECTOR):
            if depth and isinstance(target, nn.Module) and id(argument) not in self.shared:
                return False
            self._encode_tensor(argument, key, reads)
        elif kind is slice:
            start, stop, step = argument.start, argument.stop, argument.step
            if type(start) in _INDEX and type(stop) in _INDEX and type(step) in _INDEX:
                key.append((slice, start, stop, step))
            else:
                key.append(slice)
                return self._encode((start, stop, step), key, reads, target)
        elif kind is dict:
            key.append((dict, *argument))
            return self._encode(list(argument.values()), key, reads, target, depth)
        elif isinstance(argument, tuple):  # a named tuple, a torch.return_types
            key.append(kind)
            return self._encode(tuple(argument), key, reads, target, depth)
        else:
            return False
        return True

    def _encode_tensor(self, tensor: Tensor, key: list[Any], reads: list[int]) -> None:
        number = id(tensor)
        if number in self.shared:
            key.append(("shared", number))
            return
        found = self.known.get(number)
        if found is None:
            base = tensor._base
            if base is not None and id(base) in self.shared and base.dtype == tensor.dtype:
                place = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
                key.append(("shared", id(base), *place))
                return
            value = self.outside_row(tensor)
        else:
            value = found[0]
        key.append(value._kind)
        reads.append(value._number)

    def outside_row(self, tensor: Tensor) -> Lazy:
        """Return the value of a tensor that the model did not make; each object once."""
        found = self.known.get(id(tensor))
        if found is not None:
            return found[0]  # type: ignore[no-any-return]
        plain = tensor.dim() == 0 and tensor.is_cpu and not tensor.dtype.is_floating_point
        name: Any = (tensor.dtype, tensor.item()) if plain else id(tensor)
        found = self.known.get(name)
        if found is None:
            if tensor.device != self.device:
                what = "autobatch: a tensor is on a different device"
                hint = "move the examples to the device of the model"
                where = self.where()
                raise mismatch(ValueError, what, self.device, tensor.device, where=where, hint=hint)
            kind = self.table.kind(TensorType(tuple(tensor.shape), tensor.dtype))
            self.outside.setdefault(kind, []).append(name[1] if plain else tensor)
            found = self.known[name] = self.record(self.table.external[kind], ()), tensor
        # The tensor is kept, so that its identity is not given to a different one.
        self.known[id(tensor)] = found[0], tensor
        return found[0]

    def outside_rows(self, tensor: Tensor) -> list[Lazy]:
        """Return the values of all rows of a tensor that the model did not make."""
        kind = self.table.kind(TensorType(tuple(tensor.shape[1:]), tensor.dtype))
        if len(tensor):
            self.outside.setdefault(kind, []).append(Block(tensor))  # type: ignore[arg-type]
        return [self.record(self.table.external[kind], ()) for _ in range(len(tensor))]

    def _stale(self, value: Lazy) -> RuntimeError:
        what = "autobatch: a lazy value of a different call of the model"
        hint = "return values from the model; do not keep them on self"
        got = f"{value!r} of an earlier call"
        return mismatch(
            RuntimeError, what, "values of this call", got, where=self.where(), hint=hint
        )

    # New signatures.

    def _new_site(
        self, key: Any, target: Any, args: Sequence[Any], kwargs: dict[str, Any], reads: list[int]
    ) -> Site:
        where, is_module = self.where(), isinstance(target, nn.Module)
        path = self.table.path.get(id(target)) if is_module else None
        name = path or _name(target)
        if is_module and (path is None or getattr(target, "autobatch_open", False)):
            reason = "autobatch.open" if path is not None else "it is not part of the model"
            return self._open_site(key, target, where, reason)
        if kwargs.get("out") is not None:
            what = f"autobatch: {name}(out=...) would change a tensor in place"
            raise mismatch(TypeError, what, "a call without out", "out=...", where=where)
        inputs = tuple(self.table.row_types[self._kind_of_value(number)] for number in reads)
        template = (self._template(tuple(args)), self._template(kwargs))
        no_grad = torch.is_grad_enabled() is not self.grad
        named = target if path is None else path
        spec = Spec(self._portable(key, named), named, template, inputs, no_grad)
        site = self.table.site_of(spec, self.device, where)
        self.table.by_key[key] = site
        return site

    def _portable(self, key: Any, target: Any) -> Any:
        """Replace what means nothing in a different process: numbers of types, identities."""
        types, shared = self.table.row_types, self.shared
        found = [types[k] if type(k) is int else k for k in key[1:]]
        return (target, *(
            ("shared", shared[k[1]], *k[2:]) if type(k) is tuple and k[:1] == ("shared",) else k
            for k in found
        ))  # fmt: skip

    def _template(self, value: Any) -> Any:
        """Replace rows and parameters by marks."""
        if isinstance(value, Lazy):
            return ROW
        if isinstance(value, Tensor):
            if id(value) in self.shared:
                return Shared(self.shared[id(value)])
            base = value._base
            if base is not None and id(base) in self.shared and base.dtype == value.dtype:
                place = (tuple(value.shape), value.stride(), value.storage_offset())
                return Shared(self.shared[id(base)], place)
            return ROW
        return _mapped(self._template, value)

    def _open_site(self, key: Any, target: Any, where: str, reason: str) -> Site:
        site = self.table.by_key[key] = Site(-1, "", where, open=True)
        self.table.opened[target] = (where, reason)
        return site

    def _kind_of_value(self, number: int) -> int:
        if number < self.base:
            return int(self.kind_of[number])
        first = self.base
        for start in self.starts:
            kinds = self.table.sites[self.code[start]].kinds
            if number < first + len(kinds):
                return kinds[number - first]
            first += len(kinds)
        raise AssertionError

    # Running.

    def flush(self) -> None:
        """Run everything that was recorded since the last flush, as one schedule."""
        if not self.starts:
            return
        program, old = self.program()
        schedule = Schedule.from_programs([program], self.policy)
        if self.device.type != "cpu":
            schedule = schedule.to(self.device)
            self.table.engine.to(self.device)
        if self.run is None:
            self.run = Run(self.table.engine)
        inputs = {
            self.table.row_types[kind]: (stacked(found, self.table.row_types[kind], self.device),)
            for kind, found in self.outside.items()
        }
        recording, ACTIVE.session = active(), None
        try:
            with torch.set_grad_enabled(self.grad):
                self.run.extend(schedule, inputs)
        finally:
            ACTIVE.session = recording
        row_of = np.zeros(self.count - self.base, dtype=np.int64)
        flat = (
            schedule.wiring.numpy() if self.device.type == "cpu" else schedule.wiring.cpu().numpy()
        )
        for name, output in schedule.outputs.items():
            first = output.wiring.offset
            row_of[program.outputs[name] - old] = flat[first : first + output.wiring.length]
        self.row_of = np.concatenate([self.row_of, row_of])
        self.kind_of = np.concatenate([self.kind_of, program.value_type[old:]])
        self.rows = [store.rows for store in schedule.stores]
        self.base = self.count
        self.code, self.starts, self.outside = [], [], {}
        self.schedules.append(schedule)

    def program(self) -> tuple[Program, int]:
        """Decode the records; values of earlier flushes become inputs, and come first."""
        tables, types = self.table.arrays(), self.table.row_types
        code, start = np.array(self.code, dtype=np.int64), np.array(self.starts, dtype=np.int64)
        site = code[start]
        width, signature = tables["width"][site], tables["signature"][site]
        is_read = np.ones(code.size, dtype=bool)
        is_read[start] = False
        reads = code[is_read]
        lengths = np.diff(start, append=code.size) - 1
        record = np.repeat(np.arange(start.size), lengths)
        argument = np.arange(reads.size) - (np.cumsum(lengths) - lengths)[record]
        argument = _arguments(tables, argument, site[record])
        is_call = signature >= 0
        call_number = np.cumsum(is_call) - 1

        earlier = reads < self.base
        old, inverse = np.unique(reads[earlier], return_inverse=True)
        read_value = reads - self.base + old.size
        read_value[earlier] = inverse

        made = int(width.sum())
        first = np.cumsum(width) - width
        owner = np.repeat(np.arange(start.size), width)
        slot = np.arange(made) - first[owner]
        kind = tables["kind"][site[owner], slot]
        place = np.where(is_call, call_number, 0)[owner]
        num_inputs = [*self.rows, *[0] * (len(types) - len(self.rows))]
        for number in self.outside:
            mine = np.flatnonzero(site == self.table.external[number].number)
            place[first[mine]] = num_inputs[number] + np.arange(mine.size)
            num_inputs[number] += mine.size
        old_kind = self.kind_of[old]
        value_type = np.concatenate([old_kind, kind])
        new = np.arange(old.size, old.size + made)
        program = Program(
            tuple(self.table.signatures), tuple(types), num_inputs, [0] * len(types),
            [[] for _ in types],
            value_type=value_type,
            value_kind=np.concatenate(
                [np.full(old.size, INPUT), np.where(is_call, RESULT, INPUT)[owner]]
            ),
            value_place=np.concatenate([self.row_of[old], place]),
            value_slot=np.concatenate([np.zeros(old.size, dtype=np.int64), slot]),
            call_signature=signature[is_call],
            read_value=read_value,
            read_call=call_number[record],
            read_argument=argument,
            outputs={str(n): new[kind == n] for n in np.unique(kind)},
            num_examples=1,
        )  # fmt: skip
        program.output_example = {n: np.zeros(v.size, np.int64) for n, v in program.outputs.items()}
        return program, old.size

    def value_of(self, value: Lazy) -> Tensor:
        """Return the content of a value on the host, after a flush if there must be one."""
        if value._session is not self or active_is_not(self):
            raise self._stale(value)
        if value._number not in self.read:
            if value._number >= self.base:
                if not self.can_run:
                    what = "autobatch.trace: the example reads a value"
                    hint = "call the model on the example itself; traces hold no values"
                    wanted = "calls that do not depend on values"
                    raise mismatch(RuntimeError, what, wanted, where=self.where(), hint=hint)
                self.reads[self.line()] += 1
                if self.suspend is not None:
                    self.suspend(value)
                else:
                    self.flush()
            if value._number not in self.read:
                self.fetch([value])
        return self.read[value._number]

    def fetch(self, values: Sequence[Lazy]) -> None:
        """Copy the content of computed values to the host, all of one row type at once."""
        groups: dict[int, list[Lazy]] = {}
        for value in values:
            groups.setdefault(value._kind, []).append(value)
        for kind, found in groups.items():
            numbers = [value._number for value in found]
            # Rows that the last step made are written now, with their gradients.
            with torch.set_grad_enabled(self.grad):
                index = torch.from_numpy(self.row_of[numbers]).to(self.device)
                rows = self.run.peek(kind, index).cpu()  # type: ignore[union-attr]
            self.read.update(zip(numbers, rows, strict=True))

    def rows_of(self, groups: Sequence[tuple[int, Sequence[int]]]) -> list[Tensor]:
        """Return rows of computed values, with their gradients: one tensor per group."""
        picks = [
            (kind, torch.from_numpy(self.row_of[np.asarray(numbers, np.int64)]).to(self.device))
            for kind, numbers in groups
        ]
        with torch.set_grad_enabled(self.grad):
            return [rows[0] for rows in self.run.read(picks)]  # type: ignore[union-attr]


def active_is_not(session: Session) -> bool:
    """Return whether a session has ended."""
    return getattr(ACTIVE, "session", None) is not session


@dataclass
class Block:
    """Rows from outside that lie together."""

    tensor: Tensor


def stacked(found: list[Any], row_type: TensorType, device: torch.device) -> Tensor:
    """Stack rows from outside."""
    if all(not isinstance(item, Tensor | Block) for item in found):
        return torch.tensor(found, dtype=row_type.dtype, device=device)
    if all(isinstance(item, Tensor) for item in found):
        return torch.stack(found)
    pieces = [
        item.tensor if isinstance(item, Block)
        else torch.as_tensor(item, dtype=row_type.dtype, device=device)[None]
        for item in found
    ]  # fmt: skip
    return torch.cat(pieces)


def _arguments(tables: dict[str, np.ndarray], argument: np.ndarray, site: np.ndarray) -> np.ndarray:
    """Number the argument of each read; rows of ragged arguments alternate after the fixed ones."""
    fixed, ragged = tables["fixed"][site], tables["ragged"][site]
    beyond = np.flatnonzero(argument >= fixed)
    argument[beyond] = fixed[beyond] + (argument[beyond] - fixed[beyond]) % np.maximum(
        ragged[beyond], 1
    )
    return argument


def _name(target: Any) -> str:
    if isinstance(target, nn.Module):
        return type(target).__name__
    return str(getattr(target, "__name__", type(target).__name__)).strip("_")


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the items of a container; other objects are returned as they are."""
    if hasattr(value, "_fields"):
        return type(value)(*map(function, value))
    if type(value) in (tuple, list):
        return type(value)(map(function, value))
    if isinstance(value, dict):
        return {name: function(item) for name, item in value.items()}
    if isinstance(value, slice):
        return slice(*map(function, (value.start, value.stop, value.step)))
    return value


def _resolve(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Replace the marks of parameters by the parameters."""
    if isinstance(value, Shared):
        tensor = tensors[value.name]
        return tensor.as_strided(*value.place) if value.place else tensor
    return _mapped(lambda item: _resolve(item, tensors), value)


class _Call:
    """Calls a target with rows in the places of its template."""

    def __init__(self, target: Any, template: Any, no_grad: bool, tensors: dict[str, Any]) -> None:
        self.target, self.template, self.no_grad, self.tensors = target, template, no_grad, tensors
        self.plain = not template[1] and all(a is ROW for a in template[0]) and not no_grad

    def __call__(self, *rows: Any) -> Any:
        return self.target(*rows) if self.plain else self._filled(rows, None)

    def expanded(self, *rows: Any) -> Any:
        """Call with one copy of each parameter per row."""
        return self._filled(rows, rows[0].size(0))

    def _filled(self, rows: Any, size: int | None) -> Any:
        given = iter(rows)

        def fill(value: Any) -> Any:
            if size is not None and isinstance(value, Tensor):
                return value.expand(size, *value.shape)
            return next(given) if value is ROW else _mapped(fill, value)

        args, kwargs = (fill(_resolve(part, self.tensors)) for part in self.template)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.no_grad):
            return self.target(*args, **kwargs)


def _flat(examined: Examined) -> Callable[..., Any]:
    """Return a form whose results are one tensor, or a tuple of tensors."""
    form = examined.form
    if examined.spec.is_leaf():
        return form
    children = examined.spec.children()
    tensors = all(isinstance(leaf, TensorType) for leaf in examined.leaves)
    if examined.spec.type is tuple and tensors and all(c.is_leaf() for c in children):
        return form if len(children) > 1 else lambda *rows: form(*rows)[0]

    def flat(*rows: Any) -> Any:
        found = tuple(leaf for leaf in tree_leaves(form(*rows)) if isinstance(leaf, Tensor))
        return found if len(found) > 1 else found[0]

    return flat
