"""What a model of molecules needs to know about its training data."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from pyg_dynbatch.core.errors import checked_choice, mismatch
from pyg_dynbatch.molecules.features.pair_table import PairTable
from pyg_dynbatch.prediction import differences

PropertyKind = Literal["regression", "binary", "multiclass"]


@dataclass(frozen=True)
class MoleculeSchema:
    """How molecules are featurized, and what the outputs of a model mean.

    Every checkpoint contains it, as plain values, so that no other file is needed to predict.

    Args:
        featurizer: The ``spec`` of the featurizer; empty if the molecules were made without one.
        atom_channels: Number of features of an atom.
        pair_table: What the pair codes mean.
        task_names: Names of the properties.
        kind: ``regression``, ``binary`` or ``multiclass``.
        num_classes: Classes of a ``multiclass`` property.
        pairs: Which pairs are used, as in ``MoleculeCollater``.
        self_pairs: Whether each atom is also paired with itself.

    Raises:
        ValueError: If there is no property, two have the same name, or the kind is unknown.

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
        """Check properties and kind."""
        names = self.task_names
        if not names or len(set(names)) != len(names):
            what = "MoleculeSchema: the names of the properties cannot be used"
            got = ", ".join(names) or "none"
            raise mismatch(ValueError, what, "at least one name, all different", got)
        kinds = get_args(PropertyKind)
        checked_choice("MoleculeSchema: unknown kind of property", self.kind, kinds)
        if self.kind == "multiclass" and self.num_classes < 2:
            what = "MoleculeSchema: too few classes"
            raise mismatch(ValueError, what, "at least 2", self.num_classes)

    @property
    def num_tasks(self) -> int:
        """Number of properties."""
        return len(self.task_names)

    @property
    def descriptor_names(self) -> tuple[str, ...]:
        """Names of the descriptors of whole molecules; often none."""
        parts = self.featurizer.get("descriptors", ())
        return tuple(name for part in parts for name in part["names"])

    @property
    def num_outputs(self) -> int:
        """Number of outputs of a model for one molecule."""
        return self.num_tasks * (self.num_classes if self.kind == "multiclass" else 1)

    def as_dict(self) -> dict[str, Any]:
        """Return the schema as plain values, which :meth:`from_dict` reads."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "featurizer": dict(self.featurizer),
            "pair_table": self.pair_table.as_dict(),
            "task_names": list(self.task_names),
        }

    @classmethod
    def from_dict(cls, content: Any) -> "MoleculeSchema":
        """Build the schema that :meth:`as_dict` has written, or raise ``ValueError``."""
        names = [field.name for field in fields(cls)]
        if not isinstance(content, Mapping) or any(name not in content for name in names):
            what, hint = "MoleculeSchema: this does not describe molecules", "such as NCIData gives"
            got = sorted(content) if isinstance(content, Mapping) else type(content).__name__
            raise mismatch(ValueError, what, f"a mapping with {', '.join(names)}", got, hint=hint)
        values = {name: content[name] for name in names}
        values["pair_table"] = PairTable.from_dict(values["pair_table"])
        values["task_names"] = tuple(values["task_names"])
        return cls(**values)


def check_same(
    what: str,
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    hint: str,
    ignored: Collection[str] = (),
) -> None:
    """Raise an error that names all values in which two nested descriptions differ."""
    found = [part for part in differences(ours, theirs) if part[0] not in ignored]
    if found:
        expected = "; ".join(f"{name}: {str(own):.80}" for name, own, _ in found)
        got = "; ".join(f"{name}: {str(other):.80}" for name, _, other in found)
        raise mismatch(ValueError, what, expected, got, hint=hint)
