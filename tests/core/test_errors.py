from pyg_dynbatch.core import mismatch


def test_all_parts_stand_in_order() -> None:
    text = mismatch("Thing: odd", expected="even", got=3, where="line 1", mend="add one")
    assert text.splitlines() == [
        "Thing: odd.",
        "  expected: even",
        "  got:      3",
        "  where:    line 1",
        "  try:      add one",
    ]


def test_empty_parts_are_left_out() -> None:
    assert mismatch("Thing: odd", got=0) == "Thing: odd.\n  got:      0"
    assert mismatch("Thing: odd") == "Thing: odd."
