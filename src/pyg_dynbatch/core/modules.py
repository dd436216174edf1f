"""Modules of the user: which one a callable has, its mode, and copies that a check may run."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any, TypeVar

from torch import Tensor, nn

F = TypeVar("F", bound=Callable[..., Any])


def module_of(called: object) -> nn.Module | None:
    """Return the module of a callable: itself, or that of a method or a ``partial``; else None."""
    while isinstance(called, partial):
        called = called.func
    owner = called if isinstance(called, nn.Module) else getattr(called, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def tensors_of(owner: nn.Module | None) -> Iterator[Tensor]:
    """List the parameters and buffers of a module."""
    return iter(()) if owner is None else chain(owner.parameters(), owner.buffers())


def set_mode(called: F, training: bool) -> F:
    """Set the module of a function to training or evaluation mode; return the function."""
    if (owner := module_of(called)) is not None:
        for part in owner.modules():
            part.training = training
    return called


def batch_norm_in(called: object) -> str:
    """Return the class of a batch normalization among the parts of a module, or an empty text."""
    owner = module_of(called)
    for part in () if owner is None else owner.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            return type(part).__name__
    return ""


def copy_of(called: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a module, or the module of a method, so that calls leave the original as it is.

    Parameters are shared. Buffers are copied, and so are attributes that are lists, dictionaries
    or sets; other attributes are shared, as they may be large, or cannot be copied.
    """
    return _copy(called, {})


def _copy(called: Callable[..., Any], copies: dict[int, nn.Module]) -> Callable[..., Any]:
    if isinstance(called, partial):
        return partial(_copy(called.func, copies), *called.args, **called.keywords)
    if isinstance(called, MethodType) and isinstance(called.__self__, nn.Module):
        return MethodType(called.__func__, _copy_of_module(called.__self__, copies))
    return _copy_of_module(called, copies) if isinstance(called, nn.Module) else called


def _copy_of_module(module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
    """Copy a module, without ``__init__``, and its parts; ``copies`` holds those made so far."""
    if id(module) in copies:
        return copies[id(module)]
    copied = copies[id(module)] = module.__new__(type(module))
    for name, value in vars(module).items():
        # Plain collections alone: the hooks of torch, in an OrderedDict, stay shared.
        vars(copied)[name] = value.copy() if type(value) in (list, dict, set) else value
        if isinstance(value, partial | MethodType):
            vars(copied)[name] = _copy(value, copies)
    for name, buffer in module._buffers.items():
        copied._buffers[name] = None if buffer is None else buffer.detach().clone()
    for name, part in module._modules.items():
        copied._modules[name] = None if part is None else _copy_of_module(part, copies)
    return copied
