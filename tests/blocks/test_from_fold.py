"""The porting guide names everything: all public names here, and all names of Fold."""

import re
from pathlib import Path

import pytest
import torch

import pyg_dynbatch
from pyg_dynbatch import blocks as td
from tests.core.helpers import message

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"

FOLD = {
    "Types": "TensorType TupleType SequenceType BroadcastSequenceType PyObjectType VoidType "
    "ResultType convert_to_type canonicalize_type IOBase",
    "Blocks": "Block convert_to_block Tensor Scalar Vector InputTransform SerializedMessageToTree "
    "OneHot OneHotFromList Optional Composition Pipe Record AllOf FromTensor Function Concat Zeros "
    "Map Fold RNN Reduce Sum Min Max Mean Broadcast Zip ZipWith NGrams Nth GetItem Slice Length "
    "ForwardDeclaration OneOf Identity Void Metric",
    "Layers": "Layer TensorToTensorLayer FC Embedding FractalNet ScopedLayer create_variable_scope",
    "Running": "Compiler EdibleIterator group_by_batches epochs Compiler.create Compiler.compile "
    "Compiler.init_loom Compiler.is_loom_initialized Compiler.build_feed_dict "
    "Compiler.build_loom_input_batched Compiler.build_loom_inputs Compiler.multiprocessing_pool "
    "Compiler.pool Compiler.input_tensor Compiler.output_tensors Compiler.metric_tensors "
    "Compiler.loom_input_tensor Compiler.max_depth Compiler.root",
    "Loom": "Loom Weaver TypeShape LoomOp PassThroughLoomOp WeaverOpBase DeserializingWeaver",
    "Plans": "Plan TrainPlan EvalPlan InferPlan define_plan_flags plan_default_params parse_spec",
}
"""Public names by the part of the library; those of options and inner members are left out."""
OPTIONS = (
    "mode debug logdir_base plan_name run_id save_summaries_secs num_multiprocess_processes "
    "truncate_examples master task ps_tasks worker_replicas num_dequeuers queue_capacity epochs "
    "batch_size batches_per_epoch save_model_secs eval_interval_secs save_best infer_from "
    "optimizer_spec learning_rate_decay_spec"
)
NAMED = [name for names in FOLD.values() for name in names.split()]


def rows(section: str) -> list[list[str]]:
    """The cells of all tables of a section, without their heads."""
    text = PAGE.read_text(encoding="utf-8")
    part = re.search(rf"^### {section}\n(.*?)(?=^##|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert part is not None
    lines = re.findall(r"^\| *`.*\|$", part[1], flags=re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def name(cell: str) -> str:
    return re.findall(r"`([^`]+)`", cell)[0]


PORTED = [row for section in ("Types", "Blocks", "Layers", "Running") for row in rows(section)]
LEFT_OUT = [row for row in rows("Left out on purpose") if len(row) == 3]


def resolve(path: str) -> object:
    """What a dotted name is; a field of a data class is its annotation."""
    first, *rest = path.split(".")
    found = td.Compiler(td.Scalar()) if first == "Compiler" else getattr(td, first)
    for part in rest:
        fields = getattr(found, "__dataclass_fields__", {})
        found = fields[part] if part in fields else getattr(found, part)
    return found


def test_every_name_of_fold_is_listed_once() -> None:
    named = [name(row[0]) for row in PORTED + LEFT_OUT]
    assert sorted(named) == sorted(NAMED)


@pytest.mark.parametrize("row", PORTED, ids=lambda row: name(row[0]))
def test_what_is_ported_is_there(row: list[str]) -> None:
    fold, here = name(row[0]), name(row[1])
    assert resolve(here) is not None
    public = here.partition(".")[0]
    assert public in td.__all__
    assert fold == here or public == "BlockResult"


def test_blocks_layers_and_declarations_are_io_bases() -> None:
    sides = ("input_type", "output_type")
    changes = [f"set_{side}{more}" for side in sides for more in ("", "_classes")]
    members = ["name", *sides, *changes, "set_io_types"]
    for make in (td.Identity, td.ForwardDeclaration, lambda: td.Layer(), td.IOBase):
        one = make()
        assert isinstance(one, td.IOBase) and all(hasattr(one, member) for member in members)
        assert one.name is None and one.input_type is None and one.output_type is None
    layer, other = td.Layer(name_or_scope="mine"), td.FC(2).set_input_type(3)
    assert layer.set_io_types(other) is layer and layer.name == "mine"
    assert (layer.input_type, layer.output_type) == (td.TensorType((3,)), td.TensorType((2,)))
    block = td.Function(torch.nn.Linear(3, 2)).set_io_types(layer)
    assert td.IOBase().set_io_types(block).output_type == layer.output_type
    text = message(TypeError, layer.set_io_types, td.FC(5))
    assert "mine: the output type differs" in text
    kinds = td.Layer().set_input_type_classes(td.TupleType).set_output_type_classes(td.VoidType)
    assert "a wrong kind of input" in message(TypeError, kinds.set_input_type, 3)
    assert "a wrong kind of output" in message(TypeError, kinds.set_output_type, 3)
    assert not isinstance(torch.nn.Linear(3, 2), td.IOBase)


def test_what_is_left_out_is_not_there() -> None:
    model = td.Compiler(td.Scalar())
    for row in LEFT_OUT:
        first, *rest = name(row[0]).split(".")
        # Modules of torch have a method of this name.
        is_there = hasattr(model, rest[0]) if rest else hasattr(td, first)
        assert is_there == (rest == ["compile"]), row
        assert row[1], "the page says what to write instead"


def test_every_public_name_is_listed() -> None:
    named = {name(row[1]).partition(".")[0] for row in PORTED}
    beyond = {name(row[0]) for row in rows("Beyond Fold")}
    assert sorted(td.__all__) == sorted(named | beyond)
    assert not named - {"BlockResult"} & beyond


def test_options_of_plans_and_parts_of_the_loom_are_listed() -> None:
    text = PAGE.read_text("utf-8")
    for part in ("Engine", "Recording", "TensorType", "Operations", "schedule_structure"):
        assert part in pyg_dynbatch.__all__ and (f"`{part}" in text or f".{part}`" in text)
    cells = [row[0] for row in rows("Left out on purpose") if len(row) == 2]
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(OPTIONS.split())


def test_depth_is_counted_as_documented() -> None:
    numbers = lambda: td.Map(td.Scalar())  # noqa: E731
    for total in (td.Sum, td.Min, td.Max, td.Mean):
        block = numbers() >> total()
        assert [block.max_depth(range(n)) for n in (0, 1, 2, 7)] == [0, 0, 1, 1]
    pairs = numbers() >> td.Reduce(td.Function(torch.add))
    assert [pairs.max_depth(range(n)) for n in (0, 1, 2, 7)] == [0, 0, 1, 3]
    assert (numbers() >> td.Map(td.Metric("m")) >> td.Void()).max_depth([1, 2]) == 0
