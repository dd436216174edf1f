"""Keep the finished program of one example as small integer arrays."""

from dataclasses import dataclass

import numpy as np

from pyg_dynbatch.core.operation import Signature
from pyg_dynbatch.core.program import RESULT, Program, ProgramArrays
from pyg_dynbatch.core.structure import longest_paths
from pyg_dynbatch.core.tensor_type import RowType


@dataclass(frozen=True, eq=False)
class CompactProgram:
    """Holds what a :class:`Program` holds, without the lists that are only needed to record it.

    Schedules and the one-by-one reference take either. Programs of one model share their tables
    of signatures and row types, so that an example costs its integers and constants alone.

    Args:
        signatures: What calls name by number; some may not be called.
        row_types: What values name by number; of some there may be no value.
        num_inputs: Input rows of each row type.
        fields: The calls, values, reads, constants and outputs.

    Example:
        >>> from pyg_dynbatch.core.tensor_type import TensorType
        >>> scalar, program = TensorType(()), Program()
        >>> add = Signature("add", (scalar, scalar), (scalar,))
        >>> one = program.constant(scalar, 1.0)
        >>> program.output(program.call(add, one, one))
        >>> compact = CompactProgram((add,), (scalar,), (0,), program.arrays())
        >>> compact
        CompactProgram(1 calls, depth 1, outputs ['output'])
    """

    signatures: tuple[Signature, ...]
    row_types: tuple[RowType, ...]
    num_inputs: tuple[int, ...]
    fields: ProgramArrays

    def arrays(self) -> ProgramArrays:
        """Gives the fields."""
        return self.fields

    @property
    def num_calls(self) -> int:
        """Number of calls."""
        return len(self.fields.call_signature)

    @property
    def depth(self) -> int:
        """Longest chain of calls that read something; 0 for a program without calls."""
        f = self.fields
        # A call that reads nothing (a learned start state) waits for nothing and counts nothing.
        reads = np.zeros(self.num_calls, dtype=bool)
        reads[f.read_call] = True
        inner = np.flatnonzero(f.value_kind[f.read_value] == RESULT)
        source, target = f.value_place[f.read_value[inner]], f.read_call[inner]
        kept = reads[source]
        depth = longest_paths(source[kept], target[kept], self.num_calls) + 1
        return int(depth[reads].max(initial=0))

    @property
    def outputs(self) -> dict[str, np.ndarray]:
        """Values of each named output."""
        return self.fields.outputs

    def __repr__(self) -> str:
        """Says how large the program is."""
        outputs = list(self.outputs)
        return f"CompactProgram({self.num_calls} calls, depth {self.depth}, outputs {outputs})"


AnyProgram = Program | CompactProgram
"""The calls of one example, while they are recorded or afterwards."""
