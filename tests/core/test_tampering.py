"""Recordings and levels with wrong fields are refused, or run: they never end the process."""

import copy
import pickle
import random
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from pyg_dynbatch.core import (
    Engine,
    Levels,
    Operations,
    Ragged,
    Recording,
    Signature,
    TensorType,
    joining,
    schedule_structure,
    scheduling,
)
from pyg_dynbatch.core.recording import Site, Sites
from pyg_dynbatch.core.types import RaggedRows, parts_of
from pyg_dynbatch.nn import ChildSumTreeLSTM, NaryTreeLSTM
from tests.core.helpers import unfused
from tests.core.test_definitions import SIGNATURES, random_recording


def module_of(signature: Signature) -> Callable[..., Any]:
    """Return a function that adds up the first numbers of what it is given."""

    def rows_of(size: int, part: TensorType, total: torch.Tensor) -> torch.Tensor:
        return total.view(size, *[1] * len(part.shape)).expand(size, *part.shape)

    def run(*arguments: Any) -> Any:
        size, total = 1, torch.zeros(1)
        for given in arguments:
            if isinstance(given, RaggedRows):
                size, given = given.num_calls, given.sum()
            first = given[0] if isinstance(given, tuple) else given
            size = first.size(0)
            total = total + first.reshape(size, -1)[:, 0]
        made = [
            tuple(rows_of(size, part, total) for part in parts_of(row_type))
            if isinstance(row_type, tuple) else rows_of(size, row_type, total)
            for row_type in signature.outputs
        ]  # fmt: skip
        return made[0] if len(made) == 1 else tuple(made)

    return run


def engine() -> Engine:
    operations = Operations()
    for each in SIGNATURES:
        facts: Any = {"name": each.name, "random": each.random}
        operations.add(module_of(each), each.inputs, each.outputs, **facts)
    return Engine(operations)


def number(draw: random.Random) -> int:
    return draw.choice([-1, 0, 1, 2, 3, 5, 8, 20, 1000, -7, 2**31 - 1, -(2**31)])


def vector(draw: random.Random, values: Any) -> Any:
    """Return integers of which one is different, missing or added, or of another form."""
    found, place = np.array(values, dtype=np.int32), draw.randrange(len(values) + 1)
    match draw.randrange(9):
        case 0:
            return np.insert(found, place, number(draw)).astype(np.int32)
        case 1:
            return np.delete(found, slice(place, place + draw.randrange(3)))
        case 2:
            return found.astype(draw.choice([np.int64, np.float32, np.uint8, np.int16, object]))
        case 3:
            return draw.choice([None, "code", 3, found[None], found[::-1], found[::2], [*found]])
        case 4:
            draw.shuffle(shuffled := found.tolist())
            return np.array(shuffled, dtype=np.int32)
        case _:
            found[place : place + 1] = number(draw)
            return found


def tamper(draw: random.Random, recording: Recording) -> Recording:
    """Return a recording of which one field is different."""
    field = draw.choice(["code", "code", "code", "data", "num_inputs", "outputs", "sites"])
    found = getattr(recording, field)
    if field == "code":
        return replace(recording, code=vector(draw, found))
    if field == "sites":
        return replace(recording, sites=tampered_sites(draw, found))
    found = dict(found)
    if field == "outputs" and found:
        name = draw.choice([*found])
        found[name] = vector(draw, found[name])
    elif field == "num_inputs":
        wrong = draw.choice([number(draw), 0.5, None, "1", 2**40])
        found[draw.choice([*recording.sites.row_types, TensorType((9,))])] = wrong
    elif field == "data" and found:
        site = draw.choice([*found])
        rows = found[site][0][0]
        wrong = [
            [],
            None,
            rows,
            [rows],
            [(rows,)],
            [(rows[:0],)],
            [(rows, rows)],
            [*found[site]] * 2,
        ]
        wrong += [[(rows.astype(object),)], [(rows[..., None],)], [(rows.astype(np.complex64),)]]
        found[draw.choice([site, -1, number(draw), "site"])] = draw.choice(wrong)
    return replace(recording, **{field: draw.choice([found] * 9 + [None])})


def tampered_sites(draw: random.Random, sites: Sites) -> Any:
    found = list(sites)
    if not found:
        return draw.choice([None, (), Sites([None])])
    place, scalar = draw.randrange(len(found)), TensorType(())
    site = found[place]
    wrong: list[Any] = [site._replace(kind=number(draw)), site._replace(results=()), None]
    wrong += [site._replace(signature=draw.choice([None, *SIGNATURES])), site._replace(kind=None)]
    wrong += [site._replace(results=(scalar, scalar)), Site(0, (scalar,)), Site(1, (scalar,))]
    called = pickle.loads(pickle.dumps(draw.choice(SIGNATURES)))
    object.__setattr__(called, "inputs", draw.choice([(), (scalar,), (None,), (Ragged(scalar),)]))
    found[place] = draw.choice([*wrong, Site(2, called.outputs, called), draw.choice(found)])
    return draw.choice([Sites(found), Sites(found), Sites(found[:place]), tuple(found)])


def schedule(recordings: list[Recording], extension: Any) -> Any:
    """Return the steps, or None if the recordings are refused."""
    with mock.patch.object(joining, "extension", extension):
        try:
            return scheduling.schedule_recordings(recordings)
        except ValueError as error:
            assert "schedule_recordings: " in str(error), error
            return None
        except TypeError as error:  # of recordings that do not go together
            assert "has two types" in str(error) or "are called" in str(error), error
            return None


def tamper_with_recordings(seeds: range, runs: bool = True) -> int:
    """Return how many are refused."""
    model, refused = engine(), 0
    for seed in seeds:
        draw = random.Random(seed)
        recordings = [random_recording(draw, 6) for _ in range(1 + draw.randrange(3))]
        place = draw.randrange(len(recordings))
        recordings[place] = tamper(draw, recordings[place])
        steps = schedule(recordings, joining.extension)
        refused += steps is None
        if seed % 10 == 0:
            with unfused():  # as definitions do
                pair = [schedule(recordings, each) for each in (joining.extension, lambda: None)]
            assert pair[0] == pair[1] and (pair[0] is None) == (steps is None), seed
        if runs and steps is not None:
            rows = sum(buffer.inputs for buffer in steps.buffers)
            if rows < 1000:
                inputs = {
                    b.row_type: tuple(torch.zeros(b.inputs, *p.shape) for p in parts_of(b.row_type))
                    for b in steps.buffers
                }
                inputs = {k: v if isinstance(k, tuple) else v[0] for k, v in inputs.items()}
                try:
                    model(steps, inputs)
                except (TypeError, LookupError) as error:  # signatures of other operations
                    assert "Engine" in str(error), (seed, error)
    return refused


def random_levels(draw: random.Random) -> Levels:
    nodes, down = draw.randrange(9), draw.random() < 0.4
    pairs = [(a, b) for b in range(nodes) for a in range(b) if draw.random() < 0.3]
    if draw.random() < 0.6:  # a tree
        pairs = [(a, draw.randrange(a + 1, nodes)) for a in range(nodes - 1)]
    edges = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t()
    sizes, facts = [nodes], dict[str, Any](direction="top_down" if down else "bottom_up")
    if draw.random() < 0.5:
        sizes = [draw.randrange(nodes + 1)]
        sizes += [nodes - sizes[0], 0]
    if draw.random() < 0.5:
        facts["has_input"] = torch.tensor([draw.random() < 0.7 for _ in range(nodes)]).bool()
    if not down and draw.random() < 0.5:
        facts["arity"] = nodes + 1
    if draw.random() < 0.3:
        facts["child_slot"] = torch.tensor(draw.sample(range(len(pairs)), len(pairs))).long()
        facts.pop("arity", None)
    return schedule_structure(edges, nodes, example_sizes=sizes, **facts)


def tamper_with_one(draw: random.Random, levels: Levels) -> Levels:
    """Return levels of which one field is different."""
    names = ("num_nodes", "num_edges", "num_examples", "arity", "direction", "single_parent")
    match draw.randrange(5):
        case 0:
            value = draw.choice([number(draw), None, "up", 1.0, not levels.single_parent])
            return replace(levels, **{draw.choice(names): value})
        case 1:
            name = draw.choice(["level_sizes", "level_inputs", "level_children"])
            value = list(getattr(levels, name)) or [0]
            value[draw.randrange(len(value))] = number(draw)
            return replace(levels, **{name: draw.choice([tuple(value), value, (), value[:-1]])})
        case 2:
            index = levels.index
            wrong = [index.int(), index[None], index.flip(0), index[:-1], index.double()]
            wrong += [torch.cat([index, index])[::2], index.roll(1)]
            return replace(levels, index=draw.choice(wrong))
        case _:
            levels = levels.clone()
            if levels.index.numel():
                levels.index[draw.randrange(levels.index.numel())] = number(draw)
            return levels


def tamper_with_levels(seeds: range) -> int:
    """Return how many are refused; the others run, and C computes what torch does."""
    refused = 0
    layers: dict[Any, Any] = {
        (arity, direction): ChildSumTreeLSTM(3, 4, direction=direction) if arity is None
        else NaryTreeLSTM(3, 4, arity=arity, direction=direction)
        for arity in (None, *range(1, 10)) for direction in ("bottom_up", "top_down")
    }  # fmt: skip
    for seed in seeds:
        draw = random.Random(seed)
        levels = random_levels(draw)
        pickle.loads(pickle.dumps(levels)).check()
        layer = layers[levels.arity, levels.direction]
        x = torch.randn(levels.num_nodes, 3, requires_grad=True)
        wrong = tamper_with_one(draw, levels)
        try:
            rows = layer(x, schedule=wrong)
        except ValueError as error:
            refused += 1
            assert not isinstance(error, UnicodeError), seed
            continue
        (grad,) = torch.autograd.grad(rows.sum(), x)
        y = x.detach().double().requires_grad_()
        expected = copy.deepcopy(layer).double()(y, schedule=wrong)
        torch.testing.assert_close(rows.double(), expected, rtol=1e-4, atol=1e-4)
        (expected,) = torch.autograd.grad(expected.sum(), y)
        torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-4)
    return refused


# .ci/sanitize runs both on many more.
@pytest.mark.parametrize("tamper", [tamper_with_recordings, tamper_with_levels])
def test_wrong_fields_never_end_the_process(tamper, another_process: Executor) -> None:
    assert another_process.submit(tamper, range(200)).result() > 100
