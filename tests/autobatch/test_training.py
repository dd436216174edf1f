"""Lightning and distributed training of wrapped models."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from pyg_dynbatch.autobatch import autobatch, emit, total
from pyg_dynbatch.lightning import Task
from pyg_dynbatch.models import TreeClassifier, TreeSchema, load, predict
from tests.autobatch.models import TreeLSTM, trees
from tests.training.helpers import bare_trainer, tree_files


def test_parameters_that_no_example_reaches_get_gradients(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = autobatch(TreeLSTM())
    parallel = DistributedDataParallel(model)
    for _ in range(2):  # without a gradient of every parameter the second round is refused
        parallel.zero_grad()
        parallel([torch.tensor(1), torch.tensor(2)]).sum().backward()
        parallel.zero_grad()
        parallel(model.collate([torch.tensor(1)])).sum().backward()
    del parallel  # freed after the process group, it may wait forever
    dist.destroy_process_group()
    gates = model.plain.cell.gates.weight.grad
    assert gates is not None and not gates.any()
    assert model.plain.head.weight.grad.any()


class Emitting(TreeLSTM):
    """Returns nothing, and emits a value for every node."""

    def encode(self, tree: Any) -> tuple[Tensor, Tensor]:
        state = super().encode(tree)
        emit("node", self.head(state[0]))
        return state

    def forward(self, tree: Any) -> None:  # type: ignore[override]
        self.encode(tree)


SHARES = [trees(4), [torch.tensor(1), torch.tensor(2)]]  # no tree of rank 1 reaches the cell


def gradients_of(kind: type[TreeLSTM], examples: list[Any], parallel: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = autobatch(kind().double())
    called = DistributedDataParallel(model) if parallel else model
    for _ in range(2):  # the second round needs a gradient of every parameter in the first
        model.zero_grad()
        result = called(examples)
        (model.emitted["node"].rows if kind is Emitting else result).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


def run_rank(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = [gradients_of(kind, SHARES[rank], parallel=True) for kind in (TreeLSTM, Emitting)]
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.long
def test_two_ranks_have_the_gradients_of_one_process(tmp_path: Path) -> None:
    mp.spawn(run_rank, (str(tmp_path),), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for number, kind in enumerate((TreeLSTM, Emitting)):
        expected = gradients_of(kind, [*SHARES[0], *SHARES[1]], parallel=False)
        for found in ranks:
            twice = [2 * gradient for gradient in found[number]]  # ranks average
            torch.testing.assert_close(twice, expected)


class OwnTask(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = autobatch(TreeLSTM())

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(batch), torch.zeros(len(batch)).long())
        self.log("loss", loss, batch_size=len(batch))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


@pytest.mark.long
def test_lightning_trains_from_batches_that_workers_schedule(tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = OwnTask()
    options: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(default_root_dir=tmp_path, max_epochs=4, accelerator="cpu", **options)
    loader = DataLoader(trees(24), batch_size=8, collate_fn=task.model.collate, num_workers=1)
    trainer.fit(task, loader)
    assert float(trainer.callback_metrics["loss"]) < 1.3
    path = next(tmp_path.rglob("*.ckpt"))
    twin = OwnTask.load_from_checkpoint(path)
    torch.testing.assert_close(twin.eval().model(trees()), task.eval().model(trees()))
    assert {name.removeprefix("model.") for name in twin.state_dict()} == {*TreeLSTM().state_dict()}


class OfNodes(nn.Module):
    """A recursive network that emits the classes of all nodes of a tree of the data module."""

    def __init__(self, tokens: int, classes: int) -> None:
        super().__init__()
        self.word, self.head = nn.Embedding(tokens, 8), nn.Linear(8, classes)
        self.part, self.whole = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, tree: Any) -> None:
        states: list[Any] = [None] * tree.num_nodes
        children: list[list[int]] = [[] for _ in states]
        for child, parent in tree.edge_index.T.tolist():
            children[parent].append(child)
        for node in reversed(range(tree.num_nodes)):  # children come after their parents
            if children[node]:
                states[node] = torch.tanh(total([self.part(states[c]) for c in children[node]]))
            else:
                states[node] = torch.tanh(self.whole(self.word(tree.token[node])))
        for state in states:
            emit("classes", self.head(state))


class ClassifierOfNodes(TreeClassifier):
    """Takes loss, predictions and metrics from ours, with a wrapped network."""

    def __init__(self, schema: TreeSchema) -> None:
        super().__init__(schema, embedding_channels=2, hidden_channels=2)
        self.network = autobatch(OfNodes(self.schema.num_tokens, self.schema.num_classes))

    def forward(self, batch: Any) -> Tensor:
        self.network(batch.to_data_list())
        return self.network.emitted["classes"].rows  # type: ignore[no-any-return]


@pytest.mark.long
def test_our_task_trains_a_wrapped_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = tree_files(tmp_path)
    task = Task(ClassifierOfNodes(data.schema), partial(torch.optim.Adam, lr=0.01))
    trainer = bare_trainer(tmp_path, max_epochs=30)
    trainer.fit(task, data)
    after = trainer.validate(task, data, verbose=False)[0]
    classes = data.schema.num_classes
    assert after["val/loss"] < math.log(classes) and after["val/node_accuracy"] > 0.5
    path = tmp_path / "own.ckpt"
    trainer.save_checkpoint(path)
    model = load(path, kind=ClassifierOfNodes)
    tables = [predict(each, data.dataset("test"), nodes=True) for each in (model, task.model)]
    assert (tables[0]["probability"] == tables[1]["probability"]).all()
