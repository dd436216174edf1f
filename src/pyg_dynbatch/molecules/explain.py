"""Attribute a prediction to atoms and pairs of atoms."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.molecules.data import MoleculeData
from pyg_dynbatch.molecules.predict import MoleculePredictor
from pyg_dynbatch.molecules.property_model import MoleculePropertyModel
from pyg_dynbatch.molecules.schema import MoleculeSchema


@dataclass(frozen=True)
class Explanation:
    """Attributions of one prediction, in the units of the property (log-odds for classes)."""

    value: float
    gradient: Float[np.ndarray, " atom"]
    leave_one_out: Float[np.ndarray, " atom"]
    pair_index: Int[np.ndarray, "two pair"]
    pair_gradient: Float[np.ndarray, " pair"]
    pair_bonds: Int[np.ndarray, " pair"]

    def strongest_pairs(self, count: int) -> dict[tuple[int, int], float]:
        """Return the attributions of the pairs with the largest absolute values."""
        order = np.argsort(-np.abs(self.pair_gradient), kind="stable")[:count].tolist()
        ends = ((int(i), int(j)) for i, j in self.pair_index[:, order].T)
        return dict(zip(ends, self.pair_gradient[order].tolist(), strict=True))


def explain(
    predictor: MoleculePredictor, molecule: MoleculeData, task: str | None = None, label: int = 1
) -> Explanation:
    r"""Attribute one prediction to atoms and pairs; the mean over several checkpoints.

    - gradient times input: :math:`\sum_k x_{ik} \, \partial f / \partial x_{ik}` for every atom,
      and the same for every pair of atoms;
    - leave one out: :math:`f(\text{all}) - f(\text{without } i)`, the pairs of the other atoms
      unchanged.

    Descriptors of the whole molecule stay unchanged in both.

    Args:
        predictor: The model.
        molecule: The molecule, described by the featurizer of the checkpoints.
        task: Name of the property; the first by default.
        label: Class to explain, of a multiclass property.

    Reference:
        Gradient times input: Shrikumar et al. (2017), arXiv:1605.01713.

    Example:
        >>> from pyg_dynbatch.data import MoleculeFeaturizer
        >>> from pyg_dynbatch.lightning import MoleculeProperty
        >>> from pyg_dynbatch.models import MoleculeSchema
        >>> made = MoleculeFeaturizer()
        >>> schema = MoleculeSchema(made.spec, len(made.atom_names), made.pair_table, ("logS",))
        >>> task = MoleculeProperty(schema.as_dict(), hidden=4, atom_out=4, readout="sum", head=[])
        >>> found = explain(MoleculePredictor([task]), made("CCO"))
        >>> len(found.leave_one_out), found.pair_index.tolist()
        (3, [[0, 0, 1], [1, 2, 2]])
    """
    output = _output_of(predictor.schema, task, label)
    lacking = [without_atom(molecule, atom) for atom in range(int(molecule.num_nodes))]
    parts = [_gradients(predictor, member, molecule, output) for member in predictor.models]
    value, gradient, pair_gradient = (np.mean(part, axis=0) for part in zip(*parts, strict=True))
    rest = _values(predictor, lacking, output)
    pairs = predictor.collater([molecule]).pairs
    proper = ~pairs.is_self
    ends = torch.stack([pairs.first, pairs.second])[:, proper].numpy()
    bonds = predictor.schema.pair_table.distance[pairs.code.long()][proper].numpy()
    pair_gradient = pair_gradient[proper.numpy()]
    return Explanation(float(value), gradient, value - rest, ends, pair_gradient, bonds)


def without_atom(molecule: MoleculeData, atom: int) -> MoleculeData:
    """Remove an atom from a molecule; other atoms, pairs and descriptors stay as they are."""
    count = int(molecule.num_nodes)
    first, second = torch.triu_indices(count, count)
    kept = torch.arange(count) != atom
    return MoleculeData(
        molecule.x[kept],
        molecule.pair_code[(first != atom) & (second != atom)],
        descriptor=molecule.get("descriptor"),
    )


def _output_of(schema: MoleculeSchema, task: str | None, label: int) -> int:
    names, classes = schema.task_names, schema.num_classes
    if task not in (None, *names):
        what = "explain: the checkpoint does not predict this property"
        raise mismatch(ValueError, what, ", ".join(names), task)
    number = names.index(task or names[0])
    if schema.kind != "multiclass":
        return number
    if not 0 <= label < classes:
        raise mismatch(ValueError, "explain: unknown class", f"0 to {classes - 1}", label)
    return number * classes + label


def _explained(model: MoleculePropertyModel, batch: Any, output: int) -> Float[Tensor, " molecule"]:
    raw, schema = model(batch), model.schema
    if schema.kind != "multiclass":
        return model.scale.restored(raw)[:, output]
    # Log-odds, as adding one number to the logits of all classes changes no probability.
    number, label = divmod(output, schema.num_classes)
    logits = raw.unflatten(1, (schema.num_tasks, -1))[:, number]
    others = torch.cat([logits[:, :label], logits[:, label + 1 :]], 1)
    return logits[:, label] - others.logsumexp(1)


@torch.no_grad()
def _values(
    predictor: MoleculePredictor, molecules: Sequence[MoleculeData], output: int
) -> Float[np.ndarray, " molecule"]:
    found = [np.zeros(0)]
    for chosen in predictor.batches(molecules):
        batch = predictor.collater(chosen).to(predictor.device)
        each = torch.stack([_explained(model, batch, output) for model in predictor.models])
        found.append(each.mean(0).double().cpu().numpy())
    return np.concatenate(found)


def _gradients(
    predictor: MoleculePredictor, model: MoleculePropertyModel, molecule: MoleculeData, output: int
) -> tuple[float, np.ndarray, np.ndarray]:
    batch = predictor.collater([molecule]).to(predictor.device)
    batch.x = batch.x.detach().requires_grad_()
    with pair_rows(model) as rows, torch.enable_grad():
        value = _explained(model, batch, output).sum()
        given = [batch.x, *rows]
        grads = torch.autograd.grad(value, given, materialize_grads=True)
    of_atoms, of_pairs = (
        (grad * part).sum(1).detach().double().cpu().numpy()
        for grad, part in zip(grads, given, strict=True)
    )
    return float(value.detach()), of_atoms, of_pairs


@contextmanager
def pair_rows(model: MoleculePropertyModel) -> Iterator[list[Tensor]]:
    """Replace the table with one row per pair within the context, so that each has a gradient."""
    rows: list[Tensor] = []

    def run_on_rows(stack: Any, given: tuple[Any, ...], _: Tensor) -> Tensor:
        x, table, pairs = given
        pair = table.detach()[pairs.code.long()].requires_grad_()
        rows.append(pair)
        for conv in stack.convs:
            x, pair = conv(x, pair, pairs)
        return x

    network: Any = model.network
    hook = network.weave.register_forward_hook(run_on_rows)
    try:
        yield rows
    finally:
        hook.remove()
