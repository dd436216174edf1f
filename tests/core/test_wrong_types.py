"""Arguments of wrong types, one table: each error says what was expected, and what was given."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pyg_dynbatch.blocks import Compiler, Map, Mean, Scalar, Sum
from pyg_dynbatch.core import (
    Engine,
    Operations,
    Ragged,
    Recording,
    Signature,
    TensorType,
    run_one_by_one,
    schedule_recordings,
    schedule_structure,
)
from pyg_dynbatch.core.errors import Mismatch
from tests.core.helpers import as_users_run_it

SCALAR, VECTOR = TensorType(()), TensorType((2,))
PAIR = (SCALAR, VECTOR)
EDGES = torch.tensor([[0, 1], [2, 2]])
SUM = Signature("sum", (Ragged(SCALAR),), (SCALAR,))


def structure(**fields: Any) -> Callable[[], Any]:
    return lambda: schedule_structure(**({"edge_index": EDGES, "num_nodes": 3} | fields))


def constant(row_type: Any, data: Any) -> Callable[[], Any]:
    return lambda: Recording().constant(row_type, data)


def one(model: str = "") -> Recording:
    recording = Recording(model=model)
    recording.output(recording.constant(SCALAR, 1.0))
    return recording


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    **{
        f"edge_index {each!r}": (structure(edge_index=each), "edge_index is not a dense tensor")
        for each in ([[0, 1], [2, 2]], None, EDGES.numpy(), EDGES.to("meta"), EDGES.to_sparse())
    },
    **{
        f"num_nodes {each!r}": (structure(num_nodes=each), "invalid num_nodes")
        for each in ("3", 3.0, None, -3, 2**70)
    },
    **{
        f"arity {each!r}": (structure(arity=each), "invalid arity")
        for each in ("2", 2.0, -1, 2**50)
    },
    "child_slot": (structure(child_slot=[0, 1]), "child_slot is not a dense tensor"),
    "has_input": (structure(has_input=[True] * 3), "has_input is not a dense tensor"),
    **{
        f"sizes {each!r}": (structure(example_sizes=each), "example_sizes are not integers")
        for each in (3, [[3]], [[3], [1, 2]], "3", [3.0], ["3"])
    },
    **{
        f"type {each!r}": (constant(each, 1.0), "constant: not a row type")
        for each in (None, "x", [SCALAR], ())
    },
    **{
        f"constant {each!r}": (constant(SCALAR, each), "constant: not a number or array of numbers")
        for each in (None, "a", int, 2**80, np.datetime64("2020-01-01"), torch.ones(()).to("meta"))
    },
    "lists": (constant(VECTOR, [[1], [2, 3]]), "constant: not a number or array of numbers"),
    "sparse": (constant(VECTOR, torch.ones(2).to_sparse()), "constant: not a number or array of"),
    "no parts": (constant(PAIR, None), "constant: wrong number of parts"),
    **{
        f"row {each!r}": (lambda row=each: Recording().input(SCALAR, row), "input: invalid row")
        for each in (0.5, "0", None, -1, 2**40)
    },
    "input type": (lambda: Recording().input("x", 0), "input: not a row type"),
    "rows": (lambda: Recording().declare_inputs(SCALAR, 2.5), "fewer rows than are read, or no"),
    "rows type": (lambda: Recording().declare_inputs(None, 2), "declare_inputs: not a row type"),
    "ragged": (lambda: Recording().call(SUM, 3), "not a value of a recording"),
    "output": (lambda: one().output(3), "not a value of a recording"),
    **{
        f"{run.__name__} {each!r}": (lambda run=run, each=each: run(each), what)
        for run in (schedule_recordings, lambda given: run_one_by_one(Engine(Operations()), given))
        for each, what in (
            (None, "not a list of recordings"), (one(), "not a list of recordings"),
            ("ab", "not a recording"), ([one(), 3], "not a recording"),
            ([[one()]], "not a recording"), ([one("a"), one("b")], "of different models"),
            ([one("a"), one()], "of different models"),
        )
    },
    "policy": (lambda: schedule_recordings([one()], ["depth"]), "unknown policy"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_wrong_types_are_named(name: str) -> None:
    run, what = CASES[name]
    with as_users_run_it(), pytest.raises((TypeError, ValueError)) as raised:
        run()
    assert isinstance(raised.value.args[0], Mismatch)
    assert what in str(raised.value), raised.value


def test_integers_of_other_libraries_are_integers() -> None:
    wanted = structure()()
    with as_users_run_it():
        for nodes in (np.int64(3), torch.tensor(3)):
            sizes = torch.tensor([3])
            assert schedule_structure(EDGES, nodes, example_sizes=sizes) == wanted  # type: ignore[arg-type]


def test_both_models_of_mixed_recordings_are_named() -> None:
    models = [Compiler(Map(Scalar()) >> each) for each in (Sum(), Mean())]
    recordings = [model.tracer([1.0]) for model in models]
    with pytest.raises(ValueError, match="different models") as raised:
        schedule_recordings(recordings)
    assert all(recording.model in str(raised.value) for recording in recordings)
