"""Ordinary models batched by `autobatch`, beside what users have without it.

Trees beside DyNet; SPINN, which decides by itself, and thousands of expressions beside one example
after the other; an encoder-decoder beside the padded model. Results and gradients are compared
first.

``trees``: ``train`` and ``inference`` are end to end; ``cache=True`` records in the first pass
only, ``batches ahead`` also schedules before, ``loader worker`` in a worker meanwhile. ``x DyNet``
is how many times as fast as DyNet a mode is, in the same rounds. ``calls``: microseconds to record
and to plan one call. ``spinn``, ``symbolic`` and the models of benchmarks/dynamic_models.py run
beside the loop over the examples; ``flushes`` should not exceed the most that one example needs.
"""

import copy
import cProfile
import math
import pstats
import random
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from benchmarks import bench, peers
from benchmarks.dynamic_models import DYNAMIC, SEVEN, decisions, losses
from benchmarks.peers import AUTOBATCH, DYNET, EVERY_LEAF, PeerTree
from benchmarks.products import BareProducts, classifier_products, work
from benchmarks.trees import CLASSES, schedule_of, sentiment_trees
from pyg_dynbatch.autobatch import AutoBatch, autobatch
from pyg_dynbatch.autobatch.fibers import run_examples
from pyg_dynbatch.autobatch.model import _recording
from pyg_dynbatch.autobatch.session import Session
from pyg_dynbatch.core.errors import mismatch

CACHED, AHEAD, WORKER = "cache=True", "batches ahead", "loader worker"
BARE, EAGER, PADDED = "bare products", "one by one", "padded"

PARTS = bench.phases("record", "schedule", "forward", "backward")
TREE_PHASES = {**PARTS, "train": ("prepare", *bench.TRAIN), "inference": ("prepare", "inference")}
PHASES = bench.phases("forward", "backward", "inference", train=bench.TRAIN, step=bench.STEP)
SHARES = bench.phases("record", "plan", "run")
"""Of inference; with ``train`` before them, of the forward pass in training."""
CALL_PHASES = bench.phases("record", "plan", "flush")
DYNAMIC_PHASES = {**PHASES, **SHARES, **bench.phases(*(f"train {name}" for name in SHARES))}
WORDS = 16
"""Words of SPINN and of the encoder-decoder; larger tables would slow down eager gradients."""


def add_options(parser: bench.Options) -> None:
    """Declare the options."""
    parser.choices("--models", MODELS)
    parser.trees()
    parser.counts("--batch-sizes", [1, 32, 128, 256], "of trees")
    parser.counts("--leaves", [20, 128], "of a tree", least=2)
    parser.counts("--units", [150, 300], "of the Tree-LSTM")
    parser.count("--words", 21_702, "of the trees (default: 21702)", least=2)
    parser.count("--width", 100, "of SPINN and of the encoder-decoder (default: 100)")
    parser.count("--sentences", 64, "in a batch of these two (default: 64)")
    parser.count("--longest", 256, "words where lengths differ widely (default: 256)", least=5)
    parser.count("--expressions", 10_000, "that are fitted in one batch (default: 10000)")
    parser.count("--loop-examples", 200, "expressions that the loop fits (default: 200)")
    parser.count("--calls", 20_000, "recorded to time a single call (default: 20000)")
    parser.counts("--examples", [4, 8, 64, 256], "of the models with control flow of their own")
    parser.count("--channels", 64, "of these (default: 64)")
    parser.count(
        "--loop-below", None, "examples run in the plain loop (default: as shipped)", least=0
    )
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    parser.set_defaults(threads=1)
    parser.common(seed=0, budget=15.0, repeats=3)


def record(model: AutoBatch, examples: Sequence[Any]) -> Session:
    """Record examples, as a call of the model does before it schedules and runs them."""
    session = model._begin()
    with _recording(session, model.plain):
        run_examples(session, model.plain, examples)
    return session


class Recorded(peers.AutoBatch):
    """The model as users call it; afterwards, recording and scheduling are timed apart."""

    def run(self, trees: Sequence[PeerTree], lap: bench.Stopwatch) -> None:
        """Time as for all peers, then the parts."""
        super().run(trees, lap)
        examples = [tree.nested for tree in trees]
        lap.skip()
        session = record(self.batched, examples)
        lap("record")
        session.plan(read_later=np.zeros(0, dtype=np.int64))
        lap("schedule")


class Ahead(peers.AutoBatch):
    """The model on batches that were recorded and scheduled before."""

    def __init__(self, model: peers.PeerModel) -> None:
        super().__init__(model)
        self.known: dict[int, tuple[Any, Any]] = {}

    def roots(self, batch: Any) -> Tensor:
        """Run what is kept for these trees, which are kept as well."""
        if id(batch) not in self.known:
            self.known[id(batch)] = batch, self.batched.collate([tree.nested for tree in batch])
        return self.batched(self.known[id(batch)][1])


class Cached(peers.AutoBatch):
    """The model that records each structure once; the trees are scheduled at every call."""

    def __init__(self, model: peers.PeerModel) -> None:
        super().__init__(model)
        self.batched = autobatch(self.batched.plain, cache=True)


def run_bare(parts: Sequence[BareProducts], lap: bench.Stopwatch) -> None:
    """Time the bare products of several mini-batches."""
    lap("prepare")
    for part in parts:
        part.run(lap)


def from_worker(peer: peers.AutoBatch, trees: Sequence[PeerTree], lap: bench.Stopwatch) -> None:
    """Time both passes, then inference, on batches from a worker process, waiting included."""
    warm_up, timed = 3, 3
    facts: Any = {"batch_size": len(trees), "collate_fn": peer.batched.collate, "num_workers": 1}
    examples: Any = [tree.nested for tree in trees] * (warm_up + timed)
    lap("prepare")
    for train in (True, False):
        loader: Any = iter(DataLoader(examples, **facts))
        with torch.inference_mode(not train):
            for _ in range(warm_up):  # until the queue is as full as it will be
                peer.batched(next(loader))
            lap.skip()
            for _ in range(timed):
                peer.batched.zero_grad()
                roots = peer.batched(next(loader))
                lap("forward" if train else "inference")
                if train:
                    peer.loss(roots).backward()
                    lap("backward")
    lap.seconds = {phase: seconds / timed for phase, seconds in lap.seconds.items()}


def run_trees(options: Namespace, device: torch.device) -> Iterator[bench.Record]:
    """Race DyNet on random trees."""
    options = copy.copy(options)
    options.peers = [DYNET, EVERY_LEAF]
    for leaves in options.leaves:
        for units in options.units:
            case = peers.Case(options, leaves, units, device)
            del case.peers[peers.OURS]  # it computes equal leaves once
            recorded, ahead = Recorded(case.model), Ahead(case.model)
            case.peers |= {AUTOBATCH: recorded, CACHED: Cached(case.model), AHEAD: ahead}
            case.check()
            for size in options.batch_sizes:
                yield from _race_trees(options, case, size, ahead)
            if options.profile:
                profile(recorded, case.draw_trees(size))


def _race_trees(
    options: Namespace, case: peers.Case, size: int, ahead: peers.AutoBatch
) -> Iterator[bench.Record]:
    batches = case.draw_batches(size)
    contenders = case.contenders(batches)
    units = case.model.units
    schedules = [schedule_of([tree.data for tree in trees]) for trees in batches]
    products = [classifier_products(each, units, units, CLASSES)[:-1] for each in schedules]
    bare = [BareProducts(each, case.device) for each in products]
    contenders[BARE] = bench.scaled(partial(run_bare, bare), 1 / len(bare))
    if size == max(options.batch_sizes):
        contenders[WORKER] = partial(from_worker, ahead, batches[0])
    rounds = _rounds(contenders, options, case.device)
    common = case.common | {"model": "trees", "batch": size, **work(products[0])}
    base = DYNET if DYNET in rounds else None
    for name in rounds:
        to = None if name == DYNET else base
        for one in bench.phase_records(common, name, rounds, TREE_PHASES, to):
            if one["phase"] in ("train", "inference"):
                parts = TREE_PHASES[one["phase"]]
                one["to_bare"] = bench.median_ratio(rounds[name], rounds[BARE], parts)
            yield one
    for name, reason in case.missing.items():
        yield bench.make_record(common | {"reason": reason}, name, bench.LEFT_OUT)


def _rounds(
    contenders: bench.Contenders, options: Namespace, device: torch.device
) -> bench.AllRounds:
    facts: Any = {"repeats": options.repeats, "budget": options.budget}
    return bench.interleave(contenders, device=device, **facts)


def profile(peer: peers.AutoBatch, trees: Sequence[PeerTree]) -> None:
    """Print where the time of recording and scheduling goes, then that of a training step."""
    examples = [tree.nested for tree in trees]
    with cProfile.Profile() as found:  # it inflates calls of Python functions
        batch = peer.batched.collate(examples)
    pstats.Stats(found).sort_stats("tottime").print_stats(20)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as events:
        peer.loss(peer.batched(batch)).backward()
    print(events.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))


class Chain(nn.Module):
    """As many calls of one kind as an example says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.join = kind, nn.Linear(4, 4), Join()

    def forward(self, example: tuple[Tensor, int]) -> Any:
        """Run the chain."""
        start, count = example
        x: Any = self.linear(start)
        if self.kind == "cell with two states":
            x = x, x
        kinds: dict[str, Callable[[Any], Any]] = {
            "nothing": lambda x: x,
            READ: self.read,
            "module": self.linear,
            "cell with two states": lambda state: self.join(state, state),
            "operator": lambda x: x + x,
            "torch function": torch.tanh,
        }
        call = kinds[self.kind]
        for _ in range(count):
            x = call(x)
        return x

    def read(self, x: Tensor) -> Tensor:
        """Call the module, and wait for its result."""
        x = self.linear(x)
        x.tolist()
        return x


class Join(nn.Module):
    """A cell of two states of two tensors each."""

    def forward(self, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Any:
        """Add them."""
        return left[0] + right[0], left[1] + right[1]


KINDS = ("nothing", "module", "cell with two states", "operator", "torch function")
READ = "module, read"


def run_calls(options: Namespace, device: torch.device) -> Iterator[bench.Record]:
    """Time the recording and planning of single calls, and a flush after each call."""
    length = min(1_000, options.calls)
    start = torch.ones(4, device=device)
    examples = [(start, length)] * (options.calls // length)

    def run(model: AutoBatch, lap: bench.Stopwatch) -> None:
        session = record(model, examples)
        lap("record")
        session.plan(read_later=np.zeros(0, dtype=np.int64))
        lap("plan")

    def read(model: AutoBatch, lap: bench.Stopwatch) -> None:
        with torch.inference_mode():
            record(model, [(start, length)])
        lap("flush")

    contenders: bench.Contenders = {
        kind: partial(
            read if kind == READ else run, autobatch(Chain(kind), loop_below=0).to(device)
        )
        for kind in (*KINDS, READ)
    }
    rounds = _rounds(contenders, options, device)
    for kind in contenders:
        number = length if kind == READ else length * len(examples)
        common = _common("calls", "calls", number) | {"unit": "calls"}
        yield from bench.phase_records(common, kind, rounds, CALL_PHASES)


class Rival(NamedTuple):
    """One of several ways to compute the losses of the same examples."""

    loss: Callable[[], Tensor]
    """Losses ``[example]`` of a training step."""

    infer: Callable[[], object]
    parameters: Sequence[Tensor]
    """In the order of the other ways."""

    optimizer: torch.optim.Optimizer | None = None

    def run(self, lap: bench.Stopwatch) -> None:
        """Time a training step, and inference."""
        for parameter in self.parameters:
            parameter.grad = None
        bench.time_passes(lap, self.loss, optimizer=self.optimizer, infer=self.infer)

    def results(self) -> list[Tensor]:
        """Return the losses, and the gradients of their sum."""
        losses = self.loss()
        return bench.with_gradients(losses, losses.sum(), self.parameters)


def _compare(rivals: dict[str, Rival], tolerance: float = 1e-3) -> bench.Contenders:
    """Compare results with those of the first."""
    base, *others = rivals
    wanted = rivals[base].results()
    for name in others:
        bench.assert_agreement(name, wanted, rivals[name].results(), tolerance)
    return {name: rival.run for name, rival in rivals.items()}


def _race(
    contenders: bench.Contenders,
    common: bench.Record,
    options: Namespace,
    device: torch.device,
    phases: bench.Phases = PHASES,
) -> Iterator[bench.Record]:
    """Time all, with the ratio to the first."""
    base, *_ = contenders
    rounds = _rounds(contenders, options, device)
    for name in contenders:
        to = None if name == base else base
        yield from bench.phase_records(common, name, rounds, phases, to)


def _common(model: str, case: str, size: int) -> bench.Record:
    return {"case": case, "model": model, "unit": "examples", "batch": size}


def sentences(options: Namespace) -> list[list[Tensor]]:
    """Return the words of as many sentences of the treebank as a batch has, or random ones."""
    trees, _, _ = sentiment_trees(options)
    tokens = (trees[k].token for k in range(options.sentences))
    return [list(token[token >= 0] % WORDS) for token in tokens]


def run_spinn(options: Namespace, device: torch.device) -> Iterator[bench.Record]:
    """Compare SPINN, which decides by itself, with the same code one example after the other."""
    torch.manual_seed(options.seed)
    model = autobatch(bench.example("autobatch_spinn").Spinn(options.width))
    model.to(device)
    examples = [([word.to(device) for word in words], None) for words in sentences(options)]
    labels = torch.arange(len(examples), device=device) % CLASSES

    def rival(batch: bool) -> Rival:
        def loss() -> Tensor:
            return cross_entropy(compute(), labels, reduction="none")

        compute = partial(model, examples, batch=batch)
        return Rival(loss, compute, [*model.parameters()])

    with torch.no_grad():
        flushes = model.explain(examples).flushes
        longest = max(model.explain([example]).flushes for example in examples)
    common = _common("spinn", f"SPINN, width {options.width}", len(examples))
    common |= {"flushes": flushes, "longest": longest}
    yield from _race(
        _compare({EAGER: rival(False), AUTOBATCH: rival(True)}), common, options, device
    )


def run_symbolic(options: Namespace, device: torch.device) -> Iterator[bench.Record]:
    """Compare one step of descent on many expressions with a loop over some of them."""
    names = bench.example("autobatch_symbolic")
    torch.manual_seed(options.seed)

    def draw(size: int) -> tuple[list[Any], int]:
        rng, numbers = random.Random(options.seed), count()
        return [names.draw(rng, 5, numbers) for _ in range(size)], next(numbers)

    points = torch.linspace(-2, 2, 32)
    trees, num_constants = draw(options.expressions)
    few, num_few = draw(options.loop_examples)
    target = torch.sin(points).to(device)
    plain = names.Expression(num_constants, points).to(device)
    # The loop has a table of its own, since a larger one would slow down its gradients.
    small = names.Expression(num_few, points).to(device)
    with torch.no_grad():
        small.constants.weight.copy_(plain.constants.weight[:num_few])
    model = autobatch(plain)
    batch = model.collate(trees)

    def rival(module: nn.Module, compute: Callable[[], Tensor]) -> Rival:
        def loss() -> Tensor:
            return (compute() - target).square().mean(1)

        parameters = [*module.parameters()]
        return Rival(loss, compute, parameters, torch.optim.Adam(parameters, lr=0.0))

    loop = rival(small, partial(autobatch(small), few, batch=False))
    wanted, found = loop.results(), rival(plain, partial(model, few)).results()
    bench.assert_agreement(AUTOBATCH, wanted, [found[0], found[1][:num_few]], 1e-3)
    contenders = {
        EAGER: bench.scaled(loop.run, len(trees) / len(few)),
        AUTOBATCH: rival(plain, partial(model, trees)).run,
        AHEAD: rival(plain, partial(model, batch)).run,
    }
    common = _common("symbolic", "expressions", len(trees))
    yield from _race(contenders, common, options, device)


class PaddedTranslate(nn.Module):
    """The encoder-decoder of the example on padded sentences, with its parameters."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.plain, width = plain, plain.zero.numel()
        self.encoder = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        ours = dict(plain.named_parameters())
        for name, parameter in self.encoder.named_parameters():
            cell = "backwards" if name.endswith("_reverse") else "forwards"
            own = f"{cell}.{name.removesuffix('_reverse').removesuffix('_l0')}"
            parameter.data.copy_(ours[own])
            ours[own] = parameter
        self.in_order = [*ours.values()]
        """The parameters, in the order of those of the example."""

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor | None = None) -> Tensor:
        """Return the loss per word of every sentence; without a target, decode greedily."""
        plain, (size, longest) = self.plain, source.shape
        packed = pack_padded_sequence(
            plain.word(source), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        memory, _ = pad_packed_sequence(self.encoder(packed)[0], batch_first=True)
        filled = torch.arange(longest, device=source.device) < lengths[:, None]
        context = memory[torch.arange(size, device=source.device), lengths - 1]
        zero = plain.zero.expand(size, -1)
        state, last = (zero, zero), torch.zeros_like(lengths)
        given = None if target is None else plain.word(target)
        losses, read = [], []
        for step in range(longest):
            word = plain.word(last) if given is None or not step else given[:, step - 1]
            state = plain.decoder(torch.cat([word, context], -1), state)
            scores = torch.bmm(memory, plain.query(state[0])[:, :, None])[:, :, 0]
            weights = scores.masked_fill(~filled, -math.inf).softmax(-1)
            context = torch.bmm(weights[:, None], memory)[:, 0]
            read.append(torch.cat([state[0], context], -1))
            if target is None:
                scores = plain.score(read[-1])
                last = scores.argmax(-1)
                losses.append(scores.logsumexp(-1) - scores.gather(1, last[:, None])[:, 0])
        if target is None:
            loss = torch.stack(losses, 1)
        else:  # all scores at once, as the words are known
            loss = plain.score(torch.stack(read, 1)).transpose(1, 2)
            loss = cross_entropy(loss, target, reduction="none")
        return (loss * filled).sum(1) / lengths


def _emitted_losses(
    model: AutoBatch, lengths: Tensor, examples: Any, target: Tensor | None = None
) -> Tensor:
    """Return the loss per word of every sentence, as the padded model does."""
    model(examples)
    scores, example = model.emitted["scores"]
    if target is None:
        each = scores.logsumexp(-1) - scores.amax(-1)
    else:
        each = cross_entropy(scores, target, reduction="none")
    return each.new_zeros(lengths.size(0)).index_add(0, example, each) / lengths


def run_translation(options: Namespace, device: torch.device) -> Iterator[bench.Record]:
    """Compare the encoder-decoder with the same model on padded sentences."""
    names, rng = bench.example("autobatch_translation"), random.Random(options.seed)
    of_trees = sentences(options)
    bounds = math.log(4), math.log(options.longest)
    lengths = [round(math.exp(rng.uniform(*bounds))) for _ in of_trees]
    wide = [[torch.tensor(rng.randrange(1, WORDS)) for _ in range(n)] for n in lengths]
    for case, sources in (
        ("lengths of the trees", of_trees),
        (f"lengths 4 to {options.longest}", wide),
    ):
        torch.manual_seed(options.seed)
        model = autobatch(names.Translate(options.width)).to(device)
        padded = PaddedTranslate(model.plain).to(device)
        sources = [[word.to(device) for word in words] for words in sources]
        examples = [(words, words[::-1]) for words in sources]
        free = [(words, None) for words in sources]
        batches = model.collate(examples), model.collate(free)
        words = torch.cat([torch.stack(target) for _, target in examples])
        source, target = (
            pad_sequence([torch.stack(example[part]) for example in examples], batch_first=True)
            for part in (0, 1)
        )
        number = torch.tensor([len(words) for words in sources], device=device)
        greedy = partial(padded, source, number)
        ours = partial(_emitted_losses, model, number)
        with torch.no_grad():
            bench.assert_agreement(AUTOBATCH, [greedy()], [ours(free)], 1e-3)
        own = [*model.parameters()]
        rivals = {
            PADDED: Rival(partial(padded, source, number, target), greedy, padded.in_order),
            AUTOBATCH: Rival(partial(ours, examples, words), partial(ours, free), own),
            AHEAD: Rival(partial(ours, batches[0], words), partial(ours, batches[1]), own),
        }
        common = _common("translation", case, len(sources))
        common |= {"longest": int(number.max()), "mean": float(number.float().mean())}
        yield from _race(_compare(rivals), common, options, device)


@contextmanager
def _split(parts: dict[str, float], prefix: str) -> Iterator[None]:
    """Divide the time of a call of a model into recording, planning and running."""
    methods: Any = {"plan": Session.plan, "flush": Session.flush}
    spent = dict.fromkeys(methods, 0.0)

    def timed(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return methods[name](*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - begin

        return call

    begin = time.perf_counter()
    try:
        for name in methods:
            setattr(Session, name, timed(name))
        yield
    finally:
        for name, method in methods.items():
            setattr(Session, name, method)
    total = time.perf_counter() - begin
    shares = total - spent["flush"], spent["plan"], spent["flush"] - spent["plan"]
    parts |= {prefix + name: seconds for name, seconds in zip(SHARES, shares, strict=True)}


def _run_split(rival: Rival, lap: bench.Stopwatch) -> None:
    """Time a training step and inference, and the parts of both forward passes."""
    parts: dict[str, float] = {}

    def split(prefix: str, compute: Callable[[], Any]) -> Any:
        with _split(parts, prefix):
            return compute()

    loss, infer = partial(split, "train ", rival.loss), partial(split, "", rival.infer)
    rival._replace(loss=loss, infer=infer).run(lap)
    lap.seconds |= parts


def _dynamic_rivals(
    plain: nn.Module, examples: list[Any], loop_below: int | None
) -> dict[str, Rival]:
    """Return the plain loop, the model as users call it, and with a cache."""
    models = {
        EAGER: autobatch(plain),
        AUTOBATCH: autobatch(plain, loop_below=loop_below),
        CACHED: autobatch(plain, cache=True),
    }

    def rival(name: str) -> Rival:
        compute = partial(models[name], examples, batch=name != EAGER)
        return Rival(lambda: losses(compute()), compute, [*plain.parameters()])

    return {name: rival(name) for name in models}


def run_dynamic(name: str, options: Namespace, device: torch.device) -> Iterator[bench.Record]:
    """Compare a model with control flow of its own with the plain loop over the examples."""
    dynamic, units = DYNAMIC[name], options.channels
    plain = dynamic.build(units, options.seed).to(device)
    exact = copy.deepcopy(plain).double()

    def cast(dtype: torch.dtype, examples: Any) -> Any:
        return tree_map_only(
            Tensor, lambda x: x.to(device, dtype if x.is_floating_point() else None), examples
        )

    for size in options.examples:
        drawn = dynamic.examples(size, units, options.seed)
        exactly = _dynamic_rivals(exact, cast(torch.float64, drawn), loop_below=0)
        _compare(exactly, 1e-9)
        expected, *others = (decisions(rival.infer()) for rival in exactly.values())
        for decided in others:
            if decided != expected:
                what = f"{name}: {AUTOBATCH} decides differently"
                raise mismatch(RuntimeError, what, expected, decided)
        examples = cast(torch.float32, drawn)
        facts = autobatch(plain).explain(examples)
        common = _common(name, f"{name}, {units} units", size) | {
            "units": units,
            "calls": facts.calls,
            "operations": sum(operation.steps for operation in facts.operations),
            "steps": facts.steps,
            "flushes": facts.flushes,
        }
        rivals = _dynamic_rivals(plain, examples, options.loop_below)
        split = partial(_run_split, rivals[AUTOBATCH])
        contenders: bench.Contenders = {
            EAGER: rivals[EAGER].run,
            AUTOBATCH: split,
            CACHED: rivals[CACHED].run,
        }
        yield from _race(contenders, common, options, device, DYNAMIC_PHASES)


MODELS: dict[str, Callable[[Namespace, torch.device], Iterator[bench.Record]]] = {
    "trees": run_trees, "calls": run_calls, "spinn": run_spinn, "symbolic": run_symbolic,
    "translation": run_translation, **{name: partial(run_dynamic, name) for name in DYNAMIC},
}  # fmt: skip


def run(options: Namespace, device: torch.device) -> list[bench.Record]:
    """Run all models that were chosen."""
    return [one for name in options.models for one in MODELS[name](options, device)]


def _faster(row: Any) -> str:
    return "-" if not row or not row.get("ratio") else format(1 / row["ratio"], ".2f")


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write one table per case of trees, one for calls, and one for the other models."""
    title = "autobatch: {case}, batch {batch} ({threads} threads, {device})"
    columns: bench.Columns = {"mode": "mode"}
    for phase in ("train", "inference"):
        columns |= bench.phase_cells([phase], "trees/s", "trees_per_second", ".0f")
        columns[f"{phase} x {DYNET}"] = lambda row, phase=phase: _faster(row.get(phase))
        columns |= bench.phase_cells([phase], "/ bare", "to_bare")
    columns |= bench.milliseconds(PARTS)
    mine = [r for r in records if r["model"] == "trees" and r["phase"] != bench.LEFT_OUT]
    yield from bench.tables(mine, ("case", "batch"), title, ("mode",), columns, _flops)
    for name, reason in {r["mode"]: r["reason"] for r in records if "reason" in r}.items():
        yield f"{name} is left out: {reason}"

    calls = [record for record in records if record["model"] == "calls"]
    single: bench.Columns = {"call": "mode"}
    for phase in CALL_PHASES:
        single[f"{phase} us"] = partial(_per, phase, "batch")
    yield from bench.tables(calls, ("case",), "single calls", ("mode",), single)
    columns = {"mode": "mode", **bench.milliseconds(PHASES)}
    for phase in ("train", "step", "inference"):
        columns[f"{phase} x"] = lambda row, phase=phase: _faster(row.get(phase))
    apart = {"trees", "calls", *DYNAMIC}
    others = [record for record in records if record["model"] not in apart]
    yield from bench.tables(others, ("case", "batch"), title, ("mode",), columns, _facts)
    yield from _report_dynamic([record for record in records if record["model"] in DYNAMIC])
    yield "x: how many times as fast as the first, in the same rounds"


def _report_dynamic(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write two tables per number of examples: speeds, and where the time goes."""
    title = "autobatch: {batch} examples, {units} units ({threads} threads, {device})"
    speeds: bench.Columns = {"model": "model"}
    for phase in ("inference", "train"):
        speeds[f"{phase}, loop ms"] = bench.cell("loop", phase, form=".1f", times=1e3)
        speeds |= bench.phase_cells([phase], "ms", "median_seconds", ".1f", 1e3)
        speeds[f"{phase} x"] = lambda row, phase=phase: _faster(row.get(phase))
        speeds[f"cached x, {phase}"] = lambda row, phase=phase: _faster(row["cached"].get(phase))
    counts = ("calls", "operations", "steps", "flushes")
    parts: bench.Columns = {"model": "model", **{name: name for name in counts}}
    for phase in ("train record", "train plan", "train run", "backward"):
        parts[f"{phase.removeprefix('train ')} %"] = partial(_share, phase)
    for phase, each in {"record": "call", "plan": "call", "run": "step"}.items():
        parts[f"{phase} us / {each}"] = partial(_per, phase, f"{each}s")
    for (size,), mine in bench.grouped(records, "batch").items():
        rows = [
            {
                **bench.by_phase([r for r in each if r["mode"] == AUTOBATCH]),
                "loop": {r["phase"]: r["median_seconds"] for r in each if r["mode"] == EAGER},
                "cached": bench.by_phase([r for r in each if r["mode"] == CACHED]),
            }
            for each in bench.grouped(mine, "model").values()
        ]
        parted = [row for row in rows if row["model"] in SEVEN]
        lines = [bench.table(title.format_map(mine[0]), rows, speeds)]
        if parted:
            lines.append(f"geometric mean of {len(parted)}: {', '.join(_means(parted))}")
        yield "\n".join(lines)
        yield bench.table(f"{size} examples: training in %, inference in us", rows, parts)
    if records:
        yield "operations: steps, if none were fused"


def _means(rows: Sequence[Any]) -> Iterator[str]:
    for name, part in (("", lambda row: row), ("cached, ", lambda row: row["cached"])):
        for phase in ("inference", "train"):
            mean = statistics.geometric_mean(1 / part(row)[phase]["ratio"] for row in rows)
            yield f"{name}{phase} x {mean:.2f}"


def _share(phase: str, row: Any) -> str:
    """Show the share of a part in training; there are no parts where the plain loop runs."""
    if row[phase]["median_seconds"] is None:
        return "-"
    return format(100 * row[phase]["median_seconds"] / row["train"]["median_seconds"], ".0f")


def _per(phase: str, unit: str, row: Any) -> str:
    """Show the microseconds of a phase per call, step or flush."""
    if phase not in row or row[phase]["median_seconds"] is None:
        return "-"
    return format(1e6 * row[phase]["median_seconds"] / row[unit], ".2f")


def _flops(records: Sequence[bench.Record]) -> Iterator[str]:
    forward, backward = (records[0][f"flops_{name}"] / 1e9 for name in bench.TRAIN)
    yield f"products: {forward:.3f} GFLOP forward, {backward:.3f} GFLOP backward"


def _facts(records: Sequence[bench.Record]) -> Iterator[str]:
    first = records[0]
    if "flushes" in first:
        yield f"flushes: {first['flushes']}; most of a single example: {first['longest']}"
    elif "mean" in first:
        yield f"longest sentence: {first['longest']} words; mean: {first['mean']:.1f}"


def panels(records: Sequence[bench.Record]) -> Iterator[bench.Panel]:
    """Draw the speed of all modes over the batch size, one panel per case and phase."""
    labels = ("batch", "per second")
    others = [record for record in records if record["model"] not in DYNAMIC]
    for (case, phase), mine in bench.grouped(others, "case", "phase").items():
        if phase in ("train", "inference") or case == "calls":
            speed, title = f"{mine[0].get('unit', 'trees')}_per_second", f"{phase}, {case}"
            yield bench.Panel(mine, "{mode}", "batch", speed, labels, "xy", title)
    dynamic = [record for record in records if record["model"] in DYNAMIC]
    for (phase,), mine in bench.grouped(dynamic, "phase").items():
        if phase in ("train", "inference"):
            labels = ("examples", "time, relative to the loop")
            yield bench.Panel(mine, "{model}", "batch", "ratio", labels, "xy", phase)


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
