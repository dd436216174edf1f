"""Train on molecules that come with RDKit, predict ten others, and draw what matters in them.

    python examples/molecule_predict_and_draw.py

The target is the topological polar surface area, a sum over polar atoms, so nitrogen and oxygen
should be coloured. The pictures are written to a temporary folder; choose a different one to keep
them.
"""

import logging
import tempfile
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch
from rdkit.Chem.Draw import SimilarityMaps
from rdkit.Chem.Draw.rdMolDraw2D import MolDraw2DSVG

from pyg_dynbatch import load
from pyg_dynbatch.datasets import NCI
from pyg_dynbatch.lightning import DatasetData, Task
from pyg_dynbatch.models import MoleculeModel, MoleculeSchema, predict


def train(molecules: NCI, path: Path) -> None:
    """Train on 1,000 molecules, with pairs of atoms at most two bonds apart; save the model."""
    schema = MoleculeSchema(molecules.target_names, pair_set=2)
    data = DatasetData(molecules[:1000], molecules[1000:1200], schema=schema, batch_size=50)
    model = MoleculeModel(schema, hidden=24, atom_out=32, readout="sum", head=[32], atom_norm=None)
    task = Task(model, partial(torch.optim.AdamW, lr=0.005), rate="one_cycle")
    trainer = pl.Trainer(
        max_epochs=8,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, data)
    model.save(path)


def weights_of_atoms(model: MoleculeModel, smiles: str) -> list[float]:
    """Return the gradient of the prediction times the features of each atom."""
    batch = model.collater()([model.schema.entry(smiles).data])
    batch.x.requires_grad_()
    (gradient,) = torch.autograd.grad(model.values(model(batch)).sum(), batch.x)
    return (gradient * batch.x).sum(1).tolist()


def main() -> None:
    """Train, predict, and draw the weights of the atoms."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(0, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        nci = NCI()
        checkpoint = Path(folder, "tpsa.ckpt")
        train(nci, checkpoint)
        model = load(checkpoint)
        new = nci[2000:2010]
        table = predict(model, new.smiles)
        polar = 0
        for number, smiles in enumerate(new.smiles):
            weights = weights_of_atoms(model, smiles)
            mol = model.schema.featurizer.prepare(smiles)
            picture = MolDraw2DSVG(400, 400)
            SimilarityMaps.GetSimilarityMapFromWeights(mol, weights, draw2d=picture)
            picture.FinishDrawing()
            Path(folder, f"{number}.svg").write_text(picture.GetDrawingText(), encoding="utf-8")
            atom = mol.GetAtomWithIdx(max(range(len(weights)), key=weights.__getitem__))
            polar += atom.GetSymbol() in ("N", "O")
            values = f"{new.targets[number, 0]:6.1f} {table['prediction_TPSA'][number]:6.1f}"
            print(f"{values}  most: {atom.GetSymbol()}{atom.GetIdx():<3} {smiles}")
        pictures = len(list(Path(folder).glob("*.svg")))
        print(f"pictures: {pictures}, the most important atom is polar in {polar} of 10")


if __name__ == "__main__":
    main()
