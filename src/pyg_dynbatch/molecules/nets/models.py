"""The weave network, and weave modules recorded for the engine."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch_geometric.nn.aggr import Aggregation, AttentionalAggregation
from torch_geometric.nn.inits import reset
from torch_geometric.nn.resolver import aggregation_resolver

from pyg_dynbatch.core.engine import Engine
from pyg_dynbatch.core.errors import checked_choice, mismatch
from pyg_dynbatch.core.operation import Operations, Ragged, Signature, calls_only
from pyg_dynbatch.core.recording import Recording, Value
from pyg_dynbatch.core.scheduling import schedule_recordings
from pyg_dynbatch.core.structure import checksum
from pyg_dynbatch.core.types import RaggedRows, TensorType
from pyg_dynbatch.nn.directed import DirectedStack
from pyg_dynbatch.nn.pairs import Pairs
from pyg_dynbatch.nn.readout import GaussianHistogramAggregation, StandardizedInputs
from pyg_dynbatch.nn.weave import CountedBatchNorm, WeaveConv, WeaveStack


class WeaveNet(nn.Module):
    """Predict properties of molecules with weave modules, or messages along directed bonds.

    These, a linear layer with tanh, a normalization, a readout per molecule, and a dense
    head with ReLU between its layers.

    Args:
        atom_channels: Width of ``batch.x``.
        num_outputs: Width of the result: targets, or logits.
        pair_table: Features of every pair code, ``[code][feature]``; kept with the weights.
        hidden: Width of all rows within the weave modules.
        num_modules: Number of weave modules, or of steps of messages.
        atom_out: Width of an atom row before the readout.
        readout: ``"histogram"``, ``"attention"``, or the name of any aggregation of PyG
            (``"sum"``, ``"mean"``, ``"max"``, ...); several in a list are concatenated.
        head: Width of each hidden layer of the head; empty for one linear layer.
        dropout: Dropout probability in the head.
        norm: ``"batch"``, ``"layer"`` or ``None``, within the weave modules.
        atom_norm: Normalization of the rows before the readout; the histogram needs ``"batch"``.
        sync: Whether all batch normalizations use the statistics of all ranks while training; see
            :class:`~pyg_dynbatch.nn.CountedBatchNorm`.
        residual: Whether weave modules add rows to their updates.
        weave_dropout: Dropout probability of the atom rows between weave modules, or of messages.
        messages: ``"weave"``, or ``"directed"`` for a :class:`~pyg_dynbatch.nn.DirectedStack`,
            which has no ``norm``, ``residual`` and ``pair_block``; its pairs should be the bonds.
        pair_block: See :class:`~pyg_dynbatch.nn.WeaveStack`.
        num_descriptors: Width of ``batch.descriptor``, which is concatenated to the readout after
            ``net.descriptors`` has standardized it (fit that first, see
            :meth:`~pyg_dynbatch.nn.StandardizedInputs.fit`).
        descriptor_columns: Which of its columns are used; all by default.

    Shape:
        - batch: ``x`` ``[atom, atom_channels]``, ``batch``, and ``pairs`` or ``pair_code`` (of
          all pairs); perhaps ``descriptor`` ``[molecule, num_descriptors]``, NaN where unknown
        - returns: ``[molecule, num_outputs]``

    Raises:
        ValueError: If an option is unknown, a batch does not fit, or there are no batch statistics
            to synchronize.

    Reference:
        Kearnes et al. (2016), arXiv:1603.00856. Differs: no batch normalization in the modules by
        default, and tanh before the readout as in DeepChem. Directed messages: Yang et al. (2019),
        arXiv:1904.01561.

    Example:
        >>> from torch_geometric.data import Batch, Data
        >>> water = Data(x=torch.eye(3), pair_code=torch.tensor([0, 1, 2, 0, 1, 0]))
        >>> net = WeaveNet(3, 1, [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], hidden=8, head=(16,))
        >>> net(Batch.from_data_list([water, water])).shape
        torch.Size([2, 1])
    """

    def __init__(  # noqa: PLR0913 - every argument is a key of the configs
        self,
        atom_channels: int,
        num_outputs: int,
        pair_table: Sequence[Sequence[float]] | Tensor,
        *,
        hidden: int = 50,
        num_modules: int = 2,
        atom_out: int = 128,
        readout: str | Sequence[str] = "histogram",
        head: Sequence[int] = (512, 128),
        dropout: float = 0.0,
        norm: str | None = None,
        atom_norm: str | None = "batch",
        sync: bool = False,
        residual: bool = False,
        weave_dropout: float = 0.0,
        messages: Literal["weave", "directed"] = "weave",
        pair_block: int | None = None,
        num_descriptors: int = 0,
        descriptor_columns: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        table = torch.as_tensor(pair_table, dtype=torch.float32).detach().clone()
        if table.dim() != 2 or not table.numel() or atom_norm not in (None, "batch", "layer"):
            what, got = "WeaveNet: pair_table or atom_norm cannot be used", list(table.shape)
            expected = "a table [code, feature]; 'batch', 'layer' or None"
            raise mismatch(ValueError, what, expected, f"a table {got}; {atom_norm!r}")
        self.register_buffer("pair_table", table)
        widths = atom_channels, table.size(1), hidden, num_modules
        options = {"pair_block": pair_block, "norm": norm, "residual": residual}
        self.weave: nn.Module
        if checked_choice("WeaveNet: messages", messages, ("weave", "directed")) == "weave":
            self.weave = WeaveStack(*widths, **options, dropout=weave_dropout)
        elif any(options.values()):
            what, got = "WeaveNet: directed messages have no such option", f"{options}"
            raise mismatch(ValueError, what, "norm=None, residual=False, pair_block=None", got)
        else:
            self.weave = DirectedStack(*widths, dropout=weave_dropout)
        norms = {None: nn.Identity, "batch": CountedBatchNorm, "layer": nn.LayerNorm}
        self.lin_atom = nn.Linear(hidden, atom_out)
        self.norm_atom = norms[atom_norm](atom_out)
        names = [readout] if isinstance(readout, str) else list(readout)
        self.readouts = nn.ModuleList(_readout(name, atom_out) for name in names)
        bins = [getattr(part, "num_bins", 1) for part in self.readouts]
        self.fingerprint_channels = atom_out * sum(bins)
        columns = StandardizedInputs(num_descriptors, descriptor_columns)
        self.descriptors = columns if columns.num_outputs else None
        widths = [self.fingerprint_channels + columns.num_outputs, *head]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
        self.head = nn.Sequential(*layers, nn.Linear(widths[-1], num_outputs))
        if sync:
            CountedBatchNorm.synchronise(self)

    def reset_parameters(self) -> None:
        """Reset all learnable parameters."""
        for child in self.children():
            reset(child)

    def forward(self, batch: Any) -> Float[Tensor, "molecule output"]:
        """Predict one row per molecule."""
        read = self.fingerprint(batch)
        if self.descriptors is None:
            return self.head(read)
        row = getattr(batch, "descriptor", None)
        wanted = (read.size(0), self.descriptors.num_inputs)
        if row is None or row.shape != wanted:
            what = "WeaveNet: the batch has no descriptors that fit"
            expected, hint = f"batch.descriptor {list(wanted)}", "featurize as for training"
            got = "none" if row is None else list(row.shape)
            raise mismatch(ValueError, what, expected, got, hint=hint)
        return self.head(torch.cat([read, self.descriptors(row).to(read.dtype)], 1))

    def encode(self, batch: Any) -> Float[Tensor, "atom channel"]:
        """Compute the atom rows that the readout sees, in the order of ``batch.x``."""
        x = self.weave(batch.x, self.get_buffer("pair_table"), self.pairs_of(batch))
        return self.norm_atom(torch.tanh(self.lin_atom(x)))

    def fingerprint(self, batch: Any) -> Float[Tensor, "molecule channel"]:
        """Compute the readout of every molecule."""
        x = self.encode(batch)
        index, count = batch.batch, 1
        if index is None:
            index = torch.zeros(x.size(0), dtype=torch.long, device=x.device)
        else:
            count = batch.num_graphs
        read = [readout(x, index, dim_size=count) for readout in self.readouts]
        return torch.cat(read, 1) if len(read) > 1 else read[0]

    def pairs_of(self, batch: Any) -> Pairs:
        """Return the pairs of a batch, or build them from all of its pair codes."""
        num_codes = self.get_buffer("pair_table").size(0)
        pairs: Any = getattr(batch, "pairs", None)
        code = getattr(batch, "pair_code", None)
        if pairs is None and code is not None:
            ptr = getattr(batch, "ptr", None)
            sizes = [batch.num_nodes] if ptr is None else ptr.diff()
            pairs = Pairs.from_codes(code, sizes, num_codes=num_codes).to(batch.x.device)
        elif code is not None and code.is_cpu and pairs.checksum not in (None, checksum(code)):
            what = "WeaveNet: the pairs of the batch do not belong to its pair_code"
            expected, hint = "the codes that the loader merged", "collate again"
            raise mismatch(ValueError, what, expected, "other values", hint=hint)
        if pairs is None or pairs.num_codes != num_codes:
            what = "WeaveNet: the pairs of the batch do not fit the table"
            expected = f"batch.pairs or batch.pair_code with {num_codes} codes"
            got = "neither" if pairs is None else f"{pairs.num_codes} codes of a different table"
            raise mismatch(ValueError, what, expected, got)
        return pairs


def _readout(name: str, channels: int) -> Aggregation:
    if name == "histogram":
        return GaussianHistogramAggregation()
    if name == "attention":
        return AttentionalAggregation(nn.Linear(channels, 1))
    try:
        return aggregation_resolver(name)
    except (ValueError, TypeError) as error:
        what = f"WeaveNet: the readout {name!r} cannot be used"
        expected = "'histogram', 'attention', or an aggregation without arguments, such as 'sum'"
        raise mismatch(ValueError, what, expected, str(error).splitlines()[0]) from error


# What is recorded in place of.
_WEAVE_METHODS = ("forward", "split", "sum_pairs", "update_pairs", "update_atoms")


class WeaveRecorder(nn.Module):
    """Run the modules of a :class:`WeaveStack` by dynamic batching, with the same weights.

    A molecule is a recording of calls of six functions, written as in the equations. The results
    equal those of the stack, so a new variant can be tried here before a fast layer is written.

    Args:
        stack: The modules; its parameters are shared.
        table: Features of every pair code.

    Shape:
        - x: ``[atom, atom_in]`` of all molecules, one after another
        - returns: ``[atom, channels]``

    Raises:
        ValueError: If the modules have batch normalization, which depends on other calls, or
            hooks, or override methods.

    Reference:
        Looks et al. (2017), arXiv:1702.02181, equations 4-5.

    Example:
        >>> stack, table = WeaveStack(3, 2, channels=8), torch.eye(2)
        >>> weave = WeaveRecorder(stack, table)
        >>> water = weave.recording(3, [[0, 1, 1], [1, 0, 1], [1, 1, 0]])
        >>> weave(torch.randn(6, 3), [water, water]).shape
        torch.Size([6, 8])
    """

    def __init__(self, stack: WeaveStack, table: Float[Tensor, "code channel"]) -> None:
        super().__init__()
        convs: list[WeaveConv] = list(stack.convs)  # type: ignore[arg-type]
        if any(conv.norm == "batch" for conv in convs):
            what = "WeaveRecorder: batch normalization depends on other calls"
            raise mismatch(ValueError, what, "norm=None or norm='layer'", "norm='batch'")
        operations = Operations()
        self.code = TensorType((), torch.long, "code")
        self.atom = TensorType((convs[0].atom_in,), tag="atom")
        pair = TensorType((table.size(1),), tag="pair")
        lookup = nn.Embedding.from_pretrained(table)
        self.lookup = operations.add(lookup, [self.code], [pair], name="lookup")
        self.levels = [_WeaveModule(operations, conv, level) for level, conv in enumerate(convs)]
        self.engine = Engine(operations)

    def recording(self, num_atoms: int, code: Sequence[Sequence[int | None]]) -> Recording:
        """Record one molecule; the inputs are its atoms, the outputs the updated atoms.

        Args:
            num_atoms: Number of atoms.
            code: Code of every ordered pair, ``code[i][j]``; ``None`` for an unused pair.
        """
        recording, atoms = Recording(), range(num_atoms)
        a: list[Value] = [recording.input(self.atom, i) for i in atoms]
        p: dict[tuple[int, int], Value] = {
            (i, j): recording.call(self.lookup, recording.constant(self.code, code[i][j]))
            for i in atoms
            for j in atoms
            if code[i][j] is not None
        }
        for module in self.levels:
            a, p = module.record(recording, a, p)
        for value in a:
            recording.output(value)
        return recording

    def forward(
        self, x: Float[Tensor, "atom feature"], recordings: Sequence[Recording]
    ) -> Float[Tensor, "atom out"]:
        """Compute the atom rows of all molecules after the last module."""
        code = {name: getattr(WeaveConv, name) for name in _WEAVE_METHODS}
        for module in self.levels:
            if not calls_only(module.conv, **code):
                what, got = "a module has hooks or overrides methods", type(module.conv).__name__
                hint = "hooks on its linear layers and normalizations, or the stack itself"
                raise mismatch(ValueError, f"WeaveRecorder: {what}", "neither", got, hint=hint)
        schedule = schedule_recordings(recordings)
        return self.engine(schedule.to(x.device), {"atom": x})["output"]


class _WeaveModule(nn.Module):
    """One weave module as six operations, each of one function of equations 4 and 5."""

    def __init__(self, operations: Operations, conv: WeaveConv, level: int) -> None:
        super().__init__()
        self.conv = conv
        atom = TensorType((conv.atom_in,), tag="" if level else "atom")
        pair = TensorType((conv.pair_in,), tag="pair")

        def add(
            name: str, *inputs: Any, run: Callable[..., Tensor] | None = None, tag: str = ""
        ) -> Signature:
            linear: Any = conv.get_submodule(f"lin_{name}")
            outputs = [TensorType((linear.out_features,), tag=tag)]
            run = run or partial(self.activated, name)
            return operations.add(run, inputs, outputs, name=f"{name}{level}")

        aa, pa = add("aa", atom), add("pa", pair)
        a = add("a", atom, *aa.outputs, Ragged(pa.outputs[0]), run=self.atom)
        self.of_atoms = aa, pa, a
        self.of_pairs = None
        if conv.pair_out is not None:
            ap, pp = add("ap", atom, atom), add("pp", pair)
            inputs = pair, *ap.outputs, *ap.outputs, *pp.outputs
            self.of_pairs = ap, pp, add("p", *inputs, run=self.pair, tag="pair")

    def record(
        self, recording: Recording, a: list[Value], p: dict[tuple[int, int], Value]
    ) -> tuple[list[Value], dict[tuple[int, int], Value]]:
        """Record equations 4 and 5 for one molecule."""
        call, atoms = recording.call, range(len(a))
        f_aa, f_pa, f_a = self.of_atoms
        new_a = []
        for i in atoms:
            received = [call(f_pa, p[i, j]) for j in atoms if (i, j) in p]
            new_a.append(call(f_a, a[i], call(f_aa, a[i]), received))
        if self.of_pairs is None:
            return new_a, {}
        f_ap, f_pp, f_p = self.of_pairs
        ap = {(i, j): call(f_ap, a[i], a[j]) for i, j in p}
        return new_a, {
            (i, j): call(f_p, pair, ap[i, j], ap[j, i], call(f_pp, pair))
            for (i, j), pair in p.items()
        }

    def atom(self, x: Tensor, own: Tensor, received: RaggedRows) -> Tensor:
        """Update the rows of atoms."""
        return self._updated(x, self.conv.drop(self.activated("a", own, received.sum())))

    def pair(self, pair: Tensor, one: Tensor, other: Tensor, own: Tensor) -> Tensor:
        """Update the rows of pairs."""
        return self._updated(pair, self.activated("p", one + other, own))

    def activated(self, name: str, *rows: Tensor) -> Tensor:
        """Apply the linear layer of a function, its normalization and ReLU."""
        joined = torch.cat(rows, 1) if len(rows) > 1 else rows[0]
        result = getattr(self.conv, f"lin_{name}")(joined)
        if self.conv.norm is not None:
            result = self.conv.norms[name](result)
        return result.relu()

    def _updated(self, before: Tensor, update: Tensor) -> Tensor:
        fits = self.conv.residual and before.shape == update.shape
        return update + before if fits else update
