"""Peak memory and molecules per second of featurize and predict in shards, and of merge.

Commands run one after another, each in a process of its own, on N random SMILES of the molecules
that come with RDKit. Seconds include the start of the processes; memory should not grow with N.
"""

import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rdkit import Chem, rdBase

from benchmarks import bench
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.molecules.features.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.features.rdkit_access import rdkit_data_folder, rdkit_version
from pyg_dynbatch.molecules.schema import MoleculeSchema
from pyg_dynbatch.molecules.task import MoleculeProperty

FEATURIZE, PREDICT, MERGE = "featurize", "predict", "merge"
_SAMPLED = 0.02  # seconds between looks at the memory of a process
_MEMORY = {"peak": "VmHWM", "anonymous": "RssAnon"}


def add_options(parser: bench.Options) -> None:
    """Declare the options."""
    text = "numbers of records (default: 10000 100000 1000000)"
    parser.counts("--records", [10**4, 10**5, 10**6], text)
    parser.count("--shards", 4, "shards of each file (default: 4)")
    parser.count("--block-size", 4096, "records of a block (default: 4096)")
    parser.common(seed=1)


def run(options: Namespace, device: torch.device) -> list[bench.Record]:
    """Measure all commands for all numbers of records."""
    rdBase.DisableLog("rdApp.*")
    records: list[bench.Record] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder)
        for number in options.records:
            _write_smiles(folder / "in.smi", number, options.seed)
            records += _measure(folder, number, options, str(device))
    return records


def write_checkpoint(folder: Path) -> Path:
    """Write a small weave network with random weights."""
    made = MoleculeFeaturizer()
    schema = MoleculeSchema(made.spec, len(made.atom_names), made.pair_table, ("y",))
    torch.manual_seed(0)
    task = MoleculeProperty(schema.as_dict(), hidden=50, atom_out=128, readout="sum", head=[64])
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(accelerator="cpu", default_root_dir=folder, **quiet)
    trainer.strategy.connect(task)
    path = folder / "small.ckpt"
    trainer.save_checkpoint(path)
    return path


def _write_smiles(path: Path, number: int, seed: int) -> None:
    with (rdkit_data_folder() / "NCI" / "first_5K.smi").open(encoding="utf-8") as lines:
        found = [Chem.MolFromSmiles(line.split()[0]) for line in lines if line.strip()]
    mols = [mol for mol in found if mol is not None]
    drawn = (
        Chem.MolToRandomSmilesVect(mol, 1, randomSeed=seed + turn)[0]
        for turn in count()
        for mol in mols
    )
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{smiles} m{row}\n" for row, smiles in enumerate(islice(drawn, number)))


def _measure(folder: Path, number: int, options: Namespace, device: str) -> Iterator[bench.Record]:
    common = {"case": "random SMILES", "batch": number, "unit": "molecules", "repeats": 1}
    common |= {"shards": options.shards, "block_size": options.block_size, "rdkit": rdkit_version()}
    given = ["--input", str(folder / "in.smi"), "--block-size", str(options.block_size)]
    model = ["--checkpoint", str(folder / "small.ckpt"), "--device", device]
    for command, more in ((FEATURIZE, []), (PREDICT, model)):
        output = str(folder / f"{command}-{number}")
        shards = (
            [command, *given, *more, "--output", output, "--shard", f"{i}/{options.shards}"]
            for i in range(options.shards)
        )
        for phase, argvs in ((command, shards), (f"{MERGE} {command}", [[MERGE, output]])):
            begun = time.perf_counter()
            peaks = [_peaks(argv, options.threads) for argv in argvs]
            record = bench.make_record(common, "shards", phase, time.perf_counter() - begun)
            yield record | {f"{key}_bytes": max(peak[key] for peak in peaks) for key in _MEMORY}


def _peaks(argv: Sequence[str], threads: int) -> dict[str, int]:
    """Run a command; return its peak resident memory, and its peak without mapped files."""
    peaks = dict.fromkeys(_MEMORY, 0)
    command = ["env", f"OMP_NUM_THREADS={threads}", sys.executable, "-m", "pyg_dynbatch", *argv]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log) as process,
    ):
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            lines = dict(line.split(":", 1) for line in status.read_text("utf-8").splitlines())
            for key, name in _MEMORY.items():
                # A process that has just ended has no memory.
                peaks[key] = max(peaks[key], 1024 * int(lines.get(name, "0").split()[0]))
            time.sleep(_SAMPLED)
        log.seek(0)
        said = log.read().decode()
    if process.returncode:
        raise mismatch(RuntimeError, f"{argv[0]} has failed", "exit code 0", said.strip()[-500:])
    return peaks


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write one table per command."""
    columns = {
        "records": "batch",
        "shards": "shards",
        "seconds": bench.cell("median_seconds", form=".1f"),
        "molecules/s": bench.cell("molecules_per_second", form=",.0f"),
        "peak MB": bench.cell("peak_bytes", form=",.0f", times=1e-6),
        "without mapped files": bench.cell("anonymous_bytes", form=",.0f", times=1e-6),
    }
    for phase, mine in bench.grouped(records, "phase").items():
        yield bench.table(f"{phase[0]} in shards", mine, columns)


def panels(records: Sequence[bench.Record]) -> Iterator[bench.Panel]:
    """Draw peak memory over the number of records."""
    labels = ("records", "peak resident memory in bytes")
    yield bench.Panel(records, "{phase}", "batch", "peak_bytes", labels)


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
