"""Errors in the console script: one line for a mistake of the user, a traceback for a bug."""

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from pyg_dynbatch import cli
from pyg_dynbatch.core.errors import mismatch_text

OURS = mismatch_text("Layer: rows of the wrong form", "[row, 3]", "[row, 4]")


@pytest.mark.parametrize(
    "error",
    [
        TypeError(OURS),
        RuntimeError(OURS),
        ValueError("a plain error"),
        FileNotFoundError("no such file"),
        MisconfigurationException("no GPU here"),
    ],
)
def test_an_error_of_the_user_is_one_line(error: Exception, monkeypatch, capsys) -> None:
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert cli.main(["fit"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("pyg-dynbatch: error: ")
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [TypeError("int + str"), RuntimeError(f"not ours: {OURS}"), KeyError("x"), AssertionError()],
)
def test_a_bug_keeps_its_traceback(error: Exception, monkeypatch) -> None:
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    with pytest.raises(type(error)):
        cli.main(["fit"])


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["inspect", "file.txt", "--foo"], "unrecognized arguments: --foo"),
        (["inspect"], "the following arguments are required: DATA"),
        (["ensemble"], "the following arguments are required: --checkpoints"),
    ],
)
def test_wrong_options_are_reported_on_one_line(argv, text: str, capsys) -> None:
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1
