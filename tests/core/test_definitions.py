"""The scheduler in C computes what its definitions in Python compute, on random recordings."""

import random
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from pyg_dynbatch.core import (
    Ragged,
    Recording,
    Signature,
    Steps,
    TensorType,
    joining,
    native,
    scheduling,
)
from pyg_dynbatch.core.operation import row_type_of
from pyg_dynbatch.core.recording import Value, records_of
from tests.core.helpers import unfused

ONE, PAIR, WORD = TensorType((2,)), (TensorType(()), TensorType((3,))), TensorType((), tag="word")
SIGNATURES = [
    Signature("start", (), (ONE,)),
    Signature("both", (), (ONE, PAIR)),
    Signature("embed", (WORD,), (ONE,)),
    Signature("join", (ONE, ONE), (ONE,)),
    Signature("noise", (ONE,), (ONE,), random=True),
    Signature("split", (ONE,), (ONE, PAIR, ONE)),
    Signature("sum", (Ragged(ONE),), (ONE,)),
    Signature("mixed", (Ragged(ONE), PAIR, Ragged(PAIR)), (PAIR, ONE)),
]
DATA = {ONE: [[0.0, 1.0], [0.0, -0.0]], PAIR: [(1, [2, 3, 4]), (1.5, [2, 3, 4])], WORD: [1, 2, 3]}


Body = list[tuple[Signature, list[int | None]]]


def random_body(draw: random.Random) -> Body:
    """Draw calls that come together: an argument is a result of the body, or from elsewhere."""
    made, body = list[Any](), Body()
    known = draw.sample(SIGNATURES, 1 + draw.randrange(4))
    for _ in range(1 + draw.randrange(6)):
        signature = draw.choice(known)
        if draw.random() < 0.8:  # called only here
            signature = replace(signature, name=f"{signature.name} {len(body)}")
        inside = [
            [n for n, each in enumerate(made) if each == row_type_of(wanted)]
            for wanted in signature.inputs
        ]
        refer = [draw.choice(own) if own and draw.random() < 0.7 else None for own in inside]
        body.append((signature, refer))
        made += signature.outputs
    return body


def random_recording(draw: random.Random, calls: int, bodies: Sequence[Body] = ()) -> Recording:
    """Draw calls, among them those of bodies, which come again and read each other."""
    recording, known = Recording(), {ONE: list[Value](), PAIR: list[Value](), WORD: list[Value]()}

    def value(row_type: object) -> Value:
        found = known[row_type]
        if not found or draw.random() < 0.2:
            if draw.random() < 0.3:
                found.append(recording.input(row_type, draw.randrange(3)))
            else:
                found.append(recording.constant(row_type, draw.choice(DATA[row_type])))
        return draw.choice(found)

    is_single, is_read = draw.choice([0.0, 0.1, 1.0]), draw.choice([0.0, 0.3, 1.0])
    for _ in range(draw.randrange(calls)):
        body, made = [(draw.choice(SIGNATURES), [None] * 3)], list[Value]()
        if bodies and draw.random() >= is_single:
            body = draw.choice(bodies)
        for signature, refer in body:
            arguments = list[Any]()
            for wanted, number in zip(signature.inputs, refer, strict=False):
                row_type = row_type_of(wanted)
                given = [value(row_type) if number is None else made[number]]
                if isinstance(wanted, Ragged):
                    given = given[number is None :] + [value(row_type)] * draw.randrange(3)
                arguments.append(given if isinstance(wanted, Ragged) else given[0])
            results = recording.call(signature, *arguments)
            made += results if isinstance(results, tuple) else (results,)
        for result in made[:-1]:
            if draw.random() < is_read:  # others may read it
                known[result.row_type].append(result)
        known[made[-1].row_type].append(made[-1])
    for row_type, name in ((ONE, "ones"), (PAIR, "pairs")):
        for found in known[row_type][-2:]:
            recording.output(found, name)
    if draw.random() < 0.3:
        recording.declare_inputs(ONE, 3)
    return recording


def random_recordings(draw: random.Random, calls: int) -> list[Recording]:
    bodies = [random_body(draw) for _ in range(draw.randrange(3))]
    return [random_recording(draw, calls, bodies) for _ in range(1 + draw.randrange(4))]


def schedules(seed: int, calls: int = 8) -> list[tuple[Steps, int]]:
    """Schedule random recordings in C and by definition, which does not fuse calls."""
    draw, found = random.Random(seed), []
    recordings = random_recordings(draw, calls)
    policy = draw.choice(["depth", "agenda"])
    for extension in (native.extension, lambda: None):
        with mock.patch.object(joining, "extension", extension), unfused():
            steps = scheduling.schedule_recordings(recordings, policy)
        found.append((steps, steps.merged_calls))
    return found


def check_schedules(seeds: range) -> None:
    for seed in seeds:
        in_c, by_definition = schedules(seed, 2 + seed % 7)
        assert in_c == by_definition, seed


def test_c_follows_the_definitions() -> None:
    assert native.extension() is not None
    check_schedules(range(40))


@pytest.mark.long
def test_c_follows_the_definitions_on_many_recordings(another_process: Executor) -> None:
    # Checks of annotations would take hours.
    another_process.submit(check_schedules, range(4_000)).result()


def test_records_are_decoded_one_after_another() -> None:
    recording = random_recording(random.Random(3), 30)
    found = list(records_of(recording.sites, recording.code))
    assert [record.begin for record in found[1:]] == [record.end for record in found[:-1]]
    assert found[-1].end == len(recording.code)
    begins = joining.begins_of(recording.sites, np.array(recording.code, dtype=np.int32))
    assert begins.tolist() == [record.begin for record in found]
