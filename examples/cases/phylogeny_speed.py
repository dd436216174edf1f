"""Measure likelihoods and gradients of many topologies beside a loop per tree and node.

    python examples/cases/phylogeny_speed.py [--folder FOLDER] [--json FILE]

First the likelihoods of all 1,209 topologies that MrBayes sampled for DS1, then times of values and
of values with gradients at several batch sizes, for DS1 (934 patterns) and for DS5 (256 patterns)
with random topologies. Times are processor times, rooting and scheduling included; the loop does
the same products in ordinary PyTorch, and differentiates them by autograd. Gradients are also those
of the cell, which autograd differentiates level by level.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from common import data_folder, write_rows
from measuring import measure
from phylogeny_data import Alignment
from phylogeny_model import TreeLikelihood, jukes_cantor
from phylogeny_trees import Tree, Trees, read_mrbayes
from torch import Tensor

from pyg_dynbatch import keep_freed_memory

Run = Callable[[], Tensor]


def of_one(alignment: Alignment, tree: Tree, lengths: Tensor) -> Tensor:
    """Return the log-likelihood of one tree, node by node."""
    matrix, number = jukes_cantor(lengths), {name: k for k, name in enumerate(alignment.taxa)}
    products, scale = dict[int, Tensor](), -torch.full_like(alignment.count, 4).log()
    for node, name in enumerate(tree.names):
        if name:
            product = alignment.tips[number[name]]
        else:
            total = products[node].sum(0)
            product, scale = products[node] / total, scale + total.log()
        if node < len(tree.parent):
            message, above = matrix[node] @ product, tree.parent[node]
            products[above] = products[above] * message if above in products else message
    return scale @ alignment.count


def random_tree(taxa: Sequence[str], rng: random.Random) -> Tree:
    """Join two parts of the tree at a time, drawn at random, until three are left."""
    parts = list(taxa)
    while len(parts) > 3:
        rng.shuffle(parts)
        parts.append(f"({parts.pop()},{parts.pop()})")
    return Tree.parse(f"({','.join(parts)});")


def ways(alignment: Alignment, trees: list[Tree], lengths: Tensor) -> dict[str, Run]:
    """Return the values, and the gradients, of trees in a loop and in a batch (or by the cell)."""
    model = TreeLikelihood(alignment)

    def in_batch(t: Tensor) -> Tensor:
        return model(Trees.of(trees, alignment.taxa), t)

    def in_loop(t: Tensor) -> Tensor:
        return torch.stack([of_one(alignment, *pair) for pair in zip(trees, t, strict=True)])

    def by_cell(t: Tensor) -> Tensor:
        return model.of_patterns(Trees.of(trees, alignment.taxa), t) @ alignment.count

    def gradients(values: Callable[[Tensor], Tensor]) -> Tensor:
        own = lengths.detach().requires_grad_()
        return torch.autograd.grad(values(own).sum(), own)[0]

    def gradients_in_loop() -> Tensor:
        own = [t.detach().requires_grad_() for t in lengths]
        pairs = zip(trees, own, strict=True)
        return torch.stack([torch.autograd.grad(of_one(alignment, *p), p[1])[0] for p in pairs])

    return {
        "values, loop": lambda: torch.no_grad()(in_loop)(lengths),
        "values, batch": lambda: torch.no_grad()(in_batch)(lengths),
        "gradients, loop": gradients_in_loop,
        "gradients, batch": partial(gradients, in_batch),
        "gradients, cell": partial(gradients, by_cell),
    }


def table(alignment: Alignment, trees: list[Tree], rounds: int) -> dict[str, float]:
    """Print and return times per tree, ratios and memory, measured in turn."""
    lengths = torch.full((len(trees), len(trees[0].parent)), 0.05, dtype=torch.float64)
    each, found = ways(alignment, trees, lengths), dict[str, list[float]]()
    loop = each["gradients, loop"]()
    for way in ("batch", "cell"):
        torch.testing.assert_close(each[f"gradients, {way}"](), loop, rtol=1e-9, atol=1e-7)
    memory = {name: measure(run)[1] for name, run in each.items()}
    for _ in range(rounds):
        for name, run in each.items():
            start = time.process_time()
            run()
            found.setdefault(name, []).append(1e3 * (time.process_time() - start) / len(trees))
    rows = dict[str, float]()
    for name, times in found.items():
        kind, way = name.split(", ")
        rows[f"{kind}: {way}, ms"], rows[f"{kind}: {way}, MB"] = median(times), memory[name]
        ratio = median(found[f"{kind}, loop"]) / median(times)
        print(
            f"{len(trees):4} trees, {alignment.tips.size(2)} patterns, {name}: "
            f"{median(times):.2f} ms per tree, ratio {ratio:.2f}, {memory[name]:.0f} MB",
            flush=True,
        )
    return rows


def all_sampled(alignment: Alignment, trees: list[Tree], batch: int = 50) -> dict[str, float]:
    """Print the speed and memory of the likelihoods of all topologies."""
    found, rows = dict[str, list[Tensor]](), dict[str, float]()

    def run(way: str) -> None:
        found[way] = []
        for first in range(0, len(trees), batch):
            part = trees[first : first + batch]
            lengths = torch.full((len(part), len(part[0].parent)), 0.05, dtype=torch.float64)
            found[way].append(ways(alignment, part, lengths)[f"values, {way}"]())

    for way in ("loop", "batch"):
        seconds, memory = measure(partial(run, way))
        rows |= {f"{way}: trees/s": len(trees) / seconds, f"{way}: MB": memory}
        print(
            f"{len(trees)} topologies, {way}: {len(trees) / seconds:.0f} trees/s, {memory:.0f} MB"
        )
    value, other = torch.cat(found["batch"]), torch.cat(found["loop"])
    print(f"largest difference {(value - other).abs().max():.1e}", end="; ")
    print(f"from {value.min():.6f} to {value.max():.6f}", flush=True)
    return rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=data_folder("phylogeny"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    rng = random.Random(0)
    try:
        alignment = Alignment.read(options.folder / "DS1.fasta.gz")
        sampled, _ = read_mrbayes(options.folder / "DS1.rep_1.trprobs.gz")
        few = Alignment.read(options.folder / "DS5.fasta.gz")
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(str(error)) from None
    rows = {"DS1, all topologies": all_sampled(alignment, sampled)}
    for size in options.batches:
        drawn = [random_tree(few.taxa, rng) for _ in range(size)]
        rows[f"DS1, {size}"] = table(alignment, sampled[:size], options.rounds)
        rows[f"DS5, {size}"] = table(few, drawn, options.rounds)
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
