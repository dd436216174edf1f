"""Time DeepChem in an interpreter that has it: one line of JSON out for each line in.

:mod:`benchmarks.molecules` runs this file as a script. It does not import this package, which need
not be installed there.
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
    """Return the duration of a run in seconds, without garbage collection."""
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    finally:
        gc.enable()


class Probe:
    """Answer requests; every public method answers one kind."""

    def __init__(self) -> None:
        deepchem = import_module("deepchem")
        self._chem = import_module("rdkit.Chem")
        self._torch = import_module("torch")
        # Otherwise a warning per atom would take most of the time.
        import_module("rdkit.rdBase").DisableLog("rdApp.*")
        self._version = deepchem.__version__
        self._featurizer = deepchem.feat.WeaveFeaturizer()
        self._smiles: list[str] = []
        self._layers: list[Any] = []
        self._inputs: list[np.ndarray] = []

    def begin(self, threads: int) -> Answer:
        """Set the number of threads; return the versions."""
        self._torch.set_num_threads(threads)
        return {
            "deepchem": self._version,
            "deepchem_torch": self._torch.__version__,
            "deepchem_rdkit": import_module("rdkit").__version__,
            "deepchem_python": sys.version.split()[0],
        }

    def load(self, smiles: list[str]) -> Answer:
        """Store the molecules; sending them is not timed."""
        self._smiles = smiles
        return {"molecules": len(smiles)}

    def featurize(self) -> Answer:
        """Featurize all molecules."""
        found: list[Any] = []
        seconds = timed(lambda: found.extend(self._featurizer.featurize(self._smiles)))
        kept = [one for one in found if hasattr(one, "get_pair_edges")]
        size = sum(_bytes(one) for one in kept)
        return {"seconds": seconds, "bytes": size, "molecules": len(kept)}

    def features(self, path: str, count: int) -> Answer:
        """Write the features of the first molecules, atoms in the order of the SMILES."""
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
        """Build the layers of a WeaveModel from the weights and arrays in a file; run them once.

        The result is written to the name of the file with ``.atoms.npy`` appended.
        """
        model = import_module("deepchem.models.torch_models").WeaveModel
        with np.load(path) as file:
            arrays = dict(file)
        self._inputs = [arrays.pop(name) for name in ("x", "pair", "source", "ends")]
        atom_in, pair_in = (each.shape[1] for each in self._inputs[:2])
        sizes: dict[str, Any] = {"n_atom_feat": [atom_in, units], "n_pair_feat": [pair_in, units]}
        sizes |= {"n_tasks": 1, "n_weave": 2, "n_hidden": units}
        whole = model(mode="regression", batch_normalize=False, **sizes)
        self._layers = list(whole.model.layers)
        for name, value in arrays.items():
            level, _, attribute = name.partition(".")
            setattr(self._layers[int(level)], attribute, self._torch.from_numpy(value))
        np.save(f"{path}.atoms.npy", self._run().numpy())
        return {}

    def forward(self) -> Answer:
        """Run the weave layers on the arrays that were loaded last."""
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
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Redirect the output of libraries, which must not mix with the answers.
    os.dup2(2, 1)
    # The folder of a script is first in sys.path, where its modules could hide others.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [each for each in sys.path if each != here]
    probe = Probe()
    for line in sys.stdin:
        wanted = json.loads(line)
        try:
            answer = getattr(probe, wanted.pop("do"))(**wanted)
        except Exception as error:
            # The benchmark raises an error with this text.
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
