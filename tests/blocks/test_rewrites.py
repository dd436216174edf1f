"""The rewrites: on = off, and what they save."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pyg_dynbatch import blocks as td
from tests.blocks.harness import three_ways, wired


def attention(layer: Any, score: td.Block | None = None) -> td.Block:
    """Scores of all elements against one query, which is broadcast."""
    keys, query = td.Map(td.Vector(2)), td.Vector(3) >> td.Broadcast()
    return (
        {"a": query, "k": keys}
        >> td.ZipWith(td.Concat() >> layer if score is None else score)
        >> td.Sum()
    )


def pairs(layer: Any) -> td.Block:
    """A function of all pairs of two sequences, as in a weave module."""

    def row(made: td.Composition) -> td.Block:
        again = td.Zip().reads(td.Broadcast().reads(made.input[0]), made.input[1])
        return (td.Map(td.Concat() >> layer) >> td.Sum()).reads(again)

    def table(made: td.Composition) -> td.Block:
        rows = td.Map(td.Vector(2)).reads(made.input)
        all_pairs = td.Zip().reads(rows, td.Broadcast().reads(rows))
        return (td.Map(wired(row)) >> td.Sum()).reads(all_pairs)

    return wired(table)


def with_wires(layer: Any) -> td.Block:
    """Scores as in :func:`attention`, with wires instead of pipes."""
    return attention(layer, wired(lambda made: td.Function(layer).reads(concat_in(made))))


def read_thrice(layer: Any) -> td.Block:
    """A concatenation that two linear layers read, and a third block that needs all of it."""

    def wire(made: td.Composition) -> td.Block:
        both = concat_in(made)
        one, other = (td.Function(module).reads(both) for module in (layer, nn.Linear(5, 3)))
        return td.Concat().reads(one, other, td.Function(torch.neg).reads(both))

    return attention(layer, wired(wire))


def concat_in(made: td.Composition) -> td.Block:
    return td.Concat().reads(made.input[0], made.input[1])


LAYERS: dict[str, Callable[[int], Any]] = {
    "linear": lambda size: nn.Linear(size, 3),
    "no bias": lambda size: nn.Linear(size, 3, bias=False),
    "sequential": lambda size: nn.Sequential(nn.Linear(size, 3), nn.Tanh(), nn.Linear(3, 2)),
    "fc": lambda size: td.FC(3),
    "weight norm": lambda size: td.FC(3, torch.tanh, weight_norm=True),
}
QUERIES = [
    {"a": [1, 2, 3], "k": [[1, 2], [3, 4], [5, 6]]},
    {"a": [3, 2, 1], "k": []},
    {"a": [0, 1, 0], "k": [[7, 8]]},
]


@pytest.mark.parametrize(
    "kind",
    ["sequential", *(pytest.param(k, marks=pytest.mark.long) for k in LAYERS if k != "sequential")],
)
def test_on_equals_off(kind: str) -> None:
    for make, size, examples in (
        (attention, 5, QUERIES),
        (with_wires, 5, QUERIES),
        (read_thrice, 5, QUERIES),
        (pairs, 4, [[[1, 2], [3, 4], [5, 6]], [], [[1, 0]]]),
    ):
        root = make(LAYERS[kind](size))
        results = []
        for passes in ((), ("split_linear",), ("merge_equal",), td.PASSES):
            three_ways(root, examples, passes)
            model = td.Compiler.create(root, passes=passes).double()
            output = model(examples).output
            grads = torch.autograd.grad(output.square().sum(), list(model.parameters()))
            results.append([output, *sorted(grads, key=lambda g: (g.shape, g.sum().item()))])
        for found in results[1:]:
            for wanted, mine in zip(results[0], found, strict=True):
                torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("kind", ["linear", "sequential"])
def test_eval_of_a_split_layer(kind: str) -> None:
    block = attention(LAYERS[kind](5))
    example = QUERIES[0]
    found = block.eval(example)
    torch.testing.assert_close(found, td.Compiler.create(block).eval()([example]).output[0])


def test_broadcast_items_are_multiplied_once() -> None:
    for make in (attention, with_wires):
        model = td.Compiler.create(make(nn.Linear(5, 3)))
        stats = model.collate(QUERIES[:1]).stats()
        rows = dict(zip(stats.operations, stats.widths, strict=True))
        assert sorted(rows.values()) == [1, 1, 3], rows
        assert "concat" not in rows
    thrice = td.Compiler.create(read_thrice(nn.Linear(5, 3)))
    stats = thrice.collate(QUERIES[:1]).stats()
    parts = [n for name, n in zip(stats.operations, stats.widths, strict=True) if "part" in name]
    assert sorted(parts) == [1, 1, 3], (
        "both layers are split, though the concatenation is computed, too"
    )
    assert any("+neg+" in name for name in stats.operations)
    atoms = td.Compiler.create(pairs(nn.Linear(4, 3)))
    many = [[[i, 1] for i in range(8)]]
    widths = sorted(atoms.collate(many).stats().widths)
    assert widths.count(64) == 1 and widths.count(8) >= 2, "8 products per side instead of 64"


def test_nothing_is_split_without_need() -> None:
    both = (td.Vector(2), td.Vector(3)) >> td.Concat() >> nn.Linear(5, 3)
    model = td.Compiler.create(both)
    assert model.collate([([1, 2], [1, 2, 3])]).stats().rows == 2
    joined = td.Map(td.Vector(2)) >> td.Reduce(td.Concat() >> td.FC(2, torch.tanh))
    stats = td.Compiler.create(joined).collate([[[1, 2], [3, 4], [5, 6]]]).stats()
    assert set(stats.operations) == {"concat+fc"}, "nothing is broadcast in a reduction"
    dropping = attention(td.FC(3, input_keep_prob=0.5))
    names = td.Compiler.create(dropping).collate(QUERIES).stats().operations
    assert "concat+fc" in names


def doubled(module: nn.Module, arguments: Any, output: Any) -> Any:
    return 2 * output


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(doubled)
    return layer


@pytest.mark.parametrize(
    "make",
    [
        lambda: hooked(nn.Linear(5, 3)),
        lambda: hooked(nn.Sequential(nn.Linear(5, 3), nn.Tanh())),
        lambda: nn.Sequential(hooked(nn.Linear(5, 3)), nn.Tanh()),
        lambda: hooked(td.FC(3)),
        lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)),
    ],
)
def test_layers_with_hooks_are_called_whole(make: Callable[[], nn.Module]) -> None:
    layer = make()
    on, off = (td.Compiler.create(attention(layer), passes=p) for p in (("split_linear",), ()))
    for _ in range(2):
        on.eval(), off.eval()
        torch.testing.assert_close(on(QUERIES).output, off(QUERIES).output)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape))


def test_equal_leaves_are_computed_once() -> None:
    leaves = td.Map(td.OneHot(3) >> nn.Linear(3, 2)) >> td.Sum()
    on, off = (td.Compiler.create(leaves, passes=p) for p in (("merge_equal",), ()))
    examples = [[0, 1, 0, 0], [1, 1, 2]]
    assert on.collate(examples).steps[0].size == 3
    assert off.collate(examples).steps[0].size == 7
    torch.testing.assert_close(on(examples).output, off(examples).output)
