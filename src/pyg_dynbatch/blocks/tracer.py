"""Turn one Python example into integers that name its calls; knows no parameters, no modules."""

from typing import Any, NoReturn

import numpy as np

from pyg_dynbatch.blocks.code import drive
from pyg_dynbatch.blocks.complaint import Complaint, UnknownKey
from pyg_dynbatch.blocks.constants import rows_of
from pyg_dynbatch.blocks.decode import Traced, program_of
from pyg_dynbatch.blocks.result_types import ResultType, TensorType
from pyg_dynbatch.blocks.site import Recipe
from pyg_dynbatch.core.compact import CompactProgram
from pyg_dynbatch.core.errors import mismatch

_SOURCE = "<blocks>"


class Tracer:
    """Records the calls of one example; holds no parameters, so loader workers can have it.

    Made by :class:`Compiler`; call it on an example.

    Args:
        recipe: The written code and its tables.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> tracer = td.Compiler.create(td.Map(td.Scalar()) >> td.Sum()).tracer
        >>> tracer.program(tracer([1.0, 2.0]))
        CompactProgram(1 calls, depth 1, outputs ['output_0'])
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        names = dict(recipe.names)
        exec(compile(recipe.source, _SOURCE, "exec"), names)  # noqa: S102 - our own text
        self._begin = names["begin"]

    def __call__(self, example: Any, number: int | None = None) -> Traced:
        """Records the calls of one example.

        Args:
            example: The Python object.
            number: Its place in the mini-batch, for messages.

        Returns:
            Its program and what goes with it.
        """
        code, starts, data, metrics, labels, run = self._begin()
        try:
            result = drive(run, example)
            return self._finish(code, starts, data, metrics, labels, result)
        except Exception as error:
            self._explain(error, number)

    def _finish(
        self,
        code: list[int],
        starts: list[int],
        data: dict[int, list[Any]],
        metrics: tuple[list[int], ...],
        labels: tuple[list[Any], ...],
        result: Any,
    ) -> Traced:
        recipe = self.recipe
        marks = outputs_in(recipe.result_type, result)
        for name, rows in zip(recipe.metric_types, metrics, strict=True):
            if rows:
                marks[f"metric:{name}"] = rows
        stacked = {}
        for number, items in data.items():
            if items:
                site = recipe.sites[number]
                stacked[number] = rows_of(site, recipe.row_types[site.number], items)
        return Traced(
            np.array(code, dtype=np.int32),
            np.array(starts, dtype=np.int32),
            stacked,
            {name: np.array(values, dtype=np.int32) for name, values in marks.items()},
            dict(zip(recipe.metric_types, labels, strict=True)),
            result if recipe.keeps_result else None,
        )

    def program(self, traced: Traced) -> CompactProgram:
        """Spells out the program of a traced example, as the core knows programs."""
        return program_of(self.recipe, traced)

    def _explain(self, error: Exception, number: int | None) -> NoReturn:
        """Raises the error again, with the block and the example."""
        path, users_own = self._origin(error)
        example = [f"example {number}"] if number is not None else []
        if isinstance(error, Complaint):
            where = ", ".join([*example, f"block {error.facts.pop('path', path)}"])
            raise error.error(mismatch(error.what, where=where, **error.facts)) from error.__cause__
        where = ", ".join([*example, f"block {path}"])
        if users_own or not isinstance(error, KeyError | IndexError | TypeError | ValueError):
            error.add_note(f"  where:    {where}")
            raise error
        kind = UnknownKey if isinstance(error, KeyError) else type(error)
        raise kind(
            mismatch(
                f"{path.rpartition('.')[2]}: the input does not fit",
                expected="an input of the stated form",
                got=f"{type(error).__name__}: {error}",
                where=where,
            )
        ) from error

    def _origin(self, error: BaseException) -> tuple[str, bool]:
        trace, line = error.__traceback__, 0
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == _SOURCE:
                line = trace.tb_lineno
            trace = trace.tb_next
        return self.recipe.origin[line - 1] if line else ("Root", False)

    def __getstate__(self) -> dict[str, Any]:
        """Keeps the text; the code is compiled again where it arrives."""
        return {"recipe": self.recipe}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Compiles the text."""
        self.__init__(state["recipe"])  # type: ignore[misc]

    def __repr__(self) -> str:
        """Says how large the written code is."""
        return f"Tracer({len(self.recipe.origin)} lines, {len(self.recipe.signatures)} operations)"


def outputs_in(result_type: ResultType, result: Any) -> dict[str, list[int]]:
    """Gives names to the values in the root's result.

    Where their number is fixed each has a name; where there are sequences, values of one type
    share one, in the order in which :meth:`ResultType.for_each_terminal` meets them.
    """
    if not result_type.size:
        if result_type.size == 0:
            return {}
        found: dict[str, list[int]] = {}

        def take(terminal: ResultType, value: Any) -> None:
            if isinstance(terminal, TensorType):
                found.setdefault(f"output:{terminal}", []).append(value)

        result_type.for_each_terminal(take, result)
        return found
    pairs = zip(result_type.terminal_types(), result_type.flatten(result), strict=True)
    tensors = [value for kind, value in pairs if isinstance(kind, TensorType)]
    return {f"output_{number}": [value] for number, value in enumerate(tensors)}
