"""Run the examples of a batch side by side, each until it reads a value."""

from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any

import torch

from pyg_dynbatch.autobatch.lazy import Lazy
from pyg_dynbatch.autobatch.session import Session

try:
    from greenlet import getcurrent, greenlet
except ImportError:  # every read then flushes at once
    greenlet = None


def take_turns() -> bool:
    """Return whether examples can wait for values, for which greenlet must be installed."""
    return greenlet is not None


def run_examples(
    session: Session, function: Callable[[Any], Any], examples: Sequence[Any]
) -> list[Any]:
    """Record all examples; whenever each has finished or waits, run what is needed and go on."""
    if not take_turns() or len(examples) == 1:
        results = []
        for number, example in enumerate(examples):
            session.turn(number)
            results.append(function(example))
        return results
    hub = getcurrent()
    results = [None] * len(examples)
    todo = iter(enumerate(examples))
    state = session.table.state
    awaited = list[Lazy]()
    running = list[greenlet]()

    def suspend(value: Lazy) -> None:
        _, number = session.turns[-1]
        is_switched = torch.is_grad_enabled() is not session.grad
        if is_switched:  # not for other examples
            torch._C._set_grad_enabled(session.grad)
        awaited.append(value)
        hub.switch()
        state.waiting.discard(number)
        session.turn(number)
        if is_switched:
            torch._C._set_grad_enabled(not session.grad)

    def work() -> None:
        """Run examples until one waits; when that one has finished, go on with others."""
        for number, example in todo:
            session.turn(number)
            results[number] = function(example)
            state.turn_ends(number)
            if session.suspend is None:  # an example has failed
                return

    def go_on(fiber: greenlet) -> None:
        fiber.switch()
        if not fiber.dead:
            _, number = session.turns[-1]
            state.waiting.add(number)
            state.turn_ends(number)

    session.suspend = suspend
    try:
        while not (running and running[-1].dead):
            fiber = greenlet(work)
            fiber.gr_context = copy_context()
            running.append(fiber)
            go_on(fiber)
        while running := [fiber for fiber in running if not fiber.dead]:
            session.flush(read_now=[value._number for value in awaited])
            session.fetch(awaited)
            awaited.clear()
            for fiber in running:
                go_on(fiber)
    finally:
        session.suspend = None
        for fiber in running:
            if not fiber.dead:
                fiber.throw()
    return results
