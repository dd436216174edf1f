"""What a model of molecules knows about its data: featurizer, properties, pairs of atoms."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from pyg_dynbatch.core.errors import checked_choice, mismatch
from pyg_dynbatch.molecules.chemistry import MoleculeError
from pyg_dynbatch.molecules.data import MoleculeCollater
from pyg_dynbatch.molecules.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.pair_table import PairTable
from pyg_dynbatch.molecules.read import RawMolecule, TableOptions, read_molecules
from pyg_dynbatch.predict import Entry

PropertyKind = Literal["regression", "binary", "multiclass"]


@dataclass(frozen=True)
class MoleculeSchema:
    """How molecules are featurized, and what the outputs of a model mean.

    A checkpoint of the model holds it, so that no other file is needed to predict.

    Args:
        targets: Names of the properties.
        kind: ``"regression"``, ``"binary"`` (0 or 1) or ``"multiclass"`` (0, 1, ...).
        num_classes: Classes of a ``multiclass`` property.
        featurizer: Describes a molecule.
        pair_set: Pairs of atoms that the model sees: ``"all"``, ``"connected"`` (within a
            fragment), ``"bonds"``, or the largest number of bonds between two atoms, 1 to 7.
        self_pairs: Whether each atom is also paired with itself.
        table: How the table of the training is written, as others like it are.

    Raises:
        ValueError: If there is no property, two have the same name, or an option is unknown.

    Example:
        >>> schema = MoleculeSchema(("logS",), pair_set="bonds")
        >>> MoleculeSchema.of(schema.as_dict()).num_outputs
        1
        >>> schema.entry("CO").data.num_nodes
        2
    """

    targets: tuple[str, ...]
    kind: PropertyKind = "regression"
    num_classes: int = 2
    featurizer: MoleculeFeaturizer = field(default_factory=MoleculeFeaturizer)
    pair_set: str | int = "all"
    self_pairs: bool = True
    table: TableOptions = TableOptions()

    def __post_init__(self) -> None:
        """Check properties and pairs."""
        names = tuple(self.targets)
        object.__setattr__(self, "targets", names)
        if not names or len(set(names)) != len(names):
            problem = "MoleculeSchema: the names of the properties cannot be used"
            got = ", ".join(names) or "none"
            raise mismatch(ValueError, problem, "at least one name, all different", got)
        checked_choice("MoleculeSchema: kind", self.kind, get_args(PropertyKind))
        if self.kind == "multiclass" and self.num_classes < 2:
            problem = "MoleculeSchema: too few classes"
            raise mismatch(ValueError, problem, "at least 2", self.num_classes)
        self.pair_table.kept(self.pair_set, self.self_pairs)

    @classmethod
    def of(cls, schema: "MoleculeSchema | Mapping[str, Any]") -> "MoleculeSchema":
        """Return a schema, also from what :meth:`as_dict` has returned."""
        if isinstance(schema, MoleculeSchema):
            return schema
        table = schema["table"]
        built = {
            "targets": tuple(schema["targets"]),
            "featurizer": MoleculeFeaturizer.from_spec(schema["featurizer"]),
            "table": TableOptions(**{**table, "missing": tuple(table["missing"])}),
        }
        return cls(**{**schema, **built})

    def as_dict(self) -> dict[str, Any]:
        """Return the schema as plain values."""
        return {
            "targets": list(self.targets),
            "kind": self.kind,
            "num_classes": self.num_classes,
            "featurizer": self.featurizer.spec(),
            "pair_set": self.pair_set,
            "self_pairs": self.self_pairs,
            "table": {**asdict(self.table), "missing": list(self.table.missing)},
        }

    @property
    def pair_table(self) -> PairTable:
        """What the codes of the pairs mean."""
        return self.featurizer.pair_table

    @property
    def num_outputs(self) -> int:
        """Number of outputs of a model for one molecule."""
        return len(self.targets) * (self.num_classes if self.kind == "multiclass" else 1)

    def collater(self) -> MoleculeCollater:
        """Return what merges molecules to a batch."""
        return MoleculeCollater(self.pair_table, self.pair_set, self.self_pairs)

    def read(self, path: str | Path) -> Iterator[Entry]:
        """Read a CSV, TSV, SMILES or SDF file; every record keeps its columns.

        The file is read twice, since only some records of an SDF file have a certain field.
        """
        names = dict.fromkeys(
            name for raw in read_molecules(path, table=self.table) for name in _texts_of(raw)
        )
        for raw in read_molecules(path, table=self.table):
            texts = {**dict.fromkeys(names, ""), **_texts_of(raw)}
            try:
                yield Entry(self.featurizer(raw.text()), texts)
            except MoleculeError as error:
                yield Entry(None, texts, f"{raw.where}: {error.reason}")

    def entry(self, molecule: object) -> Entry:
        """Read one molecule: a SMILES, or an ``rdkit.Chem.Mol``."""
        texts = {"smiles": molecule} if isinstance(molecule, str) else {}
        try:
            return Entry(self.featurizer(molecule), texts)
        except MoleculeError as error:
            return Entry(None, texts, error.reason)


def _texts_of(raw: RawMolecule) -> dict[str, str]:
    """Return all cells of a record by name; a name that is there again gets a number."""
    texts: dict[str, str] = {}
    for name, text in zip(*raw.source, strict=True):
        number = 0
        unique = name
        while unique in texts:
            number += 1
            unique = f"{name}.{number}"
        texts[unique] = text
    return texts
