"""The console script: ``predict`` for files, and Lightning's commands."""

import argparse
import inspect
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from pydoc import locate
from typing import TYPE_CHECKING, Any

from pyg_dynbatch import __version__, keep_freed_memory

if TYPE_CHECKING:
    from pyg_dynbatch.models import Model


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, and return its exit code."""
    if argv is None:  # the process is that of the console script
        keep_freed_memory()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`isinstance\\(treespec, LeafSpec\\)`")
            warnings.filterwarnings("ignore", message=".*does not have many workers")
            warnings.filterwarnings("ignore", message=".*smaller than the logging interval")
            # A run that goes on keeps its checkpoints in one folder.
            warnings.filterwarnings("ignore", message="Checkpoint directory .* is not empty")
            warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly")
            return _run(words)
    except SystemExit as end:  # after --help
        return int(end.code or 0)
    except Exception as error:
        if os.environ.get("PYG_DYNBATCH_TRACEBACK") or not is_complaint(error):
            raise
        message = "\n".join([str(error), *getattr(error, "__notes__", [])])
        print(f"pyg-dynbatch: error: {short(message)}", file=sys.stderr)
        return 2


def _run(words: list[str]) -> int:
    if words[:1] == ["--version"]:
        _print_version()
    elif words[:1] == ["predict"]:
        predict(words[1:])
    else:
        from pyg_dynbatch.lightning.cli import CLI, without_adverts

        with without_adverts():
            CLI(words or ["--help"])
    return 0


def _print_version() -> None:
    """Print the version, and which native code runs."""
    from pyg_dynbatch.core.native import describe_native
    from pyg_dynbatch.core.products import describe_products

    print(__version__)
    print(describe_native())
    print(describe_products())


def predict(words: Sequence[str]) -> None:
    """Run ``pyg-dynbatch predict``."""
    options = _predict_parser().parse_args(words)
    from pyg_dynbatch.core.errors import mismatch
    from pyg_dynbatch.models import predictions, write_table

    read_paths = [Path(path).resolve() for path in (options.input, *options.checkpoint)]
    if options.output != "-" and Path(options.output).resolve() in read_paths:
        problem = "predict: the output would replace what is read"
        raise mismatch(ValueError, problem, "another name", options.output)

    for module in options.modules:
        import_module(module)
    models = _open_models(options.checkpoint, options.device)
    source = Path(options.input)
    tables = predictions(models, source, batch_size=options.batch_size, nodes=options.nodes)
    num_rows, num_faulty = write_table(options.output, tables)

    with_faults = f", {num_faulty:,} of them with a fault" if num_faulty else ""
    print(f"predicted {num_rows:,} rows{with_faults}", file=sys.stderr)
    if num_rows and num_faulty == num_rows:
        problem = "predict: every row has a fault, which its column of the table says"
        hint = "the checkpoint of a model that was trained on such a file"
        raise mismatch(ValueError, problem, where=options.output or "the output", hint=hint)


def _predict_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "pyg-dynbatch predict",
        description="Predict a file with one or several checkpoints. The table has one row per "
        "record, in the same order; a record that cannot be used has its fault there.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--checkpoint", nargs="+", required=True, metavar="CKPT", help="several are averaged")
    add("--input", required=True, metavar="FILE", help="a file as in training, without targets too")
    add("--output", default="-", metavar="TABLE", help="CSV file; - for standard output (default)")
    add("--nodes", action="store_true", help="one row per node of trees, not one per tree")
    add("--device", default="cpu", help="cpu (default), cuda, ...")
    add("--batch-size", type=int, default=100, metavar="N", help="examples in a batch (100)")
    text = "modules with your own features, which a checkpoint never imports by itself"
    add("--import", nargs="+", default=[], metavar="MODULE", dest="modules", help=text)
    return parser


def _open_models(checkpoints: Sequence[str], device: str) -> "list[Model]":
    from pyg_dynbatch.core.errors import mismatch
    from pyg_dynbatch.models import load

    models: list[Model] = [load(path) for path in checkpoints]
    try:
        return [model.to(device) for model in models]
    except (RuntimeError, AssertionError) as error:
        problem = "predict: the device cannot be used"
        first_line = str(error).partition("\n")[0]
        expected = "cpu, or a device of this machine"
        raise mismatch(ValueError, problem, expected, f"{device}: {first_line}") from error


def is_complaint(error: Exception) -> bool:
    """Return whether an error is about the user's input, not a fault of the program."""
    if isinstance(error, ValueError | OSError | ImportError | argparse.ArgumentError):
        return True
    from pyg_dynbatch.core.errors import Mismatch

    # Lightning's own class, by name to avoid its import.
    from_lightning = type(error).__name__ == "MisconfigurationException"
    return from_lightning or any(isinstance(part, Mismatch) for part in error.args)


# Lines of jsonargparse about types, which do not help a user.
_UNHELPFUL_LINE = re.compile(
    r"Does not validate against any|Subtypes:|Errors:|- Expected a <class 'NoneType'>|"
    r"Given value type:|Given value: (?:NestedArg|Namespace|\w+Schema)|"
    r"Type collections.abc.Callable|^$"
)
_CLASS_IN_MESSAGE = re.compile(r"Problem with given class_path '([\w.]+)'")
# Types and classes as Python writes them, and in plain words.
_PLAIN_WORDS = {
    r"Parser key": "option",
    r"Problem with given class_path '(?:\w+\.)*(\w+)':": r"of \1:",
    r"a <class '(?:\w+\.)*(\w+)'>": r"\1",
    r"a typing\.Literal\[(.*?)\]": r"one of \1",
    r"a dot import path string": "the name of a class",
    r"\.? Got value: Namespace.*": "",
    r"'validate', 'test'\)": "'validate', 'test', 'predict')",
}


def short(message: str) -> str:
    """Shorten a message to at most five lines that name the option, its value, what is allowed."""
    lines = [line.strip() for line in message.splitlines()]
    lines = [line.removeprefix("- ") for line in lines if not _UNHELPFUL_LINE.search(line)]
    if len(lines) > 4:  # what and where first, the cause last
        lines = [lines[0], *lines[-3:]]
    text = "\n  ".join(f"{line:.300}" for line in lines)
    for pattern, plain_words in _PLAIN_WORDS.items():
        text = re.sub(pattern, plain_words, text)

    named_class = _CLASS_IN_MESSAGE.search(message)
    has_unknown_option = re.search(
        r"Option '(\w+)' is not accepted|unrecognized arguments", message
    )
    if named_class and has_unknown_option:
        text += f"\n  allowed: {_options_of(named_class[1])}"
    elif "dot import path string" in message and not named_class:
        text += f"\n  allowed: {_allowed_classes(message)}"
    elif has_unknown_option or "arguments are required: fit" in message:
        text += "\n  see 'pyg-dynbatch fit --help'; --config listops.yaml is a complete example"
    return text


def _options_of(class_path: str) -> str:
    from jsonargparse import ArgumentParser

    named_class: Any = locate(class_path)
    names = ArgumentParser().add_class_arguments(named_class, fail_untyped=False)
    return textwrap.shorten(", ".join(name for name in names if name != "schema"), 300)


def _allowed_classes(message: str) -> str:
    """Return the classes that an option accepts, which the message of an error names as a key."""
    from pyg_dynbatch.lightning import DataModule
    from pyg_dynbatch.model import Model

    if 'key "task' in message:  # also that of an option of it, such as task.optimizer
        return "a class by its path, such as torch.optim.Adam"
    is_of_data = 'key "data"' in message
    base: type = DataModule if is_of_data else Model
    return ", ".join(_subclass_names(base))


def _subclass_names(base: type) -> list[str]:
    """Return the names of all subclasses that are not abstract."""
    names: list[str] = []
    subclasses: list[type] = base.__subclasses__()
    for subclass in subclasses:
        if not inspect.isabstract(subclass):
            names.append(subclass.__name__)
        names += _subclass_names(subclass)
    return names
