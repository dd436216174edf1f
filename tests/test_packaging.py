"""Wheel and sdist have all that an installed package needs, and work without the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

import pyg_dynbatch
from tests.core.test_native import MUST_BUILD
from tests.test_docs import README, ROOT, fenced

FIT = ["pyg_dynbatch", "fit", "--config"]
RECIPE = "--data.recipe"
TINY = ["--trainer.max_epochs=1", *(f"{RECIPE}.{name}=50" for name in ("train", "val", "test"))]
OFFLINE = ["--no-deps", "--no-index", "--no-build-isolation"]


def test_the_citation_names_this_version_and_every_author() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == pyg_dynbatch.__version__
    for paper in citation["references"]:
        assert all(author["family-names"] and author["given-names"] for author in paper["authors"])
        assert paper["url"].startswith("https://arxiv.org/abs/")


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, *words], {**os.environ, **variables}
    options = {"capture_output": True, "text": True, "cwd": folder, "timeout": 300}
    done = subprocess.run(command, env=environment, **options)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A wheel, built from the sdist, and the sdist."""
    folder = tmp_path_factory.mktemp("archives")
    run(folder, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    return [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]


@pytest.mark.long
def test_wheel_and_sdist_run_where_they_are_installed(archives: list[Path], tmp_path: Path) -> None:
    assert archives[1].stat().st_size < 5_000_000
    sources = (ROOT / "src" / "pyg_dynbatch").rglob("*.py")
    wanted = {path.relative_to(ROOT / "src") for path in sources}
    wanted |= {Path("pyg_dynbatch", name) for name in ("py.typed", "_native.abi3.so")}
    wanted |= {Path("pyg_dynbatch", each.relative_to(ROOT)) for each in ROOT.glob("configs/*.yaml")}
    assert Path("pyg_dynbatch/configs/molecules.yaml") in wanted
    where = "import pyg_dynbatch; print(pyg_dynbatch.__file__)"
    blocks = fenced(README.read_text(encoding="utf-8"), "python")
    (tmp_path / "readme.py").write_text("\n".join([*blocks, where]), encoding="utf-8")
    for archive in archives:
        folder = tmp_path / archive.suffix[1:]
        run(tmp_path, "-m", "pip", "install", *OFFLINE, "--target", str(folder), str(archive))
        assert {path for path in wanted if not (folder / path).is_file()} == set()
        assert not list(folder.rglob("*.c"))
        installed = {"PYTHONPATH": str(folder)}
        *_, file = run(tmp_path, "readme.py", **installed).stdout.splitlines()
        assert Path(file).is_relative_to(folder)
    shown = run(tmp_path, "-m", *FIT, "tpsa.yaml", "--print_config", **installed).stdout
    assert "NCIData" in shown
    trained = run(tmp_path, "-m", *FIT, "listops.yaml", *TINY, **installed).stdout
    assert "test/accuracy" in trained


@pytest.mark.long
@pytest.mark.skipif(not MUST_BUILD, reason="no GCC on Linux")
def test_kernels_run_where_there_is_no_compiler(archives: list[Path], tmp_path: Path) -> None:
    """As in a slim container: the wheel in a fresh environment, and nothing else on the PATH."""
    wheel = archives[0]
    assert "-cp311-abi3-" in wheel.name
    run(tmp_path, "-m", "venv", "--without-pip", "fresh")
    python = tmp_path / "fresh" / "bin" / "python"
    (packages,) = (tmp_path / "fresh" / "lib").glob("*/site-packages")
    run(tmp_path, "-m", "pip", "install", *OFFLINE, "--target", str(packages), str(wheel))
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))
    shutil.copy(ROOT / "tests" / "check_wheel.py", tmp_path)
    environment = {"PATH": str(python.parent), "HOME": str(tmp_path)}
    assert shutil.which("cc", path=environment["PATH"]) is None
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environment}
    done = subprocess.run([str(python), "check_wheel.py"], **options)
    assert done.returncode == 0, done.stderr
    assert str(packages) in done.stdout and done.stdout.endswith("right\n")
    assert not done.stderr


USE = """
import torch
from pyg_dynbatch.nn import NaryTreeLSTM
for _ in range(2):
    NaryTreeLSTM(3, 4)(torch.ones(3, 3), torch.tensor([[0, 1], [2, 2]])).sum().backward()
"""


@pytest.mark.long
@pytest.mark.parametrize("hidden", ("CC", "PATH"))
def test_installed_without_a_compiler(hidden: str, archives: list[Path], tmp_path: Path) -> None:
    none = {"CC": "/nonexistent"} if hidden == "CC" else {"PATH": str(Path(sys.executable).parent)}
    run(tmp_path, "-m", "pip", "wheel", *OFFLINE, "-w", ".", str(archives[1]), **none)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-any" in wheel.name
    folder = tmp_path / "installed"
    run(tmp_path, "-m", "pip", "install", *OFFLINE, "--target", str(folder), str(wheel))
    used = run(tmp_path, "-c", USE, PYTHONPATH=str(folder))
    assert used.stderr.count("\n") == 1
    assert used.stderr.startswith("pyg_dynbatch runs without its C extension (No module named")
