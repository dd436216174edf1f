"""Say in plain words what jsonargparse finds wrong with options and configuration files."""

import difflib
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.training.split_datamodule import SplitDataModule
from pyg_dynbatch.training.task import Task

_CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")


def explained(message: str, options: Iterable[str]) -> str:
    """Shortens a message of jsonargparse to what is wrong, and suggests what was meant.

    Args:
        message: The message, of several lines.
        options: The options there are.

    Returns:
        One line.

    Example:
        >>> explained("unrecognized arguments: --modle 3", ["--model", "--data"])
        "unrecognized arguments: --modle 3; did you mean '--model'?"
    """
    line = " ".join(message.split())
    unknown = re.search(r"unrecognized arguments: (--?[\w.+-]+)", line)
    problem = re.search(r"Problem with given class_path '([\w.]+)'", line)
    keys = re.findall(r'Parser key "([^"]+)"', line)
    where = "--" + (".init_args." if problem else ".").join(keys)
    if problem:
        wrong = re.search(r"Option '([^']+)' is not accepted", line) or unknown
        if wrong:
            name, owner = wrong[1].lstrip("-"), problem[1]
            near = did_you_mean(name, _options_of(owner))
            return f"{where}: {owner.rpartition('.')[2]} has no option {name!r}{near}"
        needed = re.search(r"the following arguments are required: (\w+(?:, \w+)*)", line)
        if needed:
            return f"{where}: {problem[1].rpartition('.')[2]} requires {needed[1]}"
    if unknown:
        return f"{line}{did_you_mean(unknown[1], options)}"
    named = re.search(r"Expected a dot import path string: (\S+)", line)
    if named:
        return f"{where}: there is no class {named[1]!r}{did_you_mean(named[1], _classes())}"
    wanted = re.findall(r"Expected a (<class '[\w.]+'>|typing\.Literal\[[^\]]*\])", line)
    got = re.search(r"Got value: (.*?)(?= - Expected|$)", line) or re.search(
        r"Given value: (.*)$", line
    )
    if wanted and got and keys:
        kinds = [_plain(kind) for kind in dict.fromkeys(wanted)]
        kinds = [kind for kind in kinds if kind != "null"] or kinds
        return f"{where}: expected {' or '.join(kinds)}, got {got[1]}"
    return line


def _plain(kind: str) -> str:
    name = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", kind)
    if name.startswith("typing.Literal"):
        return f"one of {name[len('typing.Literal[') : -1]}"
    return {"NoneType": "null", "bool": "true or false", "float": "a number"}.get(name, name)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Suggests what a mistyped word was meant to be.

    Args:
        word: The word.
        known: The words there are.

    Returns:
        A question to append to a message; nothing if no word is close.
    """
    close = closest(word, known)
    return f"; did you mean {close!r}?" if close else ""


def closest(word: str, known: Iterable[str]) -> str:
    """Finds the known word that a mistyped one is closest to; an empty one if none is close."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), "")


def class_of(class_path: str) -> Any:
    """Imports a class by its full name.

    Args:
        class_path: Module and class, with dots.

    Returns:
        The class.
    """
    module, _, name = class_path.rpartition(".")
    return getattr(import_module(module), name)


def _options_of(class_path: str) -> list[str]:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(class_of(class_path), fail_untyped=False)
    return [option.lstrip("-") for action in parser._actions for option in action.option_strings]


def _classes() -> list[str]:
    bases: tuple[type, ...] = (Task, SplitDataModule, Callback, Logger)
    return [kind.__name__ for base in bases for kind in _below(base)]


def _below(base: type) -> Iterator[type]:
    kinds: list[type] = base.__subclasses__()
    for kind in kinds:
        yield kind
        yield from _below(kind)


def check_config_file(path: str | Path) -> None:
    """Looks for what jsonargparse reports badly: an empty file, wrong YAML, mistyped class keys.

    Args:
        path: A configuration file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it does not hold settings.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            mismatch("the configuration is missing", expected="a YAML file", got=path)
        )
    try:
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        raise ValueError(
            mismatch(
                "the configuration is not valid YAML",
                expected="settings such as 'trainer:', 'model:' and 'data:'",
                got=getattr(error, "problem", None) or "text that is not UTF-8",
                where=f"{path}:{mark.line + 1}" if mark else path,
            )
        ) from error
    if not isinstance(settings, dict):
        raise ValueError(
            mismatch(
                "the configuration holds no settings",
                expected="settings such as 'trainer:', 'model:' and 'data:'",
                got="an empty file" if settings is None else f"a {type(settings).__name__}",
                where=path,
            )
        )
    _check_class_keys(settings, "", path)


def _check_class_keys(part: Any, name: str, path: str | Path) -> None:
    children: dict[Any, Any] = part if isinstance(part, dict) else {}
    if isinstance(part, list):
        children = dict(enumerate(part))
    elif "class_path" in children:
        wrong = next((key for key in children if key not in _CLASS_KEYS), None)
        if wrong is not None:
            raise ValueError(
                mismatch(
                    f"the configuration has an unknown key beside class_path: {name}.{wrong}",
                    expected="class_path and init_args",
                    got=f"{wrong!r}{did_you_mean(str(wrong), _CLASS_KEYS)}",
                    where=path,
                )
            )
    for key, child in children.items():
        _check_class_keys(child, f"{name}.{key}".lstrip("."), path)
