"""Extrapolation: learn how long small jobs take from their DAGs of stages, test on deep ones.

    python examples/job_times.py [--jobs tpch_dags.json]

A stage of a cluster's job starts when all stages that it reads from have finished, so a job takes
as long as its longest path: a recursion of three lines has no error. The question is which networks
find it from examples, and keep to it on graphs that are deeper than those of training.
Trained on 3,000 drawn jobs of 2 to 8 levels; tested on drawn ones of as many and of 16, 32 and 64
levels, and with ``--jobs`` on those of TPC-H, from https://github.com/hongzimao/decima-sim; form of
the file and figures: docs/examples.md. Errors are relative.
"""

import argparse
import copy
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from torch import Tensor, nn
from torch_geometric.data import Batch
from torch_geometric.nn import MLP, MessagePassing, global_max_pool

from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.nn import DAGNN, TopologicalConv

WIDTH = 32
MOST_LEVELS = 8  # of a job in training
EXECUTORS = 50
Edge = tuple[int, int]


def draw_job(levels: int, rng: random.Random) -> DynTreeData:
    """Draw a job with one to three stages per level."""
    edges: set[Edge] = set()
    earlier: list[int] = []
    last_level: list[int] = []
    for _ in range(levels):
        stages = list(range(len(earlier), len(earlier) + rng.randint(1, 3)))
        for stage in stages:
            if last_level:
                edges.add((rng.choice(last_level), stage))
                edges |= {(rng.choice(earlier), stage) for _ in range(rng.randint(0, 2))}
        earlier += stages
        last_level = stages
    return job_graph(sorted(edges), [rng.lognormvariate(0, 1) for _ in earlier])


def draw_jobs(count: int, least: int, most: int, rng: random.Random) -> list[DynTreeData]:
    """Draw jobs of ``least`` to ``most`` levels."""
    return [draw_job(rng.randint(least, most), rng) for _ in range(count)]


def read_tpch(path: Path) -> list[DynTreeData]:
    """Read jobs of TPC-H; a stage runs its tasks in waves of as many as there are executors."""
    document = json.loads(path.read_text("utf-8"))
    edges = {query["query"]: query["edges"] for query in document["queries"]}
    jobs = []
    for job in document["jobs"]:
        waves = np.ceil(np.array(job["num_tasks"]) / EXECUTORS)
        times = waves * np.array(job["rough_task_duration_ms"])
        jobs.append(job_graph(edges[job["query"]], times.tolist()))
    return jobs


def job_graph(edges: Sequence[Edge], times: Sequence[float]) -> DynTreeData:
    """Create the graph of a job, whose edges lead to higher numbers; its mean stage takes 1."""
    own = np.array(times) / np.mean(times)
    level = longest_paths(edges, np.ones_like(own)).astype(np.int64) - 1
    num_levels = int(level.max()) + 1
    bound = sum(own[level == number].max() for number in range(num_levels))
    means = sum(own[level == number].mean() for number in range(num_levels))
    counts = [len(own), len(edges), num_levels, len(own) / num_levels, len(edges) / len(own)]
    summary = [*counts, own.std(), own.max(), bound, means, bound / len(own), means / len(own)]
    return DynTreeData(
        torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t().contiguous(),
        x=torch.from_numpy(own).float()[:, None],
        summary=torch.tensor([summary]).float(),
        bound=torch.tensor([bound]).float(),
        target=torch.tensor([longest_paths(edges, own).max()]).float(),
    )


def longest_paths(edges: Sequence[Edge], own: np.ndarray) -> np.ndarray:
    """Return when each stage has finished: the recursion that the networks are to find."""
    finish = own.copy()
    for source, target in sorted(edges, key=lambda edge: edge[1]):
        finish[target] = max(finish[target], finish[source] + own[target])
    return finish


class MaxConv(MessagePassing):
    """A layer of PyG: h_v = MLP(x_v, the largest entries among the h of the predecessors)."""

    def __init__(self) -> None:
        super().__init__(aggr="max")
        self.in_channels = (WIDTH, 1)
        self.mlp = MLP([WIDTH + 1, WIDTH, WIDTH], norm=None, plain_last=False)

    def forward(self, rows: tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:
        """Update the nodes of the second entry from those of the first."""
        h, x = rows
        largest = self.propagate(edge_index, x=(h, None), size=(len(h), len(x)))
        return self.mlp(torch.cat([x, largest], 1))


class MaxInOrder(nn.Module):
    """The max layer in topological order: every stage once, after its predecessors."""

    rate = 0.01
    out_channels = WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.layer = TopologicalConv(MaxConv())

    def forward(self, batch: Batch) -> Tensor:
        """Embed the stages."""
        return self.layer(batch.x, batch.edge_index, schedule=batch.schedule)


class GatedInOrder(nn.Module):
    """A DAGNN of two layers per direction."""

    rate = 0.03

    def __init__(self) -> None:
        super().__init__()
        self.layers = DAGNN(1, WIDTH, 2)
        self.out_channels = self.layers.out_channels

    def forward(self, batch: Batch) -> Tensor:
        """Embed the stages."""
        return self.layers.embed(
            batch.x, batch.edge_index, schedule=batch.schedule, schedule_down=batch.schedule_down
        )


class JobTime(nn.Module):
    """Predict the time of a job: the largest output of a linear layer among its stages."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.head = nn.Linear(embedding.out_channels, 1)

    def forward(self, batch: Batch) -> Tensor:
        """Predict one number per job."""
        return global_max_pool(self.head(self.embedding(batch)), batch.batch)[:, 0]


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "DAGNN": GatedInOrder,
    "max layer, in order": MaxInOrder,
}


def relative_error(predicted: Tensor, target: Tensor) -> Tensor:
    """Return the mean of the relative errors."""
    return ((predicted - target).abs() / target).mean()


def column(jobs: list[DynTreeData], name: str) -> Tensor:
    """Join an entry of all jobs."""
    return torch.cat([job[name] for job in jobs])


@torch.no_grad()
def predict(model: nn.Module, jobs: list[DynTreeData]) -> Tensor:
    """Predict the times of jobs, in order."""
    model.eval()
    return torch.cat([model(batch) for batch in DataLoader(jobs, 256, direction="both")])


def train(
    model: nn.Module, training: list[DynTreeData], validation: list[DynTreeData], epochs: int
) -> None:
    """Minimise the relative error, and keep the epoch with the lowest one on validation."""
    loader = DataLoader(training, 64, shuffle=True, direction="both")
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, model.embedding.rate, epochs * len(loader)
    )
    lowest = float("inf")
    best_weights = model.state_dict()
    for _ in range(epochs):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            relative_error(model(batch), batch.target).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        error = float(relative_error(predict(model, validation), column(validation, "target")))
        if error < lowest:
            lowest = error
            best_weights = copy.deepcopy(model.state_dict())
    model.load_state_dict(best_weights)


def boosting(training: list[DynTreeData]) -> HistGradientBoostingRegressor:
    """Fit gradient boosting, which predicts the share of the bound from a summary of the job."""
    share = column(training, "target") / column(training, "bound")
    model = HistGradientBoostingRegressor(loss="absolute_error", random_state=0)
    return model.fit(column(training, "summary").numpy(), share.numpy())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of relative errors: the mean and deviation of all seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=Path, help="a JSON file of the jobs of TPC-H")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--train", type=int, default=3000, help="number of jobs to train on")
    parser.add_argument("--test", type=int, default=100, help="number of jobs per test")
    options = parser.parse_args(arguments)
    rng = random.Random(0)
    training = draw_jobs(options.train, 2, MOST_LEVELS, rng)
    validation = draw_jobs(max(1, options.train // 6), 2, MOST_LEVELS, rng)
    tests = {"2-8 levels": draw_jobs(options.test, 2, MOST_LEVELS, rng)}
    for levels in (16, 32, 64):
        tests[f"{levels} levels"] = draw_jobs(options.test, levels, levels, rng)
    if options.jobs:
        tests["TPC-H"] = read_tpch(options.jobs)

    def show(name: str, predictors: list[Callable[[list[DynTreeData]], Tensor]]) -> None:
        cells = []
        for title, jobs in tests.items():
            target = column(jobs, "target")
            errors = [float(relative_error(predictor(jobs), target)) for predictor in predictors]
            deviation = np.std(errors, ddof=int(len(errors) > 1))
            cells.append(f"{title} {np.mean(errors):.3f} ± {deviation:.3f}")
        print(f"{name:30}", *cells, sep="  ", flush=True)

    def boosted(jobs: list[DynTreeData]) -> Tensor:
        share = trees.predict(column(jobs, "summary").numpy())
        return column(jobs, "bound") * torch.from_numpy(share).float()

    trees = boosting(training)
    show("exact recursion", [lambda jobs: column(jobs, "target")])
    show("longest stages of all levels", [lambda jobs: column(jobs, "bound")])
    show("gradient boosting", [boosted])
    for name, network in NETWORKS.items():
        models = []
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            models.append(JobTime(network()))
            train(models[-1], training, validation, options.epochs)
        show(name, [lambda jobs, model=model: predict(model, jobs) for model in models])


if __name__ == "__main__":
    main()
