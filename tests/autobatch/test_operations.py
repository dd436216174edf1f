"""Every entry of the table of torch functions against a loop over rows: values and gradients."""

import math
import random
from typing import Any

import pytest
import torch

from pyg_dynbatch.autobatch.operations import TABLE
from tests.autobatch.operation_cases import FAMILIES, MIXED, Case
from tests.autobatch.trials import check_all

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.bool,
    torch.uint8, torch.int32, torch.int64,
]  # fmt: skip


def functions(name: str) -> list[Any]:
    """The functions and methods of the table that have a name."""
    return [function for function, (own, _) in TABLE.items() if own == name]


def every_case(families: dict[str, list[Case]]) -> dict[str, list[Case]]:
    cases: dict[str, list[Case]] = {}
    for names, each in families.items():
        for name in names.split():
            cases.setdefault(name, []).extend(each)
    return cases


CASES = every_case(FAMILIES)
NAMES = sorted(CASES)


def shuffled(cases: list[Case], name: str) -> list[Case]:
    return random.Random(name).sample(cases, len(cases))


@pytest.mark.parametrize("name", NAMES)
def test_entry_equals_single_rows(name: str) -> None:
    for function in functions(name):
        check_all(function, shuffled(CASES[name], name), torch.float64, enough=12)


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_entry_equals_single_rows_for_all_dtypes(name: str, dtype: torch.dtype) -> None:
    for function in functions(name):
        check_all(function, CASES[name], dtype, enough=math.inf)


def test_every_entry_is_compared() -> None:
    assert {name for name, _ in TABLE.values()} == set(CASES)


MIXED_CASES = every_case(MIXED)


@pytest.mark.parametrize("name", sorted(MIXED_CASES))
def test_promotion_of_dtypes(name: str) -> None:
    for function in functions(name):
        check_all(function, shuffled(MIXED_CASES[name], name), torch.float64, enough=40)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(MIXED_CASES))
def test_promotion_of_all_dtypes(name: str) -> None:
    for function in functions(name):
        check_all(function, MIXED_CASES[name], torch.float64, enough=math.inf)
