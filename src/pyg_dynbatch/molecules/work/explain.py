"""Attribute a prediction to atoms and pairs of atoms, and draw them on the molecule."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyg_dynbatch.core.errors import checked_choice, mismatch
from pyg_dynbatch.files import write_atomically
from pyg_dynbatch.molecules.data import MoleculeData
from pyg_dynbatch.molecules.features.rdkit_access import INPUT_ATOM, Mol, chem, rdkit_module
from pyg_dynbatch.molecules.nets.properties import MoleculePropertyModel
from pyg_dynbatch.molecules.schema import MoleculeSchema
from pyg_dynbatch.molecules.work.predict import MoleculePredictor


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
        return stack.forward(x, pair, pairs, coded=False)

    network = model.weave
    hook = network.weave.register_forward_hook(run_on_rows)
    try:
        yield rows
    finally:
        hook.remove()


# Pictures -----------------------------------------------------------------------------------------


LOW, MIDDLE, HIGH = (0.13, 0.40, 0.67), (1.0, 1.0, 1.0), (0.70, 0.35, 0.02)
"""Ends and middle of the scale: blue and brown, distinct for all kinds of color vision."""

_LEGEND, _LINE = 32, 15
_STEPS = 40
_BOND = 2  # RDKit's own line width
_CAPTION = 60  # characters per line
_CENTERED = 0  # RDKit's alignment; without one, a string is split like an atom label
_FAINT = 0.05  # fraction of the scale below which a line would only hide the bond under it


def scale_color(share: float) -> tuple[float, float, float]:
    """Return the color of a number on the scale from -1 (blue) over 0 (white) to 1 (brown)."""
    channels = zip(LOW, MIDDLE, HIGH, strict=True)
    red, green, blue = (float(np.interp(share, (-1, 0, 1), ends)) for ends in channels)
    return red, green, blue


def draw_attributions(
    mol: Mol,
    atom_values: Sequence[float | int] | Float[np.ndarray, " atom"],
    pair_values: Mapping[tuple[int, int], float | int] | None = None,
    *,
    limit: float | None = None,
    caption: str = "",
    format: Literal["svg", "png"] = "svg",
    size: tuple[int, int] = (420, 340),
) -> bytes:
    """Draw a molecule with a colored number on each atom, and lines between pairs of atoms.

    The colors go up to ``limit``, by default the largest absolute number.
    """
    values, pairs = np.asarray(atom_values, dtype=float), dict(pair_values or {})
    checked_choice("draw_attributions: unknown format", format, ("svg", "png"))
    if values.shape != (mol.GetNumAtoms(),):
        what = "draw_attributions: the numbers do not fit the atoms"
        expected = f"{mol.GetNumAtoms()} numbers, one per atom"
        raise mismatch(ValueError, what, expected, list(values.shape))
    largest = max((abs(value) for value in (*values.tolist(), *pairs.values())), default=0.0)
    end = limit if limit is not None else largest or 1.0
    draw2d = rdkit_module("Chem.Draw.rdMolDraw2D")
    width, height = size
    lines = textwrap.wrap(caption, _CAPTION)
    # The molecule is drawn in a separate panel, above the scale.
    sizes = (width, height + _LEGEND + _LINE * len(lines), width, height)
    drawn = _prepared(mol, draw2d)
    atoms = list(range(drawn.GetNumAtoms()))
    highlights = {
        "highlightAtoms": atoms,
        "highlightAtomColors": {atom: scale_color(values[atom] / end) for atom in atoms},
        "highlightBonds": [],
        "highlightAtomRadii": dict.fromkeys(atoms, 0.3),
    }
    # The lines are drawn under the molecule, but only a drawn molecule has coordinates.
    trial, drawer = (_drawer(draw2d, format, sizes) for _ in range(2))
    trial.DrawMolecule(drawn, **highlights)
    drawer.ClearDrawing()
    _draw_pairs(drawer, pairs, [trial.GetDrawCoords(atom) for atom in atoms], end)
    drawer.drawOptions().clearBackground = False
    drawer.DrawMolecule(drawn, **highlights)
    _draw_scale(drawer, end, lines, width, height)
    drawer.FinishDrawing()
    content = drawer.GetDrawingText()
    return content.encode() if isinstance(content, str) else content


def atom_labels(mol: Mol) -> list[tuple[int, str]]:
    """Return for every atom its index in the input (-1 if it was added) and its element."""
    atoms = list(mol.GetAtoms())
    kept = not any(atom.HasProp(INPUT_ATOM) for atom in atoms)

    def number(atom: Any) -> int:
        return int(atom.GetIntProp(INPUT_ATOM)) if atom.HasProp(INPUT_ATOM) else -1

    return [(atom.GetIdx() if kept else number(atom), atom.GetSymbol()) for atom in atoms]


def write_picture(path: str | Path, content: bytes) -> Path:
    """Write a picture atomically."""
    return write_atomically(path, lambda file: file.write_bytes(content))


def _prepared(mol: Mol, draw2d: Any) -> Mol:
    copied = chem().Mol(mol)
    for atom, (number, _) in zip(copied.GetAtoms(), atom_labels(mol), strict=True):
        if number >= 0:
            atom.SetProp("atomNote", str(number))
    rdkit_module("Chem.rdDepictor").Compute2DCoords(copied)
    try:
        return draw2d.PrepareMolForDrawing(copied, kekulize=True, addChiralHs=False)
    except (ValueError, RuntimeError):
        # Some aromatic systems have no Kekulé form; their rings are drawn dashed.
        return draw2d.PrepareMolForDrawing(copied, kekulize=False, addChiralHs=False)


def _drawer(draw2d: Any, format: str, sizes: tuple[int, int, int, int]) -> Any:
    drawer = (draw2d.MolDraw2DSVG if format == "svg" else draw2d.MolDraw2DCairo)(*sizes)
    options = drawer.drawOptions()
    options.useBWAtomPalette()
    options.padding = 0.1
    options.fillHighlights = True
    options.circleAtoms = True
    options.annotationFontScale = 0.6
    return drawer


def _draw_pairs(
    drawer: Any, pairs: Mapping[tuple[int, int], float], points: Sequence[Any], end: float
) -> None:
    # The weakest first, so that the strongest are on top.
    for (first, second), value in sorted(pairs.items(), key=lambda item: abs(item[1])):
        share = value / end
        if abs(share) >= _FAINT:
            drawer.SetColour(scale_color(share))
            drawer.SetLineWidth(4 + round(8 * min(1.0, abs(share))))
            drawer.DrawLine(points[first], points[second], rawCoords=True)
    drawer.SetLineWidth(_BOND)


def _draw_scale(drawer: Any, end: float, lines: Sequence[str], width: int, height: int) -> None:
    point = rdkit_module("Geometry").Point2D
    left, right = width * 0.2, width * 0.8
    top, bottom = height + 4.0, height + 14.0
    step = (right - left) / _STEPS
    drawer.SetFillPolys(True)
    drawer.SetLineWidth(1)
    for number in range(_STEPS):
        drawer.SetColour(scale_color(2 * (number + 0.5) / _STEPS - 1))
        start = left + number * step
        drawer.DrawRect(point(start, top), point(start + step, bottom), rawCoords=True)
    drawer.SetFillPolys(False)
    drawer.SetColour((0.3, 0.3, 0.3))
    drawer.DrawRect(point(left, top), point(right, bottom), rawCoords=True)
    drawer.SetColour((0.0, 0.0, 0.0))
    drawer.SetFontSize(11)
    middle = (left + right) / 2
    for x, text in ((left, f"{-end:.3g}"), (middle, "0"), (right, f"{end:+.3g}")):
        drawer.DrawString(text, point(x, height + 23.0), _CENTERED, rawCoords=True)
    for number, line in enumerate(lines):
        drawer.DrawString(line, point(middle, height + 38.0 + _LINE * number), _CENTERED, True)
