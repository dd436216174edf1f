"""The wheel has everything that an installed package needs, and works without the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import pyg_dynbatch

ROOT = Path(__file__).parents[1]


def test_the_citation_names_this_version_and_every_author() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == pyg_dynbatch.__version__
    for paper in citation["references"]:
        assert all(author["family-names"] and author["given-names"] for author in paper["authors"])
        assert paper["url"].startswith("https://arxiv.org/abs/")


@pytest.mark.long
def test_the_wheel_made_from_the_sdist_runs_elsewhere(tmp_path: Path) -> None:
    def run(*words: str, **variables: str) -> str:
        command = [sys.executable, "-m", *words]
        environment = {**os.environ, **variables}
        options = {"capture_output": True, "text": True, "cwd": tmp_path, "timeout": 300}
        done = subprocess.run(command, env=environment, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("*.whl")
    (sdist,) = tmp_path.glob("*.tar.gz")
    assert sdist.stat().st_size < 5_000_000
    package = tmp_path / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(package)
    sources = (ROOT / "src" / "pyg_dynbatch").rglob("*.[cp]*")
    wanted = {path.relative_to(ROOT / "src") for path in sources if path.suffix in (".c", ".py")}
    configs = {Path("pyg_dynbatch/configs", path.name) for path in ROOT.glob("configs/*.yaml")}
    assert {path for path in wanted | configs if not (package / path).is_file()} == set()
    location = run(
        "pyg_dynbatch", "fit", "--config", "tpsa.yaml", "--print_config", PYTHONPATH=str(package)
    )
    assert "NCIData" in location
