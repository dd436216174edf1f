"""Find the parts of a molecule featurizer that are asked for by name, and list what they give."""

from collections.abc import Sequence

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.featurizers.atom_pair_features import AtomFeatures, FeaturePart, PairFeatures
from pyg_dynbatch.featurizers.atoms import KearnesAtoms
from pyg_dynbatch.featurizers.deepchem import DeepChemAtoms, DeepChemPairs
from pyg_dynbatch.featurizers.descriptors import MoleculeDescriptors, RDKitDescriptors
from pyg_dynbatch.featurizers.pairs import KearnesPairs

_SETS = ("kearnes", "deepchem")


def check_choice(name: str, given: object, choices: Sequence[str]) -> None:
    """Refuses what is none of the choices.

    Args:
        name: The option.
        given: Its value.
        choices: What it may be.

    Raises:
        ValueError: If it is something else.
    """
    if given not in choices:
        raise ValueError(
            mismatch(
                f"MoleculeFeaturizer: {name} is unknown",
                expected=", ".join(map(repr, choices)),
                got=repr(given),
            )
        )


def check_chirality(chirality: bool | None, *parts: str | FeaturePart) -> None:
    """Refuses an option that would do nothing.

    Args:
        chirality: The option.
        parts: Atom and pair features, or their names.

    Raises:
        ValueError: If it is given, and no features by name.
    """
    if chirality is not None and not any(isinstance(part, str) for part in parts):
        raise ValueError(
            mismatch(
                "MoleculeFeaturizer: chirality has no effect on features of your own",
                expected='None, or a set given by name: "kearnes", "deepchem"',
                got=chirality,
                mend="give the option to the features themselves",
            )
        )


def named_atoms(name: str, chirality: bool | None, explicit_hydrogens: bool) -> AtomFeatures:
    """Makes the atom features of a published set.

    Args:
        name: ``"kearnes"`` or ``"deepchem"``.
        chirality: Whether stereo is described; None as published.
        explicit_hydrogens: Whether hydrogens are atoms.

    Returns:
        The atom features.

    Raises:
        ValueError: If there is no such set.
    """
    check_choice("atoms", name, _SETS)
    if name == "kearnes":
        return KearnesAtoms(chirality=chirality is not False)
    return DeepChemAtoms(hydrogens=not explicit_hydrogens, chirality=bool(chirality))


def named_pairs(name: str, chirality: bool | None) -> PairFeatures:
    """Makes the pair features of a published set.

    Args:
        name: ``"kearnes"`` or ``"deepchem"``.
        chirality: Whether stereo is described; None as published.

    Returns:
        The pair features.

    Raises:
        ValueError: If there is no such set.
    """
    check_choice("pairs", name, _SETS)
    return KearnesPairs() if name == "kearnes" else DeepChemPairs(chirality=bool(chirality))


def named_descriptors(name: str) -> MoleculeDescriptors:
    """Makes a set of descriptors.

    Args:
        name: ``"rdkit"``: all that RDKit has.

    Returns:
        The descriptors.

    Raises:
        ValueError: If there is no such set.
    """
    check_choice("descriptors", name, ("rdkit",))
    return RDKitDescriptors()


def listed(
    names: Sequence[str], owners: Sequence[FeaturePart], kinds: Sequence[str] = ()
) -> list[str]:
    """Writes one line for every column: its number, its name, its kind, who gives it.

    Args:
        names: The names.
        owners: For every name the part that gives it.
        kinds: For every name its kind; left out, none is shown.

    Returns:
        The lines.

    Example:
        >>> listed(["C", "charge"], [KearnesAtoms()] * 2, ["bit", "count"])
        ['  0  C       bit    KearnesAtoms', '  1  charge  count  KearnesAtoms']
    """
    width = max(map(len, names), default=0)
    shown = [f"{kind:<5}  " for kind in kinds] or [""] * len(names)
    return [
        f"{column:>3}  {name:<{width}}  {kind}{type(owner).__name__}"
        for column, (name, owner, kind) in enumerate(zip(names, owners, shown, strict=True))
    ]
