"""Read the options of a benchmark and run what they ask for."""

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from benchmarks.choices import (
    CELLS,
    FEATURE_SETS,
    FOREST_SHAPES,
    MODES,
    PEERS,
    PRECISIONS,
    PROGRAM_SHAPES,
    SST_MODES,
    TREE_SHAPES,
    WEAVE_MODES,
    WRITTEN_MODELS,
)
from pyg_dynbatch.core.errors import OneLineArguments, mismatch


def main(argv: list[str]) -> int:
    """Runs a benchmark: prints tables, and writes records and a figure if asked to.

    Args:
        argv: The benchmark and its options, for instance ``["scaling", "--sizes", "1000"]``.

    Returns:
        The exit code: 0, or 1 where losses that must agree do not.

    Raises:
        OSError: If a file cannot be written or read.
        ValueError: If a device is not there.
        RuntimeError: If two ways to compute the same do not agree; nothing is timed then.

    Example:
        >>> main(["scaling", "--sizes", "31", "--shapes", "chain", "--modes", "fused",
        ...       "--repeats", "1"])  # doctest: +ELLIPSIS
        scaling...
        0
    """
    options = _parser().parse_args(argv)
    # Imported late: the help must not wait for torch.
    from benchmarks.protocol import chosen_device, thread_count
    from benchmarks.records import write_records
    from pyg_dynbatch.core.native import keep_freed_memory

    keep_freed_memory()
    device = chosen_device(options.device)
    with thread_count(options.threads):
        bench = import_module(f"benchmarks.{options.bench}")
        records = bench.run(options, device)
        print(bench.report(records))
    if options.json is not None:
        print(f"records: {write_records(records, options.json)}")
    if options.figure is not None:
        print(f"figure:  {bench.draw(records, options.figure)}")
    return int(options.bench == "fidelity" and not bench.agrees(records))


def _parser() -> argparse.ArgumentParser:
    parser = OneLineArguments(
        "python -m benchmarks",
        "Measure speed and memory: medians of interleaved repeats in one process.",
    )
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    _add_scaling(benches.add_parser("scaling", help="time and memory a node, 10^3 to 10^6 nodes"))
    _add_sst(benches.add_parser("sst", help="trees a second on the Stanford Sentiment Treebank"))
    _add_table1(benches.add_parser("table1", help="batching by hand and dynamically, as in Fold"))
    _add_peers(benches.add_parser("peers", help="the same trees through other packages"))
    _add_fidelity(benches.add_parser("fidelity", help="losses of a run with and without batching"))
    _add_featurize(benches.add_parser("featurize", help="molecules a second of the featurizers"))
    _add_weave(benches.add_parser("weave", help="weave modules beside all ordered pairs"))
    _add_blocks(benches.add_parser("blocks", help="a model in blocks beside the fused layers"))
    _add_policies(benches.add_parser("policies", help="steps of every policy and fewest steps"))
    _add_padding(benches.add_parser("padding", help="what it costs to pad levels to few shapes"))
    return parser


def _add_scaling(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Time and peak memory of a binary Tree-LSTM on forests of growing size, with the exponent "
        "of growth (1 = linear). A case of n nodes is a forest of equal trees of at most "
        "--tree-nodes nodes; a chain of 10,000 nodes is 10,000 levels deep."
    )
    parser.add_argument(
        "--sizes", type=_count(1), nargs="+", default=[10**3, 10**4, 10**5, 10**6], metavar="N",
        help="numbers of nodes (default: 1000 10000 100000 1000000)",
    )  # fmt: skip
    parser.add_argument("--shapes", nargs="+", choices=FOREST_SHAPES, default=list(FOREST_SHAPES))
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=list(MODES),
        help="fused and generic layer on structures, engine on recorded programs",
    )  # fmt: skip
    parser.add_argument("--tree-nodes", type=_count(1), default=10**4, metavar="N")
    parser.add_argument("--units", type=_count(1), default=16, help="width (default: 16)")
    parser.add_argument(
        "--budget", type=float, default=20.0, metavar="SECONDS",
        help="no further repeat of a case after this time (default: 20)",
    )  # fmt: skip
    parser.add_argument(
        "--thread-counts", type=_count(1), nargs="+", metavar="N",
        help="run all of it with each number of threads, for instance 1 2; instead of --threads",
    )  # fmt: skip
    _add_common(parser, repeats=5)


def _add_sst(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trees a second of a binary Tree-LSTM classifier in training and inference, the share of "
        "collating, and the ratios to the bare matrix products and to the loop over nodes."
    )
    _add_trees(parser)
    parser.add_argument(
        "--batch-sizes", type=_count(1), nargs="+", default=[25, 100, 256], metavar="N"
    )
    parser.add_argument("--units", type=_count(1), nargs="+", default=[150, 300], metavar="N")
    parser.add_argument(
        "--modes", nargs="+", choices=SST_MODES, default=list(SST_MODES[:-1]),
        help="unshared is fused with every leaf computed, equal words or not; graphed is that by "
        "CUDA graphs (on CPUs the same padded levels without graphs); default: all but graphed",
    )  # fmt: skip
    parser.add_argument("--embedding", type=_count(1), default=300, metavar="WIDTH")
    parser.add_argument(
        "--batches", type=_count(1), default=4, metavar="N", help="different batches a case"
    )
    parser.add_argument(
        "--loop-trees", type=_count(1), default=4, metavar="N",
        help="trees of a batch that the loop over nodes runs (default: 4)",
    )  # fmt: skip
    _add_common(parser, repeats=5)


def _add_table1(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Table 1 of Fold's paper: trees of one shape batched by hand, the same dynamically, and "
        "trees of different shapes dynamically; inference and training, with the schedule ready "
        "and end to end. A batch of 1,024 takes a processor minutes and 5 GB."
    )
    parser.add_argument(
        "--batch-sizes", type=_count(1), nargs="+", metavar="N",
        default=[1, 32, 64, 128, 256, 512, 1024],
    )  # fmt: skip
    parser.add_argument(
        "--cells", nargs="+", choices=CELLS, default=["fold"],
        help="the cell of the paper, the N-ary Tree-LSTM (default: fold)",
    )  # fmt: skip
    parser.add_argument(
        "--shapes", nargs="+", choices=TREE_SHAPES, default=["random"],
        help="(default: random)",
    )  # fmt: skip
    parser.add_argument("--leaves", type=_count(2), default=128, help="of a tree (default: 128)")
    parser.add_argument("--units", type=_count(1), default=1024, help="width (default: 1024)")
    parser.add_argument(
        "--batches", type=_count(1), default=1, metavar="N", help="different batches a case"
    )
    parser.add_argument(
        "--budget", type=float, default=300.0, metavar="SECONDS",
        help="no further repeat of a batch after this time (default: 300)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    _add_common(parser, repeats=5)


def _add_peers(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "One binary Tree-LSTM on random trees through what a user would otherwise write or "
        "install: a recursive loop over nodes, a loop over levels in PyG, padding, and DGL, "
        "torchfold and DyNet where they can be imported. Roots and gradients are compared first."
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="PEER")
    parser.add_argument(
        "--batch-sizes", type=_count(1), nargs="+", default=[1, 32, 128, 256], metavar="N"
    )
    parser.add_argument(
        "--leaves", type=_count(2), nargs="+", default=[20, 128], metavar="N", help="of a tree"
    )
    parser.add_argument("--units", type=_count(1), nargs="+", default=[150, 300], metavar="N")
    parser.add_argument("--words", type=_count(2), default=21_702, help="(default: 21702)")
    parser.add_argument(
        "--batches", type=_count(1), default=1, metavar="N", help="different batches a case"
    )
    parser.add_argument(
        "--loop-trees", type=_count(1), default=8, metavar="N",
        help="trees of a batch that the recursive loop runs (default: 8)",
    )  # fmt: skip
    parser.add_argument(
        "--budget", type=float, default=120.0, metavar="SECONDS",
        help="no further repeat of a batch after this time (default: 120)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    _add_common(parser, repeats=5)


def _add_fidelity(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a sentiment model (Adagrad, summed loss, dropout off) batched and, from the same "
        "start, by a loop over the nodes of each tree; compare the loss of every step and the "
        "parameters at the end. The loop is slow: a step of 100 trees takes it seconds."
    )
    _add_trees(parser)
    parser.add_argument(
        "--vectors", type=Path, metavar="FILE",
        help="word vectors, GloVe or word2vec text, also .gz; wants --raw-dir",
    )  # fmt: skip
    parser.add_argument("--steps", type=_count(1), default=50, metavar="N")
    parser.add_argument("--batch", type=_count(1), default=100, metavar="TREES")
    parser.add_argument("--units", type=_count(1), default=300, metavar="N")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["fused"])
    parser.add_argument("--dtypes", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    _add_output(parser)


def _add_featurize(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Molecules a second of the featurizers on the 5,000 molecules that come with RDKit and on "
        "files of your own, in one process and in several, and bytes a molecule."
    )
    parser.add_argument("--features", nargs="+", choices=FEATURE_SETS, default=list(FEATURE_SETS))
    parser.add_argument(
        "--processes", type=_count(1), nargs="+", default=[1, 2], metavar="N",
        help="processes that featurize and pack (default: 1 2)",
    )  # fmt: skip
    parser.add_argument(
        "--compared", type=_count(1), default=500, metavar="N",
        help="molecules whose features are compared with DeepChem's (default: 500)",
    )  # fmt: skip
    _add_molecules(parser)
    _add_common(parser, repeats=5)


def _add_weave(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Time, memory and work of two weave modules: the factored layer, a plain implementation "
        "over all ordered pairs, the engine on recorded programs, and DeepChem's; then the growth "
        "with the size of one molecule."
    )
    parser.add_argument(
        "--batch-sizes", type=_count(1), nargs="+", default=[1, 32, 128, 512], metavar="N"
    )
    parser.add_argument("--modes", nargs="+", choices=WEAVE_MODES, default=list(WEAVE_MODES))
    parser.add_argument("--units", type=_count(1), default=50, help="width (default: 50)")
    parser.add_argument(
        "--batches", type=_count(1), default=3, metavar="N", help="different batches a case"
    )
    parser.add_argument(
        "--sizes", type=_count(1), nargs="*", default=[10, 25, 50, 100, 200, 300, 500],
        metavar="ATOMS", help="sizes of single molecules (default: 10 to 500); none to leave out",
    )  # fmt: skip
    for name, largest in (("engine", 20_000), ("deepchem", 20_000)):
        parser.add_argument(
            f"--{name}-pairs", type=_count(1), default=largest, metavar="N",
            help=f"largest batch of {name}, in ordered pairs (default: {largest})",
        )  # fmt: skip
    parser.add_argument(
        "--budget", type=float, default=60.0, metavar="SECONDS",
        help="no further repeat of a batch after this time (default: 60)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    _add_molecules(parser)
    _add_common(parser, repeats=5)


def _add_blocks(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Training of the sentiment model written in blocks beside the fused layers with the same "
        "weights, the cost of tracing, and the steps and time of every policy on a calculator "
        "and a reader of letters and words."
    )
    _add_trees(parser)
    parser.add_argument("--batch-sizes", type=_count(1), nargs="+", default=[100, 256], metavar="N")
    parser.add_argument("--units", type=_count(1), nargs="+", default=[150, 300], metavar="N")
    parser.add_argument("--embedding", type=_count(1), default=300, metavar="WIDTH")
    parser.add_argument(
        "--batches", type=_count(1), default=3, metavar="N", help="different batches a case"
    )
    parser.add_argument(
        "--models", nargs="*", choices=WRITTEN_MODELS, default=list(WRITTEN_MODELS),
        help="models on which policies are compared; none to leave that out",
    )  # fmt: skip
    parser.add_argument(
        "--width", type=_count(1), default=32, metavar="N", help="width of these (default: 32)"
    )
    _add_common(parser, repeats=5)


def _add_policies(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Steps that depth, agenda and a learned policy make of chains, trees, lattices and typed "
        "trees, over the lower bound, on mini-batches the learned one has not seen."
    )
    parser.add_argument("--shapes", nargs="+", choices=PROGRAM_SHAPES, default=list(PROGRAM_SHAPES))
    parser.add_argument("--batch-sizes", type=_count(1), nargs="+", default=[1, 8, 64], metavar="N")
    parser.add_argument(
        "--fit", type=_count(1), default=4, metavar="N", help="mini-batches to learn from"
    )
    parser.add_argument(
        "--batches", type=_count(1), default=8, metavar="N", help="mini-batches to measure"
    )
    parser.add_argument("--seed", type=int, default=0)
    _add_common(parser, repeats=3)


def _add_padding(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Nodes and levels of schedules padded to a few shapes, for CUDA graphs, over those of the "
        "schedules themselves. The shapes come from one epoch, the mini-batches from another."
    )
    _add_trees(parser)
    parser.add_argument("--batch-sizes", type=_count(1), nargs="+", default=[1, 8, 25], metavar="N")
    parser.add_argument(
        "--shapes", type=_count(1), nargs="+", default=[8, 16, 32], metavar="N",
        help="numbers of shapes (default: 8 16 32)",
    )  # fmt: skip
    parser.add_argument(
        "--margin", type=float, default=0.1, help="how much larger than the sample (default: 0.1)"
    )
    _add_output(parser)


def _add_trees(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--raw-dir", type=Path, metavar="FOLDER",
        help="folder with train.txt, dev.txt, test.txt; random trees of like shape if left out",
    )  # fmt: skip
    parser.add_argument(
        "--trees", type=_count(1), default=2048, metavar="N", help="how many random trees"
    )
    parser.add_argument("--seed", type=int, default=0)


def _add_molecules(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--files", type=Path, nargs="+", default=[], metavar="FILE",
        help="csv or smi files of molecules beside those of RDKit",
    )  # fmt: skip
    parser.add_argument(
        "--molecules", type=_count(1), metavar="N", help="the first N of each (default: all)"
    )
    parser.add_argument(
        "--deepchem-python", type=Path, metavar="PYTHON",
        help="an interpreter with DeepChem, to be timed beside",
    )  # fmt: skip


def _add_common(parser: argparse.ArgumentParser, *, repeats: int) -> None:
    parser.add_argument("--repeats", type=_count(1), default=repeats, metavar="N")
    _add_output(parser)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=_count(1), metavar="N", help="threads of torch")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1 …")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all records to FILE")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw a picture: .png, .svg")


def _count(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise mismatch(
                argparse.ArgumentTypeError, "not a count", f"a number of {least} or more", text
            )
        return int(text)

    return count
