"""Loops, branches and stacks: their cases one by one, and what they refuse."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pyg_dynbatch.autobatch import AutoBatch, Stack, autobatch, cond, emit, rows, while_loop
from tests.autobatch.test_autobatch import Wrap

Function = Callable[[Any, Any], Any]
ROWS = [*torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double()]
COUNTS = [torch.tensor(n) for n in (3, 0, 1, 7, 0)]
PAIRS = list(zip(ROWS, COUNTS, strict=True))


class Pair(NamedTuple):
    """A state with names."""

    vector: Any
    steps: Any


def model_of(function: Function, **parts: nn.Module) -> Any:
    torch.manual_seed(0)
    parts.setdefault("part", nn.Linear(3, 3))
    model: Any = Wrap(function, **parts).double()
    model.start = nn.Parameter(torch.randn(3).double())
    return model


def gradients(model: nn.Module, result: Any) -> list[Tensor]:
    loss = sum(p.sum() * 0 for p in model.parameters())
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            loss = loss + (leaf * torch.arange(1, leaf.numel() + 1).view(leaf.shape)).sum()
    return list(torch.autograd.grad(loss, list(model.parameters())))  # type: ignore[arg-type]


def check(model: nn.Module, given: Any) -> Any:
    """Batched and one by one agree in values and gradients."""
    batched = autobatch(model)
    ours, theirs = batched(given), batched(given, batch=False)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    found, expected = gradients(model, ours), gradients(model, theirs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    return batched


def repeated(m: Any, x: Any, count: Any, body: Callable[[Any], Any] | None = None) -> Any:
    step = body or (lambda x: torch.tanh(m.part(x)))
    last, _ = while_loop(
        lambda x, i: i < count, lambda x, i: (step(x), i + 1), (x, torch.tensor(0))
    )
    return last


def structured(m: Any, pair: Any) -> Any:
    x, count = pair

    def body(state: Any, deep: Any) -> Any:
        step = m.part(state.vector) + deep["a"][0]
        return Pair(step, state.steps + 1), {"a": [deep["a"][0] * 0.5]}

    state, deep = while_loop(
        lambda state, deep: state.steps < count, body, (Pair(x, torch.tensor(0)), {"a": [x]})
    )
    return state.vector, state.steps, deep["a"][0]


def fibonacci(m: Any, pair: Any) -> Any:
    x, count = pair
    _, last, _ = while_loop(
        lambda a, b, n: n < count, lambda a, b, n: (b, a + b, n + 1), (x, m.part(x), count * 0)
    )
    return last


def nested(m: Any, pair: Any) -> Any:
    x, count = pair

    def outer(x: Any, i: Any) -> Any:
        return repeated(m, x, i, lambda y: m.part(y) * 0.3 + x), i + 1

    return while_loop(lambda x, i: i < count, outer, (x, torch.tensor(0)))[0]


def collected(m: Any, pair: Any) -> Any:
    """Push what a loop makes, and sum what is on the stack, the last one doubled."""
    x, count = pair
    stack, _ = while_loop(
        lambda stack, i: i < count,
        lambda stack, i: (stack.push((m.part(stack.top[0]).tanh(), i)), i + 1),
        (Stack.of([(x, torch.tensor(5))]), torch.tensor(0)),
    )
    size = stack.size
    total, kept = while_loop(
        lambda total, stack: stack.size > 0,
        lambda total, stack: (lambda top, rest: (total + top[0] * top[1], rest))(*stack.pop()),
        (2 * stack.top[0], stack),
    )
    return total, size, kept.size


def shared(m: Any, pair: Any) -> Any:
    """Grow two stacks from one."""
    x, count = pair
    below = Stack(x).push(x).push(m.part(x))
    left, right = below.push(x + count), below.pop()[1].push(x * 2)
    return left.top + right.top + left.peek(1) + right.peek(1), left.size, right.size


def ragged(m: Any, pair: Any) -> Any:
    x, count = pair
    stack = Stack.of(rows(x.expand(int(count) + 1, 3) * torch.arange(int(count) + 1)[:, None]))
    return m.part(stack.top), stack.size


def without_gradients(m: Any, pair: Any) -> Any:
    x, count = pair
    with torch.no_grad():
        y = repeated(m, x, count)
    stack = Stack(x).push(m.part(x))
    with torch.no_grad():
        z = stack.push(m.part(y)).top
        read = stack.top
    return m.part(x) + y + z + read, stack.top


MODELS: dict[str, Function] = {
    "loop": lambda m, p: repeated(m, *p),
    "no parameter": lambda m, p: repeated(m, p[0] + m.part(p[0]), p[1], lambda x: x * 0.5),
    "from a parameter": lambda m, p: repeated(m, m.start, p[1]),
    "to a parameter": lambda m, p: repeated(m, p[0], p[1], lambda x: m.start),
    "captured": lambda m, p: repeated(m, p[0], p[1], lambda x: m.part(x) + p[0] + m.start),
    "unread": lambda m, p: repeated(m, p[0], p[1], lambda x: (m.part(x * 2), m.part(x))[1]),
    "all end at once": lambda m, p: repeated(m, p[0], torch.tensor(2)) + m.part(p[0]),
    "structured": structured, "fibonacci": fibonacci, "nested": nested, "collected": collected,
    "shared": shared, "ragged": ragged, "no_grad": without_gradients,
    "cond": lambda m, p: cond(p[0].sum() > 0, m.part, lambda x: m.start, (p[0],)),
    "cond of one element": lambda m, p: cond((m.part(p[0]) > 0)[:1], m.part, torch.exp, (p[0],)),
    "cond without operands": lambda m, p: cond(p[1] > 1, lambda: m.part(p[0]), lambda: p[0]),
    "cond in Python": lambda m, p: cond(bool(p[1] > 1), m.part, torch.exp, (p[0],)),
    "one branch": lambda m, p: cond(p[1] < 99, m.part, torch.exp, (p[0],)),
    "operands of all kinds": lambda m, p: cond(
        p[1] > 1, lambda x, n: m.part(x["a"]) * n, lambda x, n: x["a"] / n, ({"a": p[0]}, 3)
    ),
    "cond in cond": lambda m, p: cond(
        p[1] < 1, m.part, lambda x: cond(p[1] < 3, torch.sin, lambda x: m.start, (x,)), (p[0],)
    ),
    "several results": lambda m, p: cond(
        p[1] > 1, lambda x: (m.part(x), {"n": p[1]}), lambda x: (x, {"n": p[1] + 1}), (p[0],)
    ),
    "stack in a branch": lambda m, p: cond(
        p[1] > 1, lambda s: s.push(m.part(p[0])), lambda s: s, (Stack.of([p[0]]),)
    ).top + m.part(p[0]),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_batched_equals_alone(name: str) -> None:
    model = model_of(MODELS[name])
    batched = check(model, PAIRS)
    if name != "cond in Python":
        assert batched.explain(PAIRS).flushes == 1
        expected = batched(PAIRS, batch=False)
        if name != "from a parameter":
            torch.testing.assert_close(batched(batched.collate(PAIRS)), expected)
        cached = autobatch(model, cache=True)
        for _ in range(2):
            torch.testing.assert_close(cached(PAIRS), expected)
    check(model, PAIRS[1:2])
    with torch.no_grad():
        torch.testing.assert_close(batched(PAIRS), batched(PAIRS, batch=False))


def test_loops_run_together_on_the_examples_that_go_on() -> None:
    sizes = list[int]()

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.dim() == 2:
                sizes.append(x.size(0))
            return super().forward(x)

    model = model_of(lambda m, p: repeated(m, *p), part=Counting(3, 3))
    batched = autobatch(model)
    batched(PAIRS)
    sizes.clear()
    batched(PAIRS)
    assert sizes == [3, 2, 2, 1, 1, 1, 1]  # of 3, 0, 1, 7 and 0 iterations
    sizes.clear()
    autobatch(model_of(lambda m, p: cond(p[1] > 0, m.part, lambda x: x, (p[0],)), part=model.part))(
        PAIRS
    )
    assert sizes[-1] == 3


def test_the_body_of_a_loop_is_one_signature() -> None:
    batched = autobatch(model_of(nested))
    explanation = batched.explain(PAIRS)
    assert [op.steps for op in explanation.operations] == [1]
    (table,) = vars(batched._local).values()
    before = len(table.sites)
    batched(PAIRS[::-1])
    assert len(table.sites) == before


def test_what_is_slow_inside_of_a_loop_is_explained() -> None:
    def products(x: Tensor) -> Tensor:
        return torch.kron(x, x[:1])

    batched = check(model_of(lambda m, p: repeated(m, *p, body=products)), PAIRS)
    assert "kron in while_loop runs through torch.vmap" in str(batched.explain(PAIRS))


def test_twenty_steps_of_training_equal_the_plain_loop() -> None:
    models = [model_of(collected) for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.05) for model in models]
    for _ in range(20):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            model.train()
            result, *_ = autobatch(model)(PAIRS, batch=model is models[0])
            losses.append(result.square().mean())
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9)
    for mine, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


def test_dropout_is_drawn_for_each_example_and_iteration() -> None:
    def function(m: Any, x: Any) -> Any:
        drawn, _ = while_loop(
            lambda drawn, i: i < 40,
            lambda drawn, i: (drawn.push(m.drop(torch.ones(3))), i + 1),
            (Stack(x), torch.tensor(0)),
        )
        return torch.stack([drawn.peek(n) for n in range(40)])

    batched = autobatch(Wrap(function, drop=nn.Dropout(0.5)))
    found = batched([torch.zeros(3)] * 8)
    assert set(found.unique().tolist()) == {0.0, 2.0}
    flat = found.flatten(0, 1)
    assert flat.unique(dim=0).size(0) == 8  # all patterns of three
    assert found.flatten(1).unique(dim=0).size(0) == 8  # no two examples are equal
    assert abs(found.mean() - 1) < 0.15
    batched.eval()
    assert (batched([torch.zeros(3)] * 2) == 1).all()


def test_a_model_can_be_used_on_several_threads_and_again_after_backward() -> None:
    batched = autobatch(model_of(collected))
    expected, results = batched(PAIRS, batch=False), dict[int, Any]()

    def run(number: int) -> None:
        results[number] = [batched(PAIRS)[0] for _ in range(3)]

    threads = [threading.Thread(target=run, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = batched(PAIRS)[0]
    for found in [each for n in results for each in results[n]]:
        torch.testing.assert_close(found, expected[0])
        found.sum().backward()
    kept.sum().backward()  # the rows of this call are its own
    grads = [p.grad / 10 for p in batched.plain.part.parameters()]
    batched.zero_grad()
    batched(PAIRS, batch=False)[0].sum().backward()
    torch.testing.assert_close(grads, [p.grad for p in batched.plain.part.parameters()])


def test_reads_between_loops_and_loops_after_reads() -> None:
    def function(m: Any, pair: Any) -> Any:
        x, count = pair
        stack = Stack.of([x, m.part(x)])
        x = repeated(m, x, count)
        if x.sum() > 0:
            x = repeated(m, x, count + 1)
        stack = stack.push(x)
        return stack.top + stack.peek(1), int(stack.size)

    check(model_of(function), PAIRS)


def test_a_module_that_decides_is_recorded_call_by_call() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            return cond(x.sum() > 0, self.part, torch.exp, (x,))

    batched = check(model_of(lambda m, x: m.inner(x), inner=Deciding()), ROWS)
    assert "inner is recorded call by call" in str(batched.explain(ROWS))


REFUSED: dict[str, tuple[Function, type[Exception], str]] = {
    "a number in the state": (
        lambda m, p: while_loop(lambda i: i < 3, lambda i: (i + 1,), (0,)),
        TypeError, r"the state holds something else than(.|\n)*got: +int at \[0\]",
    ),
    "no tuple": (
        lambda m, p: while_loop(lambda x: x.sum() > 9, lambda x: (x,), p[0]),
        TypeError, r"the state is not a tuple(.|\n)*\(x,\)",
    ),
    "an empty state": (
        lambda m, p: while_loop(lambda: p[1] > 9, lambda: (), ()), TypeError, "not a tuple",
    ),
    "a condition that is a number": (
        lambda m, p: while_loop(lambda x: x.sum(), lambda x: (x,), (p[0],)),
        TypeError, r"the condition is not a boolean(.|\n)*got: +float64(.|\n)*x.sum\(\) > 0",
    ),
    "a condition for each element": (
        lambda m, p: while_loop(lambda x: x > 0, lambda x: (x,), (p[0],)),
        TypeError, r"the condition is not a boolean(.|\n)*bool",
    ),
    "a condition of Python": (
        lambda m, p: while_loop(lambda x: False, lambda x: (x,), (p[0],)),
        TypeError, r"the condition is not a boolean(.|\n)*got: +bool",
    ),
    "a different shape": (
        lambda m, p: while_loop(lambda x: p[1] < 9, lambda x: (torch.cat([x, x]),), (p[0],)),
        TypeError, r"like that which it is given(.|\n)*float64\[3\](.|\n)*float64\[6\] at \[0\]",
    ),
    "a different dtype": (
        lambda m, p: while_loop(lambda x: p[1] < 9, lambda x: (x.float(),), (p[0],)),
        TypeError, r"like that which it is given(.|\n)*\.to\(torch.float64\)",
    ),
    "a different structure": (
        lambda m, p: while_loop(lambda x: p[1] < 9, lambda x: x, (p[0],)),
        TypeError, r"like that which it is given(.|\n)*\(x,\)",
    ),
    "a body that returns a number": (
        lambda m, p: while_loop(lambda x: p[1] < 9, lambda x: (1.0,), (p[0],)),
        TypeError, r"the body returns something else than tensors(.|\n)*float at \[0\]",
    ),
    "a branch that returns a number": (
        lambda m, p: cond(p[1] < 9, lambda: 1, lambda: 2),
        TypeError, r"autobatch.cond: true_fn returns something else than tensors",
    ),
    "a branch that returns nothing": (
        lambda m, p: cond(p[1] < 9, lambda: (), lambda: ()), TypeError, "true_fn returns no tensor",
    ),
    "a condition of cond": (
        lambda m, p: cond(p[0], torch.sin, torch.cos, (p[0],)),
        TypeError, r"autobatch.cond: the condition is not a boolean",
    ),
    "an endless loop": (
        lambda m, p: while_loop(
            lambda i: i < p[1], lambda i: (i * 1,), (torch.tensor(0),), max_iterations=20
        ),
        RuntimeError, r"not finished after 20 iterations(.|\n)*[13] examples(.|\n)*max_iterations",
    ),
    "max_iterations": (
        lambda m, p: while_loop(lambda x: p[1] < 9, lambda x: (x,), (p[0],), max_iterations=0),
        ValueError, "max_iterations",
    ),
    "an empty stack": (
        lambda m, p: Stack(p[0]).top, IndexError, r"read from an empty stack(.|\n)*stack.size",
    ),
    "a stack that becomes empty": (
        lambda m, p: while_loop(
            lambda s, i: i < p[1], lambda s, i: (s.pop()[1], i + 1), (Stack.of([p[0]]), p[1] * 0)
        )[0].size,
        IndexError, "read from an empty stack",
    ),
    "too deep": (lambda m, p: Stack.of([p[0]]).peek(1), IndexError, "read from an empty stack"),
    "a negative depth": (lambda m, p: Stack.of([p[0]]).peek(-1), TypeError, "not a depth"),
    "a stack of numbers": (lambda m, p: Stack(1.0), TypeError, r"not a tensor(.|\n)*float"),
    "a stack of nothing": (lambda m, p: Stack.of([]), ValueError, "there are no values"),
    "a value of a different shape": (
        lambda m, p: Stack(p[0]).push(p[1]), TypeError, r"not like the others(.|\n)*float64\[3\]",
    ),
    "a number": (lambda m, p: Stack(p[0]).push(1.0), TypeError, r"not like the others(.|\n)*float"),
    "a value of a different structure": (
        lambda m, p: Stack.of([p[0], (p[0],)]), TypeError, "not like the others",
    ),
    "a stack of a different type": (
        lambda m, p: cond(p[1] < 9, lambda: Stack(p[0]), lambda: Stack(p[1])),
        TypeError, r"different structures, shapes or dtypes|none",
    ),
}  # fmt: skip


def test_a_body_that_changes_the_model_for_some_examples_is_refused() -> None:
    def forward(m: Any, pair: Any) -> Any:
        def body(x: Any, n: Any) -> Any:
            if pair[1]:
                m.count = m.count + 1
            return m.part(x), n + 1

        return while_loop(lambda x, n: n < 3, body, (pair[0], torch.tensor(0)))[0]

    model = model_of(forward)
    model.count, batched, x = 0, autobatch(model), PAIRS[0][0]
    batched([(x, False), (x, False)])
    with pytest.raises(RuntimeError, match="changes 'count' of the model"):
        batched([(x, False), (x, True)])


CHANGES: dict[str, Callable[[Any], object]] = {
    "extra": lambda m: m.extra.add_(1),
    "shift": lambda m: m.shift.add_(1),
    "part.log": lambda m: m.part.log.append(1),
    "log": lambda m: m.log.append(1),
    "part.weight": lambda m: setattr(m.part, "weight", nn.Parameter(m.part.weight * 2)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_body_that_changes_anything_of_the_model_is_refused(name: str) -> None:
    def forward(m: Any, pair: Any) -> Any:
        def body(x: Any, n: Any) -> Any:
            with torch.no_grad():
                CHANGES[name](m)
            return 2 * x, n + 1

        return while_loop(lambda x, n: n < 3, body, (m.part(pair[0]), torch.tensor(0)))[0]

    model = model_of(forward)
    model.extra, model.log, model.part.log = nn.Parameter(torch.zeros(3)), [], []
    model.register_buffer("shift", torch.zeros(3))
    with pytest.raises(RuntimeError, match=f"'{name}' (of the model|was changed)"):
        autobatch(model)(PAIRS)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("other", [torch.ones(1), torch.ones(5), torch.ones(2).long()])
def test_every_tensor_that_is_pushed_is_checked(place: int, batch: bool, other: Tensor) -> None:
    def forward(m: Any, pair: Any) -> Any:
        value = [torch.ones(2), torch.ones(2)]
        stack = Stack(tuple(value)).push(tuple(value))
        value[place] = other
        return m.part(pair[0]).sum() + stack.push(tuple(value)).top[place].sum()

    with pytest.raises(TypeError, match="a value that is pushed is not like the others"):
        autobatch(model_of(forward))(PAIRS, batch=batch)


WAYS = [(name, batch) for name in REFUSED for batch in (True, False)]
WAYS.remove(("a stack of a different type", False))  # one branch alone is right


@pytest.mark.parametrize(("name", "batch"), WAYS)
def test_refused(name: str, batch: bool) -> None:
    function, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message) as raised:
        autobatch(model_of(function))(PAIRS, batch=batch)
    if batch:  # the message itself, or a note that an error of a step gets
        text = str(raised.value) + "".join(getattr(raised.value, "__notes__", ()))
        assert name == "max_iterations" or "test_control.py" in text


def escaped(m: Any, p: Any) -> Any:
    kept = []
    repeated(m, *p, body=lambda x: kept.append(x) or x)
    return kept[0] + 1


def held(m: Any, p: Any) -> Any:
    def body(x: Any) -> Any:
        m.last = x
        return x

    return repeated(m, *p, body=body)


def counting(m: Any, p: Any) -> Any:
    def body(x: Any) -> Any:
        m.count = getattr(m, "count", 0) + 1
        return x

    return repeated(m, *p, body=body)


REFUSED_WHILE_RECORDED: dict[str, tuple[Function, type[Exception], str]] = {
    "a value that is read": (
        lambda m, p: repeated(m, *p, body=lambda x: x if x.sum() > 0 else -x),
        RuntimeError, r"the body of while_loop reads a value(.|\n)*cond",
    ),
    "a value of outside that is read": (
        lambda m, p: repeated(m, *p, body=lambda x: x * (p[0] + m.part(p[0])).sum().item()),
        RuntimeError, r"the body of while_loop reads a value",
    ),
    "a value that is read in a condition": (
        lambda m, p: while_loop(lambda x: torch.tensor(bool(x.sum() > 0)), lambda x: (x,), (p[0],)),
        RuntimeError, r"the condition of while_loop reads a value",
    ),
    "a value that is read in a branch": (
        lambda m, p: cond(p[1] > 0, lambda: p[0], lambda: m.part(p[0]) * float(m.part(p[0])[0])),
        RuntimeError, r"false_fn of cond reads a value",
    ),
    "a value that is emitted": (
        lambda m, p: repeated(m, *p, body=lambda x: emit("x", x) or x),
        RuntimeError, r"emits 'x'(.|\n)*Stack",
    ),
    "a value that escapes": (
        escaped, RuntimeError, r"of the body of a loop or branch(.|\n)*return",
    ),
    "a value that is held": (held, RuntimeError, r"body of while_loop changes 'last'"),
    "an attribute that counts": (counting, RuntimeError, r"body of while_loop changes 'count'"),
    "in place": (
        lambda m, p: repeated(m, *p, body=lambda x: x.add_(1)), TypeError, "in place",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_WHILE_RECORDED)
def test_refused_while_recorded(name: str) -> None:
    function, kind, message = REFUSED_WHILE_RECORDED[name]
    model = model_of(function)
    with pytest.raises(kind, match=message) as raised:
        autobatch(model)(PAIRS)
    assert "example 0" in str(raised.value)
    assert "test_control.py" in str(raised.value)
    assert not hasattr(model, "last")


def test_the_example_of_an_endless_loop_is_named() -> None:
    function = lambda m, p: while_loop(  # noqa: E731
        lambda i: i < p[1] - 6, lambda i: (i * 1,), (torch.tensor(0),), max_iterations=20
    )
    with pytest.raises(RuntimeError, match="1 examples that go on") as raised:
        autobatch(model_of(function))(PAIRS)
    assert "example 3" in "".join(raised.value.__notes__)


def test_a_stack_alone_has_gradients_and_stays_as_it_was() -> None:
    x = torch.ones(3, requires_grad=True)
    first = Stack(x).push(x * 2)
    second = first.push(x * 3)
    assert (int(first.size), int(second.size), repr(first)) == (1, 2, "Stack(float32[3], size 1)")
    (second.top * second.peek(1)).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [12.0] * 3


def test_a_stack_made_before_the_model_can_be_used_in_it() -> None:
    known = Stack.of([ROWS[0], ROWS[1]])
    check(model_of(lambda m, x: m.part(known.push(x).peek(1)) + known.top), ROWS)


def test_wrapped_models_keep_no_rows_after_a_call() -> None:
    import gc
    import weakref

    from pyg_dynbatch.autobatch.stack import _Arena

    made = list[Any]()
    start = _Arena.__init__

    def noted(self: Any, *args: Any) -> None:
        start(self, *args)
        made.append(weakref.ref(self))

    batched: AutoBatch = autobatch(model_of(collected))
    _Arena.__init__ = noted  # type: ignore[method-assign]
    try:
        batched(PAIRS)[0].sum().backward()
    finally:
        _Arena.__init__ = start  # type: ignore[method-assign]
    gc.collect()
    assert made and all(each() is None for each in made)
