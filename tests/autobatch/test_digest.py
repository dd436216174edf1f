"""A digest differs for code that computes something else."""

import types
from typing import Any

import pytest
import torch

from pyg_dynbatch.autobatch import autobatch
from pyg_dynbatch.autobatch.digest import digest

SOURCES = {
    "constant": ("x + 1", "x + 2"),
    "type of a constant": ("x + 1", "x + 1.0"),
    "sign of a constant": ("x + 0.0", "x + -0.0"),
    "set of constants": ("x in {0, 1}", "x in {0, 2}"),
    "inner function": ("(lambda: 1)()", "(lambda: 2)()"),
    "global": ("min(x, 0)", "max(x, 0)"),
    "attribute": ("x.real", "x.imag"),
    "order of arguments": ("(lambda a, b: a)(x, 0)", "(lambda b, a: a)(x, 0)"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_code_that_differs(kind: str) -> None:
    one, two, again = (
        digest([compile(source, "users_own.py", "eval")])
        for source in (*SOURCES[kind], SOURCES[kind][1])
    )
    assert one != two == again


MODULE = """
from torch import nn
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
    def forward(self, x{}):
        return self.layer(x) * {}
"""


def made(source: str) -> Any:
    module = types.ModuleType("users_own")
    exec(compile(source, "users_own.py", "exec"), vars(module))  # noqa: S102
    return vars(module)["M"]


@pytest.mark.parametrize(
    "changed", [("", "3"), (", n=3", "n"), (", *, n=3", "n"), ("", "len({'a', 'b'})")]
)
def test_a_module_with_other_code_refuses_recordings(changed: tuple[str, str]) -> None:
    first = changed[0].replace("3", "2"), changed[1].replace("3", "2").replace("'a', ", "")
    model, twin, other = (
        autobatch(made(MODULE.format(*each))()) for each in (first, first, changed)
    )
    trace = model.trace(torch.ones(2))
    assert twin([trace]).shape == (1, 2)
    with pytest.raises(ValueError, match="the modules or their code changed"):
        other([trace])
