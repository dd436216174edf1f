"""What the data modules of trees share: word vectors, sizes known at construction, pictures."""

from abc import abstractmethod
from functools import cached_property
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.data import Collater, DataLoader
from pyg_dynbatch.datasets import TreeDataset
from pyg_dynbatch.featurizers import Vocabulary, WordVectors
from pyg_dynbatch.nn import RecursiveLayer
from pyg_dynbatch.training.options import VectorOptions
from pyg_dynbatch.training.split_datamodule import SPLITS, SplitDataModule, SplitName
from pyg_dynbatch.training.vectors import check_vectors, load_vectors

_LARGEST_SHOWN = 45


class TreeDataModule(SplitDataModule):
    """Makes the loaders of three splits and knows the sizes that a model needs.

    ``num_tokens`` and ``num_classes`` are known before training is set up, so that the command
    line can hand them to the model; asking for them reads (and, the first time, caches) the data.

    Splits that are not trained on are never shuffled, and on several devices no example is counted
    twice: the batches are dealt, not padded.

    Args:
        batch_size: Trees in a batch.
        max_nodes: If given, batches hold at most so many nodes, and any number of trees. A larger
            tree makes a batch of its own, with a warning.
        num_workers: Loader processes; 0 loads in the process that trains.
        arity: Argument places of the cell's schedule; left out, what the model says it needs.
        predict_split: Which split ``predict`` runs over.
        vectors: Options of the word vectors.
    """

    num_classes: int

    def __init__(
        self,
        batch_size: int = 100,
        max_nodes: int | None = None,
        num_workers: int = 0,
        arity: int | None = None,
        predict_split: SplitName = "test",
        vectors: VectorOptions = VectorOptions(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(batch_size, max_nodes, num_workers, predict_split)
        self.max_nodes = max_nodes
        self.arity = arity
        self.vectors = vectors
        self._loaded: dict[str, TreeDataset] = {}

    @abstractmethod
    def load(self, split: SplitName, vocabulary: Vocabulary | None) -> TreeDataset:
        """Loads one split.

        Args:
            split: Which.
            vocabulary: The words to use; the data set's own if left out.

        Returns:
            The split.
        """

    @cached_property
    def _all_vectors(self) -> WordVectors | None:
        if self.vectors.source == "none":
            return None
        check_vectors(self.vectors)
        return load_vectors(self.vectors, self.load("train", None).vocabulary)

    @cached_property
    def word_vectors(self) -> WordVectors | None:
        """The word vectors to start from, if any.

        If words without a vector share one, they are one word, and the vocabulary is smaller.
        """
        vectors = self._all_vectors
        shared = vectors is not None and self.vectors.missing == "shared_uniform"
        return vectors.only_found() if vectors is not None and shared else vectors

    def dataset(self, split: SplitName) -> TreeDataset:
        """Gives one split, loaded once.

        Args:
            split: Which.

        Returns:
            The split.
        """
        if split not in self._loaded:
            smaller = self.word_vectors is not self._all_vectors
            vectors = self.word_vectors if smaller else None
            self._loaded[split] = self.load(split, vectors.vocabulary if vectors else None)
        return self._loaded[split]

    @property
    def vocabulary(self) -> Vocabulary:
        """The words whose rows the trees hold."""
        return self.dataset("train").vocabulary

    @property
    def num_tokens(self) -> int:
        """Rows of the embedding."""
        return self.dataset("train").num_tokens

    def setup(self, stage: str) -> None:
        """Loads the splits of a stage and says how many words have a vector.

        Args:
            stage: ``fit``, ``validate``, ``test`` or ``predict``.
        """
        for split in self.splits_of(stage):
            self.dataset(split)
        if stage == "fit" and self._all_vectors is not None:
            counts: dict[str, Tensor] = {
                split: self.load(split, None).token_counts() for split in SPLITS
            }
            for line in self._all_vectors.coverage(counts):
                rank_zero_info(f"word vectors, {line}")

    def sizes(self, split: SplitName) -> list[int]:
        """Counts the nodes of every tree."""
        return self.dataset(split).node_counts

    def make_loader(self, dataset: TreeDataset, batch_size: int = 1, **options: Any) -> DataLoader:
        """Makes a loader whose batches carry their schedule."""
        return DataLoader(dataset, batch_size=batch_size, arity=self._arity(), **options)

    def _arity(self) -> int | None:
        if self.arity is not None or self.trainer is None:
            return self.arity
        return arity_of(self.trainer.lightning_module)

    def state_dict(self) -> dict[str, Any]:
        """Notes the vocabulary, so that a checkpoint is never used with another one."""
        return {"vocabulary": self.vocabulary.digest(), "words": list(self.vocabulary.words)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuses to go on with another vocabulary.

        Args:
            state_dict: What the checkpoint holds.

        Raises:
            ValueError: If the rows of the embedding stand for other words.
        """
        own = self.vocabulary.digest()
        if state_dict.get("vocabulary", own) != own:
            raise ValueError(
                mismatch(
                    f"{type(self).__name__}: the checkpoint was made with another vocabulary",
                    expected=f"vocabulary {own} ({len(self.vocabulary)} words)",
                    got=f"vocabulary {state_dict['vocabulary']}",
                    mend="use the data files and options the checkpoint was made with",
                )
            )

    def shown_trees(self, count: int) -> tuple[Batch, dict[str, Data], list[list[str]]]:
        """Picks the first few test trees that fit into a picture.

        Args:
            count: How many.

        Returns:
            The trees as a batch, the trees by name, and the text of their nodes.
        """
        dataset = self.dataset("test")
        sizes = dataset.node_counts
        fitting = [i for i, size in enumerate(sizes) if 3 <= size <= _LARGEST_SHOWN]
        chosen = fitting[:count] or range(min(count, len(dataset)))
        trees = {f"test example {i}": dataset[i] for i in chosen}
        # Words without a vector may be one word to the model; the picture still shows them.
        named = self.load("test", None)
        words = [self.node_texts(named[i], named.vocabulary) for i in chosen]
        return Collater(arity=self._arity())(list(trees.values())), trees, words

    def node_texts(self, tree: Data, vocabulary: Vocabulary) -> list[str]:
        """Returns the text that a picture shows at each node."""
        return [vocabulary[row] if row >= 0 else "" for row in tree.token.tolist()]


def arity_of(model: nn.Module) -> int | None:
    """Finds the number of child places that the schedules of a model need.

    Args:
        model: A model of trees.

    Returns:
        The number; ``None`` for any number of children.
    """
    layers = (module for module in model.modules() if isinstance(module, RecursiveLayer))
    return next((layer.arity for layer in layers), None)
