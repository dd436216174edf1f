"""Time DeepChem inside an interpreter that has it: each line of JSON in gets one line out.

Run as a script by :mod:`benchmarks.deepchem_process`. It imports nothing of this package,
which need not be installed there.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

Answer = dict[str, Any]


def timed(run: Callable[[], object]) -> float:
    """Runs something with the collector of garbage at rest and gives the seconds it took.

    Args:
        run: What to run.

    Example:
        >>> timed(lambda: None) < 1.0
        True
    """
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    finally:
        gc.enable()


class Probe:
    """Answers what the other side asks; every public method is a question."""

    def __init__(self) -> None:
        self._chem = import_module("rdkit.Chem")
        self._torch = import_module("torch")
        deepchem = import_module("deepchem")
        # One warning an atom would be most of the time.
        import_module("rdkit.rdBase").DisableLog("rdApp.*")
        self._version = deepchem.__version__
        self._featurizer = deepchem.feat.WeaveFeaturizer()
        self._smiles: list[str] = []
        self._layers: list[Any] = []
        self._inputs: list[np.ndarray] = []

    def begin(self, threads: int) -> Answer:
        """Sets the number of threads and tells the versions."""
        self._torch.set_num_threads(threads)
        return {
            "deepchem": self._version,
            "deepchem_torch": self._torch.__version__,
            "deepchem_rdkit": import_module("rdkit").__version__,
            "deepchem_python": sys.version.split()[0],
        }

    def load(self, smiles: list[str]) -> Answer:
        """Takes the molecules; the time of sending them is nobody's."""
        self._smiles = smiles
        return {"molecules": len(smiles)}

    def featurize(self) -> Answer:
        """Featurizes all molecules."""
        found: list[Any] = []
        seconds = timed(lambda: found.extend(self._featurizer.featurize(self._smiles)))
        kept = [one for one in found if hasattr(one, "get_pair_edges")]
        size = sum(_bytes(one) for one in kept)
        return {"seconds": seconds, "bytes": size, "molecules": len(kept)}

    def features(self, path: str, count: int) -> Answer:
        """Writes the features of the first molecules, atoms in the order of the SMILES."""
        arrays = {}
        smiles = self._smiles[:count]
        for number, (text, one) in enumerate(
            zip(smiles, self._featurizer.featurize(smiles), strict=True)
        ):
            # DeepChem's row k is the atom order[k] of the SMILES.
            order = np.array(list(self._chem.CanonicalRankAtoms(self._chem.MolFromSmiles(text))))
            arrays[f"atom{number}"] = one.get_atom_features()[np.argsort(order)]
            arrays[f"ends{number}"] = order[one.get_pair_edges()]
            arrays[f"pair{number}"] = one.get_pair_features()
        np.savez(path, **arrays)
        return {"molecules": len(smiles)}

    def weave(self, path: str, units: int) -> Answer:
        """Builds the weave layers of a WeaveModel with given weights and runs them once.

        Args:
            path: File with the weights and the arrays of a batch; ``atoms.npy`` is added to its
                name for the file that is written.
            units: Width of all layers.
        """
        model = import_module("deepchem.models.torch_models").WeaveModel
        with np.load(path) as file:
            arrays = dict(file)
        self._inputs = [arrays[name] for name in ("x", "pair", "source", "ends")]
        atom_in, pair_in = self._inputs[0].shape[1], self._inputs[1].shape[1]
        whole = model(
            n_tasks=1,
            mode="regression",
            n_weave=2,
            n_hidden=units,
            n_atom_feat=[atom_in, units],
            n_pair_feat=[pair_in, units],
            batch_normalize=False,
        )
        self._layers = list(whole.model.layers)
        for number, layer in enumerate(self._layers):
            for name, value in arrays.items():
                level, _, attribute = name.partition(".")
                if level == str(number):
                    setattr(layer, attribute, self._torch.from_numpy(value))
        atoms = self._run()
        np.save(f"{path}.atoms.npy", atoms.numpy())
        learned = {name for name, _ in whole.model.named_parameters()}
        return {"weave_weights_are_learned": any(".W_" in name for name in learned)}

    def forward(self) -> Answer:
        """Runs the weave layers on the arrays that were loaded last."""
        return {"seconds": timed(self._run)}

    def _run(self) -> Any:
        atoms, pair, source, ends = self._inputs
        with self._torch.no_grad():
            for layer in self._layers:
                atoms, pair = layer([atoms, pair, source, ends])
        return atoms


def _bytes(one: Any) -> int:
    parts = (one.get_atom_features(), one.get_pair_features(), one.get_pair_edges())
    return sum(part.nbytes for part in parts)


def main() -> None:
    """Answers questions until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Whatever the libraries print must not get between the answers.
    os.dup2(2, 1)
    # The folder of a script comes first, and here it has modules with the names of others.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [each for each in sys.path if each != here]
    probe = Probe()
    for line in sys.stdin:
        wanted = json.loads(line)
        try:
            answer = getattr(probe, wanted.pop("do"))(**wanted)
        except Exception as error:
            # Told to the other side, which ends the run with it.
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
