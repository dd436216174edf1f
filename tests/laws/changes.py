"""Changes that count whenever a module is called: hooks, other weights, overrides."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import utils
from torch.nn.utils import prune
from torch.utils._pytree import tree_map_only


def scaled(found: Any) -> Any:
    return tree_map_only(Tensor, lambda part: 0.7 * part, found)


class Scale(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return scaled(weight)


def to_weights(change: Callable[[nn.Module, str], Any]) -> Callable[[nn.Module], None]:
    """Change every matrix of a cell and its submodules."""

    def apply(cell: nn.Module) -> None:
        for module in list(cell.modules()):
            for name, weight in list(module.named_parameters(recurse=False)):
                if weight.dim() == 2:
                    change(module, name)

    return apply


def to_modules(register: str, hook: Callable[..., Any]) -> Callable[[nn.Module], None]:
    def apply(cell: nn.Module) -> None:
        for module in cell.modules():
            getattr(module, register)(hook)

    return apply


def in_class(name: str) -> Callable[[nn.Module], None]:
    def apply(cell: nn.Module) -> None:
        kind = type(cell)
        method = {name: lambda self, *given: scaled(getattr(kind, name)(self, *given))}
        cell.__class__ = type("Changed", (kind,), method)

    return apply


def on_instance(name: str) -> Callable[[nn.Module], None]:
    def apply(cell: nn.Module) -> None:
        method = getattr(cell, name)
        setattr(cell, name, lambda *given: scaled(method(*given)))

    return apply


METHODS = ("step", "project", "leaf", "no_input", "drop_candidate", "forward")
OVERRIDES = {
    **{f"{name} in a subclass": in_class(name) for name in METHODS},
    **{f"{name} of the object": on_instance(name) for name in METHODS},
}
# With so many iterations, the norm does not depend on the number of calls.
SPECTRAL = {"n_power_iterations": 20}
CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "prune": to_weights(lambda m, name: prune.l1_unstructured(m, name, 0.4)),
    "old weight_norm": to_weights(lambda m, name: utils.weight_norm(m, name)),
    "weight_norm": to_weights(lambda m, name: utils.parametrizations.weight_norm(m, name)),
    "old spectral_norm": to_weights(lambda m, name: utils.spectral_norm(m, name, **SPECTRAL)),
    "spectral_norm": to_weights(
        lambda m, name: utils.parametrizations.spectral_norm(m, name, **SPECTRAL)
    ),
    "parametrize": to_weights(
        lambda m, name: utils.parametrize.register_parametrization(m, name, Scale())
    ),
    "forward hook": to_modules("register_forward_hook", lambda m, x, found: scaled(found)),
    "pre-hook": to_modules("register_forward_pre_hook", lambda m, x: (scaled(x[0]), *x[1:])),
    "backward hook": to_modules("register_full_backward_pre_hook", lambda m, grads: scaled(grads)),
    **OVERRIDES,
    "global hook": lambda cell: None,
}
