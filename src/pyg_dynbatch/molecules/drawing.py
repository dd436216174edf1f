"""Draw a molecule whose atoms and atom pairs are coloured by numbers, with a scale."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.files import write_atomically
from pyg_dynbatch.molecules.rdkit_access import INPUT_ATOM, Mol, chem, rdkit_module

LOW, MIDDLE, HIGH = (0.13, 0.40, 0.67), (1.0, 1.0, 1.0), (0.70, 0.35, 0.02)
"""Ends and middle of the scale: blue and brown, distinct for all kinds of colour vision."""

_LEGEND, _LINE = 32, 15
_STEPS = 40
_BOND = 2  # RDKit's own line width
_CAPTION = 60  # characters per line
_CENTRED = 0  # RDKit's alignment; without one, a string is split like an atom label
_FORMATS = ("svg", "png")
_FAINT = 0.05  # fraction of the scale below which a line would only hide the bond under it


def scale_colour(share: float) -> tuple[float, float, float]:
    """Return the colour of a number on the scale from -1 (blue) over 0 (white) to 1 (brown)."""
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
    """Draw a molecule with a coloured number on each atom, and lines between pairs of atoms.

    The colours go up to ``limit``, by default the largest absolute number.
    """
    values, pairs = np.asarray(atom_values, dtype=float), dict(pair_values or {})
    if format not in _FORMATS:
        what = "draw_attributions: unknown format"
        raise mismatch(ValueError, what, " or ".join(_FORMATS), format)
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
        "highlightAtomColors": {atom: scale_colour(values[atom] / end) for atom in atoms},
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
    if not any(atom.HasProp(INPUT_ATOM) for atom in atoms):
        return [(int(atom.GetIdx()), str(atom.GetSymbol())) for atom in atoms]
    numbers = [atom.GetIntProp(INPUT_ATOM) if atom.HasProp(INPUT_ATOM) else -1 for atom in atoms]
    return [(int(n), str(atom.GetSymbol())) for n, atom in zip(numbers, atoms, strict=True)]


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
            drawer.SetColour(scale_colour(share))
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
        drawer.SetColour(scale_colour(2 * (number + 0.5) / _STEPS - 1))
        start = left + number * step
        drawer.DrawRect(point(start, top), point(start + step, bottom), rawCoords=True)
    drawer.SetFillPolys(False)
    drawer.SetColour((0.3, 0.3, 0.3))
    drawer.DrawRect(point(left, top), point(right, bottom), rawCoords=True)
    drawer.SetColour((0.0, 0.0, 0.0))
    drawer.SetFontSize(11)
    middle = (left + right) / 2
    for x, text in ((left, f"{-end:.3g}"), (middle, "0"), (right, f"{end:+.3g}")):
        drawer.DrawString(text, point(x, height + 23.0), _CENTRED, rawCoords=True)
    for number, line in enumerate(lines):
        drawer.DrawString(line, point(middle, height + 38.0 + _LINE * number), _CENTRED, True)
