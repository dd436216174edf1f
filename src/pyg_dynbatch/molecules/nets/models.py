"""Networks that predict properties of molecules from rows of atoms and of their pairs."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch_geometric.nn.aggr import Aggregation, AttentionalAggregation
from torch_geometric.nn.inits import reset
from torch_geometric.nn.resolver import aggregation_resolver

from pyg_dynbatch.core.errors import checked_choice, checked_shape, mismatch
from pyg_dynbatch.core.structure import checksum
from pyg_dynbatch.nn.directed import DirectedStack
from pyg_dynbatch.nn.pairs import Pairs
from pyg_dynbatch.nn.readout import GaussianHistogramAggregation, StandardizedInputs
from pyg_dynbatch.nn.weave import CountedBatchNorm, WeaveStack


class WeaveNet(nn.Module):
    """Predict properties of molecules with weave modules, or messages along directed bonds.

    Weave modules and a linear layer with tanh, or a :class:`~pyg_dynbatch.nn.DirectedStack`; then a
    normalization, a readout per molecule, and a dense head with ReLU between its layers.

    Args:
        atom_channels: Width of ``batch.x``.
        num_outputs: Width of the result: targets, or logits.
        pair_table: Features of every pair code, ``[code][feature]``; kept with the weights.
        hidden: Width of all rows within the weave modules, or of a message.
        num_modules: Number of weave modules, or of steps of messages.
        atom_out: Width of an atom row before the readout.
        readout: ``"histogram"``, ``"attention"``, or the name of any aggregation of PyG
            (``"sum"``, ``"mean"``, ``"max"``, ...); several in a list are concatenated.
        head: Width of each hidden layer of the head; empty for one linear layer.
        dropout: Dropout probability in the head.
        norm: ``"batch"``, ``"layer"`` or ``None``, within the weave modules.
        atom_norm: Before the readout: ``"batch"``, as histograms expect, ``"layer"`` or ``None``.
        sync: Whether all batch normalizations use the statistics of all ranks while training; see
            :class:`~pyg_dynbatch.nn.CountedBatchNorm`.
        residual: Whether weave modules add rows to their updates.
        weave_dropout: Dropout probability of the atom rows between weave modules, or of messages.
        messages: ``"weave"``, or ``"directed"`` along the pairs, which should be the bonds; without
            ``norm``, ``residual`` and ``pair_block``.
        pair_block: See :class:`~pyg_dynbatch.nn.WeaveStack`.
        num_descriptors: Width of ``batch.descriptor``, which is concatenated to the readout after
            the attribute ``descriptors`` has standardized it (fit that first, see
            :meth:`~pyg_dynbatch.nn.StandardizedInputs.fit`).

    Shape:
        - batch: ``x`` ``[atom, atom_channels]``, ``batch``, and ``pairs`` or ``pair_code`` (of all
          pairs of atoms); perhaps ``descriptor`` ``[molecule, num_descriptors]``, NaN if unknown
        - returns: ``[molecule, num_outputs]``

    Raises:
        ValueError: If an option is unknown, a batch does not fit, or there are no batch statistics
            to synchronize.

    Reference:
        Kearnes et al. (2016), arXiv:1603.00856. Differs: no batch normalization within the modules
        by default; tanh before the readout, as in DeepChem. Directed messages: Yang et al. (2019),
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
        messages: str = "weave",
        pair_block: int | None = None,
        num_descriptors: int = 0,
    ) -> None:
        super().__init__()
        table = torch.as_tensor(pair_table, dtype=torch.float32).detach().clone()
        if table.dim() != 2 or not table.numel() or atom_norm not in (None, "batch", "layer"):
            what, got = "WeaveNet: pair_table or atom_norm cannot be used", list(table.shape)
            expected = "a table [code, feature]; 'batch', 'layer' or None"
            raise mismatch(ValueError, what, expected, f"a table {got}; {atom_norm!r}")
        self.register_buffer("pair_table", table)
        given = atom_channels, table.size(1), hidden, num_modules
        options: Any = {"pair_block": pair_block, "norm": norm, "residual": residual}
        self.weave: nn.Module
        self.lin_atom: nn.Module
        chosen = {name: v for name, v in options.items() if v is not None and v is not False}
        known = "weave", "directed"
        self.kept: Tensor | None = None  # whether pairs of each code are read, from the schema
        self.messages = checked_choice("WeaveNet: unknown messages", messages, known)
        if messages == "weave":
            self.weave = WeaveStack(*given, **options, dropout=weave_dropout)
            self.lin_atom = nn.Linear(hidden, atom_out)
        elif chosen:
            what = f"WeaveNet: directed messages have no {', '.join(chosen)}"
            raise mismatch(ValueError, what, "messages='weave', or the default", chosen)
        else:
            self.weave = DirectedStack(*given, atom_out=atom_out, dropout=weave_dropout)
            self.lin_atom = nn.Identity()
        norms = {None: nn.Identity, "batch": CountedBatchNorm, "layer": nn.LayerNorm}
        self.norm_atom = norms[atom_norm](atom_out)
        names = [readout] if isinstance(readout, str) else list(readout)
        self.readouts = nn.ModuleList(_readout(name, atom_out) for name in names)
        bins = [getattr(part, "num_bins", 1) for part in self.readouts]
        self.fingerprint_channels = atom_out * sum(bins)
        self.descriptors = StandardizedInputs(num_descriptors) if num_descriptors else None
        widths = [self.fingerprint_channels + num_descriptors, *head]
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
        what, hint = "WeaveNet: batch.descriptor does not fit", "featurize as for training"
        shape = read.size(0), self.descriptors.num_inputs
        row = checked_shape(what, getattr(batch, "descriptor", None), shape, hint=hint)
        return self.head(torch.cat([read, self.descriptors(row).to(read.dtype)], 1))

    def encode(self, batch: Any) -> Float[Tensor, "atom channel"]:
        """Compute the atom rows that the readout sees, in the order of ``batch.x``."""
        table = self.get_buffer("pair_table")
        x = self.weave(batch.x.to(table.dtype), table, self.pairs_of(batch))
        if self.messages == "weave":
            x = torch.tanh(self.lin_atom(x))
        return self.norm_atom(x)

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
            pairs = Pairs.from_codes(code, sizes, self.kept, num_codes).to(batch.x.device)
        elif code is not None and code.is_cpu and pairs.num_codes == num_codes:
            what, hint = "", "collate again, with the pairs of the schema"
            if pairs.checksum not in (None, checksum(code)):
                what = "the pairs of the batch do not belong to its pair_code"
            elif self.kept is not None and pairs.plan.is_cpu:
                wanted = torch.bincount(code, minlength=num_codes) * self.kept
                if not torch.equal(pairs.by_code[1].diff().long(), wanted):
                    what = "the model was made for different pairs of the atoms of the batch"
            if what:
                raise mismatch(ValueError, f"WeaveNet: {what}", hint=hint)
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
