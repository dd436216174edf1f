"""Checks of the Triton kernels, each a function; a separate process runs them all.

``python -m tests.kernels.triton_checks`` prints one JSON object: for every check of this file
None, or the traceback of what went wrong. With TRITON_INTERPRET=1 these are the checks that run
kernels on CPU tensors, otherwise those that compile kernels for devices that need not be there.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from pyg_dynbatch.core.levels import Levels
from pyg_dynbatch.core.native import NATIVE_SWITCH
from pyg_dynbatch.kernels import tree_lstm
from pyg_dynbatch.nn import RecursiveLayer
from tests.kernels import fused
from tests.kernels.fused import everything
from tests.nn.own_process import print_outcomes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@contextmanager
def triton_everywhere() -> Iterator[list[str]]:
    """Takes the kernels for tensors of every device; yields what was launched."""
    from pyg_dynbatch.kernels.triton_gates import TritonGates

    launched: list[str] = []

    def spied(name: str) -> Callable[..., None]:
        plain = getattr(TritonGates, name)

        def launch(self: TritonGates, *args: object) -> None:
            launched.append(name)
            plain(self, *args)

        return launch

    choose = tree_lstm.choose_gates

    def choose_on_gpu(like: Tensor) -> object:
        return choose(fused.on_gpu(like.dtype))

    names = ("forward", "backward")
    with (
        mock.patch.object(tree_lstm, "choose_gates", choose_on_gpu),
        mock.patch.dict(os.environ, {NATIVE_SWITCH: "0"}),
        mock.patch.multiple(TritonGates, **{name: spied(name) for name in names}),
    ):
        yield launched


def layers(width: int, **options: object) -> Iterator[RecursiveLayer]:
    return fused.layers(width, (2, 3), **options)


def compare(
    layer: RecursiveLayer,
    schedule: Levels,
    x: Tensor,
    near: tuple[float, float] = (2e-5, 2e-6),
    **more: object,
) -> list[str]:
    """Kernels against plain torch; returns what was launched."""
    wanted = everything(layer, schedule, x, **more)
    with triton_everywhere() as launched:
        found = everything(layer, schedule, x, **more)
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=near[0], atol=near[1])
    return launched


def interpreted_every_case() -> None:
    for name, case in fused.CASES.items():
        for layer in layers(5):
            schedule, inputs, options = case(layer)
            launched = compare(layer, schedule, inputs, **options)
            if name.startswith("inputs at"):
                # One launch a level, leaves with and without an input apart.
                levels = schedule.num_levels + 1
                assert launched == ["forward"] * levels + ["backward"] * levels


def tree_schedule(layer: RecursiveLayer) -> Levels:
    return fused.some_inputs(layer)[0]


def interpreted_odd_widths() -> None:
    for width in (1, 17, 33, 130):
        for layer in layers(width):
            compare(layer, tree_schedule(layer), torch.randn(12, 3))


def interpreted_several_programs_a_row() -> None:
    from pyg_dynbatch.kernels import triton_gates

    with mock.patch.object(triton_gates, "_MOST_COLUMNS", 16):
        for layer in layers(37):
            compare(layer, tree_schedule(layer), torch.randn(12, 3))


def interpreted_recurrent_dropout() -> None:
    for layer in layers(5, recurrent_dropout=0.5):
        layer.train()
        compare(layer, tree_schedule(layer), torch.randn(12, 3))


def interpreted_low_precision() -> None:
    for dtype, most in ((torch.bfloat16, 0.02), (torch.float16, 0.003)):
        for layer in layers(9):
            x = torch.randn(12, 3).to(dtype)
            schedule = tree_schedule(layer)
            layer.to(dtype)
            with triton_everywhere() as launched:
                found = everything(layer, schedule, x)
            assert launched
            right = everything(layer.double(), schedule, x.double())
            for mine, exact in zip(found, right, strict=True):
                assert mine.dtype == dtype
                assert 0 < (mine.double() - exact).norm() / exact.norm() < most


def interpreted_autocast() -> None:
    for layer in layers(9):
        with torch.autocast("cpu", torch.bfloat16):
            # The last bit of a state may decide how products of bfloat16 are rounded.
            compare(layer, tree_schedule(layer), torch.randn(12, 3), near=(0.02, 0.002))


def interpreted_double_precision_goes_without() -> None:
    for layer in layers(5):
        assert compare(layer.double(), tree_schedule(layer), torch.randn(12, 3).double()) == []


def interpreted_switch() -> None:
    with mock.patch.dict(os.environ, {tree_lstm.SWITCH: "0"}):
        for layer in layers(5):
            assert compare(layer, tree_schedule(layer), torch.randn(12, 3)) == []


def compiled_for_gpus_that_are_not_here() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from pyg_dynbatch.kernels import triton_gates

    for kernel in (triton_gates.forward_kernel, triton_gates.backward_kernel):
        for dtype in ("fp32", "bf16", "fp16"):
            for kind in ("leaf", "nary", "ragged"):
                signature, constants = _signature(kernel.arg_names, dtype, kind)
                source = ASTSource(kernel, signature, constants)
                for capability in (80, 90):
                    made = compile(source, target=GPUTarget("cuda", capability, 32))
                    assert made.asm["cubin"]


def _signature(names: list[str], dtype: str, kind: str) -> tuple[dict, dict]:
    signature = {name: f"*{dtype}" if not _is_number(name) else "i32" for name in names}
    constants: dict[str, object] = {"ARITY": 2 if kind == "nary" else 0, "COLUMNS": 256}
    none = {"leaf": ("own", "forget", "cells", "index", "starts", "grad_forget", "grad_cells")}
    none |= {"nary": ("starts", "dropout"), "ragged": ("dropout",)}
    constants |= {name: None for name in none[kind] if name in names}
    signature |= {name: "*i64" for name in ("index", "starts")}
    signature |= dict.fromkeys(constants, "constexpr")
    return signature, constants


def _is_number(name: str) -> bool:
    return name.endswith("_row") or name in ("width", "filled", "edges")


if __name__ == "__main__":
    print_outcomes(globals(), "interpreted_" if INTERPRETED else "compiled_")
