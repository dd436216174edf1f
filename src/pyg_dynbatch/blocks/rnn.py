"""Run a recurrent cell along a sequence."""

from typing import Any, cast

from torch import nn

from pyg_dynbatch.blocks.block import Block
from pyg_dynbatch.blocks.code import Code, packed
from pyg_dynbatch.blocks.layers import ScopedLayer
from pyg_dynbatch.blocks.leaves import assign
from pyg_dynbatch.blocks.result_types import (
    PyObjectType,
    ResultType,
    SequenceType,
    TupleType,
    VoidType,
    shown,
)
from pyg_dynbatch.blocks.sequences import element_type, elements, loop_target, refuse_endless
from pyg_dynbatch.blocks.tensors import refuse_no_zeros, zero_value


class RNN(Block):
    """Runs a cell along a sequence; gives all its outputs and its last state.

    Args:
        cell: From (element, state) to (output, next state); an ``nn.LSTMCell``, ``nn.GRUCell``
            or ``nn.RNNCell`` is wrapped in a :class:`ScopedLayer`.
        initial_state: A block without input; zeros where left out.
        initial_state_from_input: Take (sequence, initial state) as input.
        name: For messages and pictures.

    Raises:
        ValueError: If the initial state is given in both ways.
        TypeError: If the cell maps no pair to a pair, its state changes type, the sequence never
            ends, or nothing tells the type of the zeros to begin with.

    Example:
        >>> import torch
        >>> from pyg_dynbatch import blocks as td
        >>> running_sum = td.RNN(td.Function(lambda x, s: (x + s, x + s)), td.Zeros([]))
        >>> (td.Map(td.Scalar()) >> running_sum).eval([1, 2], tolist=True)
        ([1.0, 3.0], 3.0)
    """

    def __init__(
        self,
        cell: Any,
        initial_state: Any = None,
        initial_state_from_input: bool = False,
        name: Any = None,
    ) -> None:
        if isinstance(cell, nn.RNNCellBase):
            cell = ScopedLayer(cell)
        start = [] if initial_state is None else [initial_state]
        super().__init__([cell, *start], name=name)
        if start and initial_state_from_input:
            self._refuse(
                "the initial state is given twice",
                ValueError,
                expected="initial_state or initial_state_from_input",
                got="both",
            )
        self._cell, self._from_input = self._children[0], initial_state_from_input
        self._start = self._children[1] if start else None
        if self._start is not None:
            self._start.set_input_type(VoidType())
        self._settle(
            *self._children, initial_state_from_input=True if initial_state_from_input else None
        )

    def _key_of(self, child: Block) -> str:
        return "[cell]" if child is self._cell else "[initial_state]"

    def _infer(self) -> None:
        sequence, state = self._given()
        refuse_endless(self, sequence)
        element = element_type(self, sequence)
        taken, given = self._pair("input"), self._pair("output")
        if self._start is not None:
            state = state or self._start.output_type
        state = state or (taken[1] if taken else None) or (given[1] if given else None)
        if isinstance(self.output_type, TupleType) and len(self.output_type) == 2:
            state = state or self.output_type[1]
        if state is None and element is not None and self._cell.output_type is None:
            state = self._stated()
        if state is None:
            return
        if element is not None:
            self._cell.set_input_type((element, state))
        if self._start is not None:
            self._start.set_output_type(state)
        elif not self._from_input:
            refuse_no_zeros(self, state)
        given = self._pair("output")
        if given is not None:
            if given[1] != state:
                self._refuse(
                    "the state changes its type",
                    expected=f"{shown(state)} as it goes in",
                    got=f"{shown(given[1])} as it comes out",
                )
            if sequence is not None:
                self.set_output_type((SequenceType(given[0]), state))

    def _stated(self) -> ResultType | None:
        """A layer may say of what type its state is."""
        layer = getattr(self._cell, "tf_fn", None)
        return getattr(layer, "state_type", None)

    def _given(self) -> tuple[ResultType | None, ResultType | None]:
        kind = self.input_type
        if not self._from_input or kind is None:
            return kind, None
        if isinstance(kind, PyObjectType):
            return kind, kind
        if not isinstance(kind, TupleType) or len(kind) != 2:
            self._refuse(
                "the input is no pair", expected="(sequence, initial state)", got=shown(kind)
            )
        return kind[0], kind[1]

    def _pair(self, side: str) -> TupleType | None:
        kind = self._cell._types[side]
        if kind is None or kind == PyObjectType():
            return None
        if not isinstance(kind, TupleType) or len(kind) != 2:
            takes = "(element, state)" if side == "input" else "(output, state)"
            self._refuse(
                f"the cell's {side} is no pair", expected=takes, got=f"{shown(kind)}, {kind!r}"
            )
        return kind

    def _check(self) -> None:
        if self._cell.output_type is None and self._start is None and not self._from_input:
            self._refuse(
                "the type of the initial state cannot be inferred",
                expected="initial_state=td.Zeros(type), or a cell whose types are stated",
                got="neither",
            )

    def _emit(self, code: Code, value: Any) -> Any:
        sequence, given = self._given()
        kind = cast("TupleType", self._cell._known("output"))
        state = code.new(kind[1], "a", varying=True)
        source_value: Any = value
        if self._from_input:
            is_object = not isinstance(value, tuple)
            source_value = f"{value}[0]" if is_object else value[0]
            assign(code, state, f"{value}[1]" if is_object else value[1])
        elif self._start is not None:
            assign(code, state, code.emit(self._start, "None"))
        else:
            assign(code, state, zero_value(code, kind[1]))
        found = code.fresh("s")
        code.line(f"{found} = []")
        element = element_type(self, sequence)
        target = code.new(element or PyObjectType(), "x", varying=True)
        inner, source = elements(source_value, target)
        with code.loop(loop_target(source_value, target), source):
            output, new = code.emit(self._cell, (inner, state))
            code.line(f"{found}.append({packed(output)})")
            assign(code, state, new)
        return found, state
