"""Run the examples of a batch side by side, each until it reads a value."""

from collections.abc import Callable, Sequence
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
    hub, results = getcurrent(), [None] * len(examples)
    wanted: list[Lazy] = []

    def suspend(value: Lazy) -> None:
        number: Any = session.example
        grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(session.grad)  # not for other examples
        wanted.append(value)
        hub.switch()
        session.turn(number)
        torch._C._set_grad_enabled(grad)

    def turn(number: int, fiber: Any, *given: Any) -> None:
        results[number] = fiber.switch(*given)
        watch = session.table.watch
        (watch.waiting.discard if fiber.dead else watch.waiting.add)(number)
        watch.turn_ends(number)

    session.suspend = suspend
    running = []
    try:
        for number, example in enumerate(examples):
            session.turn(number)
            fiber = greenlet(function)
            running.append((number, fiber))
            turn(number, fiber, example)
        while running := [(number, fiber) for number, fiber in running if not fiber.dead]:
            session.flush(needed=[value._number for value in wanted])
            session.fetch(wanted)
            wanted.clear()
            for number, fiber in running:
                turn(number, fiber)
    finally:
        session.suspend = None
        for _, fiber in running:
            if not fiber.dead:
                fiber.throw()
    return results
