"""DAGNN beside the recipe of masks, with the same weights: training steps over batches of DAGs.

The recipe (discussed in pyg-team/pytorch_geometric, issues 121 and 7346) calls a layer of PyG on
the whole graph once per level, and keeps the new rows of the nodes of that level; in its second
form, a call sees only the edges into the level. Masks and schedules are prepared beforehand. The
DAGs are drawn architectures of eight vertices, or functions of the standard library.
"""

import random
import sys
import sysconfig
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

from benchmarks import bench
from pyg_dynbatch.core.structure import depth_of
from pyg_dynbatch.nn import DAGNN, DAGNNCell
from pyg_dynbatch.trees.data import Collater, DynTreeData

CASES = ("architectures", "syntax")
OURS, MASKS, EDGES = "DAGNN", "masks", "masks of nodes and edges"
PHASES = bench.phases("forward", "backward", train=bench.TRAIN)


class MaskedConv(MessagePassing):
    """The step of a DAGNN cell for all nodes of a graph, as a layer of PyG."""

    def __init__(self, cell: DAGNNCell) -> None:
        super().__init__(aggr="add")
        self.cell = cell

    def forward(self, h: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        """Attend to the predecessors, and run the GRU cell."""
        cell = self.cell
        message = self.propagate(edge_index, h=h, score=(h @ cell.attention)[:, None])
        gru = cell.weight_input, cell.weight_hidden, cell.bias, cell.bias_hidden
        return torch.gru_cell(x, message, *gru)

    def message(self, h_j: Tensor, score_j: Tensor, index: Tensor, ptr: Any, size_i: Any) -> Tensor:
        """Weight the rows of the predecessors."""
        return h_j * softmax(score_j, index, ptr, size_i)


Level = tuple[Tensor, Tensor]
"""The mask of the nodes of a level, and the edges of the call."""


def levels_of(batch: Any, only_own_edges: bool) -> list[list[Level]]:
    """List the levels of both directions."""
    found = []
    for edges in (batch.edge_index, batch.edge_index.flip(0)):
        depth = depth_of(edges, batch.num_nodes)
        masks = [depth == level for level in range(int(depth.max()) + 1)]
        own = [edges[:, mask[edges[1]]] if only_own_edges else edges for mask in masks]
        found.append(list(zip(masks, own, strict=True)))
    return found


def run_masked(model: DAGNN, x: Tensor, levels: list[list[Level]]) -> Tensor:
    """Compute what ``model.embed`` computes."""
    found = []
    for layers, each in zip(cast(Any, model.layers), levels, strict=True):
        rows = [x]
        for layer in layers:
            conv, h = MaskedConv(layer.cell), x.new_zeros(x.size(0), layer.out_channels)
            for mask, edges in each:
                h = torch.where(mask[:, None], conv(h, rows[-1], edges), h)
            rows.append(h)
        found += rows
    return torch.cat(found, 1)


def architecture(generator: random.Random) -> DynTreeData:
    """Draw a chain of eight vertices; an earlier vertex is a further source with chance 1/2."""
    pairs = [(a, b) for b in range(8) for a in range(b)]
    edges = [(a, b) for a, b in pairs if a == b - 1 or generator.random() < 0.5]
    return DynTreeData(torch.tensor(edges).t().contiguous(), num_nodes=8)


def examples(case: str, generator: random.Random) -> Iterator[DynTreeData]:
    """Draw architectures, or list functions of the standard library in random order."""
    if case == CASES[0]:
        yield from iter(partial(architecture, generator), None)
    read = bench.example("method_names").read
    parts = read(Path(sysconfig.get_path("stdlib")), generator)
    functions = [function for part in parts for function in part]
    for _, tokens, edges in generator.sample(functions, len(functions)):
        yield DynTreeData(torch.tensor(edges).t().contiguous(), num_nodes=len(tokens))


def add_options(parser: bench.Options) -> None:
    """Declare the options."""
    parser.choices("--cases", CASES)
    parser.counts("--batch-sizes", [128])
    parser.counts("--widths", [64, 128, 256])
    parser.common(batches=3, repeats=7, seed=0)


def run(options: Namespace, device: torch.device) -> list[bench.Record]:
    """Time all cases."""
    records: list[bench.Record] = []
    for case in options.cases:
        for size in options.batch_sizes:
            drawn = examples(case, random.Random(options.seed))
            batches = [
                Collater(direction="both")(list(islice(drawn, size)))
                for _ in range(options.batches)
            ]
            for width in options.widths:
                torch.manual_seed(options.seed)
                model = DAGNN(width, width).to(device)
                timed = (_contenders(model, width, batch.to(device)) for batch in batches)
                rounds, facts = bench.interleave_batches(timed, options, device)
                common = {"case": case, "batch": size, "unit": "graphs", "width": width, **facts}
                for mode in rounds:
                    records += bench.phase_records(common, mode, rounds, PHASES, OURS)
    return records


def _contenders(model: DAGNN, width: int, batch: Any) -> bench.Batch:
    """Prepare the ways to compute one batch, and check that they agree."""
    x = torch.randn(batch.num_nodes, width, device=batch.edge_index.device)
    schedules = {"schedule": batch.schedule, "schedule_down": batch.schedule_down}
    ways = {OURS: partial(model.embed, x, batch.edge_index, **schedules)}
    for name in (MASKS, EDGES):
        ways[name] = partial(run_masked, model, x, levels_of(batch, name == EDGES))
    parameters, wanted = list(model.parameters()), None
    for name, way in ways.items():
        rows = way()
        found = bench.with_gradients(rows, rows.square().mean(), parameters)
        wanted = wanted or found
        bench.assert_agreement(f"{name}, width {width}", wanted, found)
    facts = {"nodes": batch.num_nodes, "levels": len(batch.schedule.level_sizes)}
    contenders: bench.Contenders = {
        name: partial(bench.time_passes, compute=way) for name, way in ways.items()
    }
    return contenders, {**facts, "edges": batch.num_edges}


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write a table per case, with a row per width and way."""
    ratio = {"times as long": bench.cell("train", "ratio", form=".2f")}
    columns = {"width": "width", "": "mode", **bench.milliseconds(PHASES), **ratio}
    title = "{case}, batch {batch}: {nodes:.0f} nodes, {edges:.0f} edges, {levels:.0f} levels"
    yield from bench.tables(records, ("case", "batch"), title, ("width", "mode"), columns)


def panels(records: Sequence[bench.Record]) -> Iterator[bench.Panel]:
    """Draw the time of a training step over the width, one panel per case."""
    train = [record for record in records if record["phase"] == "train"]
    for (case, size), mine in bench.grouped(train, "case", "batch").items():
        labels, title = ("width", "s per step"), f"{case}, batch {size}"
        yield bench.Panel(mine, "{mode}", "width", "median_seconds", labels, "xy", title)


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
