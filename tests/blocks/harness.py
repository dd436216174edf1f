"""Run a block three ways: call by call, scheduled alone, and scheduled in a mixed batch."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pyg_dynbatch import blocks as td
from pyg_dynbatch.blocks.compiler import compile_block
from pyg_dynbatch.core import Engine, Operations, run_one_by_one
from pyg_dynbatch.core.scheduling import schedule_recordings
from pyg_dynbatch.testing import assert_same, gradients_of, prepared

TOLERANCE = 1e-10


def three_ways(block: td.Block, examples: Sequence[Any]) -> None:
    """Call by call = scheduled alone = scheduled in a mixed batch: values and gradients."""
    operations = Operations()
    tracer = compile_block(block, operations)
    engine = prepared(Engine(operations))
    recordings = [tracer(example) for example in examples]

    def reference(_: Any) -> dict[str, Any]:
        return run_one_by_one(engine, recordings)

    def mixed(_: Any) -> dict[str, Any]:
        return engine(schedule_recordings(recordings))

    wanted = reference({})
    for policy in ("depth", "agenda"):
        found = engine(schedule_recordings(recordings, policy))
        assert_same(f"scheduled ({policy}) = call by call", wanted, found, TOLERANCE)
    assert_same("mixed = call by call", wanted, mixed({}), TOLERANCE)
    for recording in recordings:
        alone = run_one_by_one(engine, [recording])
        found = engine(schedule_recordings([recording]))
        assert_same("alone = call by call", alone, found, TOLERANCE)
    gradients = gradients_of(engine, {}, reference)
    assert_same("gradients", gradients, gradients_of(engine, {}, mixed), TOLERANCE)


def builds(block: td.Block, cases: Sequence[tuple[Any, Any]], depth: int | None = None) -> None:
    """The block gives what is expected of each input, three ways, at the stated depth."""
    for given, expected in cases:
        found = block.eval(given, tolist=True)
        assert close(found, expected), f"{block!r}: {given!r} -> {found!r}, not {expected!r}"
    if depth is not None:
        assert block.max_depth(cases[0][0]) == depth
    three_ways(block, [given for given, _ in [*cases, cases[0]]])


def close(found: Any, expected: Any) -> bool:
    """Equal up to rounding; a list does not equal a tuple."""
    if isinstance(expected, float | int) and not isinstance(expected, bool):
        return isinstance(found, float | int) and found == pytest.approx(expected, abs=1e-5)
    if isinstance(expected, list | tuple):
        return (
            type(found) is type(expected)
            and len(found) == len(expected)
            and all(close(a, b) for a, b in zip(found, expected, strict=True))
        )
    return found == expected


def wired(wire: Callable[[td.Composition], Any]) -> td.Composition:
    """A composition wired by a function, whose result, if there is one, becomes the output."""
    made = td.Composition()
    with made.scope():
        found = wire(made)
        if found is not None:
            made.output.reads(found)
    return made


def add() -> td.Block:
    return td.Function(torch.add)


def numbers() -> td.Block:
    return td.Map(td.Scalar())


def endless() -> td.Block:
    return td.Scalar() >> td.Broadcast()


def is_list(value: Any) -> bool:
    return isinstance(value, list)
