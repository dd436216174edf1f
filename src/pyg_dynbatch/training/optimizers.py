"""Optimizers that treat word vectors apart, and schedules of their learning rates."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from pyg_dynbatch.core.errors import checked_choice, checked_range, mismatch


def _check_ranges(options: object, **intervals: str) -> None:
    """Check numbers that are given, by their names."""
    for name, interval in intervals.items():
        if (value := getattr(options, name)) is not None:
            checked_range(f"{type(options).__name__}: {name}", value, interval)


@dataclass(frozen=True)
class OptimizerOptions:
    """Choose the optimizers of the weights and of the word vectors.

    Args:
        name: Optimizer of all other weights: ``adagrad``, ``adam``, ``adamw`` or ``sgd``.
        lr: Its learning rate.
        weight_decay: L2 penalty on these weights (decoupled for ``adamw``).
        initial_accumulator: First value of Adagrad's sum of squared gradients (TensorFlow: 0.1).
        eps: Added to the denominator; by default 1e-10 for Adagrad, 1e-8 for Adam.
        embedding: Optimizer of the word vectors: ``same``, another name, or ``fixed`` for none.
        embedding_lr: Learning rate of the word vectors; by default that of the weights.
        embedding_gradient_scale: Factor on the gradients of the word vectors. Adagrad divides by
            their size, so there it acts through the initial accumulator and eps alone.

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
        """Check the numbers."""
        names = ("lr", "embedding_lr", "weight_decay", "initial_accumulator", "eps")
        _check_ranges(self, **dict.fromkeys(names, "[0, inf)"), embedding_gradient_scale="(0, inf)")
        if "adagrad" in (self.name, self.embedding) and self.eps == self.initial_accumulator == 0:
            what, wanted = "OptimizerOptions: Adagrad would divide by zero", "one of them above 0"
            got, hint = "eps and initial_accumulator 0", "initial_accumulator: 0.1"
            raise mismatch(ValueError, what, wanted, got, hint=hint)


@dataclass(frozen=True)
class RateOptions:
    """Choose how the learning rates change; every rate is multiplied by the same factor.

    Args:
        name: ``constant``, ``step`` (times ``gamma`` every ``every`` epochs), ``exponential``
            (times ``gamma`` per epoch), ``cosine`` (falls to ``final`` at the end of training) or
            ``one_cycle`` (rises from a twenty-fifth, then falls to ``final``, each along half a
            cosine).
        gamma: Factor of ``step`` and ``exponential``.
        every: Epochs between two steps of ``step``.
        final: Last rate of ``cosine`` and ``one_cycle``, as a fraction of the full rate.
        warmup: Number of optimizer steps in which the rate rises linearly to its full value.
        rise: Fraction of the run in which ``one_cycle`` rises.

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
        """Check the numbers."""
        _check_ranges(self, gamma="(0, inf)", final="[0, 1]", rise="[0, 1)")
        _check_ranges(self, every="[1, inf)", warmup="[0, inf)")


# The options that each source of word vectors reads.
_READ = {"none": "", "glove": "file scale missing lower_case", "sentence": "file scale cache"}
_READ["contextual"] = "file scale layers"


@dataclass(frozen=True)
class VectorOptions:
    """Choose the initial word vectors.

    Args:
        source: ``none`` (the model's own random vectors), ``glove`` (a text file, also ``.gz``, in
            GloVe or word2vec form), ``sentence`` (a sentence-transformers model on each word) or
            ``contextual`` (a transformer on each sentence: fixed vectors of word occurrences, in
            place of an embedding; they are kept beside the cached trees).
        file: The file of ``glove``; for ``sentence`` and ``contextual`` the name or folder of the
            model.
        cache: For ``sentence``: file for the vectors, so that the model runs only once.
        scale: Factor on every vector; for ``contextual`` the standard deviation of every feature
            on the training split, where its mean is 0.
        layers: For ``contextual``: hidden layers that are put side by side, 0 the embedding.
        missing: For ``glove``, words without a vector: ``shared_uniform`` (one for all, from
            U(-0.05, 0.05)), ``uniform`` (one for each, U(-0.05, 0.05)), ``normal`` (one for each,
            with the deviation of the vectors found) or ``zeros``.
        lower_case: For ``glove``: whether a word may have the vector of its lower-case form.

    Raises:
        ValueError: If an option is given that the source does not use.

    Example:
        >>> VectorOptions("glove", file="glove.840B.300d.txt").missing
        'uniform'
    """

    source: Literal["none", "glove", "sentence", "contextual"] = "none"
    file: str | None = None
    cache: str | None = None
    scale: float = 1.0
    layers: tuple[int, ...] = (0, 3, -1)
    missing: Literal["shared_uniform", "uniform", "normal", "zeros"] = "uniform"
    lower_case: bool = True

    def __post_init__(self) -> None:
        """Refuse options that would be ignored."""
        _check_ranges(self, scale="(0, inf)")
        if not isinstance(self.layers, Sequence) or not self.layers:
            what = "VectorOptions: layers is out of range"
            expected = "at least one hidden layer, such as [0, -1]"
            raise mismatch(ValueError, what, expected, self.layers)
        checked_choice("VectorOptions: source", self.source, _READ)
        given = {each.name for each in fields(self) if getattr(self, each.name) != each.default}
        if unread := sorted(given - {"source", *_READ[self.source].split()}):
            what = f"VectorOptions: the source {self.source!r} does not use {', '.join(unread)}"
            expected = _READ[self.source] or "no option but source"
            raise mismatch(ValueError, what, expected, getattr(self, unread[0]))


def rate_factor(
    options: RateOptions, steps_per_epoch: float, total_steps: float
) -> Callable[[int], float]:
    """Return the function from the number of optimizer steps to the factor of the rates."""
    if options.name in ("cosine", "one_cycle") and not math.isfinite(total_steps):
        what = f"RateOptions: a {options.name} schedule needs to know the end of training"
        expected, hint = "a trainer with max_epochs or max_steps", "--trainer.max_epochs 20"
        raise mismatch(ValueError, what, expected, "an endless run", hint=hint)

    def factor(step: int) -> float:
        warm = min(1.0, (step + 1) / (options.warmup + 1))
        if options.name == "cosine":
            done = max(0.0, step - options.warmup) / max(1.0, total_steps - options.warmup)
            return warm * _half_cosine(1.0, options.final, done)
        if options.name == "one_cycle":
            done, rise = step / total_steps, options.rise
            if done < rise:
                return warm * _half_cosine(1 / 25, 1.0, done / rise)
            return warm * _half_cosine(1.0, options.final, (done - rise) / (1.0 - rise))
        epoch = int(step / steps_per_epoch)
        if options.name == "step":
            return warm * options.gamma ** (epoch // options.every)
        return warm * options.gamma**epoch if options.name == "exponential" else warm

    return factor


def _half_cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))


def build_scheduler(
    optimizer: Optimizer, options: RateOptions, lengths: Callable[[], tuple[float, float]]
) -> dict[str, Any] | None:
    """Return the schedule in the form that Lightning's ``configure_optimizers`` returns.

    ``lengths`` returns the optimizer steps per epoch and per run; it is called only if needed.
    """
    constant = options.name == "constant"
    if constant and options.warmup == 0:
        return None
    by_epoch = options.name in ("step", "exponential") and options.warmup == 0
    steps_per_epoch, total_steps = (1.0, math.inf) if constant or by_epoch else lengths()
    # A function, not an object: LambdaLR would store the fields of an object in the checkpoint, so
    # that a resumed run would have the old length.
    scheduler = LambdaLR(optimizer, rate_factor(options, steps_per_epoch, total_steps))
    return {"scheduler": scheduler, "interval": "epoch" if by_epoch else "step"}


_KINDS: dict[str, tuple[Any, float]] = {
    "adagrad": (Adagrad, 1e-10),  # and the default of eps
    "adam": (Adam, 1e-8),
    "adamw": (AdamW, 1e-8),
    "sgd": (SGD, 0.0),
}


class SplitOptimizer(Optimizer):
    """Run several optimizers on disjoint parameters as one.

    Lightning's automatic optimisation, learning-rate schedulers and gradient clipping see one
    optimizer: its parameter groups are those of all parts in order, and its state is shared with
    them. A checkpoint therefore has the same form as that of any optimizer.

    Args:
        parts: Optimizers over disjoint parameters.

    Raises:
        ValueError: If there are no parameters, or two parts have the same one (raised by torch).

    Example:
        >>> first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        >>> both = SplitOptimizer([SGD([first], lr=0.5), Adagrad([second], lr=0.1)])
        >>> (2 * first + second).backward()
        >>> both.step()
        >>> first.item(), round(second.item(), 3)
        (0.0, 0.9)
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = list(parts)
        for part in self.parts:
            self.state.update(part.state)
        self._link_parts()

    def _link_parts(self) -> None:
        # Parts and whole share the same objects, so that a part reads what a scheduler writes to a
        # group, or what a checkpoint restores.
        first = 0
        for part in self.parts:
            last = first + len(part.param_groups)
            part.param_groups = self.param_groups[first:last]
            part.state = self.state
            first = last

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with every part; ``closure`` runs once, and its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of all parts."""
        super().load_state_dict(state_dict)
        self._link_parts()


def build_optimizer(model: nn.Module, options: OptimizerOptions) -> Optimizer:
    """Build the optimizer of a model, whose word vectors may have a different one.

    Adagrad on the gradients of the word vectors times ``s`` equals Adagrad on the gradients, with
    the initial accumulator divided by ``s²`` and eps by ``s``:

        lr s g / (sqrt(a + s² Σ g²) + eps) = lr g / (sqrt(a / s² + Σ g²) + eps / s)

    so the gradients are not changed. For SGD the learning rate is scaled, for Adam eps.

    Args:
        model: The weights of its ``nn.Embedding`` modules are the word vectors.
        options: The optimizers and their rates.

    Raises:
        ValueError: If the optimizer of the word vectors does not support sparse gradients.

    Reference:
        Duchi, Hazan, Singer (2011), JMLR 12, figure 1 (Adagrad with diagonal matrices).

    Example:
        >>> model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
        >>> optimizer = build_optimizer(model, OptimizerOptions(embedding="sgd", embedding_lr=0.1))
        >>> [type(part).__name__ for part in optimizer.parts]
        ['Adagrad', 'SGD']
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if options.embedding == "fixed":
        for module in embeddings:
            module.weight.requires_grad_(False)
    vectors = {module.weight for module in embeddings}
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    weights = [weight for weight in trainable if weight not in vectors]
    words = [weight for weight in trainable if weight in vectors]
    parts = []
    if weights:
        parts.append(_one_optimizer(options.name, weights, options, options.lr))
    if words:
        name = options.name if options.embedding == "same" else options.embedding
        _check_sparse(name, embeddings)
        lr = options.lr if options.embedding_lr is None else options.embedding_lr
        scale = options.embedding_gradient_scale
        undecayed = replace(options, weight_decay=0.0)
        parts.append(_one_optimizer(name, words, undecayed, lr, scale))
    return SplitOptimizer(parts)


def renew_rates(
    optimizer: Optimizer,
    schedulers: Sequence[LambdaLR],
    model: nn.Module,
    options: OptimizerOptions,
) -> None:
    """Replace restored rates, weight decay and eps with those of the options."""
    fresh = build_optimizer(model, options).param_groups
    for group, new in zip(optimizer.param_groups, fresh, strict=True):
        group.update({name: new[name] for name in ("lr", "weight_decay", "eps") if name in new})
        group["initial_lr"] = new["lr"]
    for scheduler in schedulers:
        scheduler.base_lrs = [group["lr"] for group in fresh]
        rows = zip(optimizer.param_groups, fresh, scheduler.lr_lambdas, strict=True)
        for group, new, factor in rows:
            group["lr"] = new["lr"] * factor(scheduler.last_epoch)


def _one_optimizer(
    name: str,
    parameters: list[nn.Parameter],
    options: OptimizerOptions,
    lr: float,
    scale: float = 1.0,
) -> Optimizer:
    kind, eps = _KINDS[name]
    given = {"lr": lr, "weight_decay": options.weight_decay}
    if name == "sgd":
        given["lr"] = lr * scale
    else:
        given["eps"] = (eps if options.eps is None else options.eps) / scale
    if name == "adagrad":
        # Divided twice: 0.1 / 0.1 / 0.1 is 10 in floating point, 0.1 / (0.1 * 0.1) is not.
        given["initial_accumulator_value"] = options.initial_accumulator / scale / scale
    return kind(parameters, **given)


def _check_sparse(name: str, embeddings: list[nn.Embedding]) -> None:
    if not any(module.sparse for module in embeddings):
        return
    if not torch.sparse.check_sparse_tensor_invariants.is_enabled():
        # Sets the default explicitly; torch otherwise warns at the first sparse step.
        torch.sparse.check_sparse_tensor_invariants.disable()
    if name in ("adam", "adamw"):
        what = f"OptimizerOptions: {name} does not support sparse gradients of the embedding"
        expected = "optimizer.embedding: adagrad or sgd, or an embedding that is not sparse"
        raise mismatch(ValueError, what, expected, f"{name} with nn.Embedding(sparse=True)")
