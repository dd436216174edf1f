"""Fold's Table 1: the cost of dynamic batching over manual batching, and its speedup.

Trees of one shape batched by hand, the same trees batched dynamically, and trees of different
shapes batched dynamically; inference and training, with the schedule ready and end to end. A batch
of 1,024 takes minutes on a CPU and 5 GB.

The cell has a ReLU layer and four gates, 1,024 units, 128 leaves; ``tai`` is the N-ary Tree-LSTM.
``manual`` batches trees of one shape by hand, ``dynamic`` by a layer, ``different`` has a shape per
tree. ``cost`` is dynamic over manual, ``shapes`` different over dynamic, ``speedup`` the time of
manual at batch 1 over that of different, ``x bare`` the time over the bare matrix products. ``end
to end`` includes making and moving the batch and its schedule. Leaves are computed once per
occurrence. Fold reports at batch 1,024 a cost of 1.27 (CPU) and 1.62 (GPU).
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from benchmarks import bench
from benchmarks.products import BareProducts, Product, work
from benchmarks.tree_lstm import Weights, root_state
from benchmarks.trees import TREE_SHAPES, Shape, schedule_of
from pyg_dynbatch.core.levels import Levels
from pyg_dynbatch.nn.cell import RecursiveCell, States
from pyg_dynbatch.nn.recursive import NaryTreeLSTM, RecursiveLayer
from pyg_dynbatch.trees.data import Collater

CELLS = ("fold", "tai")
MANUAL, DYNAMIC, DIFFERENT = "manual", "dynamic", "different shapes"
ALONE, BARE = "manual, batch 1", "bare matrix products"
SHOWN = ("inference", "train")
PHASES = {
    **bench.phases("inference", train=bench.TRAIN, step=bench.STEP),
    "inference, end to end": ("collate", "transfer", "inference"),
    "train, end to end": ("collate", "transfer", *bench.TRAIN),
    **bench.phases("collate", "transfer"),
}
"""The schedule is part of collating."""


def add_options(parser: bench.Options) -> None:
    """Declare the options."""
    parser.counts("--batch-sizes", [1, 32, 64, 128, 256, 512, 1024])
    text = "the cell of the paper, the N-ary Tree-LSTM (default: fold)"
    parser.choices("--cells", CELLS, ["fold"], help=text)
    parser.choices("--shapes", TREE_SHAPES, ["random"], help="(default: random)")
    parser.count("--leaves", 128, "of a tree (default: 128)", least=2)
    parser.count("--units", 1024, "width (default: 1024)")
    parser.common(batches=1, seed=0, budget=300.0, repeats=5)


class FoldCell(RecursiveCell):
    r"""The cell of Fold's Table 1, for two children.

    With the rows :math:`l, r` of the children and one hidden layer,

    .. math::
        f_l, f_r, i, g = \sigma, \sigma, \sigma, \tanh\,(V\,\mathrm{relu}(W [l; r] + b) + d),
        \qquad h = f_l \odot l + f_r \odot r + i \odot g

    The state of a leaf is its input row; inner nodes have no input.

    Reference:
        Looks et al. (2017), arXiv:1702.02181, section 3.1; initial weights as in the benchmark
        program published with it.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, width, 2)
        self.state_channels = (width,)
        self.hidden = nn.Linear(2 * width, width)
        self.gates = nn.Linear(width, 4 * width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights uniformly, scaled by the number of inputs; biases are zero."""
        for layer, factor in ((self.hidden, 1.43), (self.gates, 1.0)):
            bound = factor * (3.0 / layer.in_features) ** 0.5
            nn.init.uniform_(layer.weight, -bound, bound)
            nn.init.zeros_(layer.bias)

    def project(self, x: Float[Tensor, "row feature"]) -> Float[Tensor, "row projected"]:
        """Return rows of width 0: inner nodes have no input."""
        return x[:, :0]

    def leaf(self, x: Float[Tensor, "row feature"]) -> States:
        """Return the input rows."""
        return (x,)

    def step(self, projected: Float[Tensor, "row projected"], children: Any) -> States:
        """Compute the gates and the new state."""
        (rows,) = children
        return (self.combine(rows.flatten(1), *rows.unbind(1)),)

    def combine(self, both: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Compute the new state from the rows of the children, side by side and separately."""
        f_left, f_right, i, g = self.gates(torch.relu(self.hidden(both))).chunk(4, 1)
        kept = torch.sigmoid(f_left) * left + torch.sigmoid(f_right) * right
        return kept + torch.sigmoid(i) * torch.tanh(g)


class Table1Model(nn.Module):
    """Look up the leaves in a table and compute the root of every tree with a cell."""

    def __init__(self, cell: str, width: int, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        nn.init.uniform_(self.table.weight)
        self.layer = (
            RecursiveLayer(FoldCell(width)) if cell == "fold" else NaryTreeLSTM(width, width)
        )

    def dynamic(self, batch: Any) -> Float[Tensor, "tree width"]:
        """Compute the roots of trees of any shapes."""
        schedule = batch.schedule
        inputs = self.table(batch.token.index_select(0, schedule.input_node))
        return self.layer(
            inputs, batch.edge_index, schedule, inputs_only=True, nodes=batch.root_index
        )

    def by_hand(self, shape: Shape, token: Int[Tensor, "leaf tree"]) -> Float[Tensor, "tree width"]:
        """Compute the roots of trees of one shape, node by node, all trees at once.

        Plain torch with the weights of the layer. In favour of this loop, all leaves are looked up
        at once, and their gates are one product.
        """
        cell, rows = self.layer.cell, self.table(token)
        if isinstance(cell, FoldCell):

            def join(*both: Tensor) -> Tensor:
                return cell.combine(torch.cat(both, 1), *both)

            return root_state(shape, dict(zip(shape.leaves, rows, strict=True)).pop, join)
        weights = Weights.of(cell)
        parts = zip(*(part.unbind(0) for part in weights.leaves(rows)), strict=True)
        states = dict(zip(shape.leaves, parts, strict=True))
        return root_state(shape, states.pop, weights.join)[0]


def cell_products(cell: str, schedule: Levels, units: int) -> list[Product]:
    """List the products of a cell; only the Tree-LSTM has one for leaves."""
    leaves, *levels = schedule.level_sizes
    if cell == "fold":
        return [Product(levels, 2 * units, units), Product(levels, units, 4 * units)]
    return [Product([leaves], units, 3 * units), Product(levels, 2 * units, 5 * units)]


class Case:
    """One cell on trees of one kind of shape."""

    def __init__(self, options: Namespace, cell: str, kind: str, device: torch.device) -> None:
        self.options, self.cell, self.kind, self.device = options, cell, kind, device
        self.generator = np.random.default_rng(options.seed)
        torch.manual_seed(options.seed)
        # As in Fold's program, the table has as many rows as a tree has leaves.
        self.model = Table1Model(cell, options.units, options.leaves).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-5)
        self.collate = Collater(arity=2)

    def shape(self) -> Shape:
        """Draw a shape."""
        return Shape.draw(self.kind, self.options.leaves, self.generator)

    def tokens(self, trees: int) -> Tensor:
        """Draw the leaves of some trees, ``[tree, leaf]``."""
        shape = (trees, self.options.leaves)
        return torch.from_numpy(self.generator.integers(0, self.options.leaves, shape))

    def check(self) -> None:
        """Compare the roots and all gradients of trees batched dynamically and by hand."""
        shapes, tokens = [self.shape() for _ in range(3)], self.tokens(3)
        examples = [shape.example(row) for shape, row in zip(shapes, tokens, strict=True)]
        columns = tokens.to(self.device)[:, :, None]
        alone = [self.model.by_hand(*pair) for pair in zip(shapes, columns, strict=True)]
        dynamic = self.model.dynamic(self.collate(examples).to(self.device))
        wanted, found = (
            bench.with_gradients(roots, _loss(roots), self.model.parameters())
            for roots in (torch.cat(alone), dynamic)
        )
        bench.assert_agreement("dynamic", wanted, found)

    def measure(self, size: int) -> list[bench.Record]:
        """Measure one batch size."""
        options = self.options
        batches = (self._contenders(size) for _ in range(options.batches))
        rounds, facts = bench.interleave_batches(batches, options, self.device)
        common = {"case": f"{self.cell}, {self.kind}", "batch": size}
        common |= {"units": options.units, "leaves": options.leaves, **facts}
        return list(_records(rounds, common))

    def _contenders(self, size: int) -> bench.Batch:
        shape, tokens = self.shape(), self.tokens(size)
        sets = {DYNAMIC: [shape.example(row) for row in tokens]}
        if self.kind == "random":
            sets[DIFFERENT] = [self.shape().example(row) for row in tokens]
        schedule = schedule_of(list(sets.values())[-1])
        products = cell_products(self.cell, schedule, self.options.units)

        def by_hand(tokens: Tensor) -> bench.Contender:
            def collate() -> Tensor:
                return torch.stack(list(tokens)).t().contiguous()

            return partial(self._run, collate, partial(self.model.by_hand, shape))

        contenders = {MANUAL: by_hand(tokens)}
        for name, trees in sets.items():
            contenders[name] = partial(self._run, partial(self.collate, trees), self.model.dynamic)
        contenders |= {ALONE: by_hand(tokens[:1]), BARE: BareProducts(products, self.device).run}
        flops = work(products)["flops_forward"]
        return contenders, {"steps": schedule.num_levels, "flops_forward": flops}

    def _run(
        self, collate: Callable[[], Any], roots: Callable[[Any], Tensor], lap: bench.Stopwatch
    ) -> None:
        self.optimizer.zero_grad()
        lap.skip()
        batch = collate()
        lap("collate")
        batch = batch.to(self.device)
        lap("transfer")
        rest: Any = {"optimizer": self.optimizer, "infer": partial(roots, batch)}
        bench.time_passes(lap, lambda: _loss(roots(batch)), **rest)


def _loss(roots: Tensor) -> Tensor:
    return roots.square().sum() / 2


def run(options: Namespace, device: torch.device) -> list[bench.Record]:
    """Measure all cases."""
    records = []
    for cell_name in options.cells:
        for kind in options.shapes:
            case = Case(options, cell_name, kind, device)
            case.check()
            for size in options.batch_sizes:
                records += case.measure(size)
    return records


def _records(rounds: bench.AllRounds, common: bench.Record) -> Iterator[bench.Record]:
    for name, mine in rounds.items():
        size = 1 if name == ALONE else common["batch"]
        base = MANUAL if name in (DYNAMIC, DIFFERENT) else None
        own = common | {"batch": size}
        for record in bench.phase_records(own, name, rounds, PHASES, base):
            parts, per_tree = PHASES[record["phase"]], record["median_seconds"] / size
            record |= {"batch": common["batch"], "seconds_per_tree": per_tree}
            if name in (MANUAL, DYNAMIC, DIFFERENT):
                record["speedup"] = size * bench.median_ratio(rounds[ALONE], mine, parts)
                if set(parts) <= set(rounds[BARE][0]):
                    record["ratio_to_bare"] = bench.median_ratio(mine, rounds[BARE], parts)
            if name == DIFFERENT:
                record["ratio_to_one_shape"] = bench.median_ratio(mine, rounds[DYNAMIC], parts)
            yield record


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write tables like Fold's, per case one for inference and one for training."""
    title = " shapes, {leaves} leaves, {units} units ({threads} threads, {device})"
    for mine in bench.grouped(records, "case").values():
        rows = [_row(batch) for batch in bench.grouped(mine, "batch").values()]
        for phase in SHOWN:
            what = f"table1: {phase}, {{case}}" + title
            yield bench.table(what.format_map(mine[0]), rows, _columns(phase))
    yield (
        "cost: time of dynamic over manual, same shape; shapes: of different shapes over one "
        "shape;\nspeedup: time per tree of manual at batch 1 over that of dynamic (of different "
        "shapes if there are any);\nx bare: time over that of the bare matrix products; all with "
        "the schedule ready, except the\nlast columns: end to end includes schedule and transfer"
    )


def _row(records: Sequence[bench.Record]) -> bench.Record:
    row: bench.Record = {"batch": records[0]["batch"]}
    for record in records:
        row.setdefault(record["mode"], {})[record["phase"]] = record
    return row | {"best": row.get(DIFFERENT, row[DYNAMIC])}


def _columns(phase: str) -> bench.Columns:
    def times(mode: str) -> bench.Cell:
        whole = bench.cell(mode, phase, "median_seconds", form=".1f", times=1e3)
        per_tree = bench.cell(mode, phase, "seconds_per_tree", form=".3f", times=1e3)
        return lambda row: f"{whole(row)} / {per_tree(row)}" if mode in row else "-"

    all_in = f"{phase}, end to end"
    return {
        "batch": "batch",
        "manual ms / tree": times(MANUAL),
        "dynamic ms / tree": times(DYNAMIC),
        "different ms / tree": times(DIFFERENT),
        "cost": bench.cell(DYNAMIC, phase, "ratio", form=".2f"),
        "shapes": bench.cell(DIFFERENT, phase, "ratio_to_one_shape", form=".2f"),
        "speedup": bench.cell("best", phase, "speedup", form=".1f"),
        "x bare": bench.cell("best", phase, "ratio_to_bare", form=".2f"),
        "end to end ms": bench.cell("best", all_in, "median_seconds", form=".1f", times=1e3),
        "end to end cost": bench.cell("best", all_in, "ratio", form=".2f"),
        "collate ms": bench.cell("best", "collate", "median_seconds", form=".1f", times=1e3),
    }


def panels(records: Sequence[bench.Record]) -> Iterator[bench.Panel]:
    """Draw the cost and the speedup over the batch size."""
    mine = [r for r in records if r["phase"] in SHOWN and r["mode"] in (DYNAMIC, DIFFERENT)]
    curve = "{case}: {phase}, {mode}"
    yield bench.Panel(mine, curve, "batch", "ratio", ("batch", "time / manual"), "x")
    yield bench.Panel(mine, curve, "batch", "speedup", ("batch", "speedup over batch 1"), "xy")


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
