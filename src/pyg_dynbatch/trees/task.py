"""Lightning data modules of trees and their tasks: classes of nodes, relatedness of pairs."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch_geometric.data import Batch, Data
from torchmetrics import Metric

from pyg_dynbatch.core.errors import checked_choice, mismatch
from pyg_dynbatch.prediction import evaluating
from pyg_dynbatch.training.data import SplitDataModule, SplitName
from pyg_dynbatch.training.optimizers import OptimizerOptions, RateOptions, VectorOptions
from pyg_dynbatch.training.runs import FILES, panels
from pyg_dynbatch.training.task import (
    UNLABELLED,
    Agreement,
    RatioMetric,
    Reduction,
    Summed,
    Task,
    mse,
    pearson,
    spearman,
    summed_cross_entropy,
)
from pyg_dynbatch.trees.contextual import SentenceEncoder
from pyg_dynbatch.trees.data import Collater, DataLoader
from pyg_dynbatch.trees.datasets import SICK, SST, TreeDataset, TreeFile
from pyg_dynbatch.trees.listops import ListOps, ListOpsRecipe
from pyg_dynbatch.trees.models import TreeEncoder, mean_score
from pyg_dynbatch.trees.predict import TEXT, TreeClassificationModel, TreeRelatednessModel, arity_of
from pyg_dynbatch.trees.words import (
    DEFAULT_MODEL,
    Vocabulary,
    WordVectors,
    read_word_vectors,
    sentence_vectors,
)
from pyg_dynbatch.visualize import draw_tree, draw_tree_legend, save_figure

# Data ---------------------------------------------------------------------------------------------


_LARGEST_SHOWN = 45


class TreeDataModule(SplitDataModule):
    """Create the loaders of three splits, and provide the sizes that a model needs.

    ``num_tokens`` and ``num_classes`` are available before training is set up, so that the command
    line can pass them to the model; reading them reads (and, the first time, caches) the data.
    Splits that are not trained on are never shuffled, nor is an example counted on two devices.

    Args:
        batch_size: Trees in a batch.
        max_nodes: If given, batches hold at most this many nodes, and any number of trees. A
            larger tree becomes a separate batch, with a warning.
        num_workers: Loader processes; 0 loads in the training process.
        arity: Child slots of the cell's schedule; left out, that of the model.
        predict_split: Which split ``predict`` runs over.
        vectors: Options of the word vectors.
    """

    num_classes: int
    _open: Callable[..., TreeDataset]

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
        self.max_nodes, self.arity, self.vectors = max_nodes, arity, vectors
        self._loaded: dict[str, TreeDataset] = {}
        encoder = SentenceEncoder(vectors.file or DEFAULT_MODEL, vectors.layers)
        self.encoder = encoder if vectors.source == "contextual" else None
        """The encoder of whole sentences, if their words have contextual vectors."""

    def load(self, split: SplitName, vocabulary: Vocabulary | None) -> TreeDataset:
        """Load one split.

        Args:
            split: Its name.
            vocabulary: The words to use; None for the data set's own.
        """
        words = {"vocabulary": vocabulary} if vocabulary else {}
        return self._open(split=split, encoder=self.encoder, **words)

    @cached_property
    def _all_vectors(self) -> WordVectors | None:
        options, file = self.vectors, self.vectors.file
        if options.source not in ("glove", "sentence"):
            return None
        # Before the data are read, which takes long.
        if options.source == "glove" and (file is None or not Path(file).is_file()):
            what, got = "VectorOptions: source 'glove' needs a file of word vectors", file or "none"
            hint = "--data.init_args.vectors.file glove.840B.300d.txt"
            kind = ValueError if file is None else FileNotFoundError
            raise mismatch(kind, what, "a text file of vectors, also .gz", got, hint=hint)
        words = self.load("train", None).vocabulary
        if options.source == "sentence":
            model, scale = file or DEFAULT_MODEL, options.scale
            return sentence_vectors(words, model, cache=options.cache, scale=scale)
        chosen: Any = {"missing": options.missing, "lower_case": options.lower_case}
        # Drawn from the seed of the run, so that runs with several seeds differ here too.
        chosen["seed"] = torch.initial_seed() % 2**31
        return read_word_vectors(str(file), words, **chosen).scaled(options.scale)

    @cached_property
    def word_vectors(self) -> WordVectors | None:
        """The word vectors to start from, if any.

        If words without a vector share one, they are one word, and the vocabulary is smaller.
        """
        vectors = self._all_vectors
        return vectors.only_found() if vectors and self._words_share else vectors

    @property
    def vector_sizes(self) -> tuple[int, ...] | None:
        """The ``num_tokens`` and ``embedding_channels`` that a model needs to read the vectors."""
        if self.encoder is not None and (vectors := self.dataset("train").vectors) is not None:
            return 0, vectors.rows.shape[1]
        return None if self.word_vectors is None else tuple(self.word_vectors.matrix.shape)

    @property
    def _words_share(self) -> bool:
        return self.vectors.missing == "shared_uniform"

    def dataset(self, split: SplitName) -> TreeDataset:
        """Return one split, loaded once."""
        if split not in self._loaded:
            vectors = self.word_vectors  # which checks the options before the data are read
            chosen = vectors.vocabulary if vectors and self._words_share else None
            if self.encoder is not None and not self.encoder.mean and split != "train":
                self.dataset("train")
            loaded = self._loaded[split] = self.load(split, chosen)
            if loaded.vectors is not None and not loaded.vectors.encoder.mean:
                self._encode_by(loaded.vectors.standardized(self.vectors.scale))
        return self._loaded[split]

    def _encode_by(self, encoder: SentenceEncoder) -> None:
        self.encoder = encoder
        for vectors in filter(None, (dataset.vectors for dataset in self._loaded.values())):
            vectors.encoder = encoder

    @property
    def vocabulary(self) -> Vocabulary:
        """The words whose rows the trees hold."""
        return self.dataset("train").vocabulary

    @property
    def num_tokens(self) -> int:
        """Rows of the embedding, 0 if contextual vectors take its place."""
        return 0 if self.encoder else self.dataset("train").num_tokens

    def setup(self, stage: str) -> None:
        """Load all splits, so that faults come before training; report words without a vector."""
        super().setup(stage)
        for split in self.splits if stage == "fit" else self.splits_of(stage):
            self.dataset(split)
        if stage == "fit" and self._all_vectors is not None:
            counts = {str(split): self.load(split, None).token_counts() for split in self.splits}
            for line in self._all_vectors.coverage(counts):
                rank_zero_info(f"word vectors, {line}")

    def sizes(self, split: SplitName) -> list[int]:
        """Count the nodes of every tree."""
        return self.dataset(split).node_counts

    def make_loader(self, dataset: TreeDataset, batch_size: int = 1, **options: Any) -> DataLoader:
        """Create a loader whose batches carry their schedule."""
        return DataLoader(dataset, batch_size=batch_size, arity=self._arity(), **options)

    def _arity(self) -> int | None:
        if self.arity is not None or self.trainer is None:
            return self.arity
        return arity_of(self.trainer.lightning_module)

    def state_dict(self) -> dict[str, Any]:
        """Return how text becomes tensors, so that a checkpoint reads it as its data module did."""
        return {**super().state_dict(), TEXT: self._text()}

    def _text(self) -> dict[str, Any]:
        labels = self.dataset("train").labels
        if self.encoder is not None:
            return {"labels": labels, "encoder": asdict(self.encoder)}
        return {"labels": labels, "vocabulary": self.vocabulary.as_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise an error if the checkpoint was trained on other words or contextual vectors."""
        own, found = map(_origin, (self._text(), state_dict[TEXT]))
        own["weights"] = own.get("weights") or found.get("weights")  # known once vectors are loaded
        names = ("vocabulary", "model", "layers", "weights")
        if other := next((name for name in names if own.get(name) != found.get(name)), None):
            what = f"{type(self).__name__}: the checkpoint was made with a different {other}"
            hint = "use the data files and options the checkpoint was made with"
            wanted = f"{own.get(other)}" + ("" if self.encoder else f" ({self.num_tokens} words)")
            raise mismatch(ValueError, what, wanted, found.get(other), hint=hint)
        if "encoder" in state_dict[TEXT]:
            self._encode_by(SentenceEncoder(**state_dict[TEXT]["encoder"]))
        super().load_state_dict(state_dict)

    def shown_trees(self, count: int) -> tuple[Batch, dict[str, Data], list[list[str]]]:
        """Choose the first few test trees that fit into a picture.

        Returns:
            The trees as a batch, the trees by name, and the text of their nodes.
        """
        dataset = self.dataset("test")
        sizes = dataset.node_counts
        fitting = [i for i, size in enumerate(sizes) if 3 <= size <= _LARGEST_SHOWN]
        chosen = fitting[:count] or range(min(count, len(dataset)))
        trees = {f"test example {i}": dataset[i] for i in chosen}
        # Words without a vector may be one word to the model; the picture still shows them.
        named = self.load("test", None) if self._words_share else dataset
        words = [self.node_texts(named[i], named.vocabulary) for i in chosen]
        return Collater(arity=self._arity())(list(trees.values())), trees, words

    def node_texts(self, tree: Data, vocabulary: Vocabulary) -> list[str]:
        """Return the text that a picture shows at each node."""
        return [vocabulary[row] if row >= 0 else "" for row in tree.token.tolist()]


def _origin(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be the same in a checkpoint: a digest of the words, or what encodes them."""
    if "encoder" in text:
        return dict(text["encoder"])
    return {"vocabulary": Vocabulary.from_dict(text["vocabulary"]).digest()}


class SSTData(TreeDataModule):
    """The Stanford Sentiment Treebank: binary trees, five classes on every node.

    Args:
        root: Folder for downloads and for the cache.
        raw_dir: Folder with ``train.txt``, ``dev.txt`` and ``test.txt``; left out, ``root/raw``,
            where they are downloaded to.
        vocabulary: Words of ``all`` splits (a word that only the test split has can use its
            pretrained vector), or of the ``train`` split alone.
        verify: Whether files other than the published ones are an error.
        **loading: Options of :class:`~pyg_dynbatch.lightning.TreeDataModule`.

    Example:
        >>> from pyg_dynbatch.lightning import VectorOptions
        >>> data = SSTData(batch_size=25, vectors=VectorOptions("glove", "glove.txt"))
        >>> data.num_classes
        5
    """

    num_classes = 5

    def __init__(
        self,
        root: str = "data/sst",
        raw_dir: str | None = None,
        vocabulary: Literal["all", "train"] = "all",
        verify: bool = True,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        self._open = partial(SST, root, vocabulary=vocabulary, raw_dir=raw_dir, verify=verify)


class ListOpsData(TreeDataModule):
    """ListOps, generated when needed: nested operations on digits, ten classes at the root.

    Args:
        root: Folder for the cache.
        form: ``operator`` nodes with up to five ordered arguments, or the published ``binary``
            parse with all pieces at the leaves.
        recipe: What to generate.
        tsv_dir: Folder with ``train.tsv``, ``val.tsv`` and ``test.tsv`` in the published format,
            to be read instead.
        **loading: Options of :class:`~pyg_dynbatch.lightning.TreeDataModule`.

    Example:
        >>> ListOpsData(recipe=ListOpsRecipe(train=100, val=10, test=10)).num_classes
        10
    """

    num_classes = 10

    def __init__(
        self,
        root: str = "data/listops",
        form: Literal["operator", "binary"] = "operator",
        recipe: ListOpsRecipe = ListOpsRecipe(),  # noqa: B008 - frozen
        tsv_dir: str | None = None,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        self._open = partial(ListOps, root, form=form, recipe=recipe)
        self.recipe, self.tsv_dir = recipe, tsv_dir

    def load(self, split: SplitName, vocabulary: Vocabulary | None) -> TreeDataset:
        """Load one split."""
        if vocabulary is not None:
            what = "ListOpsData: the pieces of this data set have no pretrained vectors"
            raise mismatch(ValueError, what, "vectors.source: none", self.vectors.source)
        tsv = None if self.tsv_dir is None else Path(self.tsv_dir) / f"{split}.tsv"
        return self._open(split=split, tsv=tsv, encoder=self.encoder)

    def node_texts(self, tree: Data, vocabulary: Vocabulary) -> list[str]:
        """Return the text that a picture shows at each node, operators without their bracket."""
        return [text.removeprefix("[") for text in super().node_texts(tree, vocabulary)]


class SICKData(TreeDataModule):
    """SICK relatedness: pairs of trees with a distribution over the scores 1 to 5.

    Args:
        root: Folder for the cache.
        raw_dir: Folder with the raw files; left out, ``root/raw``.
        trees: Which parses: ``dependency``, ``constituency``, or ``chain`` for none.
        vocabulary: Words of ``all`` splits, or of the ``train`` split alone.
        **loading: Options of :class:`~pyg_dynbatch.lightning.TreeDataModule`.

    Example:
        >>> SICKData(batch_size=25).num_classes
        5
    """

    num_classes = 5

    def __init__(
        self,
        root: str = "data/sick",
        raw_dir: str | None = None,
        trees: Literal["dependency", "constituency", "chain"] = "dependency",
        vocabulary: Literal["all", "train"] = "all",
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        self._open = partial(SICK, root, trees=trees, vocabulary=vocabulary, raw_dir=raw_dir)


class TreeFileData(TreeDataModule):
    """Your own files of bracketed trees, one tree per line, plain or compressed (``.gz``).

    Args:
        train_file: Trees to train on; they also define the classes.
        val_file: Trees to choose the best checkpoint by.
        test_file: Trees to test and predict; left out, nothing is tested, and those of ``val_file``
            are predicted.
        root: Folder for the cache; left out, the files are parsed at every start.
        labels: Whether every node has a label (``required``), or some have (``optional``).
        vocabulary: Words of the ``train`` file, or of ``all`` files. With the first, a checkpoint
            can be used with any other ``test_file``.
        classes: Number of classes; left out, the largest label of ``train_file`` plus one.
        **loading: Options of :class:`~pyg_dynbatch.lightning.TreeDataModule`.

    Example:
        >>> TreeFileData("train.txt", "val.txt", classes=3).num_classes
        3
    """

    def __init__(
        self,
        train_file: str,
        val_file: str,
        test_file: str | None = None,
        root: str | None = None,
        labels: Literal["required", "optional"] = "required",
        vocabulary: Literal["train", "all"] = "train",
        classes: int | None = None,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        self.files: dict[SplitName, str] = {"train": train_file, "val": val_file}
        if test_file is not None:
            self.files["test"] = test_file
        elif self.predict_split == "test":
            self.predict_split = "val"
        self.splits = tuple(self.files)
        defining = self.files.values() if vocabulary == "all" else [train_file]
        self.defining_files = list(dict.fromkeys(defining))
        self.root, self.labels, self.classes = root, labels, classes

    @cached_property
    def _defining(self) -> TreeFile:
        """The trees that define the words and classes."""
        return TreeFile(self.defining_files, self.root, self.classes, self.labels)

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        """Number of classes."""
        found = self._defining.num_classes if self.classes is None else self.classes
        if found < 1:
            what, where = "TreeFileData: no node has a label", ", ".join(self.defining_files)
            expected, hint = "at least one label, such as the 3 of (3 word)", "the option classes"
            raise mismatch(ValueError, what, expected, where=where, hint=hint)
        return found

    def load(self, split: SplitName, vocabulary: Vocabulary | None) -> TreeDataset:
        """Load one file."""
        hint = "test_file, with trees that nothing is chosen by"
        checked_choice("TreeFileData: there is no such part", split, self.files, hint=hint)
        words = vocabulary or self._defining.vocabulary
        options: Any = {"vocabulary": words, "encoder": self.encoder}
        return TreeFile(self.files[split], self.root, self.num_classes, self.labels, **options)


# Tasks --------------------------------------------------------------------------------------------


def polarity_hits(
    logits: Float[Tensor, "row class"], labels: Int[Tensor, " row"]
) -> tuple[Bool[Tensor, " row"], Bool[Tensor, " row"]]:
    """Find rows predicted on the correct side of the middle class; middle labels are ignored."""
    middle = logits.size(-1) // 2
    chance = logits.float().softmax(-1)
    positive = chance[:, middle + 1 :].sum(-1) > chance[:, :middle].sum(-1)
    return positive == (labels > middle), (labels != UNLABELLED) & (labels != middle)


def agreement_metrics() -> dict[str, Metric]:
    """Return metrics of predicted scores: Pearson's r, Spearman's rho, mean squared error."""
    formulas = {"pearson": pearson, "spearman": spearman, "mse": mse}
    return {name: Agreement(formula) for name, formula in formulas.items()}


class TreeTask(Task):
    """Base of the tasks of trees, which start from word vectors if the data module has any."""

    @classmethod
    def dry_run_instance(cls, options: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
        """Create a task with these options for one word and five classes."""
        facts = {"num_tokens": 1, "num_classes": 5}
        known = inspect.signature(cls).parameters
        return cls.from_plain({**options, **{k: v for k, v in facts.items() if k in known}})

    def setup(self, stage: str) -> None:
        """Raise an error if the gradients of a sparse embedding are to be clipped."""
        super().setup(stage)
        limit = self.trainer.gradient_clip_val if stage == "fit" else None
        if limit and any(getattr(module, "sparse", False) for module in self.model.modules()):
            what = f"{type(self).__name__}: torch cannot clip the sparse gradients of the embedding"
            got, hint = f"gradient_clip_val {limit}", "--model.init_args.sparse_embedding false"
            raise mismatch(ValueError, what, "no gradient_clip_val", got, hint=hint)

    def start_from(self, data: Any) -> None:
        """Start the embedding from the word vectors of the data module, if it has any.

        Raises:
            ValueError: If the vectors do not fit.
        """
        super().start_from(data)
        encoder = getattr(self.model.network, "encoder", None)
        sizes = getattr(data, "vector_sizes", None)
        if sizes is None or not isinstance(encoder, TreeEncoder):
            return
        embedding, channels = encoder.embedding, encoder.layer.in_channels
        found = (0 if embedding is None else embedding.num_embeddings, channels)
        if found != sizes:
            what = "word vectors: they do not fit the model"
            both = ["num_tokens {}, embedding_channels {}".format(*each) for each in (sizes, found)]
            hint = f"--model.init_args.embedding_channels {sizes[1]}"
            raise mismatch(ValueError, what, *both, hint=hint)
        if embedding is not None:
            with torch.no_grad():
                embedding.weight.copy_(data.word_vectors.matrix)


class TreeClassification(TreeTask):
    """Train a tree classifier with the cross entropy of labelled nodes.

    Logged for every stage: ``loss`` (mean over the labelled rows), ``accuracy`` (roots),
    ``node_accuracy`` (all labelled nodes), and with ``polarity`` also ``binary_accuracy`` and
    ``node_binary_accuracy``, computed from the same model, which is not trained on two classes.

    Args:
        num_tokens: Rows of the embedding.
        num_classes: Classes of a node.
        loss_on: Which nodes have a loss: all labelled ``nodes``, or ``roots`` alone.
        reduction: What the summed loss is divided by: nothing (``sum``), the labelled nodes
            (``mean``) or the trees of the batch (``per_tree``).
        polarity: Whether the classes are a scale around a neutral middle.
        optimizer: Options of the optimizer.
        rate: Options of the learning-rate schedule.
        **network: Everything else goes to
            :class:`~pyg_dynbatch.models.TreeClassifier`.

    Reference:
        Looks et al. (2017), arXiv:1702.02181, table 2; Tai, Socher, Manning
        (2015), arXiv:1503.00075, section 4.1.

    Example:
        >>> task = TreeClassification(num_tokens=10, num_classes=5, hidden_channels=8)
        >>> task.hparams["hidden_channels"], task.main_metric
        (8, 'accuracy')
    """

    main_metric = "accuracy"

    def __init__(
        self,
        num_tokens: int,
        num_classes: int,
        loss_on: Literal["nodes", "roots"] = "nodes",
        reduction: Reduction = "mean",
        polarity: bool = False,
        optimizer: OptimizerOptions = OptimizerOptions(),  # noqa: B008 - frozen
        rate: RateOptions = RateOptions(),  # noqa: B008 - frozen
        **network: Any,
    ) -> None:
        model = TreeClassificationModel(num_tokens, num_classes, **network)
        kinds = ("accuracy", "binary_accuracy") if polarity else ("accuracy",)
        names = [f"{prefix}{kind}" for kind in kinds for prefix in ("", "node_")]
        super().__init__(
            model, optimizer, rate, reduction, lambda: {name: RatioMetric(0) for name in names}
        )
        self.save_hyperparameters(ignore=["optimizer", "rate"])
        self.save_hyperparameters(self.plain_options())
        if polarity and num_classes % 2 == 0:
            what = "TreeClassification: polarity needs a neutral middle class"
            expected = "an odd number of classes"
            raise mismatch(ValueError, what, expected, num_classes, hint="polarity: false")
        self.num_classes, self.loss_on, self.polarity = num_classes, loss_on, polarity

    def summed_loss(self, output: Float[Tensor, "node class"], batch: Batch) -> Summed:
        """Sum the cross entropy of the nodes that have a loss."""
        rows = batch.root_index if self.loss_on == "roots" else slice(None)
        return summed_cross_entropy(output[rows], self.target(batch, len(output))[rows])

    def update_scores(self, stage: str, output: Tensor, batch: Batch) -> None:
        """Count hits at the roots and at all nodes."""
        labels, roots = batch.y, batch.root_index
        rows = {"accuracy": (output.argmax(-1) == labels, labels != UNLABELLED)}
        if self.polarity:
            rows["binary_accuracy"] = polarity_hits(output, labels)
        scores: Any = self.scores[f"{stage}_scores"]
        for name, (hit, counts) in rows.items():
            hit = hit & counts
            scores[name].update(hit[roots].sum(), counts[roots].sum())
            scores[f"node_{name}"].update(hit.sum(), counts.sum())

    def report_test(self, folder: Path, trees: int) -> None:
        """Draw a few trees of the test split, if the data module has ``shown_trees``."""
        show = getattr(getattr(self.trainer, "datamodule", None), "shown_trees", None)
        batch, shown, words = show(trees) if show and trees else (None, {}, [])
        if not shown:
            return
        with evaluating(self):
            predicted = self(batch.to(self.device)).argmax(-1).cpu()
        classes = map(Tensor.numpy, predicted.split([tree.num_nodes for tree in shown.values()]))
        figure, axes = panels(len(shown), 2, 6.5, 4.5)
        for panel, name, found, texts in zip(axes, shown, classes, words, strict=True):
            tree = shown[name]
            gold = tree.y.numpy() if "y" in tree else np.full(tree.num_nodes, UNLABELLED)
            arrays = tree.edge_index.numpy(), tree.child_slot.numpy(), tree.depth.numpy()
            draw_tree(panel, *arrays, found, gold, texts, self.num_classes)
            root = tree.root_index[0]
            true = gold[root] if gold[root] >= 0 else "unknown"
            score = f"{(found == gold).sum()} of {(gold >= 0).sum()} labeled nodes correct"
            title = f"{name}: true class {true}, predicted {found[root]}\n{score}"
            panel.set_title(title, fontsize="medium")
        draw_tree_legend(figure, self.num_classes)
        save_figure(figure, folder / FILES["predicted trees"])


class TreeRelatedness(TreeTask):
    r"""Train a model of pairs with the divergence from a distribution over scores.

    The target gives a score between two integers to both, so that its mean is the score; the
    loss is :math:`KL(p \,\|\, \hat p)`, and the predicted score is the mean of
    :math:`\hat p`. Logged for every stage: ``loss``, ``pearson``, ``spearman``, ``mse``.

    Args:
        num_tokens: Rows of the embedding.
        num_classes: Largest score, 5 for SICK.
        reduction: What the summed loss is divided by: nothing (``sum``) or the pairs (``mean``).
        optimizer: Options of the optimizer.
        rate: Options of the learning-rate schedule.
        **network: Everything else goes to :class:`~pyg_dynbatch.models.TreeSimilarity`.

    Reference:
        Tai, Socher, Manning (2015), arXiv:1503.00075, section 4.2, equation 15.

    Example:
        >>> task = TreeRelatedness(num_tokens=10, hidden_channels=8)
        >>> task.main_metric
        'pearson'
    """

    main_metric = "pearson"

    def __init__(
        self,
        num_tokens: int,
        num_classes: int = 5,
        reduction: Reduction = "mean",
        optimizer: OptimizerOptions = OptimizerOptions(),  # noqa: B008 - frozen
        rate: RateOptions = RateOptions(),  # noqa: B008 - frozen
        **network: Any,
    ) -> None:
        model = TreeRelatednessModel(num_tokens, num_classes, **network)
        super().__init__(model, optimizer, rate, reduction, agreement_metrics)
        self.save_hyperparameters(ignore=["optimizer", "rate"])
        self.save_hyperparameters(self.plain_options())

    def summed_loss(self, output: Float[Tensor, "example score"], batch: Batch) -> Summed:
        """Sum the divergences from the target."""
        target = self.target(batch, *output.shape, name="target").float()
        loss = F.kl_div(output.float(), target, reduction="sum")
        return loss, torch.full((), batch.num_graphs, dtype=torch.long, device=loss.device)

    def update_scores(self, stage: str, output: Tensor, batch: Batch) -> None:
        """Compare predicted and gold scores."""
        predicted, gold = mean_score(output.exp()).float(), mean_score(batch.target).float()
        scores: Any = self.scores[f"{stage}_scores"]
        for metric in scores.values():
            metric.update(predicted, gold)
