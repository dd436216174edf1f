"""Phylogenetic likelihoods: equal to brute force, to a plain recursion and to reference values."""

import gzip
import itertools
import json
import math
import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import phylogeny
import pytest
import torch
from phylogeny_data import Alignment
from phylogeny_model import TreeLikelihood, jukes_cantor
from phylogeny_speed import main as speed
from phylogeny_speed import random_tree
from phylogeny_trees import Tree, Trees, read_mrbayes
from scipy.linalg import expm
from torch import Tensor

SETS = {"A": "A", "C": "C", "G": "G", "T": "T", "R": "AG", "N": "ACGT", "-": "ACGT", "Y": "CT"}


def drawn(taxa: int, columns: int, seed: int = 0) -> tuple[dict[str, str], random.Random]:
    rng = random.Random(seed)
    return {f"t{n}": "".join(rng.choices("ACGTRYN-", k=columns)) for n in range(taxa)}, rng


def batch_of(num_trees: int, taxa: int, columns: int) -> tuple[Any, ...]:
    sequences, rng = drawn(taxa, columns)
    alignment = Alignment.of(sequences)
    trees = [random_tree(alignment.taxa, rng) for _ in range(num_trees)]
    lengths = torch.rand(num_trees, 2 * taxa - 3, dtype=torch.float64) / 5
    return sequences, alignment, trees, lengths


def probabilities(length: float) -> np.ndarray:
    """Return the exponential of a rate matrix by its series, halved and squared."""
    rates = (np.ones((4, 4)) / 3 - np.eye(4) * 4 / 3) * length / 1024
    found = np.eye(4) + rates + rates @ rates / 2 + rates @ rates @ rates / 6
    return np.linalg.matrix_power(found, 1024)


def brute_force(sequences: dict[str, str], tree: Tree, lengths: list[float]) -> float:
    """Sum over all bases of all inner nodes, column by column."""
    inner = [node for node, name in enumerate(tree.names) if not name]
    matrices, total = [probabilities(t) for t in lengths], 0.0
    for column in range(len(next(iter(sequences.values())))):
        options = [SETS[sequences[name][column]] if name else "ACGT" for name in tree.names]
        likelihood = 0.0
        for bases in itertools.product(*options):
            factors = [
                matrices[node]["ACGT".index(bases[above]), "ACGT".index(bases[node])]
                for node, above in enumerate(tree.parent)
            ]
            likelihood += math.prod(factors) / 4
        total += math.log(likelihood)
    assert len(inner) == len(sequences) - 2
    return total


def recursion(
    sequences: dict[str, str],
    tree: Tree,
    lengths: list[float],
    transition: Any = probabilities,
    frequencies: Any = (0.25,) * 4,
) -> float:
    """Prune from the root that is written, without scaling."""
    children: dict[int, list[int]] = {}
    for node, above in enumerate(tree.parent):
        children.setdefault(above, []).append(node)

    def partial(node: int) -> np.ndarray:
        if name := tree.names[node]:
            return np.array([[base in SETS[c] for c in sequences[name]] for base in "ACGT"], float)
        return math.prod(transition(lengths[child]) @ partial(child) for child in children[node])

    return float(np.log(np.asarray(frequencies) @ partial(len(tree.parent))).sum())


def test_brute_force_on_five_taxa() -> None:
    sequences, alignment, trees, lengths = batch_of(3, 5, 4)
    found = TreeLikelihood(alignment)(Trees.of(trees, alignment.taxa), lengths)
    wanted = [brute_force(sequences, *p) for p in zip(trees, lengths.tolist(), strict=True)]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("block", [2**22, 600])
def test_many_topologies_equal_a_recursion(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with patterns in several blocks; the cell gives the same values and gradients."""
    monkeypatch.setattr("phylogeny_pruning.BLOCK", block)
    sequences, alignment, trees, lengths = batch_of(6, 9, 40)
    lengths = lengths.requires_grad_()
    model, batch = TreeLikelihood(alignment), Trees.of(trees, alignment.taxa)
    found = model(batch, lengths)
    wanted = [recursion(sequences, *p) for p in zip(trees, lengths.tolist(), strict=True)]
    np.testing.assert_allclose(found.detach(), wanted, rtol=0, atol=1e-10)
    by_cell = model.of_patterns(batch, lengths) @ alignment.count
    torch.testing.assert_close(by_cell, found, rtol=0, atol=1e-10)
    weight = torch.linspace(-1, 1, 6, dtype=torch.float64)
    both = [torch.autograd.grad(each @ weight, lengths)[0] for each in (found, by_cell)]
    torch.testing.assert_close(*both, rtol=1e-9, atol=1e-9)


def test_any_reversible_model_equals_a_recursion_and_others_are_refused() -> None:
    """Six rates of exchange and four frequencies; P(t) is not symmetric."""
    share = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    rates = torch.tensor([[0, 1, 4, 2], [1, 0, 3, 6], [4, 3, 0, 1], [2, 6, 1, 0]]).double() * share
    rates -= rates.sum(1).diag()

    def transition(t: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(rates * t[..., None, None])

    sequences, alignment, trees, lengths = batch_of(5, 8, 30)
    model = TreeLikelihood(alignment, transition, share.tolist())
    batch = Trees.of(trees, alignment.taxa)

    def plain(t: float) -> np.ndarray:
        return expm(rates.numpy() * t)

    each = zip(trees, lengths.tolist(), strict=True)
    wanted = [recursion(sequences, *pair, plain, share.numpy()) for pair in each]
    found = model(batch, lengths.requires_grad_())
    np.testing.assert_allclose(found.detach(), wanted, rtol=0, atol=1e-10)
    by_cell = model.of_patterns(batch, lengths) @ alignment.count
    torch.testing.assert_close(by_cell, found, rtol=0, atol=1e-10)
    both = [torch.autograd.grad(part.sum(), lengths)[0] for part in (found, by_cell)]
    torch.testing.assert_close(*both, rtol=1e-9, atol=1e-9)
    for wrong in ((0.25,) * 4, (0.1, 0.2, 0.3, 0.4)):
        with pytest.raises(ValueError, match="not a reversible model with frequencies"):
            TreeLikelihood(alignment, transition, wrong)(batch, lengths)


def test_gradients_of_a_small_tree() -> None:
    _, alignment, trees, lengths = batch_of(2, 5, 6)
    model, batch = TreeLikelihood(alignment), Trees.of(trees, alignment.taxa)
    assert torch.autograd.gradcheck(lambda t: model(batch, t), lengths.requires_grad_())


def test_frequencies_are_checked_and_have_gradients() -> None:
    _, alignment, trees, lengths = batch_of(2, 5, 6)
    batch, share = Trees.of(trees, alignment.taxa), torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    for wrong in ((1, 1, 1, 1), (0.5, 0.5, 0.5, -0.5), (0.5, 0.5), (math.nan,) * 4, (0.25,)):
        with pytest.raises(ValueError, match="frequencies: expected 4 above 0, of sum 1"):
            TreeLikelihood(alignment, frequencies=wrong)

    def likelihood(free: torch.Tensor) -> torch.Tensor:
        own = free.softmax(0)
        # Felsenstein (1981): what a branch changes is drawn anew, by the frequencies.
        decay = lambda t: torch.exp(-t / (1 - own.square().sum()))[..., None, None]  # noqa: E731
        p = lambda t: decay(t) * torch.eye(4).double() + (1 - decay(t)) * own  # noqa: E731
        return TreeLikelihood(alignment, p, own)(batch, lengths)

    assert torch.autograd.gradcheck(likelihood, share.log().requires_grad_())


def test_what_would_be_wrong_is_refused() -> None:
    _, alignment, trees, lengths = batch_of(2, 5, 6)
    model, batch = TreeLikelihood(alignment), Trees.of(trees, alignment.taxa)
    likelihood = model(batch, lengths.requires_grad_())
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(likelihood.sum(), lengths, create_graph=True)
    for wrong in (lengths[:1], lengths[:, :-1], torch.cat([lengths, lengths[:, :1]], 1)):
        with pytest.raises(ValueError, match=r"lengths: expected \[2, 7\], got"):
            model(batch, wrong)
    tree = Tree.parse("((a:1,b:1):1,c,d:0);")
    unknown = torch.tensor([tree.lengths]).double()
    model = TreeLikelihood(Alignment.of(dict.fromkeys("abcd", "A")))
    with pytest.raises(ValueError, match="lengths: branch 3 of tree 0 is nan; Newick's text has"):
        model(Trees.of([tree], "abcd"), unknown)


def test_short_branches_are_exact() -> None:
    tiny = torch.tensor([1e-15, 1e-9], dtype=torch.float64)
    change = jukes_cantor(tiny)[:, 0, 1]
    torch.testing.assert_close(change, tiny / 3, rtol=1e-8, atol=0)


def test_a_batch_equals_each_tree_alone() -> None:
    _, alignment, trees, lengths = batch_of(4, 6, 8)
    model = TreeLikelihood(alignment)
    for run in (model, model.of_patterns):
        pairs = zip(trees, lengths.split(1), strict=True)
        alone = [run(Trees.of([tree], alignment.taxa), t) for tree, t in pairs]
        found = run(Trees.of(trees, alignment.taxa), lengths)
        torch.testing.assert_close(found, torch.cat(alone), rtol=0, atol=1e-11)


def test_another_model_of_substitution() -> None:
    """Kimura's model with equal rates is that of Jukes and Cantor."""
    _, alignment, trees, lengths = batch_of(2, 6, 10)
    rates = (torch.ones(4, 4) / 3 - torch.eye(4) * 4 / 3).double()
    batch = Trees.of(trees, alignment.taxa)
    other = TreeLikelihood(alignment, lambda t: torch.linalg.matrix_exp(t[:, None, None] * rates))
    found = other(batch, lengths)
    torch.testing.assert_close(found, TreeLikelihood(alignment)(batch, lengths))


def test_branches_of_length_zero() -> None:
    same = Alignment.of({"a": "AC", "b": "AC", "c": "AC", "d": "AC"})
    tree = Tree.parse("((a:0,b:0):0,c:0,d:0);")
    zeros = torch.zeros(1, 5, dtype=torch.float64, requires_grad=True)
    found = TreeLikelihood(same)(Trees.of([tree], same.taxa), zeros)
    assert float(found.detach()) == pytest.approx(2 * math.log(1 / 4))
    assert torch.autograd.grad(found, zeros)[0].isfinite().all()
    other = Alignment.of({"a": "AC", "b": "AC", "c": "AC", "d": "AG"})
    found = TreeLikelihood(other)(Trees.of([tree], same.taxa), zeros)
    assert float(found.detach()) == -math.inf


def test_gaps_ambiguity_and_equal_columns() -> None:
    alignment = Alignment.of({"a": "A-AR", "b": "c?cY", "c": "ANAU"})
    assert alignment.count.tolist() == [2, 1, 1] or sorted(alignment.count.tolist()) == [1, 1, 2]
    assert alignment.pattern[0] == alignment.pattern[2]
    assert alignment.tips[1, :, alignment.pattern[3]].tolist() == [0, 1, 0, 1]
    gaps = Alignment.of({"a": "-", "b": "N", "c": "."})
    found = TreeLikelihood(gaps)(
        Trees.of([Tree.parse("(a,b,c);")], "abc"), torch.ones(1, 3).double()
    )
    assert float(found) == pytest.approx(0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("((a,b),(c,d));", "the top node 6 has 2 children instead of 3"),
        ("(a,b,c,d);", "the top node 4 has 4 children instead of 3"),
        ("((a,b,c),d,e);", "the inner node 3 has 3 children instead of 2"),
        ("((a),b,c);", "the inner node 1 has 1 children instead of 2"),
        ("(a,b,c)", "not one tree"),
        ("(a,b,c;", "not one tree"),
        ("a,b,c);", "not a tree"),
        ("(a:x,b,c);", "not a tree: 'x' after ':'"),
        ("(a:-1,b,c);", "lengths from 0"),
        ("(a b,c,d);", "not a tree: 'b' after 'a'"),
    ],
)
def test_trees_that_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Tree.parse(text)


def test_alignments_that_are_refused(tmp_path: Path) -> None:
    for sequences, said in [
        ({"a": "AC", "b": "AZ"}, "b: 'Z' at 2 is none of"),
        ({"a": "AC", "b": "AC", "c": "A"}, "c: 1 characters, where others have 2"),
    ]:
        with pytest.raises(ValueError, match=said):
            Alignment.of(sequences)
    path = tmp_path / "x.fasta"
    for text, said in [("AC", "no line begins with '>'"), (">a\nA\n>a\nC", "two sequences")]:
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            Alignment.read(path)
    with pytest.raises(FileNotFoundError, match="is missing"):
        Alignment.read(tmp_path / "y.fasta")
    for main in (phylogeny.main, speed):
        with pytest.raises(SystemExit, match="DS1.fasta.gz is missing; set PYG_DYNBATCH_DATA"):
            run(main, "--folder", tmp_path)


@pytest.mark.parametrize("text", ["(a,b,c);", "((a,b),c,e);", "((a,b),c,c);"])
def test_trees_of_other_taxa_are_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match="differ in their taxa: (d|d, e|a taxon that occurs twice)"
    ):
        Trees.of([Tree.parse(text)], "abcd")


def test_rooting_keeps_branches_and_halves_levels() -> None:
    """A chain of ten cherries' height is halved, and every branch is used once."""
    text = "t0"
    for number in range(1, 12):
        text = f"({text}:{number},t{number}:0.5)"
    tree = Tree.parse(f"({text}:3,x:4,y:5);")
    parent, branch, ends = tree.rooted()
    assert sorted(branch) == list(range(len(tree.names)))
    assert [parent[end] for end in ends] == [-1, -1]
    edges = {frozenset((node, tree.parent[node])): node for node in range(len(tree.parent))}
    for node, above in enumerate(parent):
        if above >= 0:
            assert edges[frozenset((node, above))] == branch[node]
    assert Trees.of([tree], [*(f"t{n}" for n in range(12)), "x", "y"]).schedule.num_levels == 7


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write two small alignments and a file of MrBayes."""
    sequences, rng = drawn(6, 30)
    fasta = "".join(f">{name}\n{row[:20]}\n{row[20:]}\n" for name, row in sequences.items())
    for name in ("DS1", "DS5"):
        (tmp_path / f"{name}.fasta.gz").write_bytes(gzip.compress(fasta.encode()))
    lines = ["begin trees;", " translate", *(f"  {n + 1} t{n}," for n in range(5)), "  6 t5;"]
    for weight in (0.5, 0.3, 0.2):
        parts = list("123456")
        while len(parts) > 3:
            rng.shuffle(parts)
            parts.append(f"({parts.pop()},{parts.pop()})")
        lines.append(f"tree x [p = 1] = [&W {weight}] ({','.join(parts)});")
    (tmp_path / "DS1.rep_1.trprobs.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return tmp_path


def run(main: Any, *argv: object) -> None:
    with mock.patch.object(sys, "argv", ["case", *map(str, argv)]):
        main()


def test_commands_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trees, weights = read_mrbayes(folder / "DS1.rep_1.trprobs.gz")
    assert weights.tolist() == [0.5, 0.3, 0.2]
    assert sorted(filter(None, trees[2].names)) == [f"t{n}" for n in range(6)]
    found = folder / "found.json"
    run(phylogeny.main, "--folder", folder, "--draws", 200, "--repeats", 2, "--json", found)
    values = json.loads(found.read_text())["rows"]["importance sampling"]["log p(Y), DS1"]
    assert len(values) == 2
    assert values[0] == pytest.approx(values[1], abs=0.5)
    run(speed, "--folder", folder, "--batches", 2, "--rounds", 1, "--json", found)
    assert json.loads(found.read_text())["rows"]["DS1, 2"].keys() >= {
        "values: loop, ms",
        "gradients: cell, MB",
    }
    assert "3 topologies, batch:" in capsys.readouterr().out


def test_the_reference(shared_data: Any) -> None:
    """DS1: five topologies and three sets of lengths in one batch, values and gradients."""
    reference = json.loads(shared_data("phylogeny/reference.json").read_text("utf-8"))
    alignment = Alignment.read(shared_data("phylogeny/DS1.fasta.gz"))
    assert alignment.tips.shape == (27, 4, 934)
    trees = [Tree.parse(case["newick"]) for case in reference["cases"]]
    lengths = torch.tensor([tree.lengths for tree in trees], dtype=torch.float64).requires_grad_()
    model, batch = TreeLikelihood(alignment), Trees.of(trees, alignment.taxa)
    found = model(batch, lengths)
    wanted = [case["log_likelihood"] for case in reference["cases"]]
    np.testing.assert_allclose(found.detach(), wanted, rtol=0, atol=1e-9)
    wanted = [case["gradient_by_postorder_branch"] for case in reference["cases"]]
    gradient = torch.autograd.grad(found.sum(), lengths)[0]
    np.testing.assert_allclose(gradient, np.array(wanted), rtol=0, atol=1e-9)
    with torch.no_grad():
        sites = model.of_patterns(batch, lengths)[0, alignment.pattern[:40]]
        single = TreeLikelihood(alignment).float()(batch, lengths.float())
    wanted = reference["first_case_sites"]["values"]
    np.testing.assert_allclose(sites, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(single.double(), found.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("name", "patterns"), [("DS2", 1246), ("DS5", 256)])
def test_patterns_of_the_other_alignments(name: str, patterns: int, shared_data: Any) -> None:
    assert len(Alignment.read(shared_data(f"phylogeny/{name}.fasta.gz")).count) == patterns
