"""Estimate the marginal likelihood of an alignment, over topologies and branch lengths.

    python examples/cases/phylogeny.py [--folder FOLDER] [--repeats 20] [--json FILE]
    python examples/cases/phylogeny_speed.py         # 1,209 topologies; speed and memory

Data: DS1, 27 sequences (``DS1.fasta.gz``), and the topologies that MrBayes sampled with their
weights (``DS1.rep_1.trprobs.gz``), from https://github.com/zcrabbit/vbpi-gnn, in FOLDER (default:
``phylogeny`` below ``$PYG_DYNBATCH_DATA``).
Protocol: importance sampling with K draws from q(tree) q(log t | tree), where q(tree) are the
weights, and q(log t | tree) is a Gaussian at the mode of the posterior with the inverse of its
Hessian, deviations times 1.05. Prior: uniform over topologies, exponential with mean 0.1 for each
length. Results: ``docs/cases/phylogeny.md``.
"""

import argparse
import math
import time
from pathlib import Path

import torch
from common import data_folder, write_rows
from phylogeny_data import Alignment
from phylogeny_model import TreeLikelihood
from phylogeny_trees import Tree, Trees, read_mrbayes
from torch import Tensor

from pyg_dynbatch import keep_freed_memory

RATE = 10.0  # of the prior of a branch length
BATCH = 50  # trees at once


class Posterior:
    """Topologies with Gaussians q(log t | tree)."""

    def __init__(self, alignment: Alignment, trees: list[Tree]) -> None:
        self.alignment, self.trees = alignment, trees
        self.likelihood = TreeLikelihood(alignment)
        self.gaussians = dict[int, tuple[Tensor, Tensor, Tensor]]()

    def density(self, trees: Trees, u: Tensor) -> Tensor:
        """Return log p(alignment, u | tree) for logarithms of lengths ``[tree, branch]``."""
        t = u.exp()
        return self.likelihood(trees, t) + (math.log(RATE) - RATE * t + u).sum(1)

    def gradient(self, trees: Trees, u: Tensor) -> Tensor:
        """Return the derivatives of the density by ``u``."""
        u = u.detach().requires_grad_()
        return torch.autograd.grad(self.density(trees, u).sum(), u)[0]

    def fit(self, numbers: list[int]) -> float:
        """Find the modes and Hessians of topologies at once; return the largest slope left."""
        trees = Trees.of([self.trees[number] for number in numbers], self.alignment.taxa)
        start = torch.full((len(numbers), 2 * len(self.alignment.taxa) - 3), math.log(0.05))
        u = start.double().requires_grad_()
        options = {"max_iter": 400, "tolerance_grad": 0.01, "history_size": 30}
        optimizer = torch.optim.LBFGS([u], line_search_fn="strong_wolfe", **options)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = -self.density(trees, u).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        mode, step = u.detach(), 1e-4
        columns = []
        for branch in step * torch.eye(mode.size(1), dtype=mode.dtype):
            change = self.gradient(trees, mode + branch) - self.gradient(trees, mode - branch)
            columns.append(change / (2 * step))
        hessian = torch.stack(columns, 2)
        values, vectors = torch.linalg.eigh(-(hessian + hessian.mT) / 2)
        precise = values.clamp(min=0.3)
        # A step of Newton's method, as the Hessian is known anyway.
        along = vectors.mT @ self.gradient(trees, mode)[..., None]
        mode = mode + (vectors @ (along / precise[..., None]))[..., 0]
        found = zip(numbers, mode, vectors, 1.05 / precise.sqrt(), strict=True)
        self.gaussians |= {number: tuple(parts) for number, *parts in found}
        return float(self.gradient(trees, mode).abs().max())

    def draw(self, drawn: Tensor, log_q: Tensor) -> Tensor:
        """Draw lengths for topologies, and return the logarithms of the importance weights."""
        chosen, taxa = drawn.tolist(), self.alignment.taxa
        parts = zip(*map(self.gaussians.__getitem__, chosen), strict=True)
        mode, vectors, deviation = map(torch.stack, parts)
        noise = torch.randn_like(mode)
        u = mode + (vectors @ (deviation * noise)[..., None])[..., 0]
        of_u = (-noise.square() / 2 - deviation.log() - math.log(2 * math.pi) / 2).sum(1)
        num_trees = math.log(math.prod(range(3, 2 * len(taxa) - 4, 2)))
        density = list[Tensor]()
        for first, part in zip(range(0, len(chosen), BATCH), u.split(BATCH), strict=True):
            trees = [self.trees[number] for number in chosen[first : first + BATCH]]
            with torch.no_grad():
                density.append(self.density(Trees.of(trees, taxa), part))
        return torch.cat(density) - num_trees - log_q[drawn] - of_u


def main() -> None:
    """Estimate the marginal likelihood of DS1 several times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=data_folder("phylogeny"))
    parser.add_argument("--draws", type=int, default=1000, help="K of one estimate")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    keep_freed_memory()
    torch.manual_seed(0)
    start = time.perf_counter()
    try:
        alignment = Alignment.read(options.folder / "DS1.fasta.gz")
        trees, weights = read_mrbayes(options.folder / "DS1.rep_1.trprobs.gz")
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(str(error)) from None
    posterior, log_q = Posterior(alignment, trees), (weights / weights.sum()).log()
    draws = options.repeats * options.draws
    drawn = torch.multinomial(weights, draws, replacement=True)
    different = drawn.unique()
    slope = max(posterior.fit(numbers.tolist()) for numbers in different.split(BATCH))
    fitted = time.perf_counter() - start
    print(f"{len(different)} of {len(trees)} topologies drawn; fitted in {fitted:.0f} s", end="; ")
    print(f"largest derivative at a mode: {slope:.1e}", flush=True)
    log_weights = torch.stack([posterior.draw(part, log_q) for part in drawn.split(options.draws)])
    found = log_weights.logsumexp(1) - math.log(options.draws)
    share = (log_weights - log_weights.logsumexp(1, keepdim=True)).exp()
    effective = 1 / share.square().sum(1)
    pooled = log_weights.logsumexp((0, 1)) - math.log(draws)
    deviation = found.std(correction=int(len(found) > 1))
    print(f"log p(Y), K = {options.draws}: {found.mean():.2f} ± {deviation:.2f}", end="; ")
    print(f"from {found.min():.2f} to {found.max():.2f}; pooled {pooled:.2f}")
    print(f"mean log weight (K = 1): {log_weights.mean():.2f}; ", end="")
    print(f"effective sample sizes: {effective.min():.0f} to {effective.max():.0f}")
    print("published: MrBayes, stepping stone: -7108.42 (0.18); VBPI-GNN: -7108.41 (0.14)")
    rows = {"importance sampling": {"log p(Y), DS1": found.tolist()}}
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
