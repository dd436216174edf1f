"""The README does what it shows; links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def set_up_commands() -> list[str]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = re.search(r"^## Set up\n(.*?)(?=^## )", readme, flags=re.MULTILINE | re.DOTALL)
    assert section is not None, "README.md has no section '## Set up'"
    return fenced(section.group(1), "bash")


def test_set_up_shows_two_commands_of_one_line() -> None:
    commands = set_up_commands()
    assert [command.count("\n") for command in commands] == [1, 1]
    run, test = commands
    assert run.rstrip().endswith("pyg-dynbatch fit --config configs/listops.yaml")
    assert "pytest" in test


def test_ci_runs_the_test_command_of_the_readme_and_then_the_long_tests() -> None:
    _, test = set_up_commands()
    script = ROOT / ".ci" / "run"
    *_, first, second = script.read_text(encoding="utf-8").splitlines()
    assert first == test.rstrip("\n")
    assert second == ".venv/bin/python -m pytest -m long -n 2"
    assert script.stat().st_mode & 0o111, ".ci/run is not executable"


def test_the_first_example_is_short() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(fenced(readme, "python")[0].splitlines()) <= 25


def test_code_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the blocks in order, in one namespace, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    page = ROOT / "README.md"
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in fenced(page.read_text(encoding="utf-8"), "python"):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    inside = [target for target in targets if "://" not in target]
    assert [target for target in inside if not (page.parent / target).exists()] == []
