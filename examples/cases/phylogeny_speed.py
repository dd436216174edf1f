"""Measure likelihoods and gradients of many topologies beside a loop per tree and node.

    python examples/cases/phylogeny_speed.py [--folder FOLDER] [--json FILE]

First the likelihoods of all 1,209 topologies that MrBayes sampled for DS1, then times of values and
of values with gradients at several batch sizes, for DS1 (934 patterns) and for DS5 (256 patterns)
with random topologies. Times are processor times, rooting and scheduling included; the loop does
the same products in ordinary PyTorch, and differentiates them by autograd.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from circuit_speed import measure
from phylogeny_data import Alignment
from phylogeny_model import TreeLikelihood, jukes_cantor
from phylogeny_trees import Tree, Trees, read_mrbayes
from torch import Tensor

from pyg_dynbatch import keep_freed_memory


def of_one(alignment: Alignment, tree: Tree, lengths: Tensor) -> Tensor:
    """Return the log-likelihood of one tree, node by node."""
    matrix, number = jukes_cantor(lengths), {name: k for k, name in enumerate(alignment.taxa)}
    products = list[Tensor | None]([None] * len(tree.names))
    scale = torch.zeros_like(alignment.count)
    for node, name in enumerate(tree.names):
        if name:
            product = alignment.tips[number[name]]
        else:
            product, total = products[node], products[node].sum(0)
            product, scale = product / total, scale + total.log()
        if node == len(tree.parent):
            break
        message, above = matrix[node] @ product, tree.parent[node]
        products[above] = message if products[above] is None else products[above] * message
    return (scale - torch.log(torch.tensor(4.0))) @ alignment.count


def random_tree(taxa: Sequence[str], rng: random.Random) -> Tree:
    """Join two parts of the tree at a time, drawn at random, until three are left."""
    parts = list(taxa)
    while len(parts) > 3:
        rng.shuffle(parts)
        parts.append(f"({parts.pop()},{parts.pop()})")
    return Tree.parse(f"({','.join(parts)});")


def ways(
    alignment: Alignment, trees: list[Tree], lengths: Tensor
) -> dict[str, Callable[[], Tensor]]:
    """Return the values, and the gradients, of trees in a batch and in a loop."""
    model = TreeLikelihood(alignment)

    def batch() -> Tensor:
        return model(Trees.of(trees, alignment.taxa), lengths)

    def loop() -> Tensor:
        pairs = zip(trees, lengths, strict=True)
        return torch.stack([of_one(alignment, tree, t) for tree, t in pairs])

    def gradient_of_loop() -> Tensor:
        own = [t.detach().requires_grad_() for t in lengths]
        pairs = zip(trees, own, strict=True)
        grads = [torch.autograd.grad(of_one(alignment, tree, t), t)[0] for tree, t in pairs]
        return torch.stack(grads)

    def gradient_of_batch() -> Tensor:
        own = lengths.detach().requires_grad_()
        found = model(Trees.of(trees, alignment.taxa), own).sum()
        return torch.autograd.grad(found, own)[0]

    return {
        "values, batch": torch.no_grad()(batch),
        "values, loop": torch.no_grad()(loop),
        "gradients, batch": gradient_of_batch,
        "gradients, loop": gradient_of_loop,
    }


def times(each: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """Return the median processor seconds of each way, in interleaved rounds."""
    found = {name: list[float]() for name in each}
    for _ in range(rounds + 1):
        for name, run in each.items():
            start = time.process_time()
            run()
            found[name].append(time.process_time() - start)
    return {name: median(seconds[1:]) for name, seconds in found.items()}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    default = Path(os.environ.get("PYG_DYNBATCH_DATA", "data")) / "phylogeny"
    parser.add_argument("--folder", type=Path, default=default)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, rows = time.perf_counter(), {}
    alignment = Alignment.read(options.folder / "DS1.fasta.gz")
    sampled, _ = read_mrbayes(options.folder / "DS1.rep_1.trprobs.gz")
    all_lengths = torch.full((len(sampled), len(sampled[0].parent)), 0.05, dtype=torch.float64)
    found = dict[str, Tensor]()
    for way in ("batch", "loop"):
        def run() -> None:
            parts = range(0, len(sampled), 50)
            found[way] = torch.cat([ways(alignment, sampled[k:k+50], all_lengths[k:k+50])[f"values, {way}"]() for k in parts])
        seconds, memory = measure(run)
        print(f"{len(sampled)} topologies, {way}: {len(sampled) / seconds:.0f} trees/s, {memory:.0f} MB")
    print(f"largest difference {(found['batch'] - found['loop']).abs().max():.1e}")
