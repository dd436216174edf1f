"""The commands of the README are those of the CI; no link of a page is broken."""

import re
from pathlib import Path

import pytest

from tests.test_docs import PAGES, README, ROOT, fenced

LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


def set_up_commands() -> list[str]:
    _, _, section = README.read_text(encoding="utf-8").partition("\n## Set up\n")
    return fenced(section.partition("\n## ")[0], "bash")


def test_set_up_shows_two_commands_on_one_line_each() -> None:
    commands = set_up_commands()
    assert [command.count("\n") for command in commands] == [1, 1]
    run, test = commands
    assert run.rstrip().endswith("pyg-dynbatch fit --config configs/listops.yaml")
    assert "pytest" in test


def test_ci_runs_the_test_command_of_the_readme_and_then_the_long_tests() -> None:
    _, test = set_up_commands()
    script = ROOT / ".ci" / "run"
    *_, first, second, third, last = script.read_text(encoding="utf-8").splitlines()
    assert first == test.rstrip("\n")
    assert second == ".venv/bin/python -m pytest -m long -n 2"
    assert "--jaxtyping-packages" in third
    assert last == ".ci/sanitize"
    assert script.stat().st_mode & 0o111, ".ci/run is not executable"


def test_the_first_example_is_short() -> None:
    first, *_ = fenced(README.read_text(encoding="utf-8"), "python")
    assert len(first.splitlines()) <= 25


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_inside_the_repository_are_not_broken(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(page))
    broken = []
    for target in targets:
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if "://" in target or (file.exists() and not anchor):
            continue
        if not file.exists() or anchor not in anchors(file):
            broken.append(target)
    assert broken == []


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and Sphinx make them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
