"""Split files of JSON documents, and train a model of them."""

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info
from torch_geometric.data import Batch

from pyg_dynbatch.blocks import Compiler
from pyg_dynbatch.blocks.schema import DocumentSchema, category_of, kind_of, step_to
from pyg_dynbatch.core.errors import checked_count, checked_range, mismatch
from pyg_dynbatch.documents.predict import (
    DocumentPredictionModel,
    collate,
    name_of_class,
    read_documents,
    traced,
)
from pyg_dynbatch.loading import PlanningLoader
from pyg_dynbatch.training.data import SPLITS, SplitDataModule, SplitName
from pyg_dynbatch.training.optimizers import OptimizerOptions, RateOptions
from pyg_dynbatch.training.task import Agreement, RatioMetric, Summed, Task, rmse

_LABELS = ("string", "number", "boolean")
# Share of the target that is spread over all classes in training.
_SMOOTHING = 0.1


def is_number(label: str, overrides: Mapping[str, str]) -> bool:
    """Return whether an override makes the label a value, and not a class."""
    return overrides.get(f"${step_to(label)}") == "number"


class DocumentFileData(SplitDataModule):
    r"""Your own file of JSON documents, and the key of the label to predict.

    The schema is inferred from the training documents, without the label.

    Args:
        file: One JSON document per line; or one array of documents, if the name is that of a
            ``.json`` file. Both can be compressed (``.gz``).
        label: Key of the label in every document, a string, number, true or false. With the
            override ``"number"`` of its path, the label is a value to predict, and not a class.
        val_file: Documents to choose the best checkpoint by; by default drawn from ``file``.
        test_file: Documents to test and predict; by default drawn from ``file``.
        val_share: Share of ``file`` for validation.
        test_share: Share of ``file`` for the test.
        split_seed: Seed of the draw.
        overrides: Choices by path, see :func:`~pyg_dynbatch.blocks.from_examples`.
        **loading: Options of :class:`~pyg_dynbatch.lightning.SplitDataModule`.

    Example:
        >>> path = getfixture("tmp_path") / "all.jsonl"
        >>> size = path.write_text('{"x": 1, "y": "a"}\n{"x": 2, "y": "b"}\n' * 5)
        >>> data = DocumentFileData(str(path), "y")
        >>> data.schema["classes"], list(data.schema["documents"]["nodes"])
        (['a', 'b'], ['$', '$.x', '$.y'])
    """

    def __init__(
        self,
        file: str,
        label: str,
        val_file: str | None = None,
        test_file: str | None = None,
        val_share: float = 0.1,
        test_share: float = 0.1,
        split_seed: int = 0,
        overrides: dict[str, str] | None = None,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        shares = {"val_share": val_share, "test_share": test_share}
        for name, share in shares.items():
            checked_range(f"DocumentFileData: {name}", share, "[0, 1)")
        if sum(shares.values()) >= 1:
            what = "DocumentFileData: the shares leave no documents to train on"
            raise mismatch(ValueError, what, "in sum below 1", shares)
        self.file, self.label, self.overrides = file, label, overrides or {}
        self.given = {"val": (val_file, val_share), "test": (test_file, test_share)}
        self.split_seed = checked_count("DocumentFileData: split_seed", split_seed, least=0)
        self.is_number = is_number(label, self.overrides)
        self._traced: dict[str, tuple[Any, list[tuple[Any, float | int]]]] = {}

    @cached_property
    def documents(self) -> dict[str, list[tuple[str, Any]]]:
        """The documents of each split, with their places."""
        own, found = list(read_documents(self.file)), {}
        generator = torch.Generator().manual_seed(self.split_seed)
        left = [own[number] for number in torch.randperm(len(own), generator=generator)]
        for split, (path, share) in self.given.items():
            count = 0 if path else round(share * len(own))
            found[split], left = list(read_documents(path)) if path else left[:count], left[count:]
        found["train"] = left
        for split in SPLITS:
            if not found[split]:
                what, got = f"DocumentFileData: no document is left for {split}", len(own)
                hint = "the options val_share and test_share, or val_file and test_file"
                raise mismatch(ValueError, what, "more documents", got, where=self.file, hint=hint)
        return found

    @cached_property
    def schema(self) -> dict[str, Any]:
        """Schema of the documents, key of the label, and its classes or its scale."""
        path = f"${step_to(self.label)}"
        values = [self._label(*pair) for pair in self.documents["train"]]
        choices = {**self.overrides, path: "ignore"}
        documents = DocumentSchema.infer(self.documents["train"], choices).as_dict()
        common = {"documents": documents, "label": self.label}
        if self.is_number:
            scale = {"mean": float(np.mean(values)), "deviation": float(np.std(values))}
            if min(values) == max(values) or not scale["deviation"]:
                what = "there is nothing to learn from the label"
                got = f"{min(values)} to {max(values)}, deviation {scale['deviation']:.2g}"
                expected = "different numbers in the training documents"
                raise mismatch(ValueError, what, expected, got, where=self.file)
            return {**common, "scale": scale}
        if (got := self.overrides.get(path, "categories")) not in ("categories", "ignore"):
            what, expected = "the override of the label cannot be used", "number or categories"
            raise mismatch(ValueError, what, expected, got, where=path)
        # Classes that only validation or test documents have are known too, but nothing else.
        own = [split for split in SPLITS if self.given.get(split, (None,))[0] is None]
        pairs = [pair for split in own for pair in self.documents[split]]
        seen: dict[str, tuple[str, Any]] = {}
        for pair in pairs:
            label = self._label(*pair)
            place, same = seen.setdefault(name_of_class(label), (pair[0], label))
            if kind_of(same) != kind_of(label):
                what, where = "two labels have the same name", f"{place} and {pair[0]}"
                got = f"{category_of(same)} and {category_of(label)}"
                raise mismatch(ValueError, what, "labels of one kind", got, where=where)
        labels = (label for _, label in seen.values())
        classes = sorted(labels, key=lambda label: (kind_of(label), label))
        if not 2 <= len(classes) <= len(pairs) / 2:
            what, expected = "the labels cannot be classes", "at least 2, each twice on average"
            got = f"{len(classes)} different labels of {len(pairs)} documents"
            hint = f"the override {{{path}: number}} to predict numbers"
            raise mismatch(ValueError, what, expected, got, where=self.file, hint=hint)
        return {**common, "classes": classes}

    @classmethod
    def known_facts(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return as ``kind`` whether values or classes are predicted."""
        number = is_number(options["label"], options.get("overrides") or {})
        return {"kind": "regression" if number else "classification"}

    def _label(self, place: str, document: Any) -> Any:
        """Return the label of a document, or raise an error."""
        is_object = isinstance(document, dict)
        value = document.get(self.label, ...) if is_object else document
        kind = "no such key" if value is ... else kind_of(value)
        known = ("number",) if self.is_number else _LABELS
        if not is_object or kind not in known:
            what, where = "a document has no label", f"{place}, path ${step_to(self.label)}"
            got = kind if is_object else f"{kind}, not an object"
            hint = "the option label; documents without one can be predicted only"
            raise mismatch(ValueError, what, " or ".join(known), got, where=where, hint=hint)
        return value

    def setup(self, stage: str) -> None:
        """Read the documents; before ``fit`` print their schema."""
        super().setup(stage)
        documents = self.schema["documents"]
        if stage == "fit":
            rank_zero_info(str(DocumentSchema.from_dict(documents)))

    def dataset(self, split: SplitName) -> list[tuple[Any, float | int]]:
        """Return the documents of a split, traced for the model of the trainer, and targets."""
        tracer = self._compiler().tracer
        if split not in self._traced or self._traced[split][0] is not tracer:
            classes = self.schema.get("classes", ())
            known = {category_of(label): n for n, label in enumerate(classes)}
            pairs = self.documents[split]
            examples = [(traced(tracer, *pair), self._target(known, *pair)) for pair in pairs]
            self._traced[split] = tracer, examples
        return self._traced[split][1]

    def _compiler(self) -> Compiler:
        modules = self.trainer.lightning_module.modules()  # type: ignore[union-attr]
        return next(module for module in modules if isinstance(module, Compiler))

    def _target(self, known: dict[str, int], place: str, document: Any) -> float | int:
        label = self._label(place, document)
        if self.is_number:
            return float(label)
        name = category_of(label)
        if name not in known:
            what, expected = "the label is unknown", f"a class of {self.file}"
            raise mismatch(ValueError, what, expected, name, where=place)
        return known[name]

    def sizes(self, split: SplitName) -> list[int]:
        """Count the integers of the recording of every document."""
        return [len(example.code) for example, _ in self.dataset(split)]

    def make_loader(self, dataset: Any, batch_size: int = 1, **options: Any) -> PlanningLoader:
        """Create a loader of traced documents."""
        collater: Any = partial(collate, self._compiler().collate)
        return PlanningLoader(
            dataset, batch_size=batch_size, shuffle=False, collater=collater, **options
        )

    def describe_examples(self, example: np.ndarray) -> dict[str, np.ndarray]:
        """Return the places of documents, for the table of predictions."""
        return {"document": np.array([self.documents[self.predict_split][n][0] for n in example])}


class DocumentPrediction(Task):
    """Train a model of JSON documents to predict a class or a number.

    Logged for every stage: ``loss`` and, for classes ``accuracy``, for numbers ``rmse``.

    Args:
        schema: What :class:`~pyg_dynbatch.lightning.DocumentFileData` has inferred: the schema of
            the documents, the key of the label, and its classes or its ``scale``. All of it is kept
            in the checkpoint.
        optimizer: Options of the optimiser.
        rate: Options of the learning-rate schedule.
        penalty: Strength of the L2 penalty on the weights of the linear part: times the number of
            paths it is 1/C of scikit-learn.
        **network: ``width``, the length of the vectors of all parts of a document; ``dropout``, the
            share of the inputs of all layers that is dropped in training; ``unknown``, whether
            parts of a document that the schema does not know are an error (``"refuse"``), or
            missing (``"ignore"``, with a warning per path); ``linear``, the weight of the linear
            part in the prediction, 0 to 1.

    Example:
        >>> from pyg_dynbatch.blocks import from_examples
        >>> documents = from_examples([{"x": 1.5}]).schema.as_dict()
        >>> schema = {"documents": documents, "label": "y", "classes": ["no", "yes"]}
        >>> DocumentPrediction(schema, width=4).main_metric
        'accuracy'
    """

    model: DocumentPredictionModel

    def __init__(
        self,
        schema: dict[str, Any],
        optimizer: OptimizerOptions = OptimizerOptions("adamw", 3e-3, 0.01),  # noqa: B008 - frozen
        rate: RateOptions = RateOptions("cosine"),  # noqa: B008 - frozen
        penalty: float = 0.04,
        **network: Any,
    ) -> None:
        classes, values = ("accuracy", partial(RatioMetric, 0)), ("rmse", partial(Agreement, rmse))
        name, kind = values if "scale" in schema else classes
        model = DocumentPredictionModel(schema, **network)
        super().__init__(model, optimizer, rate, scores=lambda: {name: kind()})
        self.penalty = checked_range("DocumentPrediction: penalty", penalty, "[0, 1e6]")
        self.main_metric = name
        self.save_hyperparameters(ignore=["optimizer", "rate"])
        self.save_hyperparameters(self.plain_options())

    @classmethod
    def dry_run_instance(cls, options: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
        """Build a task for documents without content."""
        numbers = {"scale": {"mean": 0.0, "deviation": 1.0}}
        label = numbers if data.get("kind") == "regression" else {"classes": [False, True]}
        schema = {"documents": DocumentSchema.infer([("", None)]).as_dict(), **label}
        return cls.from_plain({**options, "schema": schema})

    def forward(self, batch: Batch) -> Any:
        """Run the network, and return both of its predictions."""
        return self.model.network.ways(batch)

    def summed_loss(self, output: Any, batch: Batch) -> Summed:
        """Sum the cross entropies, or the squared errors in deviations of the training targets.

        In training both ways predict alone, and the weights of the linear one have a penalty.
        """
        network, scale, y = self.model.network, self.model.scale, self.target(batch, len(output[0]))
        loss: Any = self.penalty * len(y) * network.penalty() if self.training else 0.0
        ways = output if self.training else [network.mean(output)]
        for way in ways:
            exact = way.to(torch.promote_types(way.dtype, torch.float32))
            if scale is None:
                spread = _SMOOTHING * self.training
                loss = loss + F.cross_entropy(exact, y, reduction="sum", label_smoothing=spread)
            else:
                target = (y - scale["mean"]) / scale["deviation"]
                loss = loss + (exact[:, 0] - target.to(exact.dtype)).square().sum()
        return loss, torch.full((), len(ways) * len(y), device=y.device)

    def update_scores(self, stage: str, output: Any, batch: Batch) -> None:
        """Count hits, or compare numbers."""
        output = self.model.network.mean(output)
        scores: Any = self.scores[f"{stage}_scores"]
        if self.model.scale is None:
            count = torch.full((), len(batch.y), device=output.device)
            scores["accuracy"].update((output.argmax(1) == batch.y).sum(), count)
        else:
            scores["rmse"].update(self.model.restored(output), batch.y)
