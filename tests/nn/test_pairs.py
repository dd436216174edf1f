"""Pairs against plain loops over atoms, and what they refuse."""

import copy
import os
import pickle
from collections.abc import Callable
from itertools import combinations_with_replacement
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch.core.native import NATIVE_SWITCH
from pyg_dynbatch.nn.pairs import Pairs

SIZES = st.lists(st.integers(0, 6), max_size=5)


def listed(sizes: list[int]) -> list[tuple[int, int]]:
    """All pairs i <= j of each molecule, by loops."""
    found, start = [], 0
    for size in sizes:
        found += combinations_with_replacement(range(start, start + size), 2)
        start += size
    return found


def check_incidence(pairs: Pairs, expected: list[tuple[int, int]]) -> None:
    assert list(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)) == expected
    ptr = pairs.ptr.tolist()
    assert len(ptr) == pairs.num_atoms + 1
    for atom in range(pairs.num_atoms):
        mine = slice(ptr[atom], ptr[atom + 1])
        entries = [number for number, pair in enumerate(expected) if atom in pair]
        assert pairs.entry[mine].tolist() == entries
        others = [sum(expected[number]) - atom for number in entries]
        assert pairs.other[mine].tolist() == others
    assert pairs.num_entries == ptr[-1] == int(pairs.entry_count.sum())
    assert pairs.is_self.tolist() == [a == b for a, b in expected]
    end, end_ptr = (part.tolist() for part in pairs.ends)
    slices = zip(end_ptr[:-1], end_ptr[1:], strict=True)
    assert [sorted(set(pair)) for pair in expected] == [end[a:b] for a, b in slices]
    order, order_ptr = (part.tolist() for part in pairs.orders)
    for atom in range(pairs.num_atoms):
        begin = [n for n, (a, _) in enumerate(expected) if a == atom]
        begin += [n + len(expected) for n, (_, b) in enumerate(expected) if b == atom]
        assert sorted(order[order_ptr[atom] : order_ptr[atom + 1]]) == sorted(begin)


@given(SIZES, st.booleans())
def test_all_pairs_are_those_of_a_loop(sizes: list[int], self_pairs: bool) -> None:
    pairs = Pairs.all_pairs(sizes, self_pairs)
    check_incidence(pairs, [(a, b) for a, b in listed(sizes) if self_pairs or a != b])
    assert pairs.num_molecules == len(sizes)
    assert pairs.atom_ptr.diff().tolist() == sizes


@given(SIZES, st.data())
def test_pairs_of_kept_codes_are_those_of_a_loop(sizes: list[int], data: st.DataObject) -> None:
    candidates = listed(sizes)
    code = data.draw(
        st.lists(st.integers(0, 3), min_size=len(candidates), max_size=len(candidates))
    )
    kept = data.draw(st.lists(st.booleans(), min_size=4, max_size=4))
    pairs = Pairs.from_codes(
        torch.tensor(code, dtype=torch.uint8), torch.tensor(sizes), torch.tensor(kept)
    )
    columns = [n for n, c in enumerate(code) if kept[c]]
    check_incidence(pairs, [candidates[n] for n in columns])
    assert pairs.column.tolist() == columns
    assert pairs.code.tolist() == [code[n] for n in columns]
    count = torch.zeros(sum(sizes), 4, dtype=torch.int32)
    for number in columns:
        for atom in set(candidates[number]):
            count[atom, code[number]] += 1
    assert torch.equal(pairs.code_count, count)
    order, ptr = (part.tolist() for part in pairs.by_code)
    for number in range(4):
        mine = [n for n, c in enumerate(columns) if code[c] == number]
        assert order[ptr[number] : ptr[number + 1]] == mine


@given(st.lists(st.integers(-1, 6), max_size=5), st.data())
def test_bytes_are_planned_in_c_as_by_definition(sizes: list[int], data: st.DataObject) -> None:
    stored = sum(size * (size + 1) // 2 for size in sizes) + data.draw(st.sampled_from([0, 0, 1]))
    code = data.draw(st.lists(st.integers(0, 4), min_size=stored, max_size=stored))
    kept = data.draw(st.none() | st.lists(st.booleans(), min_size=4, max_size=5))
    given = torch.tensor(code, dtype=torch.uint8), sizes
    found: list[object] = []
    for switch in "01":
        with mock.patch.dict(os.environ, {NATIVE_SWITCH: switch}):
            try:
                options = {"num_codes": 4} if kept is None else {"kept": torch.tensor(kept)}
                found.append(Pairs.from_codes(*given, **options))
            except ValueError as error:
                found.append(str(error))
    assert found[0] == found[1]


@given(SIZES, st.data())
def test_pairs_of_an_index_are_those_of_a_loop(sizes: list[int], data: st.DataObject) -> None:
    chosen = [pair for pair in listed(sizes) if data.draw(st.booleans())]
    columns = [pair if data.draw(st.booleans()) else pair[::-1] for pair in chosen]
    columns += [pair[::-1] for pair in columns if data.draw(st.booleans())]
    columns = data.draw(st.permutations(columns))
    index = torch.tensor(columns, dtype=torch.long).reshape(-1, 2).t()
    pairs = Pairs.from_pair_index(index, sum(sizes), sizes)
    check_incidence(pairs, chosen)
    for pair, column in zip(chosen, pairs.column.tolist(), strict=True):
        assert sorted(columns[column]) == list(pair)


@given(SIZES, st.integers(1, 9))
def test_blocks_have_the_pairs_in_order(sizes: list[int], max_pairs: int) -> None:
    expected = listed(sizes)
    code = torch.arange(len(expected)) % 3
    pairs = Pairs.from_codes(code, sizes, num_codes=3)
    blocks = pairs.split(max_pairs)
    for number, block in enumerate(blocks):
        chosen = slice(number * max_pairs, (number + 1) * max_pairs)
        check_incidence(block, expected[chosen])
        assert block.code.tolist() == code[chosen].tolist()
        assert block.column.tolist() == list(range(len(expected)))[chosen]
    assert sum(block.num_pairs for block in blocks) == len(expected)
    if blocks:
        assert torch.equal(sum(block.code_count for block in blocks), pairs.code_count)


@pytest.mark.parametrize("num_codes", [2**16, 2**16 + 1, 70_000])
def test_many_codes_are_distinguished(num_codes: int) -> None:
    codes = torch.tensor([num_codes - 1, 1, num_codes - 2])
    order, ptr = Pairs.from_codes(codes, [2], num_codes=num_codes).by_code
    assert [order[ptr[c] : ptr[c + 1]].tolist() for c in codes] == [[0], [1], [2]]


def test_number_of_codes_is_found_where_left_out() -> None:
    assert Pairs.from_codes(torch.tensor([0, 5, 0]), [2]).num_codes == 6
    assert Pairs.from_codes(torch.tensor([0, 5, 0]), [2], num_codes=9).code_count.shape == (2, 9)


def test_pairs_move_and_copy_as_a_batch_wants_it() -> None:
    pairs = Pairs.from_codes(torch.tensor([0, 1, 0, 0]), [2, 1])
    twins = [pickle.loads(pickle.dumps(pairs)), copy.deepcopy(pairs), pairs.clone(), pairs.cpu()]
    twins += [pairs.to("cpu"), pairs.to(torch.float64)]
    assert all(twin == pairs for twin in twins)
    assert pairs.to("meta").device.type == "meta"
    assert pairs.share_memory_().plan.is_shared()
    assert pairs.clone().plan.data_ptr() != pairs.plan.data_ptr()
    assert pairs != Pairs.from_codes(torch.tensor([0, 0, 0, 0]), [2, 1], num_codes=2)
    assert pairs != Pairs.all_pairs([2, 1])
    assert pairs != "pairs"
    assert not pairs.is_pinned()
    assert len(pairs) == 4
    assert repr(pairs) == "Pairs(2 molecules, 3 atoms, 4 pairs, 2 codes)"
    assert pairs.plan.dtype == torch.int32


def test_pairs_without_codes_say_so() -> None:
    for name in ("code", "code_count", "by_code"):
        with pytest.raises(AttributeError, match="these pairs have no codes"):
            getattr(Pairs.all_pairs([2]), name)


def of(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Pairs.all_pairs([2, -1]), "negative number of atoms.*got: *-1.*example 1"),
        (lambda: Pairs.all_pairs(of(1)[None]), r"sizes are not a flat list.*shape \[1, 1\]"),
        (lambda: Pairs.from_codes(of(0, 1), [2]), "codes does not fit.*3 codes.*got: *2 codes"),
        (
            lambda: Pairs.from_codes(of(0, 0, 7, 0), [1, 0, 2], num_codes=3),
            "not in the table.*0 to 2.*got: *7.*example 2",
        ),
        (
            lambda: Pairs.from_codes(of(0), [1], kept=of(1, 1).bool(), num_codes=3),
            "not in the table.*got: *2 in kept",
        ),
        (
            lambda: Pairs.from_pair_index(torch.tensor([[0, 0], [1, 3]]), 3),
            "out of range.*atoms 0 and 3.*column 1",
        ),
        (
            lambda: Pairs.from_pair_index(torch.tensor([[1], [2]]), 4, [2, 2]),
            "joins two molecules.*atoms 1 and 2.*column 0",
        ),
        (
            lambda: Pairs.from_pair_index(torch.tensor([[1], [2]]), 4, [2, 1]),
            "do not match num_atoms.*sizes of 3 atoms",
        ),
        (lambda: Pairs(of(0, 0, 0).int(), 1, 1, 1, 1), "wrong length of the plan"),
    ],
)
def test_refuses(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){words}"):
        call()
