"""Wheel and sdist have all that an installed package needs, and work without the checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import pyg_dynbatch
from tests.test_docs import README, ROOT, fenced

FIT = ["pyg_dynbatch", "fit", "--config"]
RECIPE = "--data.init_args.recipe"
TINY = ["--trainer.max_epochs=1", *(f"{RECIPE}.{name}=50" for name in ("train", "val", "test"))]


def test_the_citation_names_this_version_and_every_author() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == pyg_dynbatch.__version__
    for paper in citation["references"]:
        assert all(author["family-names"] and author["given-names"] for author in paper["authors"])
        assert paper["url"].startswith("https://arxiv.org/abs/")


@pytest.mark.long
def test_wheel_and_sdist_run_where_they_are_installed(tmp_path: Path) -> None:
    def run(*words: str, **variables: str) -> str:
        command = [sys.executable, *words]
        environment = {**os.environ, **variables}
        options = {"capture_output": True, "text": True, "cwd": tmp_path, "timeout": 300}
        done = subprocess.run(command, env=environment, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("*.whl")  # made from the sdist
    (sdist,) = tmp_path.glob("*.tar.gz")
    assert sdist.stat().st_size < 5_000_000
    sources = (ROOT / "src" / "pyg_dynbatch").rglob("*.py")
    wanted = {path.relative_to(ROOT / "src") for path in sources}
    wanted |= {Path("pyg_dynbatch", name) for name in ("py.typed", "_native.abi3.so")}
    wanted |= {
        Path("pyg_dynbatch", each.relative_to(ROOT)) for each in ROOT.glob("configs/**/*.yaml")
    }
    assert Path("pyg_dynbatch/configs/spaces/molecules.yaml") in wanted
    where = "import pyg_dynbatch; print(pyg_dynbatch.__file__)"
    blocks = fenced(README.read_text(encoding="utf-8"), "python")
    (tmp_path / "readme.py").write_text("\n".join([*blocks, where]), encoding="utf-8")
    for archive in (wheel, sdist):
        folder = tmp_path / archive.suffix[1:]
        how = ["--no-deps", "--no-index", "--no-build-isolation", "--target", str(folder)]
        run("-m", "pip", "install", *how, str(archive))
        assert {path for path in wanted if not (folder / path).is_file()} == set()
        installed = {"PYTHONPATH": str(folder)}
        shown = run("-m", *FIT, "tpsa.yaml", "--print_config", **installed)
        assert "NCIData" in shown
        assert "test/accuracy: 0." in run("-m", *FIT, "listops.yaml", *TINY, **installed)
        *_, file = run("readme.py", **installed).splitlines()
        assert Path(file).is_relative_to(folder)
