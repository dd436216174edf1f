"""Pictures of molecules with numbers: colors, sizes, the caller's molecule untouched."""

import re
from pathlib import Path

import pytest
from rdkit import Chem

from pyg_dynbatch.data import MoleculeFeaturizer
from pyg_dynbatch.molecules.work.explain import (
    HIGH,
    LOW,
    atom_labels,
    draw_attributions,
    scale_color,
    write_picture,
)


def test_scale_goes_over_white() -> None:
    assert scale_color(0.0) == (1.0, 1.0, 1.0)
    assert scale_color(2.0) == pytest.approx(HIGH)
    assert scale_color(-2.0) == pytest.approx(LOW)
    lightness = [sum(scale_color(k / 10)) for k in range(11)]
    assert lightness == sorted(lightness, reverse=True)


def test_strongest_atoms_have_the_colours_of_the_ends() -> None:
    picture = draw_attributions(Chem.MolFromSmiles("CCO"), [1.0, -1.0, 0.0]).decode()
    for end in (HIGH, LOW):
        color = "#" + "".join(f"{int(part * 255):02X}" for part in end)
        assert color in picture.upper()


def test_pairs_are_lines_as_wide_as_strong() -> None:
    mol = Chem.MolFromSmiles("CCO")
    plain = draw_attributions(mol, [0.0, 0.0, 0.0], limit=1.0).decode()
    lined = draw_attributions(mol, [0.0] * 3, {(0, 2): 1.0, (0, 1): -0.1}, limit=1.0).decode()
    assert lined.count("<path") == plain.count("<path") + 2
    faint = draw_attributions(mol, [0.0] * 3, {(0, 2): 0.01}, limit=1.0).decode()
    assert faint.count("<path") == plain.count("<path")
    widths = [float(width) for width in re.findall(r"stroke-width:([\d.]+)px", lined)]
    assert max(widths) >= 5


def test_lines_of_pairs_lie_under_bonds_and_atoms_have_numbers() -> None:
    mol = MoleculeFeaturizer(fragments="largest").prepare("[Na+].CCO")
    picture = draw_attributions(mol, [0.0] * 3, {(0, 1): 1.0}, limit=1.0).decode()
    wide = picture.index("stroke-width:12")
    assert picture.index("class='bond-0") > wide
    assert picture.count("class='bond-0") == 1
    assert picture.count("class='note'") == len(mol.GetAtoms())


@pytest.mark.parametrize("smiles", ["C", "[Na+].[Cl-]", "c1ccccc1", "[Fe]", "C[C@H](N)C(=O)O"])
@pytest.mark.parametrize("format", ["svg", "png"])
def test_every_kind_of_molecule_is_drawn_and_left_alone(smiles: str, format) -> None:
    mol = Chem.MolFromSmiles(smiles)
    before = mol.ToBinary()
    picture = draw_attributions(mol, [0.5] * mol.GetNumAtoms(), caption="log S", format=format)
    start = b"<?xml" if format == "svg" else b"\x89PNG"
    assert picture.startswith(start)
    assert mol.ToBinary() == before
    assert mol.GetNumConformers() == 0


def test_molecule_without_a_kekule_form(tmp_path: Path) -> None:
    mol = Chem.MolFromSmiles("c1ccncc1", sanitize=False)
    mol.UpdatePropertyCache(strict=False)
    path = write_picture(tmp_path / "a" / "b.svg", draw_attributions(mol, [0.0] * 6))
    assert path.read_bytes().startswith(b"<?xml")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.svg"]


def test_long_captions_take_more_lines() -> None:
    mol = Chem.MolFromSmiles("CO")
    heights = [
        int(re.search(r"height='(\d+)px'", draw_attributions(mol, [0, 1], caption=c).decode())[1])
        for c in ("", "short", "measured log solubility in mols per litre of water at 25 degrees")
    ]
    assert heights[0] < heights[1] < heights[2]


def test_input_numbers_of_atoms() -> None:
    featurizer = MoleculeFeaturizer(fragments="largest", explicit_hydrogens=True)
    assert atom_labels(featurizer.prepare("[Na+].CO"))[:3] == [(1, "C"), (2, "O"), (-1, "H")]
    assert atom_labels(MoleculeFeaturizer().prepare("OC")) == [(0, "O"), (1, "C")]


def test_the_scale_ends_at_the_largest_number() -> None:
    mol = Chem.MolFromSmiles("CO")
    assert draw_attributions(mol, [0.0, 0.0]) == draw_attributions(mol, [0.0, 0.0], limit=1.0)
    given = ([0.5, 0.0], {(0, 1): -3.0})
    assert draw_attributions(mol, *given) == draw_attributions(mol, *given, limit=3.0)


def test_complaints() -> None:
    mol = Chem.MolFromSmiles("CO")
    with pytest.raises(ValueError, match="(?s)do not fit the atoms.*2 numbers, one per atom"):
        draw_attributions(mol, [1.0])
    with pytest.raises(ValueError, match="unknown format"):
        draw_attributions.__wrapped__(mol, [1.0, 2.0], format="gif")
