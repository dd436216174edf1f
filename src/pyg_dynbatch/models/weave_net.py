"""Predict properties of molecules with weave modules over all pairs of atoms."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch_geometric.nn.aggr import Aggregation, AttentionalAggregation
from torch_geometric.nn.resolver import aggregation_resolver

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.pairs import Pairs
from pyg_dynbatch.nn.gaussian_histogram import GaussianHistogramAggregation
from pyg_dynbatch.nn.standardized_inputs import StandardizedInputs
from pyg_dynbatch.nn.weave_norm import CountedBatchNorm
from pyg_dynbatch.nn.weave_stack import WeaveStack


class WeaveNet(nn.Module):
    """Weaves atoms and pairs, reads out each molecule, and predicts from what was read out.

    Weave modules, then a linear layer with tanh on atoms, a normalisation, a readout that turns
    the atoms of a molecule into one row, and a dense head with ReLU between its layers.

    Args:
        atom_channels: Width of ``batch.x``.
        num_outputs: Width of the result: targets, or logits.
        pair_table: Features of every pair code, ``[code][feature]``; kept with the weights.
        hidden: Width of all rows within the weave modules.
        num_modules: Number of weave modules.
        atom_out: Width of an atom's row before the readout.
        readout: ``"histogram"``, ``"attention"``, or the name of any aggregation of PyG
            (``"sum"``, ``"mean"``, ``"max"``, ...); several of them, one beside the other, as a
            list.
        head: Width of each hidden layer of the head; none for one linear layer.
        dropout: Probability of dropping an entry in the head while training.
        norm: ``"batch"``, ``"layer"`` or ``None``, within the weave modules.
        atom_norm: The same for the rows before the readout. The histogram wants ``"batch"``.
        residual: Whether weave modules add rows to their updates.
        weave_dropout: Probability of dropping an entry of an atom's row between weave modules.
        pair_block: See :class:`~pyg_dynbatch.nn.WeaveStack`.
        num_descriptors: Width of ``batch.descriptor``: numbers of the whole molecule, which the
            head reads beside what was read out, standardised by ``net.descriptors`` (to be
            fitted: :meth:`~pyg_dynbatch.nn.StandardizedInputs.fit`). 0 for none.

    Shape:
        - batch: a PyG batch with ``x`` ``[atom, atom_channels]``, ``batch``, and ``pairs`` (made
          by the collater) or ``pair_code`` (all pairs are used then); with descriptors also
          ``descriptor`` ``[molecule, num_descriptors]``, NaN where unknown
        - returns: ``[molecule, num_outputs]``

    Raises:
        ValueError: If an option is unknown, or a batch does not fit.

    Reference:
        Kearnes et al. (2016), arXiv:1603.00856. Differs: ReLU without batch normalisation in the
        modules unless asked for, and tanh before the readout as in DeepChem.

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
        residual: bool = False,
        weave_dropout: float = 0.0,
        pair_block: int | None = None,
        num_descriptors: int = 0,
    ) -> None:
        super().__init__()
        table = torch.as_tensor(pair_table, dtype=torch.float32).detach().clone()
        if table.dim() != 2 or not table.numel() or atom_norm not in (None, "batch", "layer"):
            raise ValueError(
                mismatch(
                    "WeaveNet: pair_table or atom_norm cannot be used",
                    expected="a table [code, feature]; 'batch', 'layer' or None",
                    got=f"a table {list(table.shape)}; {atom_norm!r}",
                )
            )
        self.register_buffer("pair_table", table)
        self.weave = WeaveStack(
            atom_channels,
            table.size(1),
            hidden,
            num_modules,
            pair_block=pair_block,
            norm=norm,
            residual=residual,
            dropout=weave_dropout,
        )
        norms = {None: nn.Identity, "batch": CountedBatchNorm, "layer": nn.LayerNorm}
        self.lin_atom = nn.Linear(hidden, atom_out)
        self.norm_atom = norms[atom_norm](atom_out)
        names = [readout] if isinstance(readout, str) else list(readout)
        self.readouts = nn.ModuleList(_readout(name, atom_out) for name in names)
        bins = [atom_out * getattr(part, "num_bins", 1) for part in self.readouts]
        self.fingerprint_channels = sum(bins)
        self.descriptors = StandardizedInputs(num_descriptors) if num_descriptors else None
        width = self.fingerprint_channels + num_descriptors
        self.head = _head([width, *head, num_outputs], dropout)

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if module is not self and callable(reset):
                reset()

    def forward(self, batch: Any) -> Float[Tensor, "molecule output"]:
        """Predicts."""
        read = self.fingerprint(batch)
        if self.descriptors is None:
            return self.head(read)
        row = getattr(batch, "descriptor", None)
        wanted = (read.size(0), self.descriptors.num_inputs)
        if row is None or row.shape != wanted:
            raise ValueError(
                mismatch(
                    "WeaveNet: the batch has no descriptors that fit",
                    expected=f"batch.descriptor [{wanted[0]}, {wanted[1]}]",
                    got="none" if row is None else list(row.shape),
                    mend="featurize with the descriptors that the network was made for",
                )
            )
        return self.head(torch.cat([read, self.descriptors(row).to(read.dtype)], 1))

    def encode(self, batch: Any) -> Float[Tensor, "atom channel"]:
        """Computes the rows of all atoms that the readout sees, in the order of ``batch.x``."""
        x = self.weave(batch.x, self.get_buffer("pair_table"), self.pairs_of(batch))
        return self.norm_atom(torch.tanh(self.lin_atom(x)))

    def fingerprint(self, batch: Any) -> Float[Tensor, "molecule channel"]:
        """Computes the row of every molecule that is read out of its atoms."""
        x = self.encode(batch)
        owner, count = batch.batch, 1
        if owner is None:
            owner = torch.zeros(x.size(0), dtype=torch.long, device=x.device)
        else:
            count = batch.num_graphs
        read = [part(x, owner, dim_size=count) for part in self.readouts]
        return torch.cat(read, 1) if len(read) > 1 else read[0]

    def pairs_of(self, batch: Any) -> Pairs:
        """Finds the pairs of a batch, or makes them of all its codes.

        Raises:
            ValueError: If it has neither, or its codes do not fit the table.
        """
        table = self.get_buffer("pair_table")
        pairs = getattr(batch, "pairs", None)
        if pairs is None and getattr(batch, "pair_code", None) is not None:
            ptr = getattr(batch, "ptr", None)
            sizes = [batch.num_nodes] if ptr is None else ptr.diff()
            pairs = Pairs.from_codes(batch.pair_code, sizes, num_codes=table.size(0))
            pairs = pairs.to(batch.x.device)
        if pairs is None or pairs.num_codes != table.size(0):
            raise ValueError(
                mismatch(
                    "WeaveNet: the batch has no pairs that fit the table",
                    expected=f"batch.pairs or batch.pair_code with {table.size(0)} codes",
                    got="neither" if pairs is None else f"{pairs.num_codes} codes",
                    mend="featurize, collate and predict with one pair table",
                )
            )
        return pairs


def _readout(name: str, channels: int) -> Aggregation:
    if name == "histogram":
        return GaussianHistogramAggregation()
    if name == "attention":
        return AttentionalAggregation(nn.Linear(channels, 1))
    try:
        return aggregation_resolver(name)
    except (ValueError, TypeError) as error:
        raise ValueError(
            mismatch(
                f"WeaveNet: the readout {name!r} cannot be used",
                expected="'histogram', 'attention', or an aggregation without arguments, such as "
                "'sum', 'mean', 'max', 'softmax', 'median'",
                got=str(error).splitlines()[0],
            )
        ) from error


def _head(widths: Sequence[int], dropout: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in zip(widths[:-2], widths[1:-1], strict=True):
        layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))
