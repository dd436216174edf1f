"""The language: typed blocks that are checked when they are wired and batched when they run."""

from typing import NoReturn

from pyg_dynbatch.blocks.block import Block, Pipe, convert_to_block
from pyg_dynbatch.blocks.cache import TracedExamples
from pyg_dynbatch.blocks.compiler import PASSES, Collater, Compiler
from pyg_dynbatch.blocks.composition import Composition
from pyg_dynbatch.blocks.control import Identity, Metric, OneOf, Void
from pyg_dynbatch.blocks.draw import BlockDrawing, ExplainedCall, drawing_of, schedule_text
from pyg_dynbatch.blocks.functions import Function, Segment
from pyg_dynbatch.blocks.indexing import (
    Broadcast,
    GetItem,
    Length,
    NGrams,
    Nth,
    Slice,
    Zip,
    ZipWith,
)
from pyg_dynbatch.blocks.inputs import (
    InputRow,
    InputTransform,
    OneHot,
    OneHotFromList,
    Optional,
    Scalar,
    Tensor,
    Vector,
)
from pyg_dynbatch.blocks.iterators import EdibleIterator, epochs, group_by_batches
from pyg_dynbatch.blocks.layers import (
    FC,
    Embedding,
    FractalNet,
    Layer,
    ScopedLayer,
    TensorToTensorLayer,
    create_variable_scope,
)
from pyg_dynbatch.blocks.left_out import left_out as _left_out
from pyg_dynbatch.blocks.records import AllOf, ForwardDeclaration, Record
from pyg_dynbatch.blocks.reductions import Max, Mean, Min, Sum
from pyg_dynbatch.blocks.sequences import RNN, Fold, Map, Reduce
from pyg_dynbatch.blocks.tensors import Concat, FromTensor, Zeros
from pyg_dynbatch.blocks.tracing import BlockResult, Traced, TracedBatch, Tracer
from pyg_dynbatch.blocks.types import (
    BroadcastSequenceType,
    IOBase,
    PyObjectType,
    ResultType,
    SequenceType,
    TensorType,
    TupleType,
    VoidType,
    canonicalize_type,
    convert_to_type,
)

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
