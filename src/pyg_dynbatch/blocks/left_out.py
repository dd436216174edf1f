"""What replaces the names of TensorFlow Fold that are left out."""

_SCHEDULING = "pyg_dynbatch has {} in its place (docs/scheduling.md)"
_LIGHTNING = "train under Lightning, with lightning.pytorch.Trainer.{}"

INSTEAD = {
    "SerializedMessageToTree": "parse before, or in td.InputTransform: "
    "google.protobuf.json_format.MessageToDict returns nested dictionaries",
    "Loom": _SCHEDULING.format("Engine and Program"),
    "Weaver": _SCHEDULING.format("Program"),
    "TypeShape": _SCHEDULING.format("TensorType"),
    "LoomOp": _SCHEDULING.format("Operations.add(module, inputs, outputs)"),
    "PassThroughLoomOp": "nothing is needed: values are not copied from depth to depth",
    "WeaverOpBase": _SCHEDULING.format("Program and Schedule"),
    "DeserializingWeaver": "call compiler.collate on traced examples",
    "Plan": _LIGHTNING.format("fit, validate, test or predict"),
    "TrainPlan": _LIGHTNING.format("fit"),
    "EvalPlan": _LIGHTNING.format("validate or test"),
    "InferPlan": _LIGHTNING.format("predict, or call compiler(examples) after compiler.eval()"),
    "define_plan_flags": "use the command line of Lightning (docs/training.md)",
    "plan_default_params": "set defaults in your LightningModule",
    "parse_spec": "use torch.optim, or pyg_dynbatch.training.OptimizerOptions",
    "Compiler.build_feed_dict": "call the compiler on a list of examples: "
    "result = compiler(examples)",
    "Compiler.input_tensor": "use DataLoader(examples, collate_fn=compiler.collate)",
    "Compiler.loom_input_tensor": "call the compiler on compiler.collate(examples), or "
    "keep traced examples in td.TracedExamples",
    "Compiler.output_tensors": "ask the result of a call: compiler(examples).output_tensors",
    "Compiler.metric_tensors": "ask the result of a call: compiler(examples).metric_tensors",
    "Block.eval(feed_dict=)": "values come with the example, and rows from outside by "
    "td.InputRow(tag, shape) and inputs={tag: rows}",
    "Block.eval(session=)": "there are no sessions; leave it out",
    "Block.eval(use_while_loop=)": "there is no while_loop; leave it out",
}
"""Names of Fold, and what to do instead."""


def left_out(name: str) -> str:
    """One line for someone who asks for a name of Fold; empty if it is none of those left out."""
    return f"{name} is left out here; {INSTEAD[name]}" if name in INSTEAD else ""
