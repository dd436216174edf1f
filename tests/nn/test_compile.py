"""torch.compile takes cells, heads and weave modules as one graph each, and changes no value."""

from functools import cache

import pytest

from tests.nn import compile_checks
from tests.nn.own_process import outcomes

CHECKS = [name for name in vars(compile_checks) if name.startswith("check_")]


@cache
def found() -> dict[str, str | None]:
    return outcomes(compile_checks)


@pytest.mark.long
@pytest.mark.parametrize("name", CHECKS)
def test_compiled_equals_eager(name: str) -> None:
    failure = found()[name]
    assert failure is None, failure
