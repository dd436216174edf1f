"""Run Tree-LSTMs by CUDA graphs: one graph forward and one backward per shape of levels."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_dynbatch.core.errors import checked_count, mismatch
from pyg_dynbatch.core.padding import LevelBuckets, PaddedForm, padded_form, schedule_of_shape
from pyg_dynbatch.core.row_buffer import refuse_second_derivative
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.nn.cell import RecursiveCell, States, spread_rows
from pyg_dynbatch.nn.recursive import RecursiveLayer, chosen_rows
from pyg_dynbatch.nn.tree_cells import ChildSumTreeLSTMCell, NaryTreeLSTMCell

Call = Callable[[], tuple[Tensor, ...]]

_WARM_UPS = 3


class Recording(NamedTuple):
    """A recorded call: what it writes, and how to do it again."""

    replay: Callable[[], object]
    results: tuple[Tensor, ...]


class Recorder:
    """Stand in for CUDA graphs: calls are made again, and write to the same places as a graph."""

    def warm_up(self, call: Callable[[], object]) -> None:
        """Make a call before it is recorded, so that nothing is set up while recording."""

    def record(self, call: Call) -> Recording:
        """Record a call."""
        results = tuple(torch.full_like(each, torch.nan) for each in call())

        def replay() -> None:
            for place, value in zip(results, call(), strict=True):
                place.copy_(value)

        return Recording(replay, results)


class CudaRecorder(Recorder):
    """Capture calls as CUDA graphs, all with one pool of memory and on one side stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, call: Callable[[], object]) -> None:
        """Make a call several times on the side stream."""
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


class Mode(NamedTuple):
    """What a recorded run depends on besides the shape."""

    dtype: torch.dtype
    width: int
    with_gradient: bool
    rows_want_gradient: bool
    precision: torch.dtype | None
    dropout: float


class RecordedRun:
    """The forward and the backward run over levels of one shape, recorded."""

    def __init__(
        self,
        cell: RecursiveCell,
        form: PaddedForm,
        rows: Tensor,
        mode: Mode,
        recorder: Recorder,
        totals: Sequence[Tensor],
    ) -> None:
        self.cell, self.mode, self.totals = cell, mode, totals
        self.wanted = [each for each in cell.parameters() if each.requires_grad]
        self.states: tuple[Tensor, ...] | None = None
        self.grads: tuple[Tensor, ...] = ()
        with _as_in(mode, rows.device.type):
            self.wiring = torch.empty_like(form.schedule.wiring)
            self.schedule = schedule_of_shape(form.shape, self.wiring)
            self.rows = rows.new_zeros(form.input_row.size(0), mode.width)
            self.inputs = self.rows.detach().requires_grad_(mode.rows_want_gradient)
            self.load(form, rows)
            if mode.with_gradient:
                self.grads = tuple(torch.zeros_like(part) for part in self._forward())
            recorder.warm_up(self._both)
            self.forward_graph = recorder.record(self._forward)
            if mode.with_gradient:
                self.backward_graph = recorder.record(self._backward)

    def load(self, form: PaddedForm, rows: Tensor) -> None:
        """Copy a batch to where the graphs read it."""
        self.wiring.copy_(form.schedule.wiring)
        if rows.size(0):
            # Without an input there is nothing to read, and the rows stay zeros.
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
        if self.mode.rows_want_gradient:
            of_rows = self.backward_graph.results[0].index_select(0, call.form.input_place)
        # Copies, as the next replay of any run writes there.
        return of_rows, [total.clone() for total in self.totals]

    def _both(self) -> None:
        self._forward()
        if self.mode.with_gradient:
            self._backward()

    def _forward(self) -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(self.mode.with_gradient):
            self.states = self.cell.run_schedule(self.schedule, self.inputs, level_order=True)
        return tuple(part.detach() for part in self.states or ())

    def _backward(self) -> tuple[Tensor, ...]:
        # Taken away, so that the memory of the backward pass goes to the pool.
        states, self.states = self.states, None
        leaves = [*self.wanted, *([self.inputs] if self.mode.rows_want_gradient else [])]
        found = torch.autograd.grad(states or (), leaves, self.grads)
        for total, grad in zip(self.totals, found, strict=False):
            total.copy_(grad)
        return found[len(self.wanted) :]


@contextmanager
def _as_in(mode: Mode, device: str) -> Iterator[None]:
    """Set autocast as in a mode, and leave inference mode, which graphs outlive."""
    dtype, enabled = mode.precision, mode.precision is not None
    with torch.inference_mode(False), torch.autocast(device, dtype, enabled, cache_enabled=False):
        yield


TreeLSTMCell = NaryTreeLSTMCell | ChildSumTreeLSTMCell


class GraphedTreeLSTM(RecursiveLayer):
    """Run a Tree-LSTM layer by CUDA graphs over levels padded to a few shapes.

    Used like the layer itself, with the same parameters under the same names; values and gradients
    are the same up to rounding. A graph runs if the schedule carries its padded form, which loader
    workers make: see :class:`~pyg_dynbatch.loader.Collater`. The layer itself runs for
    batches that fit no shape, and while another call waits for its backward pass. On a CPU the
    padded runs are made call by call, which shows what graphs would compute and gains nothing.

    An optimiser may change the parameters in place; moving them, or switching the gradient of one
    on or off, drops all graphs. Switches of PyTorch such as the precision of products are recorded
    too, until :meth:`clear`. One thread and one stream at a time; no second derivatives.

    Args:
        layer: :class:`~pyg_dynbatch.nn.NaryTreeLSTM` or
            :class:`~pyg_dynbatch.nn.ChildSumTreeLSTM`; its cell is taken, not copied.
        buckets: Pads schedules on the CPU that have no padded form; by default they are not padded.
        max_graphs: Maximal number of recorded runs; the least recently used one is dropped.
        recorder: Makes the recorder for a device; by default CUDA graphs on CUDA devices.

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
        if not isinstance(layer.cell, TreeLSTMCell):
            what, wanted = "the layer is not a Tree-LSTM", "NaryTreeLSTM or ChildSumTreeLSTM"
            raise mismatch(TypeError, f"GraphedTreeLSTM: {what}", wanted, type(layer).__name__)
        checked_count("GraphedTreeLSTM: max_graphs", max_graphs)
        super().__init__(layer.cell, layer.direction)
        self.cell: TreeLSTMCell
        self.buckets, self.max_graphs, self._recorder = buckets, max_graphs, recorder
        self.clear()

    def clear(self) -> None:
        """Drop all recorded runs and their memory."""
        self._runs = RecordedRuns(self.cell, self.max_graphs, self._recorder)

    @property
    def num_graphs(self) -> int:
        """Number of recorded runs that are kept."""
        return len(self._runs.kept)

    def _run(
        self,
        schedule: Schedule,
        inputs: Tensor,
        leaf_row: Tensor | None,
        order: bool | Tensor,
        return_state: bool,
    ) -> States:
        """Compute states by graphs if possible, otherwise as the layer does."""
        form, states = self._padded(schedule), None
        if form is not None:
            place = form.node_place if order is False else form.level_place
            rows = spread_rows(inputs, leaf_row, schedule)
            states = self._runs.run(rows, form, place, return_state)
        if states is None:
            return super()._run(schedule, inputs, leaf_row, order, return_state)
        return chosen_rows(states, order)

    def _padded(self, schedule: Schedule) -> PaddedForm | None:
        if not schedule.steps:
            return None
        if self.buckets is not None and schedule.device.type == "cpu":
            return padded_form(schedule) or padded_form(self.buckets.pad(schedule))
        return padded_form(schedule)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the recorded runs: a copy records its own."""
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
        self, cell: TreeLSTMCell, most: int, recorder: Callable[[torch.device], Recorder]
    ) -> None:
        self.cell, self.most, self.make_recorder = cell, most, recorder
        self.kept: OrderedDict[Any, RecordedRun] = OrderedDict()
        self.addresses: tuple[Any, ...] = ()
        self.recorder: Recorder | None = None
        self.totals: list[Tensor] = []
        self.waiting: weakref.ref[_Call] | None = None

    def run(
        self, rows: Tensor, form: PaddedForm, place: Tensor, with_memory: bool
    ) -> tuple[Tensor, ...] | None:
        """Run a padded batch; None while another call waits for its backward pass."""
        call = None if self.waiting is None else self.waiting()
        if call is not None and call.open:
            return None
        mode = self._mode(rows)
        run = self._run(mode, rows, form)
        call = _Call(run, form, place, 2 if with_memory else 1)
        if not mode.with_gradient:
            return run.forward(call, rows)
        self.waiting = weakref.ref(call)
        found: tuple[Tensor, ...] = _Replayed.apply(rows, call, *run.wanted)
        return found

    def _mode(self, rows: Tensor) -> Mode:
        device, cell = rows.device.type, self.cell
        precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        wanted = any(each.requires_grad for each in (rows, *cell.parameters()))
        with_gradient = wanted and torch.is_grad_enabled()
        of_rows = with_gradient and rows.requires_grad
        dropout = cell.recurrent_dropout if cell.training else 0.0
        return Mode(rows.dtype, rows.size(1), with_gradient, of_rows, precision, dropout)

    def _run(self, mode: Mode, rows: Tensor, form: PaddedForm) -> RecordedRun:
        parameters = list(self.cell.parameters())
        addresses = tuple((p.data_ptr(), p.dtype, p.requires_grad) for p in parameters)
        if (rows.device, addresses) != self.addresses or self.recorder is None:
            self.kept.clear()
            self.addresses = (rows.device, addresses)
            self.recorder = self.make_recorder(rows.device)
            with torch.inference_mode(False):
                wanted = [p for p in parameters if p.requires_grad]
                self.totals = [torch.zeros_like(p, requires_grad=False) for p in wanted]
        key = form.shape, mode
        run = self.kept.get(key)
        if run is None:
            run = RecordedRun(self.cell, form, rows, mode, self.recorder, self.totals)
            self.kept[key] = run
            # Not before: the pool of memory goes with the last graph that uses it.
            while len(self.kept) > self.most:
                self.kept.popitem(last=False)
        self.kept.move_to_end(key)
        return run


class _Replayed(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, call: _Call, *parameters: Tensor) -> tuple[Tensor, ...]:
        # Saved only for the check of autograd that they are unchanged in the backward pass.
        ctx.save_for_backward(*parameters)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return call.run.forward(call, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        refuse_second_derivative()
        call, _ = ctx.call, ctx.saved_tensors
        if not call.open:
            what, got = "backward() was called before", "retain_graph=True and another backward()"
            wanted = "one backward() per forward(), as it frees the values"
            hint = "add up the losses, or use the layer without graphs"
            raise mismatch(RuntimeError, f"GraphedTreeLSTM: {what}", wanted, got, hint=hint)
        of_rows, of_parameters = call.run.backward(call, grads)
        call.open = False
        return of_rows, None, *of_parameters
