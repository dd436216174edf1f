"""Lightning and distributed training of wrapped models."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from pyg_dynbatch.autobatch import autobatch
from tests.autobatch.models import TreeLSTM, trees


def test_parameters_that_no_example_reaches_get_gradients(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = DistributedDataParallel(autobatch(TreeLSTM()))
        for _ in range(2):  # without a gradient of every parameter the second round is refused
            model.zero_grad()
            model([torch.tensor(1), torch.tensor(2)]).sum().backward()
            model.zero_grad()
            model(model.module.collate([torch.tensor(1)])).sum().backward()
    finally:
        dist.destroy_process_group()
    gates = model.module.plain.cell.gates.weight.grad
    assert gates is not None and not gates.any()
    assert model.module.plain.head.weight.grad.any()


class Task(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = autobatch(TreeLSTM())

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(batch), torch.zeros(len(batch)).long())
        self.log("loss", loss, batch_size=len(batch))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def test_lightning_trains_from_batches_that_workers_schedule(tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = Task()
    options: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(default_root_dir=tmp_path, max_epochs=4, accelerator="cpu", **options)
    loader = DataLoader(trees(24), batch_size=8, collate_fn=task.model.collate, num_workers=1)
    trainer.fit(task, loader)
    assert float(trainer.callback_metrics["loss"]) < 1.3
    path = next(tmp_path.rglob("*.ckpt"))
    twin = Task.load_from_checkpoint(path)
    torch.testing.assert_close(twin.eval().model(trees()), task.eval().model(trees()))
    assert {name.removeprefix("model.") for name in twin.state_dict()} == {*TreeLSTM().state_dict()}
