"""A model written in blocks, compared with the same model as fused layers; then policies.

Training of the sentiment model with the same weights, the cost of tracing, and the steps and time
of every policy on a calculator and on a model that reads letters and words.

``trace`` records the calls of every tree, ``collate`` merges and schedules them, ``step`` is
forward, backward and optimiser. ``x`` is the time of the blocks relative to the fused layers.
``compile`` makes the module, ``read`` reads traced trees from a file. The policies run on models
whose operations alternate, without an optimiser.
"""

import operator
import random
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import bench
from benchmarks.sst import draw
from benchmarks.tree_lstm import Leaf, Pair, Weights, make_ways
from benchmarks.trees import sentiment_trees
from pyg_dynbatch import blocks as td
from pyg_dynbatch.core.policy import Policy
from pyg_dynbatch.trees.data import Collater, DynTreeData
from pyg_dynbatch.trees.models import TreeClassifier
from pyg_dynbatch.trees.text import to_nested

FUSED, BLOCKS = "fused", "blocks"
CACHED, TRACED = "collate and step", "trace, collate and step"
PHASES = {
    **bench.phases("trace", "collate", *bench.STEP, train=bench.TRAIN, step=bench.STEP),
    CACHED: ("collate", *bench.STEP),
    TRACED: ("trace", "collate", *bench.STEP),
}
HOST = bench.phases("compile", "read")
POLICIES: tuple[Policy, ...] = ("depth", "agenda")
POLICY_PHASES = bench.phases("collate", train=bench.TRAIN)
STATS = ("steps", "lower_bound", "critical_path", "fold_steps", "rows")

LOSS = "loss"
"""The metric that holds the losses of a model."""


def add_options(parser: bench.Options) -> None:
    """Declare the options."""
    parser.trees()
    parser.counts("--batch-sizes", [100, 256])
    parser.counts("--units", [150, 300])
    parser.count("--embedding", 300, metavar="WIDTH")
    text = "models on which policies are compared; none to omit the comparison"
    parser.choices("--models", MODELS, help=text, nargs="*")
    parser.count("--width", 32, "width of these models (default: 32)")
    parser.common(batches=3, seed=0, repeats=5)


def sentiment(model: TreeClassifier) -> td.Block:
    """Write a binary Tree-LSTM classifier in blocks, with its parameters, for nested trees."""
    cell: Any = model.encoder.layer.cell
    embedding: Any = model.embedding
    width = Weights.of(cell).width
    node = td.ForwardDeclaration(td.PyObjectType(), (width, width), name="node")
    word = td.GetItem(1) >> td.Scalar("int64") >> embedding >> Leaf(cell)
    pair = td.Record([(1, node()), (2, node())]) >> td.Function(Pair(cell))
    whole = node() >> td.Void()
    scored = td.Composition(name="scored")
    with scored.scope():
        state = td.OneOf(len, {2: word, 3: pair}).reads(scored.input)
        label = (td.GetItem(0) >> td.Scalar("int64")).reads(scored.input)
        logits = td.Function(model.classifier).reads(state[0])
        loss = td.Function(nn.CrossEntropyLoss(reduction="none")).reads(logits, label)
        td.Metric(LOSS).reads(loss)
        scored.output.reads(state)
    node.resolve_to(scored)
    return whole


def nested_tree(tree: DynTreeData) -> Any:
    """Convert a labelled binary tree to nested ``(label, token)`` or ``(label, left, right)``."""
    labels, tokens = tree.y.tolist(), tree.token.tolist()
    return to_nested(tree, lambda n, parts: (labels[n], *(parts or (tokens[n],))))


class WrittenModel(NamedTuple):
    """A model written in blocks, and its examples."""

    block: td.Block
    examples: list[Any]


OPERATORS: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda left, right: left / right if right else 0.0,
}
LETTERS = 32
LANGUAGES = 8


def calculator(examples: int, width: int = 32, seed: int = 0) -> WrittenModel:
    """Write a model that predicts the sign of an expression, with one layer per operator.

    An example is ``(expression, sign)``, where the sign is 0 (negative), 1 (zero) or 2 (positive).
    An expression is a number or ``(operator, left, right)`` and has 1 to 24 operators; division by
    zero gives zero.
    """
    value = td.ForwardDeclaration(td.PyObjectType(), width, name="value")
    cases: dict[str, Any] = {}
    for sign, name in zip(OPERATORS, ("add", "subtract", "multiply", "divide"), strict=True):
        operands = td.Record([(1, value()), (2, value())]) >> td.Concat()
        cases[sign] = operands >> td.FC(width, torch.tanh, name=name)
    cases["number"] = td.Scalar("int64") >> td.Embedding(10, width, name="number")
    root = td.Record((value() >> td.FC(3, activation=None, name="sign"), td.Scalar("int64")))
    value.resolve_to(td.OneOf(lambda e: e[0] if isinstance(e, tuple) else "number", cases))
    generator = random.Random(seed)
    drawn = [_expression(generator, generator.randint(1, 24)) for _ in range(examples)]
    return WrittenModel(_with_loss(root), [(e, 1 + (v > 0) - (v < 0)) for e, v in drawn])


def _with_loss(scored: td.Block) -> td.Block:
    loss = td.Function(nn.CrossEntropyLoss(reduction="none"), name="loss")
    return scored >> loss >> td.Metric(LOSS)


def _expression(generator: random.Random, operators: int) -> tuple[Any, float]:
    """Draw an expression and its value."""
    if operators == 0:
        return (digit := generator.randint(0, 9)), float(digit)
    below = generator.randint(0, operators - 1)
    sign = generator.choice(list(OPERATORS))
    left, first = _expression(generator, below)
    right, second = _expression(generator, operators - 1 - below)
    return (sign, left, right), OPERATORS[sign](first, second)


def language(examples: int, width: int = 32, seed: int = 0) -> WrittenModel:
    """Write a model that combines letters to words and words to a sentence, with an LSTM each.

    An example is a random ``(words, language)``: 3 to 20 words, each a list of 1 to 10 letters.
    """

    def last_state(name: str) -> td.Block:
        cell = td.ScopedLayer(nn.LSTMCell(width, width), name)
        return td.RNN(cell) >> td.GetItem(1) >> td.GetItem(0)

    def draw_word() -> list[int]:
        return [generator.randrange(LETTERS) for _ in range(generator.randint(1, 10))]

    letter = td.Scalar("int64") >> td.Embedding(LETTERS, width, name="letter")
    word = td.Map(letter) >> last_state("word")
    sentence = td.Map(word) >> last_state("sentence")
    score = td.FC(LANGUAGES, activation=None, name="language")
    root = td.Record((sentence >> score, td.Scalar("int64")))
    generator = random.Random(seed)
    drawn = [[draw_word() for _ in range(generator.randint(3, 20))] for _ in range(examples)]
    labelled = [(words, generator.randrange(LANGUAGES)) for words in drawn]
    return WrittenModel(_with_loss(root), labelled)


MODELS: dict[str, Callable[..., WrittenModel]] = {"calculator": calculator, "language": language}


class Sentiment:
    """One set of weights, trained as fused layers and as a compiled block."""

    def __init__(self, num_tokens: int, embedding: int, units: int, device: torch.device) -> None:
        self.device = device
        self.ways = make_ways(num_tokens, embedding, units, device)
        self.model = self.ways.model
        self.compiler = self.compile()
        self.collate = Collater(arity=2)

    def compile(self) -> td.Compiler:
        """Compile the block again."""
        return td.Compiler(sentiment(self.model)).to(self.device)

    def check(self, trees: Sequence[Any]) -> None:
        """Compare loss and gradients of both."""
        batch = self.collate(list(trees)).to(self.device)
        fused = self.ways.loss(self.model(batch), batch.y)
        blocks = self.loss([nested_tree(tree) for tree in trees])
        wanted, found = (
            bench.with_gradients(loss, loss, self.model.parameters()) for loss in (fused, blocks)
        )
        bench.assert_agreement("the model in blocks", wanted, found)

    def loss(self, examples: Any) -> Tensor:
        """Return the total loss of the model in blocks."""
        return self.compiler(examples).metric_tensors[LOSS].sum()

    def fused_step(self, trees: Sequence[Any], lap: bench.Stopwatch) -> None:
        """Time collating and one training step with the layers."""
        batch = self.collate(list(trees)).to(self.device)
        lap("collate")
        self.ways.train(FUSED, batch, lap)

    def blocks_step(self, examples: Sequence[Any], lap: bench.Stopwatch) -> None:
        """Time tracing, collating and one training step with the block."""
        tracer, optimizer = self.compiler.tracer, self.ways.optimizer
        traced = [tracer(example) for example in examples]
        lap("trace")
        batch = self.compiler.collate(traced).to(self.device)
        lap("collate")
        optimizer.zero_grad()
        bench.time_passes(lap, lambda: self.loss(batch), optimizer=optimizer)

    def host(self, examples: Sequence[Any], file: Path, lap: bench.Stopwatch) -> None:
        """Time compiling, and reading traced examples from a file."""
        tracer = self.compile().tracer
        lap("compile")
        td.TracedExamples(tracer, examples, file)
        lap("read")


def run(options: Namespace, device: torch.device) -> list[bench.Record]:
    """Measure all cases; tracing and collating are done on the CPU."""
    trees, source, num_tokens = sentiment_trees(options)
    records: list[bench.Record] = []
    for units in options.units:
        both = Sentiment(num_tokens, options.embedding, units, device)
        both.check([trees[k] for k in range(min(4, len(trees)))])
        for size in options.batch_sizes:
            batches = _batches(options, both, trees, size)
            rounds, facts = bench.interleave_batches(batches, options, device)
            common = {"case": f"{units} units", "batch": size, "data": source, "units": units}
            common |= {"embedding": options.embedding, **facts}
            records += _speeds(rounds, common)
    for name in options.models:
        for size in options.batch_sizes:
            records += _policies(options, name, size, device)
    return records


def _batches(options: Namespace, both: Sentiment, trees: Any, size: int) -> Iterator[bench.Batch]:
    """Yield the contenders and the sizes of every batch."""
    for numbers in draw(len(trees), size, options.batches, options.seed):
        members = [trees[k] for k in numbers]
        examples = [nested_tree(tree) for tree in members]
        schedule = both.compiler.collate(examples)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "examples"
            td.TracedExamples(both.compiler.tracer, examples, file)
            contenders: bench.Contenders = {
                FUSED: partial(both.fused_step, members),
                BLOCKS: partial(both.blocks_step, examples),
                "host": partial(both.host, examples, file),
            }
            sizes = {"nodes": sum(tree.num_nodes for tree in members)}
            sizes |= {"steps": len(schedule.steps), "file_bytes": file.stat().st_size}
            yield contenders, sizes


def _speeds(rounds: bench.AllRounds, common: bench.Record) -> Iterator[bench.Record]:
    fused, blocks = rounds[FUSED], rounds[BLOCKS]
    yield from bench.phase_records(common, FUSED, rounds, PHASES)
    for record in bench.phase_records(common, BLOCKS, rounds, PHASES, FUSED):
        # The layers need no tracing, so compare it with all the work, and all the work with theirs.
        if record["phase"] == "trace":
            share = bench.median_ratio(blocks, blocks, PHASES["trace"], PHASES[TRACED])
            record |= {"ratio": share, "ratio_to": TRACED}
        elif record["phase"] == TRACED:
            ratio = bench.median_ratio(blocks, fused, PHASES[TRACED], PHASES[CACHED])
            record |= {"ratio": ratio, "ratio_to": f"{FUSED}, {CACHED}"}
        yield record
    yield from bench.phase_records(common, "host", rounds, HOST)


class Policies:
    """One model whose operations alternate, trained with the steps in several orders."""

    def __init__(self, name: str, examples: int, options: Namespace, device: torch.device) -> None:
        torch.manual_seed(0)
        block, drawn = MODELS[name](examples, options.width, options.seed)
        self.compiler = td.Compiler(block).to(device)
        tracer = self.compiler.tracer
        self.traced = [tracer(example) for example in drawn]
        self.collaters = {policy: td.Collater(tracer, policy) for policy in POLICIES}

    def check(self) -> None:
        """Compare the losses of all orders."""
        by_depth, by_agenda = (
            self.compiler(collate(self.traced)).metric_tensors[LOSS]
            for collate in self.collaters.values()
        )
        bench.assert_agreement("agenda", [by_depth], [by_agenda])

    def train(self, policy: Policy, lap: bench.Stopwatch) -> None:
        """Time scheduling and both passes."""
        self.compiler.zero_grad()
        lap.skip()
        batch = self.collaters[policy](self.traced).to(lap.device)
        lap("collate")
        bench.time_passes(lap, lambda: self.compiler(batch).metric_tensors[LOSS].sum())


def _policies(
    options: Namespace, name: str, size: int, device: torch.device
) -> Iterator[bench.Record]:
    model = Policies(name, size, options, device)
    model.check()
    contenders: bench.Contenders = {policy: partial(model.train, policy) for policy in POLICIES}
    rounds = bench.interleave(contenders, repeats=options.repeats, device=device)
    common = {"case": name, "batch": size, "unit": "examples", "width": options.width}
    for policy in POLICIES:
        stats = model.collaters[policy](model.traced).stats()
        own = common | {field: getattr(stats, field) for field in STATS}
        base = None if policy == POLICIES[0] else POLICIES[0]
        yield from bench.phase_records(own, policy, rounds, POLICY_PHASES, base)


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write one table per case and batch size, and one for policies."""
    title = (
        "blocks: {case}, batch {batch} ({data}, {nodes:.0f} nodes, {steps:.0f} steps, "
        "{threads} threads, {device})"
    )
    columns = {
        "mode": "mode",
        **bench.milliseconds(("collate", *bench.STEP, "step")),
        **bench.phase_cells(("step", CACHED), "trees/s", "trees_per_second", ".0f"),
        **bench.phase_cells(("train", "step", CACHED), "x", "ratio"),
    }
    speeds = [record for record in records if record["mode"] not in POLICIES]
    yield from bench.tables(speeds, ("case", "batch"), title, ("mode",), columns, _remarks)
    policies = [record for record in records if record["mode"] in POLICIES]
    columns = {name.replace("_", " "): name for name in ("case", "batch", "mode", *STATS[:-1])}
    columns |= bench.milliseconds(POLICY_PHASES)
    columns["train x depth"] = bench.cell("train", "ratio", form=".2f")
    by, rows = ("width",), ("case", "batch", "mode")
    yield from bench.tables(policies, by, "policies, width {width}", rows, columns)


def _remarks(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write the cost of tracing, which the layers do not need, and of compiling."""
    phases = ("trace", TRACED, "read", "compile")
    trace, traced, read, compiled = (bench.find(records, phase=phase) for phase in phases)
    batch = trace["batch"]
    yield (
        f"tracing: {trace['median_seconds'] / batch * 1e6:.0f} us per tree, "
        f"{trace['ratio']:.1%} of {TRACED} ({traced['ratio']:.2f} x fused); from a file: "
        f"{read['median_seconds'] / batch * 1e6:.0f} us and "
        f"{read['file_bytes'] / batch:.0f} bytes per tree; from memory: nothing"
    )
    yield f"compiling: {compiled['median_seconds'] * 1e3:.0f} ms"


def panels(records: Sequence[bench.Record]) -> Iterator[bench.Panel]:
    """Draw trees per second, the ratio to the fused layers, and steps over the batch size."""
    mine = [r for r in records if r["mode"] in (FUSED, BLOCKS) and r["phase"] == CACHED]
    curve, labels = "{mode}, {case}", ("batch", "trees per second")
    yield bench.Panel(mine, curve, "batch", "trees_per_second", labels, "y", "training")
    yield bench.Panel(mine, curve, "batch", "ratio", ("batch", "time / fused layers"))
    trained = [r for r in records if r["mode"] in POLICIES and r["phase"] == "train"]
    if trained:
        curve, labels = "{case}, {mode}", ("batch", "steps")
        yield bench.Panel(trained, curve, "batch", "steps", labels, title="policies")


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
