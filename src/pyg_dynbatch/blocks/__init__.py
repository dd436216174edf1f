"""The language of TensorFlow Fold: typed blocks, checked when they are wired, batched when run."""
# fmt: off
# isort: skip_file

from pyg_dynbatch.blocks.block import Block, Identity, Pipe, convert_to_block
from pyg_dynbatch.blocks.cache import TracedExamples
from pyg_dynbatch.blocks.compiler import Compiler
from pyg_dynbatch.blocks.composition import Composition
from pyg_dynbatch.blocks.control import (
    AllOf, ForwardDeclaration, Metric, OneOf, Optional, Record, Void,
)
from pyg_dynbatch.blocks.draw import drawing_of, schedule_text
from pyg_dynbatch.blocks.functions import Function, Segment
from pyg_dynbatch.blocks.layers import (
    FC, Embedding, Layer, ScopedLayer, TensorToTensorLayer, create_variable_scope,
)
from pyg_dynbatch.blocks.sequences import (
    RNN, Broadcast, Fold, GetItem, Length, Map, Max, Mean, Min, NGrams, Nth, Reduce, Slice, Sum,
    Zip, ZipWith,
)
from pyg_dynbatch.blocks.tensors import (
    Concat, FromTensor, InputRow, InputTransform, OneHot, OneHotFromList, Scalar, Tensor, Vector,
    Zeros,
)
from pyg_dynbatch.blocks.tracing import BlockResult, Collater, Tracer
from pyg_dynbatch.blocks.types import (
    BroadcastSequenceType, IOBase, PyObjectType, ResultType, SequenceType, TensorType, TupleType,
    VoidType, canonicalize_type, convert_to_type,
)

__all__ = [
    # Types.
    "BroadcastSequenceType", "IOBase", "PyObjectType", "ResultType", "SequenceType",
    "TensorType", "TupleType", "VoidType", "canonicalize_type", "convert_to_type",
    # Blocks.
    "AllOf", "Block", "Broadcast", "Composition", "Concat", "Fold", "ForwardDeclaration",
    "FromTensor", "Function", "GetItem", "Identity", "InputRow", "InputTransform", "Length", "Map",
    "Max", "Mean", "Metric", "Min", "NGrams", "Nth", "OneHot", "OneHotFromList", "OneOf",
    "Optional", "Pipe", "RNN", "Record", "Reduce", "Scalar", "Segment", "Slice", "Sum", "Tensor",
    "Vector", "Void", "Zeros", "Zip", "ZipWith", "convert_to_block",
    # Layers.
    "Embedding", "FC", "Layer", "ScopedLayer", "TensorToTensorLayer", "create_variable_scope",
    # Running and drawing.
    "BlockResult", "Collater", "Compiler", "TracedExamples", "Tracer", "drawing_of",
    "schedule_text",
]
