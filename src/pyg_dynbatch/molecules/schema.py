"""Keep together what a model of molecules must know of the data it was trained on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.molecules.pair_table import PairTable

PropertyKind = Literal["regression", "binary", "multiclass"]

_FIELDS = (
    "featurizer",
    "atom_channels",
    "pair_table",
    "task_names",
    "kind",
    "num_classes",
    "pairs",
    "self_pairs",
)


@dataclass(frozen=True)
class MoleculeSchema:
    """Says how molecules become numbers and what the numbers of a prediction mean.

    It travels from the data module to the model and into every checkpoint, as plain values, so
    that a checkpoint alone is enough to predict from SMILES.

    Args:
        featurizer: The ``spec`` of the featurizer; empty if the molecules were made elsewhere.
        atom_channels: Features of an atom.
        pair_table: What the pair codes mean.
        task_names: Names of the properties.
        kind: ``regression``, ``binary`` or ``multiclass``.
        num_classes: Classes of a ``multiclass`` property.
        pairs: Which pairs are used: ``all``, ``connected``, ``bonds``, or at most so many bonds.
        self_pairs: Whether an atom is paired with itself too.

    Raises:
        ValueError: If there is no property, two share a name, or the kind is unknown.

    Example:
        >>> import torch
        >>> table = PairTable(torch.tensor([[0.0], [1.0]]), ("bonded",), torch.tensor([0, 1]))
        >>> schema = MoleculeSchema({}, 27, table, ("logS",))
        >>> MoleculeSchema.from_dict(schema.as_dict()) == schema, schema.num_outputs
        (True, 1)
    """

    featurizer: Mapping[str, Any]
    atom_channels: int
    pair_table: PairTable
    task_names: tuple[str, ...]
    kind: PropertyKind = "regression"
    num_classes: int = 2
    pairs: str | int = "all"
    self_pairs: bool = True

    def __post_init__(self) -> None:
        """Refuses a schema that no model can be made for."""
        names = self.task_names
        if not names or len(set(names)) != len(names):
            raise mismatch(
                ValueError,
                "MoleculeSchema: the names of the properties cannot be used",
                "one name or more, all different",
                ", ".join(names) or "none",
            )
        if self.kind not in get_args(PropertyKind):
            raise mismatch(
                ValueError,
                "MoleculeSchema: there is no such kind of property",
                ", ".join(get_args(PropertyKind)),
                repr(self.kind),
            )
        if self.kind == "multiclass" and self.num_classes < 2:
            raise mismatch(
                ValueError, "MoleculeSchema: too few classes", "2 classes or more", self.num_classes
            )

    @property
    def num_tasks(self) -> int:
        """Number of properties."""
        return len(self.task_names)

    @property
    def descriptor_names(self) -> tuple[str, ...]:
        """Names of the descriptors of whole molecules, which the featurizer says; often none."""
        return tuple((self.featurizer.get("descriptors") or {}).get("names", ()))

    @property
    def num_outputs(self) -> int:
        """Numbers that a model gives for one molecule."""
        return self.num_tasks * (self.num_classes if self.kind == "multiclass" else 1)

    def as_dict(self) -> dict[str, Any]:
        """Writes the schema as plain values, which any checkpoint may hold.

        Returns:
            A mapping that :meth:`from_dict` reads.
        """
        return {
            "featurizer": dict(self.featurizer),
            "atom_channels": self.atom_channels,
            "pair_table": self.pair_table.as_dict(),
            "task_names": list(self.task_names),
            "kind": self.kind,
            "num_classes": self.num_classes,
            "pairs": self.pairs,
            "self_pairs": self.self_pairs,
        }

    @classmethod
    def from_dict(cls, content: Any) -> "MoleculeSchema":
        """Reads what :meth:`as_dict` has written.

        Args:
            content: The mapping.

        Returns:
            The schema.

        Raises:
            ValueError: If something is missing.
        """
        if not isinstance(content, Mapping) or any(name not in content for name in _FIELDS):
            raise mismatch(
                ValueError,
                "MoleculeSchema: this does not describe molecules",
                f"a mapping with {', '.join(_FIELDS)}",
                sorted(content) if isinstance(content, Mapping) else type(content).__name__,
                hint="use a data module of molecules, such as NCIData",
            )
        values = {name: content[name] for name in _FIELDS}
        values["pair_table"] = PairTable.from_dict(values["pair_table"])
        values["task_names"] = tuple(values["task_names"])
        return cls(**values)
