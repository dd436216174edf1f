"""Build optimisers that treat word vectors apart from all other weights."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.training.options import OptimizerOptions

_EPS = {"adagrad": 1e-10, "adam": 1e-8, "adamw": 1e-8, "sgd": 0.0}


class SplitOptimizer(Optimizer):
    """Runs several optimisers, each on its own parameters, as if they were one.

    Lightning's automatic optimisation, learning-rate schedulers and gradient clipping see one
    optimiser: the parameter groups are those of the parts one after another, and the state is
    shared with them. A checkpoint therefore has the form of any other optimiser's.

    Args:
        parts: Optimisers over disjoint parameters.

    Raises:
        ValueError: If there is no part, or two parts hold the same parameter.

    Example:
        >>> first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        >>> both = SplitOptimizer([SGD([first], lr=0.5), Adagrad([second], lr=0.1)])
        >>> (2 * first + second).backward()
        >>> both.step()
        >>> first.item(), round(second.item(), 3)
        (0.0, 0.9)
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        if not parts:
            raise ValueError(
                mismatch("SplitOptimizer: no parts", expected="one optimiser or more", got=0)
            )
        owner: dict[int, int] = {}
        for number, part in enumerate(parts):
            for parameter in _parameters_of(part):
                if id(parameter) in owner:
                    raise ValueError(
                        mismatch(
                            "SplitOptimizer: a parameter belongs to two parts",
                            expected="disjoint parameters",
                            got=f"a parameter of shape {list(parameter.shape)}",
                            where=f"parts {owner[id(parameter)]} and {number}",
                        )
                    )
                owner[id(parameter)] = number
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = list(parts)
        for part in self.parts:
            self.state.update(part.state)
        self._link_parts()

    def _link_parts(self) -> None:
        # One state and one list of groups, seen from two sides: what a scheduler writes into a
        # group, or a checkpoint into the state, is what the part reads.
        first = 0
        for part in self.parts:
            last = first + len(part.param_groups)
            part.param_groups = self.param_groups[first:last]
            part.state = self.state
            first = last

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Lets every part take one step.

        Args:
            closure: Computes the loss and its gradients, once for all parts.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state of all parts.

        Args:
            state_dict: What :meth:`state_dict` gave.
        """
        super().load_state_dict(state_dict)
        self._link_parts()


def _parameters_of(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def build_optimizer(model: nn.Module, options: OptimizerOptions) -> Optimizer:
    """Makes the optimiser of a model whose word vectors may learn in their own way.

    Multiplying the gradients of the word vectors by ``s`` before Adagrad is the same as Adagrad on
    the gradients as they are, with the initial accumulator divided by ``s²`` and eps by ``s``:

        lr s g / (sqrt(a + s² Σ g²) + eps) = lr g / (sqrt(a / s² + Σ g²) + eps / s)

    so no gradient is touched. For plain SGD the factor goes into the learning rate, for Adam into
    eps.

    Args:
        model: The weights of its ``nn.Embedding`` modules are the word vectors.
        options: Which optimisers, with which rates.

    Returns:
        One optimiser over all trainable parameters.

    Raises:
        ValueError: If the optimiser of the word vectors cannot take sparse gradients.

    Reference:
        Duchi, Hazan, Singer (2011), JMLR 12, figure 1 (Adagrad with diagonal matrices).

    Example:
        >>> model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
        >>> optimizer = build_optimizer(model, OptimizerOptions(embedding="sgd", embedding_lr=0.1))
        >>> [type(part).__name__ for part in optimizer.parts]
        ['Adagrad', 'SGD']
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    vectors = {id(module.weight): module.weight for module in embeddings}
    if options.embedding == "fixed":
        for weight in vectors.values():
            weight.requires_grad_(False)
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    weights = [weight for weight in trainable if id(weight) not in vectors]
    words = [weight for weight in trainable if id(weight) in vectors]
    parts = []
    if weights:
        parts.append(_one_optimizer(options.name, weights, options, options.lr))
    if words:
        name = options.name if options.embedding == "same" else options.embedding
        _check_sparse(name, embeddings)
        lr = options.lr if options.embedding_lr is None else options.embedding_lr
        parts.append(_one_optimizer(name, words, options, lr, words=True))
    return SplitOptimizer(parts)


def renew_rates(
    optimizer: Optimizer,
    schedulers: Sequence[LambdaLR],
    model: nn.Module,
    options: OptimizerOptions,
) -> None:
    """Puts rates, weight decay and eps of the options in the place of restored ones.

    Args:
        optimizer: What a checkpoint was restored into.
        schedulers: Its schedules, at the step they were restored to.
        model: Its model.
        options: The options that hold from now on.
    """
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
    words: bool = False,
) -> Optimizer:
    scale = options.embedding_gradient_scale if words else 1.0
    eps = (_EPS[name] if options.eps is None else options.eps) / scale
    decay = 0.0 if words else options.weight_decay
    if name == "adagrad":
        # Divided twice: 0.1 / 0.1 / 0.1 is 10 in floating point, 0.1 / (0.1 * 0.1) is not.
        accumulator = options.initial_accumulator / scale / scale
        return Adagrad(
            parameters,
            lr=lr,
            weight_decay=decay,
            initial_accumulator_value=accumulator,
            eps=eps,
        )
    if name == "sgd":
        return SGD(parameters, lr=lr * scale, weight_decay=decay)
    kind = Adam if name == "adam" else AdamW
    return kind(parameters, lr=lr, eps=eps, weight_decay=decay)


def _check_sparse(name: str, embeddings: list[nn.Embedding]) -> None:
    if not any(module.sparse for module in embeddings):
        return
    if not torch.sparse.check_sparse_tensor_invariants.is_enabled():
        # Says aloud what is so anyway; torch otherwise warns at the first sparse step.
        torch.sparse.check_sparse_tensor_invariants.disable()
    if name in ("adam", "adamw"):
        raise ValueError(
            mismatch(
                f"OptimizerOptions: {name} cannot take the sparse gradients of the embedding",
                expected="adagrad or sgd for the word vectors, or an embedding that is not sparse",
                got=f"embedding optimiser {name!r}, nn.Embedding(sparse=True)",
                mend="optimizer.embedding: adagrad",
            )
        )
