"""Speak with DeepChem, which lives in an environment of its own and times itself there."""

import json
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from benchmarks import deepchem_probe
from benchmarks.protocol import Contender, Stopwatch
from pyg_dynbatch.core.errors import mismatch

NAME = "deepchem's own"


class DeepChem:
    """Runs DeepChem in another interpreter, one question after another.

    Args:
        python: The interpreter, with DeepChem installed.

    Raises:
        OSError: If it cannot be started.
        RuntimeError: If it ends or complains.
    """

    def __init__(self, python: Path) -> None:
        self._python = python
        # Closed with the process. A pipe would fill up with DeepChem's remarks and block it.
        self._remarks = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(python), "-u", str(deepchem_probe.__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._remarks,
            text=True,
        )
        try:
            self.facts = self.ask("begin", threads=torch.get_num_threads())
        except RuntimeError:
            self.close()
            raise

    def ask(self, do: str, **wanted: Any) -> dict[str, Any]:
        """Asks one question.

        Args:
            do: A method of the probe.
            **wanted: Its arguments.

        Returns:
            The answer.

        Raises:
            RuntimeError: If there is none, or it is an error.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise mismatch(RuntimeError, "bench: DeepChem's process has no pipes")
        try:
            stdin.write(json.dumps({"do": do, **wanted}) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_remark()}
        if "error" in answer:
            raise mismatch(
                RuntimeError,
                f"bench: DeepChem did not {do}",
                "an interpreter with DeepChem, RDKit and torch",
                answer["error"],
                where=self._python,
                hint="the installation in docs/benchmarks.md",
            )
        return answer

    def contender(self, do: str, phase: str) -> Contender:
        """Makes a contender whose time is what DeepChem's process says.

        Args:
            do: A method of the probe that answers with its seconds.
            phase: What the time is called.
        """

        def run(lap: Stopwatch) -> None:
            lap.seconds[phase] = self.ask(do)["seconds"]

        return run

    def close(self) -> None:
        """Ends the process, which stops when nothing more can be asked."""
        self._process.communicate(timeout=60)
        self._remarks.close()

    def _last_remark(self) -> str:
        self._process.wait(timeout=60)
        self._remarks.seek(0)
        lines = self._remarks.read().strip().splitlines()
        return lines[-1] if lines else f"it ended with {self._process.returncode}"

    def __enter__(self) -> "DeepChem":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
