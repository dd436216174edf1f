"""The documentation site: built offline without warnings, complete, and without broken links."""

import importlib
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

import pyg_dynbatch

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture
def site_pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("site_pages")


class Page(HTMLParser):
    """Collects what a page links to, what it loads, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.add(given.get("id", ""))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") != "index":
            self.loaded.append(given["href"])
        if tag in ("script", "img") and "src" in given:
            self.loaded.append(given["src"])


@pytest.mark.parametrize(
    ("link", "origin", "expected"),
    [
        ("docs/trees.md", "README.md", "/trees.md"),
        ("../examples/own_cell.py", "docs/cells.md", "/generated/examples/own_cell.md"),
        ("../benchmarks/RESULTS.md#sst", "docs/speed.md", "/generated/results.md#sst"),
        ("trees.md#files", "docs/index.md", "/trees.md#files"),
        ("../LICENSE", "docs/index.md", "../LICENSE"),
        ("https://pyg.org/a.md", "docs/index.md", "https://pyg.org/a.md"),
    ],
)
def test_links_point_to_the_site(
    site_pages: ModuleType, link: str, origin: str, expected: str
) -> None:
    text = f"see [this]({link})\n```python\nx[0](trees.md)\n```\n"
    adapted = text.replace(f"]({link})", f"]({expected})")
    assert site_pages.adapt(text, ROOT / origin, DOCS / "page.md") == adapted


def test_an_example_is_shown_with_its_picture_and_output(
    site_pages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_pages, "GENERATED", tmp_path)
    page = site_pages.example_page(ROOT / "examples" / "autobatch_tree_lstm.py", runs=True)
    assert "![autobatch_tree_lstm](/generated/examples/autobatch_tree_lstm.svg)" in page
    assert "largest difference to the layer:" in page
    picture = (tmp_path / "examples" / "autobatch_tree_lstm.svg").read_text(encoding="utf-8")
    assert picture.count("<path") > 25


def test_the_card_of_a_use_shows_its_first_sentence_and_picture(
    site_pages: ModuleType, tmp_path: Path
) -> None:
    path = DOCS / "cases" / "unwritten.md"
    text = "# A use\n\nWhat it\ndoes. More.\n\n![first](one.svg)\n\n![second](two.svg)\n"
    assert site_pages.case_card(path, text) == (
        "- [![](../cases/one.svg)](/cases/unwritten.md)\n\n"
        "  **[A use](/cases/unwritten.md)**\n\n  What it does.\n"
    )


@pytest.mark.long
def test_the_site_is_complete(tmp_path: Path) -> None:
    """Build it; the tests of the examples run them, so this does not."""
    site = tmp_path / "site"
    options = ["-W", "--keep-going", "-q", "-D", "run_examples=0", "-b", "html"]
    command = [sys.executable, "-m", "sphinx", *options, str(DOCS), str(site)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr

    pages = {path: Page(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        assert [url for url in page.loaded if urlsplit(url).netloc] == [], path
        for link in page.links:
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if parts.scheme or parts.netloc:
                continue
            assert target.is_file(), (path, link)
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, (path, link)

    assert 'class="batching"' in pages[site / "index.html"].text
    for name in pyg_dynbatch._NAMESPACES:
        module = importlib.import_module(f"pyg_dynbatch.{name}")
        anchors = pages[site / "generated" / "api" / f"{name}.html"].anchors
        wanted = {f"pyg_dynbatch.{name}.{key}" for key in getattr(module, "__all__", [])}
        assert wanted - anchors == set()
    gallery = set(pages[site / "generated" / "gallery.html"].links)
    sources = [*ROOT.glob("examples/*.py"), *ROOT.glob("examples/notebooks/*.ipynb")]
    assert {f"{path.parent.name}/{path.stem}.html" for path in sources} <= gallery
    assert {f"../cases/{path.stem}.html" for path in DOCS.glob("cases/*.md")} <= gallery
    trees = pages[site / "generated" / "notebooks" / "trees.html"].text
    assert re.search(r"accuracy of roots: 0\.[89]", trees)
    assert "ChildSumTreeLSTM" in (site / "searchindex.js").read_text(encoding="utf-8")
