"""The table behind one-byte pair codes."""

import pytest
import torch

from pyg_dynbatch.molecules.pair_table import PairTable

DISTANCE = torch.tensor([0, 1, 1, 2, 7, 8, -1])


def make(width: int = 2) -> PairTable:
    features = torch.arange(len(DISTANCE) * width).reshape(len(DISTANCE), width) / 3
    features[0] = 0
    return PairTable(features, tuple("abcdefgh"[:width]), DISTANCE)


PAIR_SETS = [
    ("all", [1, 2, 3, 4, 5, 6]),
    ("connected", [1, 2, 3, 4, 5]),
    ("bonds", [1, 2]),
    (1, [1, 2]),
    (2, [1, 2, 3]),
    (6, [1, 2, 3]),
    (7, [1, 2, 3, 4]),
]


@pytest.mark.parametrize(("pair_set", "codes"), PAIR_SETS)
def test_sets_of_pairs(pair_set: str | int, codes: list[int]) -> None:
    table = make()
    assert table.kept(pair_set, self_pairs=False).nonzero().flatten().tolist() == codes
    assert table.kept(pair_set, self_pairs=True).nonzero().flatten().tolist() == [0, *codes]
    assert torch.equal(table.kept(pair_set), table.kept(pair_set, True))


def test_differences_are_seen() -> None:
    table = make()
    others = [
        PairTable(table.features + (table.distance != 0)[:, None], table.names, table.distance),
        PairTable(table.features, ("x", "y"), table.distance),
        PairTable(table.features, table.names, table.distance * (table.distance != 2)),
    ]
    assert all(other != table for other in others)
    assert table != "something else"
    assert len(table) == 7
    assert repr(table) == "PairTable(7 codes, 2 features)"


def test_products_number_the_codes_row_by_row() -> None:
    ours, theirs = make(), PairTable(torch.tensor([[0.0], [1.0]]), ("z",), torch.tensor([0, 8]))
    both = ours.times(theirs)
    assert len(both) == 14 and both.names == ("a", "b", "z")
    for code in range(7):
        for extra in range(2):
            row = torch.cat([ours.features[code], theirs.features[extra]])
            assert torch.equal(both.features[code * 2 + extra], row)
            assert both.distance[code * 2 + extra] == ours.distance[code]


def test_256_codes() -> None:
    assert len(PairTable(torch.zeros(256, 1), ("a",), torch.zeros(256, dtype=torch.long))) == 256


def table(features: torch.Tensor, names: tuple[str, ...], distance: list[int]) -> PairTable:
    return PairTable(features, names, torch.tensor(distance, dtype=torch.long))


ZEROS = torch.zeros(2, 1)
UNKNOWN = torch.tensor([[0.0], [torch.nan]])


REFUSED = [
    *((lambda p=p: make().kept(p), "set of pairs") for p in ("some", "", 0, 8, -1, True)),
    (lambda: make().times(make()).times(make()), "names"),
    (lambda: make().times(PairTable(torch.zeros(40, 0), (), torch.zeros(40).int())), "one byte"),
    (lambda: table(torch.zeros(0, 1), ("a",), []), "1 to 256 codes"),
    (lambda: table(torch.zeros(2, 2), ("a", "a"), [0, 1]), "2 different names"),
    (lambda: table(ZEROS, (), [0, 1]), "no names"),
    (lambda: table(ZEROS, ("a",), [0]), "distances"),
    (lambda: table(ZEROS, ("a",), [0, 9]), "distances"),
    (lambda: table(ZEROS, ("a",), [0, -2]), "distances"),
    (lambda: table(ZEROS, ("a",), [1, 0]), "code 0"),
    (lambda: table(ZEROS + 1, ("a",), [0, 1]), "code 0"),
    (lambda: table(UNKNOWN, ("a",), [0, 1]), "not finite"),
]


@pytest.mark.parametrize(("call", "word"), REFUSED)
def test_what_cannot_be_is_refused(call, word):
    with pytest.raises(ValueError, match=word):
        call()
