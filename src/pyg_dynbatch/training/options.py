"""Group the settings of a run into small records that a YAML file can spell out."""

import math
from dataclasses import dataclass
from typing import Literal

from pyg_dynbatch.core.errors import mismatch


@dataclass(frozen=True)
class OptimizerOptions:
    """Chooses the optimiser of the weights and that of the word vectors.

    Args:
        name: Optimiser of all weights but the word vectors: ``adagrad``, ``adam``, ``adamw`` or
            ``sgd``.
        lr: Its learning rate.
        weight_decay: L2 penalty on these weights (decoupled for ``adamw``); word vectors have
            none.
        initial_accumulator: First value of Adagrad's sum of squared gradients. TensorFlow starts
            at 0.1, PyTorch at 0.
        eps: Added to the denominator of Adagrad and Adam; left out, 1e-10 and 1e-8.
        embedding: Optimiser of the word vectors: ``same`` as the weights, another name, or
            ``fixed`` to leave them as they are.
        embedding_lr: Learning rate of the word vectors; left out, that of the weights.
        embedding_gradient_scale: Factor on the gradients of the word vectors. Adagrad divides by
            the size of the gradients, so there the factor acts through the initial accumulator
            and eps alone.

    Raises:
        ValueError: If a number is out of range, or Adagrad would divide by zero.

    Example:
        >>> OptimizerOptions("adagrad", lr=0.05, embedding="sgd", embedding_lr=0.1).lr
        0.05
    """

    name: Literal["adagrad", "adam", "adamw", "sgd"] = "adagrad"
    lr: float = 0.05
    weight_decay: float = 0.0
    initial_accumulator: float = 0.0
    eps: float | None = None
    embedding: Literal["same", "adagrad", "adam", "adamw", "sgd", "fixed"] = "same"
    embedding_lr: float | None = None
    embedding_gradient_scale: float = 1.0

    def __post_init__(self) -> None:
        """Refuses numbers that no optimiser can use."""
        for name in ("lr", "embedding_lr", "weight_decay", "initial_accumulator", "eps"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ValueError(
                    mismatch(
                        f"OptimizerOptions: {name} is out of range",
                        expected="a finite number, 0 or more",
                        got=value,
                    )
                )
        if not self.embedding_gradient_scale > 0:
            raise ValueError(
                mismatch(
                    "OptimizerOptions: embedding_gradient_scale must be positive",
                    expected="a number above 0",
                    got=self.embedding_gradient_scale,
                    mend='embedding: "fixed" leaves the word vectors as they are',
                )
            )
        adagrad = "adagrad" in (self.name, self.embedding)
        if adagrad and self.eps == 0 and self.initial_accumulator == 0:
            raise ValueError(
                mismatch(
                    "OptimizerOptions: Adagrad would divide by zero",
                    expected="eps or initial_accumulator above 0",
                    got="both are 0",
                    mend="initial_accumulator: 0.1",
                )
            )


@dataclass(frozen=True)
class RateOptions:
    """Chooses how the learning rates change; every rate is multiplied by the same factor.

    Args:
        name: ``constant``, ``step`` (times ``gamma`` every ``every`` epochs), ``exponential``
            (times ``gamma`` an epoch), ``cosine`` (falls to ``final`` at the end of training) or
            ``one_cycle`` (rises from a twenty-fifth, then falls to ``final``, both by half a
            cosine).
        gamma: Factor of ``step`` and ``exponential``.
        every: Epochs between two falls of ``step``.
        final: What ``cosine`` and ``one_cycle`` end at, as a fraction of the full rate.
        warmup: Number of optimiser steps in which the rate rises linearly to its full value.
        rise: Share of the run in which ``one_cycle`` rises.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> RateOptions("cosine", warmup=100).final
        0.0
    """

    name: Literal["constant", "step", "exponential", "cosine", "one_cycle"] = "constant"
    gamma: float = 0.99
    every: int = 1
    final: float = 0.0
    warmup: int = 0
    rise: float = 0.3

    def __post_init__(self) -> None:
        """Refuses numbers that no schedule can use."""
        ranges = {
            "gamma": self.gamma > 0,
            "every": self.every >= 1,
            "final": 0 <= self.final <= 1,
            "warmup": self.warmup >= 0,
            "rise": 0 <= self.rise < 1,
        }
        for name, fits in ranges.items():
            if not fits:
                raise ValueError(
                    mismatch(
                        f"RateOptions: {name} is out of range",
                        expected="gamma > 0, every >= 1, 0 <= final <= 1, warmup >= 0, "
                        "0 <= rise < 1",
                        got=getattr(self, name),
                    )
                )


@dataclass(frozen=True)
class VectorOptions:
    """Chooses the word vectors that a run starts from.

    Args:
        source: ``none`` (the model's own random vectors), ``glove`` (a text file, also ``.gz``, in
            GloVe or word2vec form) or ``sentence`` (what a sentence-transformers model gives to
            single words).
        file: The file of ``glove``; for ``sentence`` the name or folder of the model.
        cache: For ``sentence``: file that keeps the vectors, so that the model runs only once.
        scale: Factor on every vector.
        missing: What a word without a vector starts from: ``shared_uniform`` (all such words are
            one word, U(-0.05, 0.05)), ``uniform`` (each its own U(-0.05, 0.05)), ``normal`` (each
            its own, as spread as the vectors found) or ``zeros``.
        lower_case: Whether a word without a vector may take that of its lower-case form.

    Example:
        >>> VectorOptions("glove", file="glove.840B.300d.txt").missing
        'uniform'
    """

    source: Literal["none", "glove", "sentence"] = "none"
    file: str | None = None
    cache: str | None = None
    scale: float = 1.0
    missing: Literal["shared_uniform", "uniform", "normal", "zeros"] = "uniform"
    lower_case: bool = True
