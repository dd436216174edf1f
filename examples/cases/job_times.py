"""Predict how long a job takes from its DAG of stages: train on small jobs, test on deep ones.

    python examples/cases/job_times.py [--jobs tpch_dags.json] [--figure job_times.svg]

Trained on 3,000 drawn jobs of 2 to 8 levels; tested on drawn ones of as many and of 16, 32 and 64
levels, and with ``--jobs`` on those of TPC-H. Errors are relative. ``--tune`` tries four settings
of every network on validation, which has jobs of 2 to 8 levels. Results: ``docs/cases/dags.md``.
"""

import argparse
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from common import fit, predict, write_rows
from job_data import draw, graph, read_tpch
from job_models import CHOSEN, GRID, MOST_LEVELS, Create, JobTime
from sklearn.ensemble import HistGradientBoostingRegressor
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.visualize import draw_curves, new_figure, save_figure

Data = list[DynTreeData]


def jobs_of(count: int, least: int, most: int, rng: random.Random) -> Data:
    """Draw jobs."""
    return [graph(*draw(rng.randint(least, most), rng)) for _ in range(count)]


def joined(data: Data, name: str) -> Tensor:
    """Join an entry of all jobs."""
    return torch.cat([each[name] for each in data])


def error(found: Tensor, data: Data) -> float:
    """Return the mean of the relative errors."""
    target = joined(data, "target")
    return float(((found - target).abs() / target).mean())


def boosted(train: Data, test: Data) -> Tensor:
    """Predict the share of the bound by gradient boosting on a summary of the job."""
    share = joined(train, "target") / joined(train, "bound")
    model = HistGradientBoostingRegressor(loss="absolute_error", random_state=0)
    model.fit(joined(train, "summary").numpy(), share.numpy())
    found = model.predict(joined(test, "summary").numpy())
    return joined(test, "bound") * torch.from_numpy(found).float()


def trained(
    create: Create, rate: float, train: Data, valid: Data, seed: int, epochs: int
) -> nn.Module:
    """Minimise the relative error, and keep the epoch with the lowest one on validation."""
    torch.manual_seed(seed)
    model = JobTime(create)
    loader = DataLoader(train, 64, shuffle=True, direction="both")
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, epochs * len(loader))

    def clip(*_: object) -> None:
        clip_grad_norm_(model.parameters(), 1.0)

    optimizer.register_step_pre_hook(clip)

    def losses() -> Iterator[Tensor]:
        for batch in loader:
            yield ((model(batch) - batch.target).abs() / batch.target).mean()
            schedule.step()

    fit(model, optimizer, losses, lambda: error(predict(model, valid), valid), epochs)
    return model


def tune(train: Data, valid: Data, epochs: int) -> None:
    """Print the error on validation of every setting, one seed each."""
    for name, settings in GRID.items():
        for number, (rate, create) in enumerate(settings):
            found = error(predict(trained(create, rate, train, valid, 0, epochs), valid), valid)
            print(f"{name:30} {number}: rate {rate}  on validation {found:.4f}", flush=True)


def show(name: str, rows: dict[str, list[float]]) -> None:
    """Print a row of the table."""
    cells = (
        f"{key} {np.mean(values):.4f} ± {np.std(values, ddof=len(values) > 1):.4f}"
        for key, values in rows.items()
    )
    print(f"{name:30}", *cells, sep="  ", flush=True)


def main() -> None:
    """Print a table of relative errors, and draw them against the number of levels."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=Path, help="a JSON of the jobs of TPC-H")
    for name, default in {"--seeds": 5, "--epochs": 20, "--train": 3000, "--test": 100}.items():
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--tune", action="store_true", help="only try the settings, on validation")
    parser.add_argument("--figure", type=Path, help=".svg or .png")
    parser.add_argument("--json", type=Path, help="write the errors per seed")
    options = parser.parse_args()
    rng = random.Random(0)
    train, valid = (jobs_of(n, 2, MOST_LEVELS, rng) for n in (options.train, options.train // 6))
    if options.tune:
        tune(train, valid, options.epochs)
        return
    tests = {"2-8 levels": jobs_of(options.test, 2, MOST_LEVELS, rng)}
    tests |= {f"{n} levels": jobs_of(options.test, n, n, rng) for n in (16, 32, 64)}
    if options.jobs:
        tests["TPC-H"] = read_tpch(options.jobs)
    plain = {"longest stages of all levels": lambda test: joined(test, "bound")}
    plain["gradient boosting"] = partial(boosted, train)
    rows = {}
    for name, guess in plain.items():
        rows[name] = {key: [error(guess(test), test)] for key, test in tests.items()}
        show(name, rows[name])
    for name, settings in GRID.items():
        rate, create = settings[CHOSEN[name]]
        rows[name] = {key: [] for key in (*tests, "training, s")}
        for seed in range(options.seeds):
            begin = time.process_time()
            model = trained(create, rate, train, valid, seed, options.epochs)
            rows[name]["training, s"].append(time.process_time() - begin)
            for key, test in tests.items():
                rows[name][key].append(error(predict(model, test), test))
        show(name, rows[name])
    write_rows(options.json, rows)
    if options.figure:
        levels = [MOST_LEVELS, 16, 32, 64]
        curves = {
            name: (levels, [np.mean(row[key]) for key in list(tests)[:4]])
            for name, row in rows.items()
        }
        figure, (axes,) = new_figure(1, 1, 5, 3.2)
        draw_curves(axes, curves, "levels", "mean relative error").set_yscale("log")
        print("figure:", save_figure(figure, options.figure))


if __name__ == "__main__":
    main()
