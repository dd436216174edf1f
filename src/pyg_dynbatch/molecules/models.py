"""The weave network, and weave written as programs for the engine."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch_geometric.nn.aggr import Aggregation, AttentionalAggregation
from torch_geometric.nn.resolver import aggregation_resolver

from pyg_dynbatch.core.engine import Engine
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.operation import Operations, Ragged, Signature
from pyg_dynbatch.core.program import Program, Value
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.types import TensorType
from pyg_dynbatch.nn.pairs import Pairs
from pyg_dynbatch.nn.readout import GaussianHistogramAggregation, StandardizedInputs
from pyg_dynbatch.nn.weave import CountedBatchNorm, WeaveConv, WeaveStack


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
            raise mismatch(
                ValueError,
                "WeaveNet: pair_table or atom_norm cannot be used",
                "a table [code, feature]; 'batch', 'layer' or None",
                f"a table {list(table.shape)}; {atom_norm!r}",
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
            raise mismatch(
                ValueError,
                "WeaveNet: the batch has no descriptors that fit",
                f"batch.descriptor [{wanted[0]}, {wanted[1]}]",
                "none" if row is None else list(row.shape),
                hint="featurize with the descriptors that the network was made for",
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
            raise mismatch(
                ValueError,
                "WeaveNet: the batch has no pairs that fit the table",
                f"batch.pairs or batch.pair_code with {table.size(0)} codes",
                "neither" if pairs is None else f"{pairs.num_codes} codes",
                hint="featurize, collate and predict with one pair table",
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
        raise mismatch(
            ValueError,
            f"WeaveNet: the readout {name!r} cannot be used",
            "'histogram', 'attention', or an aggregation without arguments, such as "
            "'sum', 'mean', 'max', 'softmax', 'median'",
            str(error).splitlines()[0],
        ) from error


def _head(widths: Sequence[int], dropout: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in zip(widths[:-2], widths[1:-1], strict=True):
        layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


class WeaveProgram(nn.Module):
    """Runs the modules of a :class:`WeaveStack` by dynamic batching, with the same weights.

    A molecule is a program of calls of the six functions, written down exactly as in the
    equations; nothing in it knows of batches. It gives what the stack gives, and is the way to
    try a changed weave before it is worth a fast layer of its own.

    Args:
        stack: The modules; its parameters are shared. Batch normalisation is refused, since a
            call must not depend on others.
        table: Row of every pair code.

    Shape:
        - x: ``[atom, atom_in]`` of all molecules, one after another
        - returns: ``[atom, channels]``

    Raises:
        ValueError: If the modules have batch normalisation.

    Reference:
        Looks et al. (2017), arXiv:1702.02181, equations 4-5.

    Example:
        >>> stack, table = WeaveStack(3, 2, channels=8), torch.eye(2)
        >>> weave = WeaveProgram(stack, table)
        >>> water = weave.program(3, [[0, 1, 1], [1, 0, 1], [1, 1, 0]])
        >>> weave(torch.randn(6, 3), [water, water]).shape
        torch.Size([6, 8])
    """

    def __init__(self, stack: WeaveStack, table: Float[Tensor, "code channel"]) -> None:
        super().__init__()
        convs: list[WeaveConv] = list(stack.convs)  # type: ignore[arg-type]
        if any(conv.norm == "batch" for conv in convs):
            raise mismatch(
                ValueError,
                "WeaveProgram: batch normalisation looks at several calls at once",
                "norm=None or norm='layer'",
                "norm='batch'",
            )
        operations = Operations()
        self.code = TensorType((), torch.long, "code")
        self.atom = TensorType((convs[0].atom_in,), tag="atom")
        pair = TensorType((table.size(1),), tag="pair")
        lookup = operations.add(_Lookup(table), [self.code], [pair], name="lookup")
        self.lookup: Signature = lookup
        self.levels = [_Level(operations, conv, number) for number, conv in enumerate(convs)]
        self.engine = Engine(operations)

    def program(self, num_atoms: int, code: Sequence[Sequence[int | None]]) -> Program:
        """Writes down one molecule.

        Args:
            num_atoms: Number of atoms.
            code: Code of every ordered pair; ``None`` for a pair that is not used.

        Returns:
            The program; it reads the atoms as inputs and gives the updated ones.
        """
        program, atoms = Program(), range(num_atoms)
        a: list[Value] = [program.input(self.atom, i) for i in atoms]
        used = [(i, j) for i in atoms for j in atoms if code[i][j] is not None]
        p: dict[tuple[int, int], Value] = {
            (i, j): program.call(self.lookup, program.constant(self.code, code[i][j]))
            for i, j in used
        }
        for level in self.levels:
            a, p = level.record(program, a, p)
        for value in a:
            program.output(value)
        return program

    def forward(
        self, x: Float[Tensor, "atom feature"], programs: Sequence[Program]
    ) -> Float[Tensor, "atom out"]:
        """Computes the atom rows of all molecules after the last module."""
        schedule = Schedule.from_programs(programs)
        return self.engine(schedule.to(x.device), {"atom": x})["output"]


class _Level:
    """The six functions of one module as operations."""

    def __init__(self, operations: Operations, conv: WeaveConv, number: int) -> None:
        self.pairs_too = conv.pair_out is not None
        atom = TensorType((conv.atom_in,), tag="" if number else "atom")
        pair = TensorType((conv.pair_in,), tag="pair")

        def add(name: str, inputs: list[Any], width: int, tag: str = "") -> Signature:
            part = _Part(conv, name)
            out = TensorType((width,), tag=tag)
            return operations.add(part, inputs, [out], name=f"{name}{number}")

        self.aa = add("aa", [atom], conv.lin_aa.out_features)
        self.pa = add("pa", [pair], conv.lin_pa.out_features)
        self.a = add("a", [atom, *self.aa.outputs, Ragged(self.pa.outputs[0])], conv.atom_out)
        if self.pairs_too:
            between = conv.lin_ap.out_features
            self.ap = add("ap", [atom, atom], between)
            self.pp = add("pp", [pair], conv.lin_pp.out_features)
            inputs = [*self.ap.outputs * 2, *self.pp.outputs, pair]
            self.p = add("p", inputs, conv.pair_out or 0, "pair")

    def record(
        self, program: Program, a: list[Value], p: dict[tuple[int, int], Value]
    ) -> tuple[list[Value], dict[tuple[int, int], Value]]:
        """Writes down equations 4 and 5 for one molecule."""
        call, atoms = program.call, range(len(a))
        new_a = [
            call(
                self.a,
                a[i],
                call(self.aa, a[i]),
                [call(self.pa, p[i, j]) for j in atoms if (i, j) in p],
            )
            for i in atoms
        ]
        if not self.pairs_too:
            return new_a, {}
        ap = {(i, j): call(self.ap, a[i], a[j]) for i, j in p}
        new_p = {
            (i, j): call(self.p, ap[i, j], ap[j, i], call(self.pp, p[i, j]), p[i, j]) for i, j in p
        }
        return new_a, new_p


class _Lookup(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, code: Tensor) -> Tensor:
        return self.get_buffer("table")[code]


class _Part(nn.Module):
    """One of the six functions of a module, on rows of calls."""

    def __init__(self, conv: WeaveConv, name: str) -> None:
        super().__init__()
        self.conv, self.name = conv, name

    def forward(self, *rows: Any) -> Tensor:
        conv, own = self.conv, None
        if self.name == "a":
            own, *rest = rows
            rows = (rest[0], rest[1].sum())
        elif self.name == "p":
            one, other, pair, own = rows
            rows = (one + other, pair)
        linear = getattr(conv, f"lin_{self.name}")
        result = linear(torch.cat(rows, 1) if len(rows) > 1 else rows[0])
        if conv.norm is not None:
            result = conv.norms[self.name](result)
        result = result.relu()
        if self.name == "a":
            result = conv.drop(result)
        fits = own is not None and conv.residual and own.shape == result.shape
        return result + own if fits else result
