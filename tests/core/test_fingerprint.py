"""A digest differs for any two objects of which one computes something else."""

import collections
import dataclasses
import decimal
import enum
import operator
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pyg_dynbatch.autobatch import autobatch
from pyg_dynbatch.core.fingerprint import digest

N = 1
SOURCES = {
    "constant": "def f(x): return x + {}",
    "positional default": "def f(x, n={}): return x + n",
    "keyword default": "def f(x, *, n={}): return x + n",
    "default that is a list": "def f(x, n=[{}]): return x + n[0]",
    "global": "n = {}\ndef f(x): return x + n",
    "global of a function": "n = {}\ndef g(x): return x + n\ndef f(x): return g(x)",
    "global in a comprehension": "n = {}\ndef f(x): return [y + n for y in x]",
    "global of a module": "import a_module as m\nm.n = {}\ndef f(x): return x + m.n",
    "global that is replaced": "n = {}\ndef f(x):\n  global n\n  n += 1\n  return x + n",
    "set of constants": "def f(x): return x in {{0, {}}}",
    "inner function": "def f(x):\n  def g(): return {}\n  return g()",
    "inner class": "def f(x):\n  class G: n = {}\n  return G.n",
    "order of arguments": "def f(x, {0[0]}, {0[1]}): return (a, b)[0]",
    "range of a handler": "def f(x):\n  {0[0]}\n  try:\n    {0[1]}\n  except ValueError: return 0",
    "closure": "def made(n): return lambda x: x + n\nf = made({})",
    "decorated": "def d(g): return lambda x: g(x)\n@d\ndef f(x): return x + {}",
    "partial": "import functools\nf = functools.partial(lambda x, n: x + n, n={})",
    "cached": "import functools\n@functools.cache\ndef f(x): return x + {}",
    "dispatched": "import functools\n@functools.singledispatch\ndef f(x): return x + {}",
    "dispatched by class": "import functools\n@functools.singledispatch\ndef f(x): return x\n"
    "@f.register\ndef _(x: int): return x + {}",
    "attribute": "def f(x): return x + f.n\nf.n = {}",
    "generator": "def f(x): yield x + {}",
}  # fmt: skip
CLASSES = {
    "attribute": "class C:\n  n = {}\n  def __call__(self, x): return x + self.n",
    "state": "class C:\n  def __init__(self): self.n = {}\n  def __call__(self, x): return x",
    "slots": "class C:\n  __slots__ = ('n',)\n  def __init__(self): self.n = {}",
    "method": "class C:\n  def __call__(self, x): return x + {}",
    "method of a base": "class B:\n  def __call__(self, x): return x + {}\nclass C(B): pass",
    "property": "class C:\n  @property\n  def n(self): return {}",
    "setter": "class C:\n  n = property(None, lambda self, x: {})",
    "static method": "class C:\n  @staticmethod\n  def n(): return {}",
    "class method": "class C:\n  @classmethod\n  def n(cls): return {}",
    "cached property": "import functools\nclass C:\n  @functools.cached_property\n"
    "  def n(self): return {}",
    "partial method": "import functools\nclass C:\n  def g(self, n): return n\n"
    "  f = functools.partialmethod(g, {})",
    "call that is no function": "import functools\nclass C:\n"
    "  __call__ = functools.partial(lambda n, x: x + n, {})",
    "special class method": "class C:\n  @classmethod\n  def __class_getitem__(cls, x): return {}",
    "list": "class C(list):\n  def __init__(self): self.append({})",
    "dict": "class C(dict):\n  def __init__(self): self['n'] = {}",
    "int": "class C(int):\n  def __new__(cls): return int.__new__(cls, {})",
    "data": "import dataclasses\n@dataclasses.dataclass\nclass C:\n  n: int = {}",
    "own state": "class C:\n  def __init__(self): self.n = {}\n"
    "  def __reduce__(self): return C, (), {{'m': self.n}}",
}  # fmt: skip
SWAPPED = {"order of arguments": ("ab", "ba"),
           "range of a handler": (("int(x)", "pass"), ("pass", "int(x)"))}  # fmt: skip


def made(source: str, value: object, name: str) -> Any:
    module = types.ModuleType("users_own")
    exec(compile(source.format(value), "users_own.py", "exec"), vars(module))  # noqa: S102
    return vars(module)[name]


@pytest.fixture(autouse=True)
def a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "a_module", types.ModuleType("a_module"))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", SOURCES)
def test_functions(kind: str, strict: bool) -> None:
    one, two = (
        digest(made(SOURCES[kind], value, "f"), strict) for value in SWAPPED.get(kind, (1, 2))
    )
    # Of a global that the function replaces, the value differs from run to run.
    assert (one == two) == (kind == "global that is replaced" and not strict)
    again = digest(made(SOURCES[kind], SWAPPED.get(kind, (1, 2))[1], "f"), strict)
    assert again == two


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", CLASSES)
def test_objects_of_classes(kind: str, strict: bool) -> None:
    one, two, again = (digest(made(CLASSES[kind], n, "C")(), strict) for n in (1, 2, 2))
    assert one != two == again


class Color(enum.Enum):
    RED, BLUE = 1, 2


Point = collections.namedtuple("Point", "x y")  # noqa: PYI024
Data = dataclasses.make_dataclass("Data", ["n"])


class Bag:
    """Raises a KeyError for attributes that it does not have."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __getattr__(self, name: str) -> Any:
        return vars(self)[name]


VALUES: dict[str, Callable[[int], Any]] = {
    "enumeration": lambda n: list(Color)[n],
    "named tuple": lambda n: Point(0, n),
    "data class": Data,
    "item getter": operator.itemgetter,
    "bound method": lambda n: [n].index,
    "method of a class": lambda n: (str.split, str.strip)[n],
    "function of another module": lambda n: (np.sin, torch.sin)[n],
    "builtin functions": lambda n: (min, max)[n],
    "default of a dict": lambda n: collections.defaultdict((int, float)[n]),
    "items of a dict": lambda n: collections.OrderedDict(a=n),
    "queue": lambda n: collections.deque([n]),
    "counts": lambda n: collections.Counter("ab"[n]),
    "zero with a sign": lambda n: (0.0, -0.0)[n],
    "true or one": lambda n: (True, 1)[n],
    "one or one": lambda n: (1.0, 1)[n],
    "attributes of a dict": Bag,
    "decimal": decimal.Decimal,
    "bytes": lambda n: bytearray([n]),
    "dtype of an array": lambda n: np.zeros(1, ("int8", "int16")[n]),
    "shape of an array": lambda n: np.zeros(((1, 2), (2, 1))[n]),
    "array of objects": lambda n: np.array([n, None], dtype=object),
    "number of an array": lambda n: np.int64(n),
    "dtype of a tensor": lambda n: torch.zeros(1, dtype=(torch.int8, torch.int16)[n]),
    "shape of a tensor": lambda n: torch.zeros(((1, 2), (2, 1))[n]),
    "shape of an empty tensor": lambda n: torch.zeros(0, n),
    "bfloat16": lambda n: torch.tensor([n], dtype=torch.bfloat16),
    "view of conjugates": lambda n: torch.tensor([1j + n]).conj(),
    "masked array": lambda n: np.ma.array([1, 999999], mask=[0, n]),  # type: ignore[no-untyped-call]
    "set in a set": lambda n: {frozenset({n})},
    "view": lambda n: types.MappingProxyType({"n": n}),
    "namespace": lambda n: types.SimpleNamespace(n=n),
    "nesting": lambda n: ([[n], 1], [[n, 1]])[n],
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", VALUES)
def test_values(kind: str, strict: bool) -> None:
    one, two, again = (digest(VALUES[kind](n), strict) for n in (0, 1, 1))
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


@pytest.mark.parametrize(
    "changed", [("", "3"), (", n=3", "n"), (", *, n=3", "n"), ("", "len({'a', 'b'})")]
)
def test_a_module_with_other_code_refuses_recordings(changed: tuple[str, str]) -> None:
    first = changed[0].replace("3", "2"), changed[1].replace("3", "2").replace("'a', ", "")
    model, twin, other = (
        autobatch(made(MODULE.replace("{}", each[0], 1), each[1], "M")())
        for each in (first, first, changed)
    )
    trace = model.trace(torch.ones(2))
    assert twin([trace]).shape == (1, 2)
    with pytest.raises(ValueError, match="the modules or their code changed"):
        other([trace])
