from pyg_dynbatch.core.errors import mismatch_text


def test_all_parts_stand_in_order() -> None:
    text = mismatch_text("Thing: odd", "even", 3, where="line 1", hint="add one")
    assert text.splitlines() == [
        "Thing: odd.",
        "  expected: even",
        "  got:      3",
        "  where:    line 1",
        "  try:      add one",
    ]


def test_empty_parts_are_left_out() -> None:
    assert mismatch_text("Thing: odd", got=0) == "Thing: odd.\n  got:      0"
    assert mismatch_text("Thing: odd") == "Thing: odd."
