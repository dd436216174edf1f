"""The documentation site: built offline without warnings, complete, and without broken links."""

import importlib
import re
import subprocess
import sys
from html.parser import HTMLParser
from inspect import Parameter, isclass, signature
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
import torch
from matplotlib import rc_context
from torch import nn

import pyg_dynbatch
from pyg_dynbatch.core.levels import schedule_structure
from pyg_dynbatch.visualize import SEQUENCE

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


LINKS = [
    ("docs/trees.md", "README.md", "/trees.md"),
    ("../examples/own_cell.py", "docs/cells.md", "/generated/examples/own_cell.md"),
    ("../benchmarks/RESULTS.md#sst", "docs/speed.md", "/generated/results.md#sst"),
    ("trees.md#files", "docs/index.md", "/trees.md#files"),
    ("../LICENSE", "docs/index.md", "../LICENSE"),
    ("https://pyg.org/a.md", "docs/index.md", "https://pyg.org/a.md"),
]


@pytest.mark.parametrize(("link", "origin", "expected"), LINKS)
def test_links_point_to_the_site(site_pages, link, origin, expected):
    text = f"see [this]({link})\n```python\nx[0](trees.md)\n```\n"
    adapted = text.replace(f"]({link})", f"]({expected})")
    assert site_pages.adapt(text, ROOT / origin, DOCS / "page.md") == adapted


@pytest.mark.long
def test_an_example_is_shown_with_its_picture_and_output(site_pages, tmp_path, monkeypatch):
    monkeypatch.setattr(site_pages, "GENERATED", tmp_path)
    page = site_pages.example_page(ROOT / "examples" / "autobatch_tree_lstm.py", runs=True)
    assert "![autobatch_tree_lstm](/generated/examples/autobatch_tree_lstm.svg)" in page
    assert "largest difference to the layer:" in page
    picture = (tmp_path / "examples" / "autobatch_tree_lstm.svg").read_text(encoding="utf-8")
    assert picture.count("<path") > 25


def test_the_card_of_a_use_shows_its_first_sentence_and_picture(site_pages, tmp_path):
    path = DOCS / "cases" / "unwritten.md"
    text = "# A use\n\nWhat it\ndoes. More.\n\n![first](one.svg)\n\n![second](two.svg)\n"
    assert site_pages.case_card(path, text) == (
        "- [![](../cases/one.svg)](/cases/unwritten.md)\n\n"
        "  **[A use](/cases/unwritten.md)**\n\n  What it does.\n"
    )


@pytest.mark.long
def test_the_first_frame_of_the_animation_shows_everything(site_pages: ModuleType) -> None:
    first, *others = site_pages.batching_svg().split('<g class="frame"')[1:]
    shown = [re.findall("fill: (#[0-9a-f]{6})", frame) for frame in (first, *others)]
    assert len(shown[0]) == max(map(len, shown)) and set(SEQUENCE[:4]) <= set(shown[0])
    assert len(set(map(len, shown))) == 4, "one picture per step"
    assert "19 nodes in 4 calls" in first and "one call for 1 node;" in first


def test_one_example_is_no_plural(site_pages: ModuleType, tmp_path: Path) -> None:
    edges = torch.tensor([[0, 1], [2, 2]])
    with rc_context({"svg.fonttype": "none"}):
        site_pages.draw_example(schedule_structure(edges, 3), tmp_path / "one.svg")
    text = (tmp_path / "one.svg").read_text(encoding="utf-8")
    assert "1 example: 3 calls in 2 steps" in text
    assert not re.search(r"\b1 (examples|calls|steps|rows)\b", text)


def test_the_example_in_plain_pytorch_has_a_thumbnail(site_pages: ModuleType) -> None:
    page = "/generated/examples/dynamic_batching_in_one_page.md"
    assert f"- [![](/generated/batching.svg)]({page})" in site_pages.gallery_page()


PUBLIC = [
    (f"{room}.{name}", value)
    for room in pyg_dynbatch._NAMESPACES
    for module in [importlib.import_module(f"pyg_dynbatch.{room}")]
    for name, value in [(name, getattr(module, name)) for name in getattr(module, "__all__", ())]
    if isclass(value)
]


def test_no_class_hides_its_parameters() -> None:
    """``*sizes``, or the ``__call__`` of a metaclass, would say nothing in ``help`` and here."""
    catch_all = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    hidden = [
        f"{name}: {parameter}"
        for name, value in PUBLIC
        for parameter in (signature(value).parameters.values() if value.__init__ else ())
        if parameter.kind in catch_all and f"*{parameter.name}" not in (value.__doc__ or "")
    ]
    assert hidden == []


def modules_of(*rooms: str) -> dict[str, type]:
    found = {name: value for name, value in PUBLIC if name.partition(".")[0] in rooms}
    return {name: value for name, value in found.items() if issubclass(value, nn.Module)}


def test_layers_and_cells_state_their_shapes() -> None:
    without = {
        name
        for name, value in modules_of("nn", "models").items()
        if "\n    Shape:\n" not in value.__doc__
    }
    assert without == set()


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
    for name, value in PUBLIC:
        text = pages[site / "generated" / "api" / f"{name.rpartition('.')[0]}.html"].text
        given = re.search(rf'<dt class="sig[^>]*id="pyg_dynbatch.{name}">(.*?)</dt>', text, re.S)
        assert given and "[source]" in given[1], name
        assert all(f">{key}<" in given[1] for key in signature(value).parameters), name
    for name in modules_of("nn", "models", "autobatch"):
        room = name.partition(".")[0]
        assert f"pyg_dynbatch.{name}.forward" in pages[site / f"generated/api/{room}.html"].anchors
    front = set(pages[site / "index.html"].links)
    assert {f"cases/{path.stem}.html" for path in DOCS.glob("cases/*.md")} <= front
    text = pages[site / "generated" / "gallery.html"].text
    page = 'href="examples/dynamic_batching_in_one_page.html"'
    assert re.search(rf'{page}>(<span[^>]*>)?<img alt="" src="../_images/batching.svg"', text)
    gallery = set(pages[site / "generated" / "gallery.html"].links)
    sources = [*ROOT.glob("examples/*.py"), *ROOT.glob("examples/notebooks/*.ipynb")]
    assert {f"{path.parent.name}/{path.stem}.html" for path in sources} <= gallery
    assert {f"../cases/{path.stem}.html" for path in DOCS.glob("cases/*.md")} <= gallery
    trees = pages[site / "generated" / "notebooks" / "trees.html"].text
    assert re.search(r"accuracy of roots: 0\.[89]", trees)
    assert "ChildSumTreeLSTM" in (site / "searchindex.js").read_text(encoding="utf-8")
