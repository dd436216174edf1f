"""Train on molecules that come with RDKit, predict ten others, and draw what matters in them.

The target is the topological polar surface area, a sum over polar atoms, so nitrogen and oxygen
should be coloured. The pictures are written to a temporary folder; choose a different one to keep
them.
"""

import logging
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from rdkit.Chem.Draw import SimilarityMaps
from rdkit.Chem.Draw.rdMolDraw2D import MolDraw2DSVG
from torch.utils.data import Subset

from pyg_dynbatch.datasets import NCI, FeaturizeOptions
from pyg_dynbatch.lightning import MoleculeProperty, OptimizerOptions, RateOptions
from pyg_dynbatch.loader import MoleculeLoader
from pyg_dynbatch.models import MoleculePredictor, MoleculeSchema

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pl.seed_everything(0, verbose=False)

# 1. Data: 1,000 training molecules, pairs of atoms at most two bonds apart.
nci = NCI(options=FeaturizeOptions(progress=False))
schema = MoleculeSchema(
    nci.featurizer_spec, len(nci.atom_names), nci.pair_table, nci.task_names, pairs=2
)
train, val = Subset(nci, range(1000)), Subset(nci, range(1000, 1200))
loader = MoleculeLoader(train, nci.pair_table, batch_size=50, shuffle=True, pairs=2)
val_loader = MoleculeLoader(val, nci.pair_table, batch_size=200, pairs=2)

# 2. Model and training.
task = MoleculeProperty(
    schema.as_dict(),
    hidden=24,
    atom_out=32,
    readout="sum",
    atom_norm=None,
    head=[32],
    optimizer=OptimizerOptions("adamw", lr=0.005),
    rate=RateOptions("one_cycle"),
)
task.fit_targets(torch.from_numpy(nci.targets[:1000].copy()))
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = pl.Trainer(max_epochs=8, accelerator="cpu", enable_model_summary=False, **quiet)
trainer.fit(task, loader, val_loader)

# 3. Ten new molecules: prediction, and the gradient times the features of each atom, which RDKit
#    draws.
predictor = MoleculePredictor([task])
featurizer, model = predictor.featurizer, task.model.eval()
polar = 0
with tempfile.TemporaryDirectory() as folder:
    for number in range(2000, 2010):
        smiles = nci.smiles(number)
        batch = predictor.collater([featurizer(smiles)])
        batch.x.requires_grad_()
        value = model.predicted(model(batch))[0, 0]
        (gradient,) = torch.autograd.grad(value, batch.x)
        weights = (gradient * batch.x).sum(1).tolist()
        mol = featurizer.prepare(smiles)
        picture = MolDraw2DSVG(400, 400)
        SimilarityMaps.GetSimilarityMapFromWeights(mol, weights, draw2d=picture)
        picture.FinishDrawing()
        Path(folder, f"{number}.svg").write_text(picture.GetDrawingText(), encoding="utf-8")
        atom = mol.GetAtomWithIdx(max(range(len(weights)), key=weights.__getitem__))
        polar += atom.GetSymbol() in ("N", "O")
        name = f"{atom.GetSymbol()}{atom.GetIdx()}"
        print(f"{float(nci.targets[number, 0]):6.1f} {value.item():6.1f}  most: {name:<4} {smiles}")
    pictures = sorted(Path(folder).glob("*.svg"))
    print(f"pictures: {len(pictures)}, the most important atom is polar in {polar} of 10")
