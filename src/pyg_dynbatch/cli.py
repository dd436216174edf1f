"""Dispatch the sub-commands of the console script, which other files implement."""

import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from pyg_dynbatch import __version__

_ONE_AT_A_TIME = Lock()  # a command sets seeds and sys.argv, which threads share

_COMMANDS = {
    "fit": "train; then test and predict with the best or last checkpoint, and draw pictures",
    "validate": "measure a checkpoint on the validation split",
    "test": "measure a checkpoint on the test split, and draw its predictions",
    "predict": "write predictions to a table, of a split or of molecules, trees or JSON documents",
    "featurize": "describe the molecules of a file once, in packed files",
    "inspect": "show the schedule of a data set or of a file of trees; --native: the C in use",
}

_HELP = """\
usage: pyg-dynbatch [--version] COMMAND [options]

Dynamic batching of tree- and graph-structured networks.

commands:
{commands}

examples:
  pyg-dynbatch fit --config configs/sst.yaml --data.init_args.raw_dir trees --trainer.max_epochs 5
  pyg-dynbatch fit --run runs/sst/version_0 --trainer.max_epochs 20
  pyg-dynbatch test --run runs/sst/version_0
  pyg-dynbatch inspect my_trees.txt --batch-size 100
  pyg-dynbatch predict --checkpoint best.ckpt --input molecules.csv --output predictions.csv
  pyg-dynbatch featurize --input molecules.smi.gz --output packed

'pyg-dynbatch COMMAND --help' lists the options of a command. An error is one line and exit code 2;
set PYG_DYNBATCH_TRACEBACK=1 to see where it was raised.
"""

_LIGHTNING_HELP = """\
usage: pyg-dynbatch {command} --config FILE [options]

{summary}

settings:
  --config FILE                 settings as YAML, your own or of the package, such as listops.yaml;
                                later options override it
  --run FOLDER                  settings and checkpoint of a run, such as runs/sst/version_0: the
                                last checkpoint for fit, the best one for all others
  --print_config                print all settings as YAML and stop
  --ckpt_path FILE              the checkpoint to resume from (fit) or to use, or "best" or "last"
                                of the run; rates, dropout and paths may differ from its own
  --seed_everything N           seed of weights, dropout and order (default: 1)

model and data:
  --model CLASS                 TreeClassification, TreeRelatedness, MoleculeProperty or
                                DocumentPrediction
  --model.init_args.NAME VALUE  one of its options, such as --model.init_args.optimizer.lr 0.1
  --model.help CLASS            list its options
  --data CLASS                  SSTData, ListOpsData, SICKData, TreeFileData, NCIData,
                                MoleculeNetData, MoleculeFileData, PackedMoleculeData or
                                DocumentFileData
  --data.init_args.NAME VALUE   one of its options, such as --data.init_args.batch_size 25
  --data.help CLASS             list its options

the run:
  --trainer.max_epochs N        epochs of training
  --trainer.accelerator NAME    cpu, gpu or auto
  --trainer.devices N           processes on the CPU, or GPUs
  --trainer.precision NAME      32-true, bf16-mixed, 64-true
  --trainer.fast_dev_run true   run one batch of everything, write nothing
  --trainer.callbacks+ CLASS    add a callback, such as EarlyStopping

output:
  --trainer.logger.init_args.name NAME   folder below runs/
  --checkpoint.monitor METRIC   metric of the best checkpoint (default: val/accuracy)
  --checkpoint.mode MODE        max or min (default: max)
  --predictions.folder FOLDER   where the table of predictions goes (default: that of the run)
  --predictions.node_name FILE  write a table of all nodes too
  --report.trees N              trees in the picture (default: 4)

'pyg-dynbatch {command} --help_all' lists every option of Lightning's trainer as well.
"""

_FILE_HELP = """
To predict a file of molecules, bracketed trees or JSON documents from checkpoints alone:
  pyg-dynbatch predict --checkpoint CKPT --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        with _ONE_AT_A_TIME:
            return _dispatch(given)
    except SystemExit as end:  # after --help
        return int(end.code or 0)
    except Exception as error:
        if os.environ.get("PYG_DYNBATCH_TRACEBACK") or not _is_complaint(error):
            raise
        print(f"pyg-dynbatch: error: {one_line(error)}", file=sys.stderr)
        return 2


def _is_complaint(error: Exception) -> bool:
    """Return whether an error is about the user's input, not a fault of the program."""
    if isinstance(error, (ValueError, OSError, ImportError)):
        return True
    from pyg_dynbatch.core.errors import Mismatch

    # Lightning's own class, by name to avoid its import.
    from_lightning = type(error).__name__ == "MisconfigurationException"
    return from_lightning or any(isinstance(part, Mismatch) for part in error.args)


def _dispatch(argv: list[str]) -> int:
    command, *options = argv or ["--help"]
    if command in ("-h", "--help"):
        commands = "\n".join(f"    {name:<11} {text}" for name, text in _COMMANDS.items())
        print(_HELP.format(commands=commands), end="")
        return 0
    if command == "--version":
        print(__version__)
        return 0
    if command not in _COMMANDS:
        close = difflib.get_close_matches(command, _COMMANDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        expected = f"expected one of {', '.join(_COMMANDS)}"
        raise ValueError(f"unknown command {command!r}: {expected}{hint}")
    # Imported here, so that the help appears without loading torch and Lightning.
    if command == "inspect" and options == ["--native"]:
        from pyg_dynbatch.core.native import describe_native
        from pyg_dynbatch.kernels.products import describe_products

        print(describe_native())
        print(describe_products())
        return 0
    if command == "inspect":
        from pyg_dynbatch.trees.inspection import run_inspect

        return run_inspect(options)
    if command == "featurize":
        from pyg_dynbatch.molecules.work.commands import run_featurize

        return run_featurize(options)
    has_file = bool({"--checkpoint", "--input"} & {word.split("=")[0] for word in options})
    if command == "predict" and has_file:
        return _predict_file(options)
    if options[:1] in (["-h"], ["--help"]):
        text = _LIGHTNING_HELP.format(command=command, summary=_COMMANDS[command])
        print(text + (_FILE_HELP if command == "predict" else ""), end="")
        return 0
    _import_tasks(command)
    from pyg_dynbatch.training.command import run_lightning

    return run_lightning(["--help" if word == "--help_all" else word for word in argv])


def _import_tasks(command: str) -> None:
    """Import the classes that configurations name."""
    try:
        import pyg_dynbatch.lightning  # noqa: F401
    except ModuleNotFoundError as error:
        from pyg_dynbatch.core.errors import mismatch

        what, hint = f"{command}: a package is missing", "pip install 'pyg_dynbatch[cli]'"
        raise mismatch(ImportError, what, "packages to train with", error, hint=hint) from error


def _predict_file(options: list[str]) -> int:
    """Predict a file of what the first checkpoint was trained on."""
    from pyg_dynbatch.console import OneLineArguments
    from pyg_dynbatch.prediction import read_checkpoint

    known = OneLineArguments("pyg-dynbatch predict", add_help=False)
    known.add_argument("--checkpoint", nargs="+", default=[])
    paths = known.parse_known_args(options)[0].checkpoint
    # Without a file, molecules print the help or the error.
    contents = read_checkpoint(paths[0]) if paths and Path(paths[0]).is_file() else {}
    kind = contents.get("pyg_dynbatch_task")
    if kind == "DocumentPrediction":
        from pyg_dynbatch.documents.predict import run_documents

        return run_documents(options)
    if kind == "TreeClassification":
        from pyg_dynbatch.trees.predict import run_tree_predict

        return run_tree_predict(options)
    if kind == "TreeRelatedness":
        from pyg_dynbatch.core.errors import mismatch

        what, got = f"predict: not for checkpoints of {kind}", f"--checkpoint {paths[0]}"
        expected, hint = (
            "one of trees, molecules or JSON documents",
            "pyg-dynbatch predict --run FOLDER",
        )
        raise mismatch(ValueError, what, expected, got, hint=hint)
    from pyg_dynbatch.molecules.work.commands import run_molecule_predict

    return run_molecule_predict(options, contents)


def one_line(error: object) -> str:
    """Join a message of several lines into one."""
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    first, *others = lines or [type(error).__name__]
    return f"{first} {'; '.join(others)}".strip()
