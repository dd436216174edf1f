"""Find the values of nested lists of digits with your own LightningModule over a Tree-LSTM.

    python examples/own_lightning_module.py

Nothing of ``pyg_dynbatch.lightning`` is used: the layer is a module, the batches are PyG's, and
the loader attaches the schedule by which the layer runs all trees of a batch level by level.
"""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from pyg_dynbatch.datasets import ListOps, ListOpsRecipe
from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.nn import ChildSumTreeLSTM


class Lists(pl.LightningModule):
    """Embed digits and operators, and classify the row of the root: the value of the list."""

    def __init__(self, num_tokens: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        self.tree_lstm = ChildSumTreeLSTM(width, width)
        self.classify = nn.Linear(width, 10)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits ``[tree, value]``."""
        rows = self.embedding(batch.token)
        return self.classify(
            self.tree_lstm(rows, batch.edge_index, batch.schedule, nodes=batch.root_index)
        )

    def training_step(self, batch: Batch) -> Tensor:
        """Return the loss."""
        return nn.functional.cross_entropy(self(batch), batch.y[batch.root_index])

    def validation_step(self, batch: Batch) -> None:
        """Log how many values are right."""
        hits = self(batch).argmax(1) == batch.y[batch.root_index]
        self.log("accuracy", hits.float().mean(), batch_size=batch.num_graphs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main() -> None:
    """Train on drawn lists."""
    pl.seed_everything(1, verbose=False)
    recipe = ListOpsRecipe(train=1000, val=300, test=0, max_depth=3, max_length=12)
    train = ListOps(None, "train", recipe=recipe)
    val = ListOps(None, "val", recipe=recipe)
    trainer = pl.Trainer(max_epochs=10, logger=False, enable_checkpointing=False)
    trainer.fit(
        Lists(train.num_tokens),
        DataLoader(train, batch_size=50, shuffle=True),
        DataLoader(val, batch_size=50),
    )
    print(f"validation accuracy: {trainer.callback_metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
