"""Names of TensorFlow Fold that are not supported, and what replaces them."""

_SCHEDULING = "pyg_dynbatch has {} instead (docs/scheduling.md)"
_LIGHTNING = "train under Lightning, with lightning.pytorch.Trainer.{}"

REPLACEMENTS = {
    "SerializedMessageToTree": "parse before, or in td.InputTransform: "
    "google.protobuf.json_format.MessageToDict returns nested dictionaries",
    "Loom": _SCHEDULING.format("Engine and Program"),
    "Weaver": _SCHEDULING.format("Program"),
    "TypeShape": _SCHEDULING.format("TensorType"),
    "LoomOp": _SCHEDULING.format("Operations.add(module, inputs, outputs)"),
    "PassThroughLoomOp": "nothing is needed: values are not copied from depth to depth",
    "WeaverOpBase": _SCHEDULING.format("Program and schedule_structure"),
    "DeserializingWeaver": "call compiler.collate on traced examples",
    "Plan": _LIGHTNING.format("fit, validate, test or predict"),
    "TrainPlan": _LIGHTNING.format("fit"),
    "EvalPlan": _LIGHTNING.format("validate or test"),
    "InferPlan": _LIGHTNING.format("predict, or call compiler(examples) after compiler.eval()"),
    "define_plan_flags": "use the command line of Lightning (docs/training.md)",
    "plan_default_params": "set defaults in your LightningModule",
    "parse_spec": "use torch.optim, or pyg_dynbatch.lightning.OptimizerOptions",
    "Compiler.build_feed_dict": "call the compiler on a list of examples: "
    "result = compiler(examples)",
    "Compiler.input_tensor": "use DataLoader(examples, collate_fn=compiler.collate)",
    "Compiler.loom_input_tensor": "call the compiler on compiler.collate(examples), or "
    "keep traced examples in td.TracedExamples",
    "Compiler.output_tensors": "read them from a result: compiler(examples).output_tensors",
    "Compiler.metric_tensors": "read them from a result: compiler(examples).metric_tensors",
    "Block.eval(feed_dict=)": "values are part of the example; external rows are read by "
    "td.InputRow(tag, shape) from inputs={tag: rows}",
    "Block.eval(session=)": "there are no sessions; leave it out",
    "Block.eval(use_while_loop=)": "there is no while_loop; leave it out",
}


def replacement_of(name: str) -> str:
    """Describe in one line what replaces a name of Fold; empty for all other names."""
    return f"{name} is not supported; {REPLACEMENTS[name]}" if name in REPLACEMENTS else ""
