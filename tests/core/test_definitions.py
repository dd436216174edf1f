"""The scheduler in C computes what its definitions in Python compute, on random recordings."""

import random
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from pyg_dynbatch.core import Ragged, Recording, Signature, Steps, TensorType, native, scheduling
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


def chained(recording: Recording, one: Value, two: Value) -> Value:
    """Record calls that nobody else reads: all but the first are made in one step."""
    first, last = (Signature(name, (ONE, ONE), (ONE,)) for name in ("first", "last"))
    inner = Signature("inner", (ONE,), (ONE,))
    ragged = Signature("whole", (Ragged(ONE), ONE), (ONE,))
    both = recording.call(first, one, recording.call(inner, two))
    return recording.call(last, recording.call(ragged, [one, one], both), two)


def random_recording(draw: random.Random, calls: int) -> Recording:
    recording, known = Recording(), {ONE: list[Value](), PAIR: list[Value](), WORD: list[Value]()}

    def value(row_type: object) -> Value:
        found = known[row_type]
        if not found or draw.random() < 0.2:
            if draw.random() < 0.3:
                found.append(recording.input(row_type, draw.randrange(3)))
            else:
                found.append(recording.constant(row_type, draw.choice(DATA[row_type])))
        return draw.choice(found)

    fusible = draw.random() < 0.5
    for _ in range(draw.randrange(calls)):
        if fusible and draw.random() < 0.6:
            known[ONE].append(chained(recording, value(ONE), value(ONE)))
            continue
        signature = draw.choice(SIGNATURES)
        arguments = [
            [value(wanted.row_type) for _ in range(draw.randrange(4))]
            if isinstance(wanted, Ragged) else value(wanted)
            for wanted in signature.inputs
        ]  # fmt: skip
        results = recording.call(signature, *arguments)
        for result in results if isinstance(results, tuple) else (results,):
            known[result.row_type].append(result)
    for row_type, name in ((ONE, "ones"), (PAIR, "pairs")):
        for found in known[row_type][-2:]:
            recording.output(found, name)
    if draw.random() < 0.3:
        recording.declare_inputs(ONE, 3)
    return recording


def schedules(seed: int, calls: int = 8) -> list[tuple[Steps, int]]:
    """Schedule random recordings in C and by definition, which does not fuse calls."""
    draw, found = random.Random(seed), []
    recordings = [random_recording(draw, calls) for _ in range(1 + draw.randrange(4))]
    policy, merge_equal = draw.choice(["depth", "agenda"]), draw.random() < 0.8
    for extension in (native.extension, lambda: None):
        with mock.patch.object(scheduling, "extension", extension), unfused():
            steps = scheduling.schedule_recordings(recordings, policy, merge_equal=merge_equal)
        found.append((steps, steps.merged_calls))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_c_follows_the_definitions(seed: int) -> None:
    assert native.extension() is not None
    in_c, by_definition = schedules(seed)
    assert in_c == by_definition


@pytest.mark.long
def test_c_follows_the_definitions_on_many_recordings() -> None:
    """In a process that does not check annotations, which would take hours."""
    code = "from tests.core.test_definitions import schedules\n"
    code += "for seed in range(20_000):\n    in_c, by_definition = schedules(seed, 2 + seed % 7)\n"
    code += "    assert in_c == by_definition, seed\n"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_records_are_decoded_one_after_another() -> None:
    recording = random_recording(random.Random(3), 30)
    found = list(records_of(recording.sites, recording.code))
    assert [record.begin for record in found[1:]] == [record.end for record in found[:-1]]
    assert found[-1].end == len(recording.code)
    begins = scheduling.begins_of(recording.sites, np.array(recording.code, dtype=np.int32))
    assert begins.tolist() == [record.begin for record in found]
