"""The language: typed blocks that are checked when they are wired and batched when they run."""

from typing import NoReturn

from pyg_dynbatch.blocks.access import (
    Broadcast,
    GetItem,
    Length,
    NGrams,
    Nth,
    Slice,
    Zip,
    ZipWith,
)
from pyg_dynbatch.blocks.batch import BlockResult, TracedBatch
from pyg_dynbatch.blocks.block import Block, convert_to_block
from pyg_dynbatch.blocks.cache import TracedExamples
from pyg_dynbatch.blocks.compile import PASSES
from pyg_dynbatch.blocks.compiler import Collater, Compiler
from pyg_dynbatch.blocks.composition import Composition
from pyg_dynbatch.blocks.control import Identity, Metric, OneOf, Void
from pyg_dynbatch.blocks.decode import Traced
from pyg_dynbatch.blocks.dense import FC, Embedding
from pyg_dynbatch.blocks.draw import BlockDrawing, ExplainedCall, drawing_of, schedule_text
from pyg_dynbatch.blocks.fractal import FractalNet
from pyg_dynbatch.blocks.functions import Function, Segment
from pyg_dynbatch.blocks.iterators import EdibleIterator, epochs, group_by_batches
from pyg_dynbatch.blocks.layers import (
    Layer,
    ScopedLayer,
    TensorToTensorLayer,
    create_variable_scope,
)
from pyg_dynbatch.blocks.leaves import (
    InputRow,
    InputTransform,
    OneHot,
    OneHotFromList,
    Optional,
    Scalar,
    Tensor,
    Vector,
)
from pyg_dynbatch.blocks.left_out import left_out as _left_out
from pyg_dynbatch.blocks.pipe import Pipe
from pyg_dynbatch.blocks.records import AllOf, Record
from pyg_dynbatch.blocks.recursion import ForwardDeclaration
from pyg_dynbatch.blocks.result_types import (
    BroadcastSequenceType,
    PyObjectType,
    ResultType,
    SequenceType,
    TensorType,
    TupleType,
    VoidType,
    canonicalize_type,
    convert_to_type,
)
from pyg_dynbatch.blocks.rnn import RNN
from pyg_dynbatch.blocks.sequences import Fold, Map, Reduce
from pyg_dynbatch.blocks.tensors import Concat, FromTensor, Zeros
from pyg_dynbatch.blocks.totals import Max, Mean, Min, Sum
from pyg_dynbatch.blocks.tracer import Tracer
from pyg_dynbatch.blocks.typed import IOBase

__all__ = [
    "group_by_batches",
    "epochs",
    "EdibleIterator",
    "schedule_text",
    "drawing_of",
    "ExplainedCall",
    "BlockDrawing",
    "TracedExamples",
    "FC",
    "IOBase",
    "PASSES",
    "RNN",
    "AllOf",
    "Block",
    "BlockResult",
    "Broadcast",
    "BroadcastSequenceType",
    "Collater",
    "Compiler",
    "Composition",
    "Concat",
    "Embedding",
    "Fold",
    "ForwardDeclaration",
    "FractalNet",
    "FromTensor",
    "Function",
    "GetItem",
    "Identity",
    "InputRow",
    "InputTransform",
    "Layer",
    "Length",
    "Map",
    "Max",
    "Mean",
    "Metric",
    "Min",
    "NGrams",
    "Nth",
    "OneHot",
    "OneHotFromList",
    "OneOf",
    "Optional",
    "Pipe",
    "PyObjectType",
    "Record",
    "Reduce",
    "ResultType",
    "Scalar",
    "ScopedLayer",
    "Segment",
    "SequenceType",
    "Slice",
    "Sum",
    "Tensor",
    "TensorToTensorLayer",
    "TensorType",
    "Traced",
    "TracedBatch",
    "Tracer",
    "TupleType",
    "Vector",
    "Void",
    "VoidType",
    "Zeros",
    "Zip",
    "ZipWith",
    "canonicalize_type",
    "convert_to_block",
    "convert_to_type",
    "create_variable_scope",
]


def __getattr__(name: str) -> NoReturn:
    """Names what stands in for a name of Fold that is left out."""
    raise AttributeError(_left_out(name) or f"module {__name__!r} has no attribute {name!r}")
