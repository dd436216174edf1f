"""Run Tree-LSTMs by CUDA graphs: one graph forwards and one backwards for each shape of levels.

A small batch gives a GPU little to compute and many calls to start, several for every level. A
CUDA graph starts them all at once, but has fixed sizes, so the levels are padded to a few shapes.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_dynbatch.core.buckets import LevelBuckets
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.padding import PaddedForm, padded_form
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.state_store import refuse_second_derivative
from pyg_dynbatch.nn.cell import States, spread_rows
from pyg_dynbatch.nn.recorded_run import Mode, RecordedRun
from pyg_dynbatch.nn.recorder import Recorder, recorder_for
from pyg_dynbatch.nn.recursive import RecursiveLayer, chosen_rows
from pyg_dynbatch.nn.tree_lstm import ChildSumTreeLSTMCell, NaryTreeLSTMCell

TreeLSTMCell = NaryTreeLSTMCell | ChildSumTreeLSTMCell


class GraphedTreeLSTM(RecursiveLayer):
    """Runs a Tree-LSTM layer by CUDA graphs over levels padded to a few shapes.

    Used like the layer itself, with the same parameters under the same names; values and
    gradients are those of the layer up to rounding. A graph runs where the schedule carries its
    padded form, which a loader's worker makes: see
    :class:`~pyg_dynbatch.data.BucketedCollater`. Otherwise the layer runs as it is: for batches
    that no shape holds, and while another call of this layer waits for its way back.

    On a CPU the same padded runs are made call by call, which shows what graphs would compute
    and gains nothing.

    The graphs read the parameters where they lie: an optimiser may change them in place; moving
    them, or switching the gradient of one on or off, drops all graphs. Switches of PyTorch such
    as the precision of products count as they are at the recording; :meth:`clear` drops the
    graphs by hand. One thread and one stream at a time; no second derivatives.

    Args:
        layer: :class:`~pyg_dynbatch.nn.NaryTreeLSTM` or
            :class:`~pyg_dynbatch.nn.ChildSumTreeLSTM`; its cell is taken, not copied.
        buckets: Pads schedules on the CPU that come without a padded form; they are not padded
            where left out.
        max_graphs: How many recorded runs to keep; the one not used for longest goes.
        recorder: Makes what records the calls on a device; CUDA graphs on CUDA devices.

    Shape:
        As for :class:`RecursiveLayer`.

    Raises:
        TypeError: If the layer is no Tree-LSTM.
        ValueError: If no graph may be kept.

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
            raise TypeError(
                mismatch(
                    "GraphedTreeLSTM: the layer is no Tree-LSTM",
                    expected="NaryTreeLSTM or ChildSumTreeLSTM",
                    got=type(layer).__name__,
                )
            )
        if max_graphs < 1:
            raise ValueError(
                mismatch("GraphedTreeLSTM: no graph may be kept", expected=">= 1", got=max_graphs)
            )
        super().__init__(layer.cell, layer.direction)
        self.cell: TreeLSTMCell
        self.buckets, self.max_graphs, self._recorder = buckets, max_graphs, recorder
        self.clear()

    def clear(self) -> None:
        """Drops all recorded runs and their memory."""
        self._runs = RecordedRuns(self.cell, self.max_graphs, self._recorder)

    @property
    def num_graphs(self) -> int:
        """How many recorded runs are kept."""
        return len(self._runs.kept)

    def _run(
        self,
        schedule: Schedule,
        inputs: Tensor,
        leaf_row: Tensor | None,
        order: bool | Tensor,
        return_state: bool,
    ) -> States:
        """Computes states by graphs where they can be had, otherwise as the layer does."""
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
        """Leaves the recorded runs behind: a copy records its own."""
        return {name: value for name, value in vars(self).items() if name != "_runs"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the layer."""
        super().__setstate__(state)
        self.clear()


class Lease:
    """Keeps the memory of all runs of a cell for one call, from its way there to its way back.

    It ends when the way back is done, or when nobody is left who could ask for it.

    Args:
        run: The run that was replayed.
    """

    def __init__(self, run: RecordedRun) -> None:
        self.run, self.open = run, True


class RecordedRuns:
    """Keeps the recorded runs of one cell, which share one pool of memory.

    Args:
        cell: The cell.
        most: How many runs to keep.
        recorder: Makes what records.
    """

    def __init__(
        self, cell: TreeLSTMCell, most: int, recorder: Callable[[torch.device], Recorder]
    ) -> None:
        self.cell, self.most, self.make_recorder = cell, most, recorder
        self.kept: OrderedDict[Any, RecordedRun] = OrderedDict()
        self.addresses: tuple[Any, ...] = ()
        self.recorder: Recorder | None = None
        self.totals: list[Tensor] = []
        self.waiting: weakref.ref[Lease] | None = None

    def run(
        self, rows: Tensor, form: PaddedForm, place: Tensor, with_memory: bool
    ) -> tuple[Tensor, ...] | None:
        """Runs a padded batch.

        Args:
            rows: Its input rows.
            form: Its padded form.
            place: Which rows of the padded levels to give.
            with_memory: Whether to give the memory rows too.

        Returns:
            Hidden rows, and memory rows where asked for; None while another call waits for its
            way back, as its values lie where those of this call would go.
        """
        lease = None if self.waiting is None else self.waiting()
        if lease is not None and lease.open:
            return None
        mode = self._mode(rows)
        run = self._run(mode, rows, form)
        parts = 2 if with_memory else 1
        if not mode.with_gradient:
            return run.forwards(form, rows, place, parts)
        lease = Lease(run)
        self.waiting = weakref.ref(lease)
        call = _Call(lease, form, place, parts)
        found: tuple[Tensor, ...] = _Replayed.apply(rows, call, *run.wanted)
        return found

    def _mode(self, rows: Tensor) -> Mode:
        device, cell = rows.device.type, self.cell
        precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        wanted = any(each.requires_grad for each in (rows, *cell.parameters()))
        with_gradient = wanted and torch.is_grad_enabled()
        return Mode(
            rows.dtype,
            rows.size(1),
            with_gradient,
            with_gradient and rows.requires_grad,
            precision,
            cell.recurrent_dropout if cell.training else 0.0,
        )

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


class _Call(NamedTuple):
    lease: Lease
    form: PaddedForm
    place: Tensor
    parts: int


class _Replayed(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, call: _Call, *parameters: Tensor) -> tuple[Tensor, ...]:
        # Kept for nothing but the checks of autograd: not changed before the way back.
        ctx.save_for_backward(*parameters)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return call.lease.run.forwards(call.form, rows, call.place, call.parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        refuse_second_derivative()
        lease, form, place, _ = ctx.call
        _ = ctx.saved_tensors
        if not lease.open:
            raise RuntimeError(
                mismatch(
                    "GraphedTreeLSTM: the way back was taken before",
                    expected="one backward() for each forward(), whose values are gone after it",
                    got="retain_graph=True and another backward()",
                    mend="add up the losses, or use the layer without graphs",
                )
            )
        of_rows, of_parameters = lease.run.backwards(form, grads, place)
        lease.open = False
        return of_rows, None, *of_parameters
