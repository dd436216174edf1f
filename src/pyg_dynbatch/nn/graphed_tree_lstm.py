"""Run Tree-LSTMs as CUDA graphs: one graph forward and one backward per shape of levels."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from pyg_dynbatch.core.errors import checked_count, mismatch
from pyg_dynbatch.core.operation import calls_only, is_unchanged
from pyg_dynbatch.core.padding import LevelBuckets, PaddedForm, padded_form, schedule_of_shape
from pyg_dynbatch.core.row_buffer import check_backward
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.nn.cell import RecursiveCell, States, spread_rows
from pyg_dynbatch.nn.recursive import RecursiveLayer, check_no_message_hooks
from pyg_dynbatch.nn.tree_cells import ChildSumTreeLSTMCell, NaryTreeLSTMCell

Call = Callable[[], tuple[Tensor, ...]]

_WARM_UPS = 3


class Recording(NamedTuple):
    """A recorded call: the tensors that it writes, and a function that repeats it."""

    replay: Callable[[], object]
    results: tuple[Tensor, ...]


class Recorder:
    """Stand in for CUDA graphs: repeat the calls themselves, and write to the same memory."""

    def warm_up(self, call: Callable[[], object]) -> None:
        """Run a call before it is recorded, so that nothing is initialised while recording."""

    def record(self, call: Call) -> Recording:
        """Record a call."""
        results = tuple(torch.full_like(each, torch.nan) for each in call())

        def replay() -> None:
            for result, value in zip(results, call(), strict=True):
                result.copy_(value)

        return Recording(replay, results)


class CudaRecorder(Recorder):
    """Capture calls as CUDA graphs, all with one pool of memory and on one side stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, call: Callable[[], object]) -> None:
        """Run a call several times on the side stream."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                for _ in range(_WARM_UPS):
                    call()
            current.wait_stream(self.stream)

    def record(self, call: Call) -> Recording:
        """Capture a call."""
        graph = torch.cuda.CUDAGraph()
        options: Any = {"stream": self.stream, "capture_error_mode": "thread_local"}
        with torch.cuda.device(self.device), torch.cuda.graph(graph, self.pool, **options):
            results = call()
        return Recording(graph.replay, results)


def recorder_for(device: torch.device) -> Recorder:
    """Choose CUDA graphs on CUDA devices, and the stand-in elsewhere."""
    return CudaRecorder(device) if device.type == "cuda" else Recorder()


class RecordedRun:
    """The recorded forward and backward pass over levels of one shape."""

    def __init__(
        self,
        cell: RecursiveCell,
        form: PaddedForm,
        rows: Tensor,
        with_gradient: bool,
        recorder: Recorder,
        totals: Sequence[Tensor],
    ) -> None:
        self.cell, self.totals, self.with_gradient = cell, totals, with_gradient
        self.of_rows = with_gradient and rows.requires_grad
        self.wanted = [each for each in cell.parameters() if each.requires_grad]
        self.states: tuple[Tensor, ...] | None = None
        self.grads: tuple[Tensor, ...] = ()
        precision = _precision(rows)
        # Graphs outlive inference mode and the cache of autocast.
        with (
            torch.inference_mode(False),
            torch.autocast(rows.device.type, precision, precision is not None, cache_enabled=False),
        ):
            self.index = torch.empty_like(form.schedule.index)
            self.schedule = schedule_of_shape(form.shape, self.index)
            self.rows = rows.new_zeros(form.input_row.size(0), rows.size(1))
            self.inputs = self.rows.detach().requires_grad_(self.of_rows)
            self.load(form, rows)
            if with_gradient:
                self.grads = tuple(torch.zeros_like(part) for part in self._forward())
            recorder.warm_up(self._both)
            self.forward_graph = recorder.record(self._forward)
            if with_gradient:
                self.backward_graph = recorder.record(self._backward)

    def load(self, form: PaddedForm, rows: Tensor) -> None:
        """Copy a batch into the memory that the graphs read."""
        self.index.copy_(form.schedule.index)
        if rows.size(0):
            torch.index_select(rows.detach(), 0, form.input_row, out=self.rows)
        else:
            self.rows.zero_()

    def forward(self, call: "_Call", rows: Tensor) -> tuple[Tensor, ...]:
        """Replay the forward graph."""
        self.load(call.form, rows)
        self.forward_graph.replay()
        found = self.forward_graph.results[: call.parts]
        return tuple(part.index_select(0, call.place) for part in found)

    def backward(
        self, call: "_Call", grads: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Replay the backward graph."""
        for kept, given in zip_longest(self.grads, grads):
            # Rows of padding have no gradient.
            kept.zero_()
            if given is not None:
                kept.index_copy_(0, call.place, given)
        self.backward_graph.replay()
        of_rows = None
        if self.of_rows:
            of_rows = self.backward_graph.results[0].index_select(0, call.form.input_position)
        # Copies, as the next replay of any run writes there.
        return of_rows, [total.clone() for total in self.totals]

    def _both(self) -> None:
        self._forward()
        if self.with_gradient:
            self._backward()

    def _forward(self) -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(self.with_gradient):
            self.states = self.cell.run_schedule(self.schedule, self.inputs, level_order=True)
        return tuple(part.detach() for part in self.states or ())

    def _backward(self) -> tuple[Tensor, ...]:
        # Released first, so that the memory of the backward pass returns to the pool.
        states, self.states = self.states, None
        leaves = [*self.wanted, *([self.inputs] if self.of_rows else [])]
        found = torch.autograd.grad(states or (), leaves, self.grads)
        for total, grad in zip(self.totals, found, strict=False):
            total.copy_(grad)
        return found[len(self.wanted) :]


def _precision(rows: Tensor) -> torch.dtype | None:
    """The dtype of autocast, if it is on."""
    device = rows.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class GraphedTreeLSTM(RecursiveLayer):
    """Run a Tree-LSTM layer as CUDA graphs over levels padded to a few shapes.

    Used like the layer itself, with the same parameters under the same names; values and gradients
    are the same up to rounding. A graph runs if the schedule contains its padded form, which loader
    workers compute: see :class:`~pyg_dynbatch.loader.Collater`. The layer itself runs for
    batches that fit no shape, while an earlier call waits for its backward pass, and if the cell
    has hooks, parametrizations, other submodules or overridden methods. On a CPU the
    same padded runs are computed without graphs, for tests; that gains nothing.

    An optimiser may change the parameters in place; moving them, or changing whether one requires
    a gradient, drops all graphs. Global settings of PyTorch, such as the precision of matrix
    products, are recorded too, until :meth:`clear`. One thread and one stream at a time; no second
    derivatives.

    Args:
        layer: :class:`~pyg_dynbatch.nn.NaryTreeLSTM` or
            :class:`~pyg_dynbatch.nn.ChildSumTreeLSTM`; its cell is shared, not copied.
        buckets: Pads schedules on the CPU that have no padded form; by default they are not padded.
        max_graphs: Maximum number of recorded runs; the least recently used one is dropped.
        recorder: Returns the recorder for a device; by default CUDA graphs on CUDA devices.

    Shape:
        - x: ``[node, in_channels]``; edge_index: ``[2, edge]``, from child to parent
        - returns: ``[node, out_channels]``, in node order

    Reference:
        PyTorch, "CUDA semantics", section "CUDA Graphs": fixed addresses, warm-up on a side
        stream, one pool for graphs that are replayed one after another.

    Example:
        >>> from pyg_dynbatch.nn import NaryTreeLSTM
        >>> layer, edges = NaryTreeLSTM(4, 3), torch.tensor([[0, 1], [2, 2]])
        >>> schedule = Schedule.from_structure(edges, 3, arity=2)
        >>> buckets = LevelBuckets.fit([schedule])
        >>> graphed, x = GraphedTreeLSTM(layer), torch.randn(3, 4)
        >>> h = graphed(x, schedule=buckets.pad(schedule))
        >>> torch.allclose(h, layer(x, schedule=schedule), atol=1e-6), graphed.num_graphs
        (True, 1)
    """

    def __init__(
        self,
        layer: RecursiveLayer,
        buckets: LevelBuckets | None = None,
        *,
        max_graphs: int = 64,
        recorder: Callable[[torch.device], Recorder] = recorder_for,
    ) -> None:
        if not isinstance(layer.cell, NaryTreeLSTMCell | ChildSumTreeLSTMCell):
            what, wanted = "the layer is not a Tree-LSTM", "NaryTreeLSTM or ChildSumTreeLSTM"
            raise mismatch(TypeError, f"GraphedTreeLSTM: {what}", wanted, type(layer).__name__)
        if not is_unchanged(layer, forward=RecursiveLayer.forward):
            what, got = "the layer has hooks or overrides forward", type(layer).__name__
            hint = "register the hooks on the GraphedTreeLSTM"
            raise mismatch(ValueError, f"GraphedTreeLSTM: {what}", "neither", got, hint=hint)
        check_no_message_hooks(layer)
        checked_count("GraphedTreeLSTM: max_graphs", max_graphs)
        super().__init__(layer.cell, layer.direction)
        self.buckets, self.max_graphs, self._recorder = buckets, max_graphs, recorder
        self.clear()

    def clear(self) -> None:
        """Drop all recorded runs and free their memory."""
        self._runs = RecordedRuns(self.cell, self.max_graphs, self._recorder)

    @property
    def num_graphs(self) -> int:
        """Number of recorded runs that are kept."""
        return len(self._runs.kept)

    def _run_schedule(
        self,
        schedule: Schedule,
        x: Tensor,
        leaf_inverse: Tensor | None,
        level_order: bool,
        parts: int,
    ) -> States | None:
        """Compute states by graphs if possible, otherwise as the layer does."""
        form, states, cell = padded_form(schedule), None, self.cell
        if cell is not self._runs.cell:
            self.clear()
        if form is None and self.buckets is not None and schedule.device.type == "cpu":
            form = padded_form(self.buckets.pad(schedule))
        # Graphs repeat kernels only, not the Python of hooks and submodules.
        can_repeat = not cell._modules and calls_only(cell, **cell._scheduled)
        if form is not None and schedule.steps and can_repeat:
            place = form.level_position if level_order else form.node_position
            states = self._runs.run(spread_rows(x, leaf_inverse, schedule), form, place, parts)
        if states is None:
            return super()._run_schedule(schedule, x, leaf_inverse, level_order, parts)
        return states

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the recorded runs: a copy records new ones."""
        return {name: value for name, value in vars(self).items() if name != "_runs"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the layer."""
        super().__setstate__(state)
        self.clear()


@dataclass(eq=False)
class _Call:
    """One call of a run; reserves the memory of all runs of a cell until backward has run."""

    run: RecordedRun
    form: PaddedForm
    place: Tensor
    parts: int
    open: bool = True


class RecordedRuns:
    """The recorded runs of one cell, which share one pool of memory."""

    def __init__(
        self, cell: RecursiveCell, max_runs: int, recorder: Callable[[torch.device], Recorder]
    ) -> None:
        self.cell, self.max_runs, self.make_recorder = cell, max_runs, recorder
        self.kept: OrderedDict[Any, RecordedRun] = OrderedDict()
        self.addresses: tuple[Any, ...] = ()
        self.recorder = Recorder()
        self.totals: list[Tensor] = []
        self.waiting: weakref.ref[_Call] | None = None

    def run(
        self, rows: Tensor, form: PaddedForm, place: Tensor, parts: int
    ) -> tuple[Tensor, ...] | None:
        """Run a padded batch; None while an earlier call waits for its backward pass."""
        earlier = None if self.waiting is None else self.waiting()
        if earlier is not None and earlier.open:
            return None
        parameters = list(self.cell.parameters())
        with_gradient = torch.is_grad_enabled() and any(
            each.requires_grad for each in (rows, *parameters)
        )
        run = self._recorded(rows, form, with_gradient, parameters)
        call = _Call(run, form, place, parts)
        if not with_gradient:
            return run.forward(call, rows)
        self.waiting = weakref.ref(call)
        found: tuple[Tensor, ...] = _Replayed.apply(rows, call, *run.wanted)
        return found

    def _recorded(
        self, rows: Tensor, form: PaddedForm, with_gradient: bool, parameters: list[nn.Parameter]
    ) -> RecordedRun:
        """Find the recorded run of a shape, or record it."""
        addresses = rows.device, *((p.data_ptr(), p.dtype, p.requires_grad) for p in parameters)
        if addresses != self.addresses:
            self.kept.clear()
            self.addresses, self.recorder = addresses, self.make_recorder(rows.device)
            with torch.inference_mode(False):
                wanted = [p for p in parameters if p.requires_grad]
                self.totals = [torch.zeros_like(p, requires_grad=False) for p in wanted]
        of_rows = with_gradient and rows.requires_grad
        dropout = self.cell.recurrent_dropout if self.cell.training else 0.0
        kind = rows.dtype, rows.size(1), _precision(rows)
        key = form.shape, kind, with_gradient, of_rows, dropout
        if key not in self.kept:
            self.kept[key] = RecordedRun(
                self.cell, form, rows, with_gradient, self.recorder, self.totals
            )
            # Only now: the pool of memory is freed with the last graph that uses it.
            while len(self.kept) > self.max_runs:
                self.kept.popitem(last=False)
        self.kept.move_to_end(key)
        return self.kept[key]


class _Replayed(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, call: _Call, *parameters: Tensor) -> tuple[Tensor, ...]:
        # Saved only for autograd's check that they are unchanged in the backward pass.
        ctx.save_for_backward(*parameters)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return call.run.forward(call, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        check_backward(grads)
        call, _ = ctx.call, ctx.saved_tensors
        if not call.open:
            what, got = "backward() was called before", "retain_graph=True and a second backward()"
            wanted = "one backward() per forward(), as it frees the values"
            hint = "add the losses, or use the layer without graphs"
            raise mismatch(RuntimeError, f"GraphedTreeLSTM: {what}", wanted, got, hint=hint)
        of_rows, of_parameters = call.run.backward(call, grads)
        call.open = False
        return of_rows, None, *of_parameters
