"""What the core refuses, and what the message says: what, expected, got, where, and a hint."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pyg_dynbatch.core import (
    Engine,
    Operation,
    Operations,
    Ragged,
    Recording,
    Signature,
    TensorType,
    depth_of,
    roots_of,
    slots_of,
)
from pyg_dynbatch.core.errors import mismatch_text
from pyg_dynbatch.core.levels import schedule_structure
from pyg_dynbatch.core.scheduling import schedule_recordings
from tests.core.helpers import (
    SCALAR,
    VECTOR,
    WORD,
    Vectors,
    chain_program,
    message,
    refuses,
    tree_program,
)
from tests.strategies import diamond, star

WIDE, UINT8 = TensorType((4,)), torch.uint8
ADD = Signature("add", (SCALAR, SCALAR), (SCALAR,))
MIX = Vectors().mix
EDGES = torch.tensor([[0, 1, 2], [2, 2, 3]])
CYCLE = torch.tensor([[0, 1], [1, 0]])
NO_EDGES = torch.zeros(2, 0, dtype=torch.long)
RING = torch.stack([torch.arange(50), (torch.arange(50) + 1) % 50])


def constant(shape: Any, dtype: torch.dtype | None, data: Any) -> Any:
    return Recording().constant(TensorType(shape, dtype), data)


def call(*data: Any) -> Any:
    """Call an addition on constants, and on other things as they are."""
    recording = Recording()
    assert recording.num_calls == 0
    values = [
        recording.constant(SCALAR if isinstance(d, float) else VECTOR, d)
        if isinstance(d, float | list)
        else d
        for d in data
    ]
    try:
        return recording.call(ADD, *values)
    finally:
        assert recording.num_calls == 0


def called(operation: Any) -> Any:
    recording = Recording()
    return recording.call(operation, recording.constant(VECTOR, [1, 2, 3]))


def decided(by: Callable[[Any], Any]) -> Any:
    recording = Recording()
    return by(recording.call(ADD, recording.constant(SCALAR, 0.0), recording.constant(SCALAR, 0.0)))


def ragged() -> Any:
    recording, total = Recording(), Signature("total", (Ragged(SCALAR),), (SCALAR,))
    values = [recording.constant(SCALAR, 1.0), recording.constant(VECTOR, [1, 2, 3])]
    return recording.call(total, values)


def declared(rows: int) -> Any:
    recording = Recording()
    recording.input(SCALAR, 4)
    return recording.declare_inputs(SCALAR, rows)


def output(own: bool) -> Any:
    recording = Recording()
    recording.output(recording.constant(SCALAR, 1.0), "a")
    other = recording.constant(VECTOR, [1, 2, 3]) if own else Recording().constant(SCALAR, 1.0)
    return recording.output(other, "a")


def added(name: str, again: bool = False) -> Any:
    operations, shared = Operations(), nn.Tanh()
    operations.add(shared, [VECTOR], [VECTOR], name="encode")
    if again:
        return operations.add(shared, [VECTOR], [SCALAR])
    return operations.add(nn.Tanh(), [VECTOR], [VECTOR], name=name)


def scheduled(then: str = "", policy: Any = "depth") -> Any:
    recordings = [tree_program(MIX, (1, 2)), Recording()]
    if then == "output":
        recordings[1].output(recordings[1].constant(WIDE, [0] * 4))
    if then == "call":
        recordings[1].call(
            Signature("mix", (WIDE,), (WIDE,)), recordings[1].constant(WIDE, [0] * 4)
        )
    return schedule_recordings(recordings, policy)


def of_levels(edges: Any = EDGES, nodes: int = 4, **options: Any) -> Any:
    return schedule_structure(edges, nodes, **options)


def run(signature: Signature) -> Any:
    recording = Recording()
    (kind,) = signature.inputs
    recording.call(signature, recording.constant(kind, [0] * kind.shape[0]))
    return Vectors().engine(schedule_recordings([recording]))


BEYOND = "ValueError … Recording.constant: a number is beyond the range of its dtype … "
FIELD = " has an invalid shape, dtype or value … "
TWO_ARGUMENTS = {"arity": 1, "direction": "top_down", "child_slot": torch.zeros(4).long()}
ERRORS: list[tuple[Callable[[], Any], str]] = [
    # Types and signatures.
    (lambda: TensorType((3, -1)), "ValueError … TensorType: negative dimension … [3, -1]"),
    (lambda: Signature("", (VECTOR,), (VECTOR,)), "ValueError … name or outputs are empty … ''"),
    (lambda: Signature("add", (VECTOR,), ()), "ValueError … name or outputs are empty … 'add'"),
    (
        lambda: Signature("noise", (), (VECTOR,), random=True),
        "ValueError … Signature 'noise': random, but without an argument … call it on a constant",
    ),
    (lambda: Operation(ADD, 3), "TypeError … Operation 'add': module is not callable … int"),
    *(
        (partial(added, name), f"Operations: the name {name!r} is taken or has a full stop … none "
         "of: encode") for name in ("encode", "a.b")
    ),
    (
        lambda: added("", again=True),
        "ValueError … 'encode' was added before with other outputs … float32[3] … float32[]",
    ),
    (lambda: Engine([nn.Linear(3, 3)]), "TypeError … Engine: not Operations … list"),
    (
        lambda: Engine(Operations())(schedule_recordings([chain_program(MIX, 3)])),
        "LookupError … Engine: no operation is called 'mix' … one of none … "
        "mix(float32[3], float32[3]) -> float32[3]",
    ),
    (
        lambda: run(Signature("squash", (WIDE,), (WIDE,))),
        "TypeError … Engine: operation 'squash' has a different signature … "
        "squash(float32[3]) -> float32[3] … squash(float32[4]) -> float32[4]",
    ),
    # Recordings.
    *(
        (partial(decided, by), "TypeError … used as a truth value while calls are recorded … "
         "depth 1 … torch.where") for by in (bool, lambda h: not h, lambda h: h and 1)
    ),
    (lambda: constant((3,), torch.float32, [1.0, 2.0]),
     "ValueError … Recording.constant: … shape differs … float32[3] … float64[2]"),
    (lambda: Recording().constant(WORD, 1.5),
     "TypeError … Recording.constant: … dtype differs … int64[]<word>"),
    (lambda: Recording().constant((SCALAR, VECTOR), (1.0,)),
     "ValueError … Recording.constant: … number of parts … (float32[], float32[3])"),
    *(
        (partial(constant, (1,) * np.ndim(data), torch.float32, data),
         "TypeError … Recording.constant: ")
        for data in (2 + 3j, np.ma.masked, np.ma.array([1.0], mask=[True]))
    ),
    *(
        (partial(constant, np.shape(data), UINT8, data), BEYOND + "uint8 … from 0 to 255")
        for data in (300, [-1], np.array(300), torch.tensor([1, 256]))
    ),
    (lambda: constant((), torch.bool, 2), "ValueError … expected: bool[], 0 or 1"),
    *(
        (partial(constant, (), dtype, data), BEYOND + str(data)) for dtype, data in (
            (torch.float32, 1e300), (torch.float16, 70000), (torch.bfloat16, 3.4e38))
    ),
    (lambda: declared(4), "ValueError … fewer rows than are read … at least 5"),
    (lambda: Recording().input(SCALAR, -1), "ValueError … Recording.input: invalid row"),
    *(
        (partial(called, operation), "TypeError … Recording.call: not a signature … got:      "
         f"{type(operation).__name__} … operations.add(module, inputs, outputs)")
        for operation in (nn.Linear(3, 3), torch.tanh, "add", None)
    ),
    (lambda: call(1.0), "TypeError … Operation 'add': wrong number of arguments … "
     "2: add(float32[], float32[]) -> float32[] … call 0"),
    (lambda: call(1.0, [1, 2, 3]),
     "TypeError … Operation 'add': argument types differ … call 0, argument 1"),
    (ragged, "TypeError … argument types differ"),
    (lambda: call(1.0, 1), "TypeError … Recording: not a value of a recording … int … "
     "recording.constant(row_type, data)"),
    (lambda: call(1.0, Recording().constant(SCALAR, 1.0)),
     "ValueError … Recording: a value of a different recording … Value(0, float32[], depth 0)"),
    (lambda: output(own=True), "TypeError … Recording.output: 'a' mixes two types … "
     "use a separate name for each type"),
    (lambda: output(own=False), "ValueError … output 'a'"),
    *(
        (lambda copier=copier: copier(Recording().constant(SCALAR, 1.0)),
         "TypeError … a value cannot be pickled or copied … pickle the recording")
        for copier in (pickle.dumps, copy.deepcopy)
    ),
    # Schedules and policies.
    (lambda: schedule_recordings([]),
     "ValueError … the list of recordings is empty … at least one recording"),
    (lambda: scheduled(policy="widest"), "ValueError … schedule_recordings: unknown policy "
     "'widest' … 'depth' or 'agenda'"),
    (lambda: scheduled(policy=lambda graph: graph), "ValueError … unknown policy"),
    (lambda: scheduled("output"), "TypeError … output 'output' has two types … float32[4]"),
    (lambda: scheduled("call"), "TypeError … two signatures are called 'mix' … "
     "take all signatures from one Operations object"),
    # Structures.
    *(
        (partial(function, edges, 3), f"ValueError … {function.__name__}: {words}")
        for function in (depth_of, slots_of, roots_of) for edges, words in (
            (torch.tensor([[0, 1], [1, 7]]),
             "an edge has a node that does not exist … 0 to 2 … 1 -> 7 … edge 1"),
            (torch.tensor([[-1], [0]]), "an edge has … -1 -> 0"),
            *((torch.zeros(shape, dtype=dtype), "edge_index has an invalid shape or dtype … "
               f"int64 tensor [2, edge] … {list(shape)}") for shape, dtype in (
                ((3, 2), torch.long), ((2, 2), torch.float), ((2, 1), torch.int32))))
    ),
    (lambda: depth_of(torch.tensor([[0, 1, 2, 2, 4], [1, 2, 0, 3, 5]]), 6),
     "ValueError … edge_index has a cycle … 0 -> 1 -> 2 -> 0 … remove one edge"),
    (lambda: depth_of(torch.tensor([[0, 3], [3, 3]]), 4), "ValueError … 3 -> 3"),
    (lambda: depth_of(RING, 50), "ValueError … a cycle of 50 nodes: 0 -> 1 -> 2 … …"),
    *(
        (partial(of_levels, CYCLE, 2, direction=way), "ValueError … edge_index has a cycle")
        for way in ("bottom_up", "top_down")
    ),
    (lambda: of_levels(direction="sideways"), "ValueError … schedule_structure: unknown "
     "direction … 'bottom_up' or 'top_down'"),
    (lambda: of_levels(arity=-1), "ValueError … invalid arity"),
    (lambda: of_levels(nodes=3), "ValueError … schedule_structure: an edge has a node that does "
     "not exist … 2 -> 3"),
    *(
        (partial(of_levels, arity=arity, **{name: value}),
         f"ValueError … {name}{FIELD}{wanted} … {got}")
        for arity in (None, 2) for name, wanted, value, got in (
            ("has_input", "bool tensor [4]", torch.ones(3).bool(), "bool tensor [3]"),
            *(("child_slot", "int64 tensor [3], one number >= 0 per edge", torch.tensor(slots), g)
              for slots, g in (([0, 1], "int64 tensor [2]"), ([0, -1, 0], "smallest -1"),
                               ([0.0, 1.0, 0.0], "float32 tensor [3]"))),
            ("child_slot", "int64 tensor [3]", torch.zeros(3).int(), "int32 tensor [3]"))
    ),
    *(
        (partial(of_levels, arity=arity, has_input=torch.ones(4)),
         "ValueError … has_input is not a mask … integers 0 and 1 … float32 tensor [4]")
        for arity in (None, 2)
    ),
    (lambda: of_levels(star(4).edge_index, arity=2), "ValueError … node 0 has a child beyond the "
     "arity … child slots below 2 … slot 2 … arity=3; or … cell='child_sum'"),
    (lambda: of_levels(child_slot=torch.tensor([1, 1, 0]), arity=2), "ValueError … node 2 has two "
     "arguments in one slot … slot 1 taken by nodes [0, 1]"),
    (lambda: of_levels(diamond().edge_index, **TWO_ARGUMENTS),
     "ValueError … two arguments in one slot … use arity=None"),
    *(
        (partial(of_levels, NO_EDGES, 5, example_sizes=sizes),
         "ValueError … example_sizes does not fit the nodes … add up to 5")
        for sizes in ([2, 2], [6, -1], [2**63 - 1, 2**63 - 1, 7])
    ),
    *(
        (partial(of_levels, NO_EDGES, 5, example_sizes=np.array(sizes)),
         "TypeError … example_sizes are not integers")
        for sizes in ([2.5, 2.5], [True, True], ["2", "3"])
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_what_is_refused_is_said(case: tuple[Callable[[], Any], str]) -> None:
    refuses(*case)


@pytest.mark.parametrize("name", ["has_input", "child_slot"])
def test_fields_of_any_arity_are_refused_alike(name: str) -> None:
    texts = {message(ValueError, of_levels, arity=n, **{name: torch.ones(2)}) for n in (None, 2)}
    assert len(texts) == 1


def test_all_parts_stand_in_order() -> None:
    text = mismatch_text("Thing: odd", "even", 3, where="line 1", hint="add one")
    assert text.splitlines() == [
        "Thing: odd.",
        "  expected: even",
        "  got:      3",
        "  where:    line 1",
        "  try:      add one",
    ]
    assert mismatch_text("Thing: odd", got=0) == "Thing: odd.\n  got:      0"
    assert mismatch_text("Thing: odd") == "Thing: odd."
