"""Code and commands of the pages run, the index lists every page, and the site is built."""

import re
import runpy
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from pyg_dynbatch.cli import main
from pyg_dynbatch.data import from_nested
from pyg_dynbatch.loader import Collater

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, *GUIDES]
COMMANDS = ("fit", "validate", "test", "predict")
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = fenced(text, "bash")
    lines = [line for block in blocks for line in re.split(r"\n|; (?:do )?| && ", block)]
    ours = [line.removeprefix(".venv/bin/") for line in lines]
    return [shlex.split(line)[1:] for line in ours if line.startswith("pyg-dynbatch ")]


def trainings() -> list[list[str]]:
    """Return every different training on a page, with a number for the seed of a loop."""
    shown = [
        tuple(word.replace("$seed", "1") for word in words if word != "--print_config")
        for page in PAGES
        for words in commands(page)
        if words[0] == "fit"
    ]
    return [list(words) for words in dict.fromkeys(shown)]


@EVERY_PAGE
@pytest.mark.filterwarnings("ignore:The `srun` command is available")
@pytest.mark.filterwarnings("ignore:.*`tensorboardX` has been removed")
@pytest.mark.filterwarnings("ignore:.*smaller than the logging interval")
def test_code_on_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks of a page in order, in one namespace, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in fenced(page.read_text(encoding="utf-8"), "python"):
        exec(compile(block, str(page), "exec"), namespace)


def test_the_index_links_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\((\w+\.md)\)", index))
    assert linked == {page.name for page in GUIDES} - {"index.md"}


def test_the_page_of_examples_lists_every_example() -> None:
    text = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"`(\w+\.py)`", text))
    assert shown == {path.name for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.parametrize("page", sorted((ROOT / "docs/api").glob("*.rst")), ids=lambda p: p.stem)
def test_the_reference_lists_every_public_name(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    module = import_module(text.partition("\n")[0])
    shown = re.findall(rf"^   ~{module.__name__}\.(\w+)$", text, flags=re.MULTILINE)
    assert sorted(shown) == sorted(set(module.__all__) - {"__version__"})


@EVERY_PAGE
def test_commands_and_configs_exist(page: Path) -> None:
    for command, *_ in commands(page):
        assert command in COMMANDS
    named = set(re.findall(r"configs/\w+\.yaml", page.read_text(encoding="utf-8")))
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_the_commands_on_the_pages_are_found() -> None:
    assert len(commands(ROOT / "docs" / "training.md")) >= 7
    assert len(trainings()) >= 9


@pytest.mark.parametrize("words", trainings(), ids=" ".join)
def test_options_of_a_training_are_understood(words, monkeypatch, capsys):
    """Read the options only, without loading data, training or writing."""
    monkeypatch.chdir(ROOT)
    assert main([*words, "--print_config"]) == 0
    settings = yaml.safe_load(capsys.readouterr().out)
    assert settings["model"]["class_path"]
    assert settings["data"]["init_args"]


def test_the_page_on_architecture_names_existing_files_and_names() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    package = ROOT / "src" / "pyg_dynbatch"
    shown = [
        name
        for name in re.findall(r"`([\w./]+(?:\.py|/))`", text)
        if not ((ROOT if name.startswith(("tests/", "benchmarks/")) else package) / name).exists()
    ]
    assert shown == []
    for file, names in re.findall(r"^\| `([\w/]+\.py)` \| (`[^|]+) \|", text, flags=re.MULTILINE):
        source = (package / file).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^(class|def) {name}\b", source, flags=re.MULTILINE), (file, name)


def test_the_picture_of_the_readme_counts_the_calls(tmp_path: Path) -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_batching.py"))
    trees = [from_nested(tree) for tree in drawn["TREES"]]
    sizes = Collater(arity=2)(trees).schedule.level_sizes
    assert (len(sizes), sum(sizes)) == (5, 25)  # as the README says
    frames = [drawn["draw"](trees, sizes, steps).tobytes() for steps in (0, 5)]
    assert len(frames[0]) == len(frames[1]) and frames[0] != frames[1]


def test_walks_are_short() -> None:
    """Count the files of the first table of each walk: one row per file, at most 9."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    walks = re.findall(
        r"^## (An? .+, from .+ to its .+)\n\n((?:\|.*\n)+)", text, flags=re.MULTILINE
    )
    files = {title: re.findall(r"^\| `([^`]+)`", rows, flags=re.MULTILINE) for title, rows in walks}
    kinds = {title.split(",")[0].split()[1] for title in files}
    assert kinds >= {"tree", "molecule", "block", "autobatch"}
    assert {title: found for title, found in files.items() if len(found) > 9} == {}
    assert all(len(set(found)) == len(found) for found in files.values())


@pytest.mark.long
def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    """With the notebooks, which are run."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, "docs", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "api" / "nn.html").read_text(encoding="utf-8")
    assert 'id="pyg_dynbatch.nn.ChildSumTreeLSTM"' in page
    notebook = (tmp_path / "notebooks" / "trees.html").read_text(encoding="utf-8")
    assert re.search(r"accuracy of roots: 0\.[89]", notebook)
