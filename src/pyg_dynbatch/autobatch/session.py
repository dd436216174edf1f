"""Record the calls of all examples as integers, and run what was recorded so far (a flush)."""

import sys
import sysconfig
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from operator import itemgetter
from pathlib import Path
from types import FrameType, NotImplementedType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jaxtyping
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.types import Number

from pyg_dynbatch.autobatch import lazy
from pyg_dynbatch.autobatch.lazy import ACTIVE, Content, EmittedValues, Lazy, TensorOrLazy, unseen
from pyg_dynbatch.autobatch.plan import plan
from pyg_dynbatch.autobatch.recorder import Recorder, active_recorder
from pyg_dynbatch.autobatch.running import SessionRun
from pyg_dynbatch.autobatch.sequences import Groups, Sequences
from pyg_dynbatch.autobatch.signatures import (
    OPEN,
    VARIES,
    Shared,
    SignatureSite,
    SignatureTable,
    Spec,
    name_of,
)
from pyg_dynbatch.autobatch.state import changed
from pyg_dynbatch.autobatch.table.calls import mapped
from pyg_dynbatch.autobatch.table.functions import ROW
from pyg_dynbatch.core.errors import describe_value, mismatch
from pyg_dynbatch.core.joining import begins_of
from pyg_dynbatch.core.policy import Policy
from pyg_dynbatch.core.row_buffer import Rows
from pyg_dynbatch.core.scheduling import Records, Values
from pyg_dynbatch.core.steps import BufferSpec, Steps
from pyg_dynbatch.core.types import RowType, TensorType

if TYPE_CHECKING:
    from pyg_dynbatch.autobatch.origins import Origins

_STATIC = {
    int, float, complex, bool, str, bytes, type(None), type(...), torch.dtype, torch.device,
    torch.layout, torch.memory_format, torch.Size,
}  # fmt: skip
_INDEX = {int, type(None)}
_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)  # whose states are tuples


class Stacked(NamedTuple):
    """Rows from outside that lie together, ``[row, ...]``."""

    rows: Tensor


RowContent = Tensor | Number | Stacked
"""A row from outside, as a tensor or a number, or several that lie together."""


def _num_rows(content: RowContent) -> int:
    return len(content.rows) if isinstance(content, Stacked) else 1


class Session(Recorder):
    """One call of a model: what its examples have recorded, and the rows computed so far.

    turn(example) → calls are recorded → flush() where values are read → value_of() → ... →
    finish() at last → rows_of() → close()

    Calls are recorded as :mod:`pyg_dynbatch.core.recording` says, in one code for all examples.
    Instead of a flush, plan() schedules them for a model that runs later.

    ``__init__`` lists its attributes in the order of these phases.
    """

    ended = "an earlier call", "return values from the model; do not keep them on self"
    """What made values that are no longer known, and how to avoid using them."""

    def __init__(
        self, root: nn.Module, table: SignatureTable, tensors: dict[str, Tensor], policy: Policy
    ) -> None:
        is_autocast = torch._C._is_any_autocast_enabled()
        super().__init__(table.lookup, root, torch.is_grad_enabled(), is_autocast)
        table.start(tensors)

        # Of the whole call: the model, and the mode of torch.
        self.table = table
        self.policy = policy
        self.device = table.device
        self.shared = {id(tensor): name for name, tensor in tensors.items()}
        self.trained = {id(tensor) for tensor in tensors.values() if tensor.requires_grad}
        self.inference = torch.is_inference_mode_enabled()
        self.can_run = True  # false if a batch is only scheduled

        # turn(): the example, and what it has done apart from calls.
        self.example: int | None = None
        self.turns: list[tuple[int, int]] = []  # first value of each turn, and the example
        self.suspend: Callable[[Lazy], None] | None = None
        self.emitted: EmittedValues = {}
        self.origins: Origins | None = None  # of the example that is recorded, if it is watched
        self.attributes: dict[int, Tensor] | None = None  # tensors that the model holds

        # outside_row(): rows from outside. All but `scalars` the recorder in C uses as well.
        # Those that were met before, by identity, with their versions, or copies where torch
        # counts no changes.
        self.known: dict[int, tuple[Lazy, Tensor, int | Tensor]] = {}
        self.like = table.like
        self.numbers: dict[torch.dtype, dict[Number, Lazy]] = {dtype: {} for dtype in _INTEGERS}
        self.scalars: dict[tuple[torch.dtype, str], Lazy] = {}  # of Python numbers
        self.belonging = self.shared
        # Since the last flush: their content, the next row of each row type, and the tensors that
        # may not change until then, with their versions.
        self.outside: dict[SignatureSite, list[RowContent]] = {}
        self.next_row: dict[int, int] = {}
        self.unread: list[tuple[Tensor, int]] = []

        # plan(): the code of all flushes, and where in the user's code each record was made.
        self.past = np.zeros(0, dtype=np.int32)
        self.places_past = np.zeros(0, dtype=np.int32)
        self.pending = np.zeros(0, dtype=np.int32)  # where calls begin that have not been run
        self.num_rows = np.zeros(0, dtype=np.int64)  # of each row type, as of the last flush
        # Of rows of any lengths: the first rows from outside of each row type and site.
        self.first_rows: dict[int, dict[SignatureSite, tuple[int, int]]] = {}
        self.values = Values()

        # flush() and value_of().
        self.run = SessionRun(self)
        self.failed = False  # in a flush: rows are missing
        self.content: dict[int, Content] = {}  # of values that were read

        # What explain() tells of the call.
        self.schedules: list[Steps] = []  # of each flush
        self.reads: Counter[tuple[str, int]] = Counter()  # lines that read values
        self.replayed = 0  # examples that were not recorded
        self.refusals: Counter[str] = Counter()  # why others are not kept

    def line(self) -> str:
        """Find the line of the user's code that is running."""
        file, number = self._line()
        return f"{file}:{number}" if file else ""

    def _line(self) -> tuple[str, int]:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and is_library(frame.f_code.co_filename):
            frame = frame.f_back
        return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)

    def where(self, line: str = "") -> str:
        """Describe the example and a line, by default the one that is running."""
        example = "" if self.example is None else f"example {self.example}"
        return ", ".join(filter(None, [example, line or self.line()]))

    def turn(self, example: int) -> None:
        """Go on with an example."""
        self.example = example
        self.turns.append((self.next_value, example))

    def example_of(self, value: int) -> int | None:
        """Return the example that made a value."""
        number = bisect_right(self.turns, value, key=itemgetter(0)) - 1
        return self.turns[number][1] if number >= 0 else None

    def example_with(self, kind: int, row: int) -> int | None:
        """Return the example that made a row of a row type."""
        sites = self.table.recorded
        code = self.past[: self.base]
        begins = begins_of(sites, code)
        # The results of a record are the values from its begin on.
        places = np.arange(sites.most_results)
        values = begins[:, None] + places
        rows = self.values.row[np.minimum(values, self.base - 1)]
        widths = np.array([len(site.results) for site in sites])[code[begins]]
        is_result = places < widths[:, None]
        is_row = (rows == row) & (sites.types[code[begins]] == kind)
        return self.example_of(int(values[is_row & is_result][0]))

    def emit(self, name: str, value: TensorOrLazy) -> None:
        """Collect a value of the current example."""
        values, examples = self.emitted.setdefault(name, ([], []))
        values.append(value)
        examples.append(self.example or 0)
        if self.origins is not None:
            self.origins.emitted.append((name, value))

    # Recording.

    def find(
        self, target: Callable[..., Any], args: Sequence[object], kwargs: dict[str, object]
    ) -> SignatureSite | NotImplementedType:
        """Return the site of a call; ``NotImplemented`` for one that cannot be recorded."""
        return self._site_and_reads(target, args, kwargs)[0]

    def call_otherwise(
        self, target: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, object]
    ) -> object:
        """Record one call, whatever its arguments; ``NotImplemented`` for an open module."""
        site, reads = self._site_and_reads(target, args, kwargs)
        if not isinstance(site, SignatureSite) or site is OPEN:
            return NotImplemented
        if site is VARIES:
            kinds = [argument._kind for argument in args if type(argument) is Lazy]
            rows = [
                self.number_row(argument, kinds) if type(argument) in (int, float) else argument
                for argument in args
            ]
            return self.call_otherwise(target, rows, kwargs)
        if site.parts:
            self.check_parts(site)
        return self.record(site, reads)

    def _site_and_reads(
        self, target: Callable[..., Any], args: Sequence[object], kwargs: dict[str, object]
    ) -> tuple[SignatureSite | NotImplementedType, list[int]]:
        """Return the site of a call, and what it reads."""
        key: list[object] = [target]
        reads: list[int] = []
        for argument in args:
            if not self._encode(argument, key, reads, target):
                return self._unrecorded(target, argument), reads
        for name, argument in kwargs.items():
            key.append(name)
            if not self._encode(argument, key, reads, target):
                return self._unrecorded(target, argument), reads
        if torch.is_grad_enabled() is not self.grad:
            key.append("no_grad")

        exact = tuple(key)
        site = self.table.by_key.get(exact)
        if site is not None:
            return site, reads
        if not reads and isinstance(target, nn.Module):
            return NotImplemented, reads
        if self.table.numbers.vary(exact):
            if isinstance(target, nn.Module):
                reason = "a number among its arguments differs from call to call"
                self.table.opened[target] = self.line(), reason
                return OPEN, reads
            return VARIES, reads
        site = self.table.by_key[exact] = self._site_of_new_key(exact, target, args, kwargs)
        return site, reads

    def number_row(self, number: float, kinds: Sequence[int]) -> Lazy:
        """Return the value of a Python number, as data of the example; each number once.

        Args:
            number: The number.
            kinds: The row types of the values with which it is an argument of a function.
        """
        dtype = self.table.numbers.dtype_of(type(number), kinds)
        origins = self.origins
        if origins is not None and origins.reason:  # nothing is kept
            origins = None
        numbers = self.scalars if origins is None else origins.numbers
        key = (dtype, repr(number))  # 0.0 and -0.0 are equal
        if key not in numbers:
            with unseen():
                tensor = torch.tensor(number, dtype=dtype, device=self.device)
            if origins is None:
                numbers[key] = self._append_row(tensor, number)
            else:
                origins.constants[id(tensor)] = tensor
                numbers[key] = self.outside_row(tensor)
        return numbers[key]

    def check_parts(self, site: SignatureSite) -> None:
        """Raise an error if a module has changed since an earlier call that has not been run."""
        with unseen():
            self.table.state.call(site.called, self.where)

    def operand_of(
        self, tensor: Tensor, target: Callable[..., Any], depth: int
    ) -> Lazy | int | None:
        """Return the value or the number of a tensor; ``None`` if it is part of an object."""
        with unseen():
            if (shared := self.shared_of(tensor)) is not None:
                self._use(shared)
                number = self.table.number_of(shared)
                if not shared.view:
                    self.met[id(tensor)] = number, tensor.requires_grad
                return number
            return None if self._is_part(target, depth) else self.outside_row(tensor)

    def _use(self, shared: Shared) -> None:
        self.table.state.use(shared.name, self.table.tensors[shared.name])

    def _is_part(self, target: Callable[..., Any], depth: int) -> bool:
        """Return whether a tensor is perhaps a part of a tree of words, which can be batched."""
        return depth > 0 and isinstance(target, nn.Module) and not isinstance(target, _RECURRENT)

    def _encode(
        self,
        argument: Any,
        key: list[object],
        reads: list[int],
        target: Callable[..., Any],
        depth: int = 0,
    ) -> bool:
        """Append an argument to a key, and its values to the reads; false for Python objects.

        ``signatures.py`` begins with what keys look like.
        """
        cls = type(argument)
        if cls is Lazy:
            if argument._session is not self:
                argument = self.foreign(argument)
            key.append(argument._kind)
            reads.append(argument._number)
        elif cls is tuple or cls is list:
            if depth == 2:  # a tree, rather than a state
                return False
            key.append((cls, len(argument)))
            for item in argument:
                if not self._encode(item, key, reads, target, depth + 1):
                    return False
        elif cls is Tensor or isinstance(argument, Tensor):
            with unseen():
                return self._encode_tensor(argument, key, reads, target, depth)
        elif cls in _STATIC or isinstance(argument, np.generic):
            # 0.0 and -0.0 are equal, but their quotients are not.
            is_zero = isinstance(argument, float) and not argument
            key.append((cls, str(argument) if is_zero else argument))
        elif cls is slice:
            start = argument.start
            stop = argument.stop
            step = argument.step
            if type(start) in _INDEX and type(stop) in _INDEX and type(step) in _INDEX:
                key.append((slice, start, stop, step))
            else:
                key.append(slice)
                return self._encode((start, stop, step), key, reads, target)
        elif cls is dict:
            key.append((dict, *argument))
            return self._encode(list(argument.values()), key, reads, target, depth)
        elif isinstance(argument, PackedSequence):
            raise self._packed(f"autobatch: {name_of(target)} is given a packed sequence")
        elif isinstance(argument, tuple):  # a named tuple
            key.append(cls)
            return self._encode(tuple(argument), key, reads, target, depth)
        else:
            return False
        return True

    def _packed(self, problem: str) -> Exception:
        expected = "a sequence [time, feature]; those of all lengths run together"
        hint = "give the layer the sequence itself"
        return mismatch(
            TypeError, problem, expected, "a PackedSequence", where=self.where(), hint=hint
        )

    def _encode_tensor(
        self,
        tensor: Tensor,
        key: list[object],
        reads: list[int],
        target: Callable[..., Any],
        depth: int,
    ) -> bool:
        if (shared := self.shared_of(tensor)) is not None:
            self._use(shared)
            key.append(shared)
        elif self._is_part(target, depth):
            return False
        else:
            value = self.outside_row(tensor)
            key.append(value._kind)
            reads.append(value._number)
        return True

    def owned(self, tensor: Tensor) -> str | None:
        """Return the name of a parameter or buffer, or of that of which a tensor is a view."""
        name = self.shared.get(id(tensor))
        return self.shared.get(id(tensor._base)) if name is None else name

    def check_ahead(self, tensor: Tensor, function: str = "") -> None:
        """Raise an error if a trace would keep what depends on a parameter or buffer as data."""
        if not self.can_run and (name := self.owned(tensor)) is not None:
            got = f"{function} of it, which is run now" if function else describe_value(tensor)
            problem = f"autobatch: an example that is recorded ahead uses {name!r} of the model"
            expected = "recorded calls, which are run with the weights of that time"
            hint = "compute it in a submodule, from a value of the example"
            hint += "; or keep a constant tensor in a plain attribute"
            raise mismatch(RuntimeError, problem, expected, got, where=self.where(), hint=hint)

    def shared_of(self, tensor: Tensor) -> Shared | None:
        """Return the mark of a parameter or buffer, or of a view of one."""
        name = self.shared.get(id(tensor))
        if name is not None:
            if tensor.requires_grad is not (id(tensor) in self.trained):
                raise changed(name, self.where())
            return Shared(name)

        base = tensor._base
        if base is None or id(base) not in self.shared:
            return None
        # When calls are run, `as_strided` of the base makes the view anew: with the dtype of the
        # base, neither conjugate nor negative, and with gradients.
        if base.dtype != tensor.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        # Gradients do not flow from a view that was made under no_grad to its parameter.
        if base.requires_grad and self.grad and tensor.grad_fn is None:
            return None
        view = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        return Shared(self.shared[id(base)], view)

    def outside_row(self, tensor: Tensor) -> Lazy:
        """Return the value of a tensor that the model did not compute; each object once."""
        if not self.can_run:
            self.check_ahead(tensor)
        if self.origins is not None and not self.origins.reason:
            return self._own_row(tensor, self.origins)
        # Numbers are kept by their value, others by identity.
        numbers = None if tensor.dim() else self.numbers.get(tensor.dtype)
        if numbers is None or not tensor.is_cpu:
            return self._row_of_object(tensor)
        number = tensor.item()
        if (row := numbers.get(number)) is None:
            self._check_tensor(tensor)
            row = numbers[number] = self._append_row(tensor, number)
        return row

    def _row_of_object(self, tensor: Tensor) -> Lazy:
        if (known := self.known.get(id(tensor))) is not None:
            row, _, before = known
            if self._is_unchanged(tensor, before):
                return row
        self._check_tensor(tensor)
        kept = self._kept(tensor)
        row = self._append_row(tensor, kept)
        # The tensor is kept, so that its identity is not given to a different one.
        self.known[id(tensor)] = row, tensor, tensor._version if kept is tensor else kept
        return row

    def _own_row(self, tensor: Tensor, origins: "Origins") -> Lazy:
        """Return the value of a tensor of an example whose recording may be kept.

        Its rows are its own: numbers that are equal now may differ in another example.
        """
        known = origins.rows.get(id(tensor))
        if known is not None and self._is_unchanged(tensor, known.version):
            return known.values[0]
        self._check_tensor(tensor)
        kept = self._kept(tensor)
        row = self._append_row(tensor, kept)
        origins.add(tensor, kept, [row], whole=False)
        return row

    def _is_unchanged(self, tensor: Tensor, before: Tensor | int) -> bool:
        """Return whether a tensor is like its copy; raise an error if its version has changed."""
        if isinstance(before, Tensor):
            return tensor.is_cpu and torch.equal(before, tensor)
        self._check_version(tensor, before)
        return True

    def _check_tensor(self, tensor: Tensor) -> None:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            problem = "autobatch: a recorded call is given a tensor of a transform of torch.func"
            hint = "use the transform in the forward of a submodule that is not opened"
            raise mismatch(TypeError, problem, "plain tensors", where=self.where(), hint=hint)
        self._check_device(tensor)

    def _append_row(self, tensor: Tensor, content: RowContent) -> Lazy:
        """Record a new row from outside, of the type of a tensor."""
        site = self.table.outside_like(tensor)
        self.outside.setdefault(site, []).append(content)
        return self._outside_value(site, tensor)

    def _kept(self, tensor: Tensor) -> Tensor:
        """Return what holds the content of a tensor until the next flush: itself, or a copy."""
        # Changes of tensors of inference mode and of the memory of numpy are not counted.
        if tensor.is_inference() or not tensor.untyped_storage().resizable():
            with torch.set_grad_enabled(self.grad):
                return tensor.clone()
        self.unread.append((tensor, tensor._version))
        return tensor

    def _check_device(self, tensor: Tensor) -> None:
        if tensor.device != self.device:
            problem = "autobatch: a tensor is on a different device"
            hint = "move the examples to the device of the model"
            where = self.where()
            raise mismatch(ValueError, problem, self.device, tensor.device, where=where, hint=hint)

    def _check_version(self, tensor: Tensor, version: int) -> None:
        if tensor._version != version:
            problem = "autobatch: a tensor was changed in place after the model had used it"
            hint = "give the model a copy, tensor.clone()"
            where = self.where()
            raise mismatch(
                RuntimeError, problem, got=describe_value(tensor), where=where, hint=hint
            )

    def outside_rows(self, rows: Tensor) -> list[Lazy]:
        """Return the values of all rows of a tensor that the model did not compute."""
        with unseen():
            self._check_device(rows)
            self.check_ahead(rows)
            site = self.table.outside_of(TensorType(tuple(rows.shape[1:]), rows.dtype))
            if not len(rows):
                return []
            kept = self._kept(rows)
            self.outside.setdefault(site, []).append(Stacked(kept))
            values = [self._outside_value(site, rows) for _ in range(len(rows))]
            if self.origins is not None:
                self.origins.add(rows, kept, values, whole=True)
            return values

    def reserve(self, kind: int, rows: int) -> int:
        """Return the next row of a row type for rows from outside, and reserve a number of them."""
        row = self.next_row.get(kind)
        if row is None:
            row = int(self.num_rows[kind]) if kind < self.num_rows.size else 0
        if rows:
            self.next_row[kind] = row + rows
        return row

    def _outside_value(self, site: SignatureSite, tensor: Tensor) -> Lazy:
        """Record the next row from outside."""
        value: Lazy = self.record(site, (), (self.reserve(site.kinds[0], 1),))
        if tensor.requires_grad:
            self.set_needs_grad(value._number)
        return value

    def _unrecorded(self, target: Callable[..., Any], argument: object) -> NotImplementedType:
        """Leave a module open that takes a Python object; raise for a function."""
        if isinstance(target, nn.Module):
            self.refused = argument
            if target not in self.table.opened:
                self.table.opened[target] = self.line(), "it takes Python objects"
            return NotImplemented
        problem = f"autobatch: {name_of(target)} takes an argument that cannot be recorded"
        expected = "tensors, numbers, strings, slices, and lists, tuples or dicts of them"
        raise mismatch(TypeError, problem, expected, type(argument).__name__, where=self.where())

    def _site_of_new_key(
        self,
        key: tuple[object, ...],
        target: Callable[..., Any],
        args: Sequence[object],
        kwargs: dict[str, object],
    ) -> SignatureSite:
        """Return the site of a new key."""
        portable_target: str | Callable[..., Any] = target
        if isinstance(target, nn.Module):
            path = self.table.path.get(id(target))
            if path is None or getattr(target, "autobatch_open", False):
                reason = "it is not part of the model" if path is None else "autobatch.open"
                self.table.opened[target] = (self.line(), reason)
                return OPEN
            portable_target = path
        elif target is torch.Tensor.__pow__:
            portable_target = torch.Tensor.pow  # which can be pickled
        else:
            self._check_function(target, kwargs)

        # Numbers of row types mean nothing in a different process.
        row_types = self.table.row_types
        tokens = [row_types[token] if type(token) is int else token for token in key[1:]]
        inputs = tuple(row_types[token] for token in key[1:] if type(token) is int)
        with unseen():
            template = (self._template(tuple(args)), self._template(kwargs))
        no_grad = torch.is_grad_enabled() is not self.grad
        spec = Spec((portable_target, *tokens), portable_target, template, inputs, no_grad)
        return self.table.site_of(spec, self.device, self.where())

    def _check_function(self, target: Callable[..., Any], kwargs: dict[str, object]) -> None:
        """Raise an error for a function that cannot be recorded."""
        name = getattr(target, "__name__", "")
        if _is_in_place(target):  # torch would take a TypeError for "not implemented" in z += x
            problem = f"autobatch: {name}() would change a tensor in place"
            hint = "a new tensor: x = x + y instead of x += y; torch.stack instead of items"
            raise mismatch(RuntimeError, problem, where=self.where(), hint=hint)
        if name in _OF_MEMORY:
            problem = f"autobatch: {name}() depends on the memory of a value, which has none"
            expected = "a function of its content"
            hint = "new_zeros or zeros_like; torch.stack or torch.cat of what is filled in"
            raise mismatch(TypeError, problem, expected, where=self.where(), hint=hint)
        if name == "_pack_padded_sequence":
            raise self._packed("autobatch: a sequence is packed inside of the model")
        if kwargs.get("out") is not None:
            problem = f"autobatch: {name_of(target)}(out=...) would change a tensor in place"
            hint = "use the tensor that the call returns"
            raise mismatch(TypeError, problem, where=self.where(), hint=hint)

    def _template(self, value: object) -> Any:
        if isinstance(value, Lazy):
            return ROW
        if isinstance(value, Tensor):
            return self.shared_of(value) or ROW
        return mapped(self._template, value)

    def foreign(self, value: Lazy) -> Lazy:
        """Return the value of this session that stands for one of a different session."""
        owner, hint = value._session.ended
        problem = "autobatch: a lazy value of a different call of the model"
        expected = "values of this call"
        got = f"{value!r} of {owner}"
        raise mismatch(RuntimeError, problem, expected, got, where=self.where(), hint=hint)

    def refuse_switch(self) -> NoReturn:
        """Raise the error for calls with another mode of autocast."""
        raise self._switched()

    def _switched(self, mode: str = "autocast") -> RuntimeError:
        problem = f"autobatch: {mode} is switched inside the model"
        expected = "one mode for all calls"
        got = "a call in a different mode"
        hint = "switch it around the call of the model, or in the forward() of a submodule"
        return mismatch(RuntimeError, problem, expected, got, where=self.where(), hint=hint)

    # Running.

    def flush(
        self, read_now: Sequence[int] | None = None, read_later: np.ndarray | None = None
    ) -> None:
        """Run what was recorded.

        Args:
            read_now: Values that are read now. Calls that can wait do, as more calls of other
                examples may come to be batched with; by default no call waits.
            read_later: Values that are read later; all by default.
        """
        if not self.num_new and not self.pending.size:
            return
        self.check_state()
        # What fails from here on belongs to all examples.
        example = self.example
        self.example = None
        self.failed = True
        if self.table.engine.device != self.device:
            self.table.engine.to(self.device)
        for tensor, version in self.unread:
            self._check_version(tensor, version)
        self.unread.clear()

        steps = self.plan(read_now, read_later)
        inputs: dict[RowType | str, Rows] = {
            row_type: (rows,) for row_type, rows in self.outside_tensors().items()
        }
        self.run.index = steps.index
        self.run.take_sequences(self.outside_sequences())
        recording = ACTIVE.session
        ACTIVE.session = None
        try:
            with torch.set_grad_enabled(self.grad):
                self.run.extend(steps.to(self.device), inputs)
        finally:
            ACTIVE.session = recording

        self.table.state.take_changes()
        self.example = example
        self.outside = {}
        self.failed = False
        self.schedules.append(steps)

    def finish(self, read_later: np.ndarray) -> None:
        """Run the last calls, also those of values that the model keeps; make tensors of these."""
        kept_values = self.table.state.kept()
        for value in kept_values:
            if value._session is not self:
                self.foreign(value)
        kept_numbers = [value._number for value in kept_values]
        self.flush(read_later=np.append(read_later, kept_numbers).astype(np.int64))

        if kept_values:
            # One row for each value.
            groups = [(value._kind, [value._number]) for value in kept_values]
            rows_of_values = self.rows_of(groups)
            self.table.state.replace(rows[0] for rows in rows_of_values)

    def check_state(self) -> None:
        """Raise an error if the model has changed since its calls were recorded."""
        self.table.state.turn_ends(self.example)
        self.table.state.check("")

    def new_code(self) -> np.ndarray:
        """Return what was recorded since the last flush."""
        return np.frombuffer(self.recorded(), dtype=np.int32)

    @property
    def next_value(self) -> int:
        """The number of the next value."""
        return self.base + self.num_new

    def plan(
        self, read_now: Sequence[int] | None = None, read_later: np.ndarray | None = None
    ) -> Steps:
        """Schedule what was recorded, as for :meth:`flush`."""
        sites = self.table.recorded
        size = self.next_value
        if size > self.past.size:
            room = max(size, 2 * self.past.size)
            self.past = np.resize(self.past, room)
            self.places_past = np.resize(self.places_past, room)
        self.past[self.base : size] = self.new_code()
        self.places_past[self.base : size] = np.frombuffer(self.places(), dtype=np.int32)

        code = self.past[:size]
        new_begins = begins_of(sites, code, self.base)
        self.first_rows = self._generalized(code, new_begins)
        sites = self.table.recorded  # with families
        begins = np.concatenate([self.pending, new_begins])
        self.clear()
        self.values.grow(size)
        self._count_rows(len(sites.row_types))

        steps, left_out = plan(
            Records(sites, code, begins, self.values),
            self.num_rows,
            self.policy,
            alive=np.frombuffer(self.alive(), dtype=np.uint8),
            places=self.places_past,
            read_now=read_now,
            read_later=read_later,
        )
        # Where all values that are read later are known, nobody will read the others.
        self.pending = left_out if read_later is None else left_out[:0]
        if self.table.lengths.buffers and self.can_run:
            steps = self._without_inputs(steps)
        return steps

    def _count_rows(self, num_types: int) -> None:
        """Count the rows from outside since the last flush."""
        rows = np.zeros(num_types, dtype=np.int64)
        rows[: self.num_rows.size] = self.num_rows
        for kind, next_row in self.next_row.items():
            rows[kind] = next_row
        self.next_row.clear()
        for kind, rows_of_sites in self.first_rows.items():
            rows[kind] += sum(num_rows for _, num_rows in rows_of_sites.values())
        self.num_rows = rows

    def _without_inputs(self, steps: Steps) -> Steps:
        """Note that the engine is given no rows of any lengths, which the run keeps itself."""
        lengths = self.table.lengths
        buffers = list[BufferSpec]()
        for kind, spec in enumerate(steps.buffers):
            if kind in lengths.buffers:
                spec = spec._replace(inputs=0)
            elif lengths.buffer_of(kind) != kind:
                spec = spec._replace(inputs=0, rows=0)
            buffers.append(spec)
        return replace(steps, buffers=tuple(buffers))

    def _generalized(
        self, code: np.ndarray, begins: np.ndarray
    ) -> dict[int, dict[SignatureSite, tuple[int, int]]]:
        """Put families in the places of new signatures, whose rows then have any lengths.

        Returns:
            For each row type of such rows, of each site of rows from outside the first row, and
            how many there are.
        """
        lengths = self.table.lengths
        first_rows: dict[int, dict[SignatureSite, tuple[int, int]]] = {}
        if not lengths.types or not self.can_run:
            return first_rows
        targets = lengths.targets()
        shift_of_site = np.zeros_like(targets)  # from rows of one shape to those of any length
        for site, contents in self.outside.items():
            kind = site.kinds[0]
            buffer = lengths.buffer_of(kind)
            if buffer == kind:
                continue
            rows_of_sites = first_rows.setdefault(buffer, {})
            first = self._rows_before(buffer)
            first += sum(num_rows for _, num_rows in rows_of_sites.values())
            rows_of_sites[site] = first, sum(map(_num_rows, contents))
            shift_of_site[site.number] = first - self._rows_before(kind)

        # The record of a row from outside is its site and the number of the row.
        sites = code[begins]
        places_of_rows = begins[shift_of_site[sites] != 0] + 1
        shifts = shift_of_site[code[places_of_rows - 1]]
        code[places_of_rows] += shifts.astype(code.dtype)
        code[begins] = targets[sites]
        return first_rows

    def _rows_before(self, kind: int) -> int:
        """Return how many rows of a row type there were at the last flush."""
        return int(self.num_rows[kind]) if kind < self.num_rows.size else 0

    def outside_sequences(self) -> dict[int, list[tuple[int, Sequences | Groups]]]:
        """Join the rows of any lengths that were recorded since the last flush, by row type."""
        lengths = self.table.lengths
        joined = dict[int, list[tuple[int, Sequences | Groups]]]()
        for kind, rows_of_sites in self.first_rows.items():
            varying_type = lengths.buffers[kind]
            first = min(row for row, _ in rows_of_sites.values())
            stacks = [
                self._stacked(content, varying_type.dtype)
                for site in rows_of_sites
                for content in self.outside[site]
            ]
            joined[kind] = [(first, varying_type.joined(stacks))]
        return joined

    def outside_tensors(self) -> dict[TensorType, Tensor]:
        """Stack the rows of fixed shapes from outside, recorded since the last flush."""
        stacked = {}
        for site, contents in self.outside.items():
            if any(site in rows_of_sites for rows_of_sites in self.first_rows.values()):
                continue
            row_type = self.table.row_types[site.kinds[0]]
            dtype = row_type.dtype
            classes = set(map(type, contents))
            if classes <= {int, float, bool, complex}:
                stacked[row_type] = torch.tensor(contents, dtype=dtype, device=self.device)
            elif Stacked not in classes:
                rows = [self._tensor(content, dtype) for content in contents]
                stacked[row_type] = torch.stack(rows)
            else:
                pieces = [self._stacked(content, dtype) for content in contents]
                stacked[row_type] = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        return stacked

    def _stacked(self, content: RowContent, dtype: torch.dtype) -> Tensor:
        """Return stacked rows, of one row or of several."""
        return content.rows if isinstance(content, Stacked) else self._tensor(content, dtype)[None]

    def _tensor(self, content: RowContent, dtype: torch.dtype) -> Tensor:
        if isinstance(content, Tensor):
            return content
        return torch.tensor(content, dtype=dtype, device=self.device)

    def value_of(self, value: Lazy) -> Content:
        """Return the content of a value as Python numbers, after a flush if there must be one."""
        active = active_recorder()
        if active is not self and active is not None:
            return active.value_of(value)
        if active is None or value._session is not self:
            self.foreign(value)
        if self.origins is not None:
            self.origins.refuse("it reads a value")
            if self.can_run:
                self.origins.stop()
        if self.failed:
            problem = "autobatch: a value is read after an error of the batch"
            raise mismatch(RuntimeError, problem, hint="do not catch errors inside the model")
        if torch._C._is_any_autocast_enabled() is not self.autocast:
            raise self._switched()
        if torch.is_inference_mode_enabled() is not self.inference:
            raise self._switched("inference mode")
        number = value._number
        if number not in self.content:
            if number >= self.base or self.values.row[number] < 0:
                if not self.can_run:
                    problem = "autobatch: an example that is recorded ahead reads a value"
                    expected = "calls that do not depend on values"
                    hint = "call the model on the example itself; traces hold no values"
                    raise mismatch(RuntimeError, problem, expected, where=self.where(), hint=hint)
                self.reads[self._line()] += 1
                if self.suspend is None:
                    self.flush(read_now=[number])
                else:
                    self.suspend(value)
            if number not in self.content:
                self._fetch_one(value)
        return self.content[number]

    def _fetch_one(self, value: Lazy) -> None:
        """Copy the content of a value that has been computed to the host."""
        row = int(self.values.row[self.values.value[value._number]])
        with torch.set_grad_enabled(self.grad):  # rows are written with their gradients
            (self.content[value._number],) = self._peek(value._kind, np.array([row])).tolist()

    def fetch(self, values: Sequence[Lazy]) -> None:
        """Copy the content of computed values to the host, all of one row type at once."""
        groups: dict[int, list[int]] = {}
        for value in values:
            if value._number not in self.content:
                groups.setdefault(value._kind, []).append(value._number)
        for kind, numbers in groups.items():
            # Rows that the last step made are written now, with their gradients.
            with torch.set_grad_enabled(self.grad):
                rows = self._peek(kind, self._row_numbers(numbers))
            self.content.update(zip(numbers, rows.tolist(), strict=True))

    def rows_of(self, groups: Sequence[tuple[int, Sequence[int]]]) -> list[Tensor]:
        """Return rows of computed values, with their gradients: one tensor per group."""
        with torch.set_grad_enabled(self.grad):
            rows_read = self._read([(kind, self._row_numbers(numbers)) for kind, numbers in groups])
        # Rows of one type lie together, those that need no gradients beside others.
        return [
            rows if any(map(self.needs_grad, numbers)) else rows.detach()
            for rows, (_, numbers) in zip(rows_read, groups, strict=True)
        ]

    def close(self) -> None:
        """Drop values and rows, which refer to this session in a cycle."""
        self.known.clear()
        self.numbers.clear()
        self.scalars.clear()
        self.emitted.clear()
        self.outside.clear()
        self.content.clear()
        del self.run  # which refers to the session

    def _row_numbers(self, numbers: Sequence[int]) -> np.ndarray:
        return self.values.rows_of(np.asarray(numbers, np.int64))

    def _index(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(rows).to(self.device)

    def _read(self, picks: Sequence[tuple[int, np.ndarray]]) -> list[Tensor]:
        """Return rows of computed values, by their row types and numbers."""
        plain = [(kind, self._index(rows)) for kind, rows in picks if self._buffer_of(kind) == kind]
        plain_rows = iter(self.run.read(plain))
        rows_read = list[Tensor]()
        for kind, rows in picks:
            buffer = self._buffer_of(kind)
            if buffer == kind:
                (column,) = next(plain_rows)
                rows_read.append(column)
            else:
                rows_read.append(self.run.sequences[buffer].take(rows).stacked())
        return rows_read

    def _peek(self, kind: int, rows: np.ndarray) -> Tensor:
        """Return rows of one type without gradients."""
        buffer = self._buffer_of(kind)
        if buffer == kind:
            return self.run.peek(kind, self._index(rows))
        return self.run.sequences[buffer].take(rows).stacked().detach()

    def _buffer_of(self, kind: int) -> int:
        lengths = self.table.lengths
        return lengths.buffer_of(kind) if lengths.types else kind


# What functions and frames are.


def _is_in_place(function: Callable[..., Any]) -> bool:
    name = getattr(function, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


_OF_MEMORY = {"new", "new_empty", "new_empty_strided", "empty_like", "empty_permuted"}
_OF_MEMORY |= {"as_strided", "as_strided_copy", "as_strided_scatter"}
_IN_PLACE = {f"__{name}__" for name in ("iand", "ior", "ixor", "ilshift", "irshift", "setitem")}

# Frames that are not the user's code.
_LIBRARY = tuple(str(Path(str(module.__file__)).parent) for module in (lazy, torch, jaxtyping, np))
_STANDARD = sysconfig.get_path("stdlib")


@cache
def is_library(filename: str) -> bool:
    """Return whether a file is not the user's."""
    standard = filename.startswith(_STANDARD) and "site-packages" not in filename
    return standard or filename.startswith(_LIBRARY)
