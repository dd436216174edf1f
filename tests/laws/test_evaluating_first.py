"""A task that is evaluated before it is trained starts as training does, and trains the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pyg_dynbatch.lightning import SICKData, Task, TreeRelatedness, VectorOptions
from tests.molecules.molecules import property_task, with_descriptors
from tests.training.helpers import SIZES, task, trainer, tree_files

pytestmark = [
    pytest.mark.filterwarnings("ignore:The variance of predictions or target is close to zero"),
    pytest.mark.filterwarnings("ignore:`Trainer.fit` stopped"),
]

Made = tuple[Task, Any]


def vectors(folder: Path) -> VectorOptions:
    """Vectors of some of the words, which the embedding starts from."""
    path = folder / "vectors.txt"
    path.write_text("".join(f"{word} {n} {-n} 2 1 {n} 5\n" for n, word in enumerate(["good", "A"])))
    return VectorOptions("glove", str(path))


def values(folder: Path, samples: Path) -> Made:
    data = with_descriptors(folder)
    return property_task(data), data


def labels(folder: Path, samples: Path) -> Made:
    data = with_descriptors(folder, "binary")
    return property_task(data, positive_weight="balanced"), data


def trees(folder: Path, samples: Path) -> Made:
    data = tree_files(folder, vectors=vectors(folder))
    return task(data), data


def pairs(folder: Path, samples: Path) -> Made:
    given = {"raw_dir": str(samples / "sick"), "vectors": vectors(folder)}
    data = SICKData(str(folder / "sick"), batch_size=2, **given)
    return TreeRelatedness(data.num_tokens, **SIZES), data


LONG = [pytest.param(make, marks=pytest.mark.long) for make in (values, labels, trees)]


def measured(given: Made, folder: Path, how: str = "validate") -> dict[str, float]:
    run = trainer(folder, logger=False, callbacks=[], enable_checkpointing=False)
    (found,) = getattr(run, how)(*given[:1], datamodule=given[1], verbose=False)
    return found


def trained(given: Made, folder: Path, epochs: int) -> Made:
    torch.manual_seed(3)
    options: dict[str, Any] = {"logger": False, "callbacks": [], "enable_checkpointing": False}
    trainer(folder, epochs, **options).fit(given[0], datamodule=given[1])
    return given


@pytest.mark.parametrize("make", [*LONG, pairs])
def test_a_new_task_is_evaluated_as_training_starts(
    make: Callable[[Path, Path], Made], tmp_path: Path, samples: Path
) -> None:
    def new() -> Made:
        torch.manual_seed(1)
        return make(tmp_path, samples)

    started = trained(new(), tmp_path, epochs=0)
    for how in ("validate", "test"):
        wanted = pytest.approx(measured(started, tmp_path, how), rel=0, abs=0, nan_ok=True)
        assert measured(first := new(), tmp_path, how) == wanted
        torch.testing.assert_close(first[0].state_dict(), started[0].state_dict(), rtol=0, atol=0)
    measured(first, tmp_path)
    trained(first, tmp_path, epochs=1)  # which validates first
    alone = trained(new(), tmp_path, epochs=1)[0].state_dict()
    torch.testing.assert_close(first[0].state_dict(), alone, rtol=0, atol=0)
    # Weights that were trained or loaded, as a whole or in part, come with their own numbers.
    state = {name: each + 1 for name, each in alone.items()}
    for write in (of_task, of_network, by_steps):
        task, data = new()
        write(task, state)
        before = {name: each.clone() for name, each in task.state_dict().items()}
        measured((task, data), tmp_path)
        torch.testing.assert_close(task.state_dict(), before, rtol=0, atol=0)


def of_task(task: Any, state: dict[str, torch.Tensor]) -> None:
    task.load_state_dict(state)


def of_network(task: Any, state: dict[str, torch.Tensor]) -> None:
    start = "model.network."
    own = {name[len(start) :]: each for name, each in state.items() if name.startswith(start)}
    task.model.network.load_state_dict(own)


def by_steps(task: Any, state: dict[str, torch.Tensor]) -> None:
    weights = list(task.model.parameters())
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    torch.optim.SGD(weights, lr=0.1).step()
