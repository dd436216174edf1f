"""Public namespace of Lightning modules and data modules, and of prediction with them."""
# fmt: off
# isort: skip_file

from pyg_dynbatch.documents.data import DocumentFileData
from pyg_dynbatch.documents.predict import DocumentPredictor
from pyg_dynbatch.documents.task import DocumentPrediction
from pyg_dynbatch.molecules.datamodules import (
    MoleculeDataModule, MoleculeFileData, MoleculeNetData, NCIData, PackedMoleculeData,
)
from pyg_dynbatch.molecules.work.explain import explain
from pyg_dynbatch.molecules.work.predict import MoleculePredictor
from pyg_dynbatch.molecules.schema import MoleculeSchema
from pyg_dynbatch.molecules.splits import SplitOptions
from pyg_dynbatch.molecules.nets.properties import AveragedProperties
from pyg_dynbatch.molecules.task import MoleculeProperty
from pyg_dynbatch.molecules.work.transfer import Pretrained
from pyg_dynbatch.trees.datamodules import (
    ListOpsData, SICKData, SSTData, TreeDataModule, TreeFileData,
)
from pyg_dynbatch.trees.predict import TreePredictor
from pyg_dynbatch.trees.task import TreeClassification, TreeRelatedness, TreeTask

__all__ = [
    "AveragedProperties", "DocumentFileData", "DocumentPrediction", "DocumentPredictor",
    "ListOpsData", "MoleculeDataModule", "MoleculeFileData", "MoleculeNetData",
    "MoleculePredictor", "MoleculeProperty", "MoleculeSchema", "NCIData", "PackedMoleculeData",
    "Pretrained", "SICKData", "SSTData", "SplitOptions", "TreeClassification", "TreeDataModule",
    "TreeFileData", "TreePredictor", "TreeRelatedness", "TreeTask", "explain",
]
