"""Generate the pages of the site that nobody writes, and point links of the guides to the site.

Before Sphinx looks for pages, ``generate`` fills ``docs/generated``: the lists of the API, the
gallery with a page per example (which it runs), the notebooks, copies of pages outside ``docs``,
and the animation of the front page.
"""

import ast
import io
import os
import re
import runpy
import sys
from collections import Counter
from contextlib import chdir, redirect_stdout
from importlib import import_module
from inspect import isclass, isroutine
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import nbformat
from batching import batching_svg
from docutils.nodes import Element, SkipNode
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.config import Config
from torch import nn

import pyg_dynbatch
from pyg_dynbatch import Levels, Steps
from pyg_dynbatch.blocks import Layer
from pyg_dynbatch.visualize import SEQUENCE, counted, draw_schedule, new_figure, save_figure

DOCS = Path(__file__).parent
ROOT = DOCS.parent
GENERATED = DOCS / "generated"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
CASES = sorted((DOCS / "cases").glob("*.md"))
NEEDS_OPTIONS = ("serving",)
# It makes no schedule of the package to draw; the animation shows the same.
IN_PLAIN_TORCH = "dynamic_batching_in_one_page"

# Pages outside docs, and their names on the site.
OUTSIDE = {
    "README.md": "index",
    "benchmarks/RESULTS.md": "generated/results",
    "CHANGELOG.md": "generated/changelog",
    "CONTRIBUTING.md": "generated/contributing",
    "configs": "generated/configs",
    "examples": "generated/gallery",
    "benchmarks": "generated/results",
}
ORIGIN = {page: source for source, page in OUTSIDE.items() if source.endswith(".md")}


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the hooks; ``-D run_examples=0`` builds the site without running the examples."""
    app.add_config_value("run_examples", True, "env", bool)
    # Before Sphinx looks for pages.
    app.connect("config-inited", generate)
    app.connect("source-read", adapt_page)
    app.connect("autodoc-process-signature", name_functions)
    app.connect("html-page-context", drop_back_links)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    return {"parallel_read_safe": True}


def visit_math(translator: Any, node: Element) -> None:
    """Write a formula as MathML, which browsers draw without a script."""
    # Unknown to docutils; brackets of MathML have the size of their content anyway.
    formula = re.sub(r"\\(textstyle|[Bb]ig)\b", "", node.astext())
    translator.body.append(tex2mathml(formula, node.tagname == "math_block"))
    raise SkipNode


def name_functions(app: Sphinx, kind: str, name: str, *rest: Any) -> tuple[str | None, Any]:
    """Show functions among the defaults of a signature by their names."""
    _, _, arguments, returned = rest
    return arguments and re.sub(r"<[\w -]+ (\w+) of [^>]*>", r"\1", arguments), returned


def drop_back_links(
    app: Sphinx, page: str, template: str, context: dict[str, Any], *_: Any
) -> None:
    """Drop links from sources to the API, which miss names that are in two namespaces."""
    if page.startswith("_modules/"):
        context["body"] = re.sub('<a class="viewcode-back".*?</a>', "", context["body"])


# Generated pages ----------------------------------------------------------------------------------


def generate(app: Sphinx, config: Config) -> None:
    """Write all generated pages."""
    for page, source in ORIGIN.items():
        if page != "index":
            write(f"{page}.md", (ROOT / source).read_text(encoding="utf-8"))
    write("generated/batching.svg", batching_svg())
    write("generated/configs.md", configs_page())
    write("generated/api.rst", api_page())
    for name in pyg_dynbatch._NAMESPACES:
        write(f"generated/api/{name}.rst", namespace_page(name))
    for path in NOTEBOOKS:
        write(f"generated/notebooks/{path.name}", path.read_text(encoding="utf-8"))
    for path in EXAMPLES:
        write(f"generated/examples/{path.stem}.md", example_page(path, bool(config.run_examples)))
    write("generated/gallery.md", gallery_page())


def write(name: str, text: str) -> None:
    """Write a page, unless it exists with this text: Sphinx reads changed pages only."""
    path = DOCS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def configs_page() -> str:
    """Show every config in a section of its own."""
    lines = ["# Configs", "", "One file per run: `pyg-dynbatch fit --config NAME.yaml`."]
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        lines += ["", f"## `{path.name}`", "", f"```{{literalinclude}} /../configs/{path.name}"]
        lines += [":language: yaml", "```"]
    return "\n".join(lines) + "\n"


def api_page() -> str:
    """List the public namespaces."""
    lines = ["API reference", "=============", "", ".. autosummary::", ""]
    lines += [f"   pyg_dynbatch.{name}" for name in pyg_dynbatch._NAMESPACES]
    lines += ["", ".. toctree::", "   :hidden:", ""]
    lines += [f"   api/{name}" for name in pyg_dynbatch._NAMESPACES]
    return "\n".join(lines) + "\n"


def namespace_page(name: str) -> str:
    """Document the public names of a namespace, after a table of them."""
    full = f"pyg_dynbatch.{name}"
    module = import_module(full)
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == full]
    names = getattr(module, "__all__", [key for key in own if not key.startswith("_")])
    kinds: dict[str, list[str]] = {"class": [], "function": [], "data": []}
    for key in sorted(names, key=str.lower):
        value = getattr(module, key)
        kinds["class" if isclass(value) else "function" if isroutine(value) else "data"].append(key)
    lines = [full, "=" * len(full), "", f".. automodule:: {full}", "   :no-members:", ""]
    lines += [f".. currentmodule:: {full}", ""]
    lines += [".. autosummary::", "   :nosignatures:", "", *(f"   {key}" for key in names), ""]
    titles = {"class": "Classes", "function": "Functions", "data": "Values"}
    for kind, keys in kinds.items():
        lines += [titles[kind], "-" * len(titles[kind]), ""] if keys else []
        for key in keys:
            lines += [f".. auto{kind}:: {key}", ""]
            if inherits_forward(getattr(module, key)):
                lines += ["   .. automethod:: forward", ""]
    return "\n".join(lines)


def inherits_forward(value: Any) -> bool:
    """Return whether a class is a module, and a class of this package defines its ``forward``."""
    if not (isclass(value) and issubclass(value, nn.Module)) or issubclass(value, Layer):
        return False
    ours = value.forward.__module__.startswith(f"{pyg_dynbatch.__name__}.")
    return ours and "forward" not in vars(value)


# Examples -----------------------------------------------------------------------------------------


def example_page(path: Path, runs: bool) -> str:
    """Show the docstring, the picture, what the example prints, and its code."""
    source = path.read_text(encoding="utf-8")
    module = ast.parse(source)
    lines = [f"# `{path.name}`", "", ast.get_docstring(module) or "", ""]
    printed = run_example(path) if runs and path.stem not in NEEDS_OPTIONS else ""
    if picture := picture_of(path):
        lines += [f"![{path.stem}]({picture})", ""]
    if printed:
        lines += ["It prints:", "", "```text", printed.rstrip("\n"), "```", ""]
    lines += [f"```{{literalinclude}} /../examples/{path.name}", ":language: python"]
    lines += [f":lines: {module.body[0].end_lineno + 2}-", f":caption: examples/{path.name}", "```"]
    return "\n".join(lines) + "\n"


def run_example(path: Path) -> str:
    """Run an example, draw its largest schedule, and return the output."""
    largest: list[Steps | Levels] = []
    out = io.StringIO()

    def noting(created: Any) -> Any:
        def create(schedule: Any, *args: Any, **kwargs: Any) -> None:
            created(schedule, *args, **kwargs)
            if not largest or schedule.index.numel() > largest[0].index.numel():
                largest[:] = [schedule]

        return create

    with (
        mock.patch.object(Steps, "__init__", noting(Steps.__init__)),
        mock.patch.object(Levels, "__init__", noting(Levels.__init__)),
        mock.patch.object(sys, "argv", [str(path)]),
        TemporaryDirectory() as folder,
        chdir(folder),
        redirect_stdout(out),
    ):
        runpy.run_path(str(path), run_name="__main__")
    stem = GENERATED / "examples" / path.stem
    stem.parent.mkdir(parents=True, exist_ok=True)
    if largest:
        draw_example(largest[0], stem.with_suffix(".svg"))
    return out.getvalue()


def draw_example(schedule: Steps | Levels, path: Path) -> None:
    """Draw a schedule, with a colour for each frequent operation and one for all others."""
    stats = schedule.stats()
    rows: Counter[str] = Counter()
    for name, width in zip(stats.operations, stats.widths, strict=True):
        rows[name] += width
    colours = len(SEQUENCE)
    names = [name for name, _ in rows.most_common(colours - (len(rows) > colours))]
    others = [f"{len(rows) - len(names)} others"] if len(rows) > len(names) else []
    operation = [names.index(n) if n in names else len(names) for n in stats.operations]
    figure, (axes,) = new_figure(1, 1, 7.6, 3.4)
    counts = (stats.examples, "example"), (stats.rows, "call"), (stats.steps, "step")
    title = "{}: {} in {}".format(*(counted(number, noun) for number, noun in counts))
    draw_schedule(axes, [*names, *others], operation, list(stats.widths), title)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small")
    save_figure(figure, path)


def picture_of(path: Path) -> str:
    """Return the generated picture of an example, or nothing."""
    if path.stem == IN_PLAIN_TORCH:
        return "/generated/batching.svg"
    found = sorted(GENERATED.glob(f"examples/{path.stem}.[ps][nv]g"))
    return f"/generated/examples/{found[0].name}" if found else ""


# Gallery ------------------------------------------------------------------------------------------


def gallery_page() -> str:
    """Show a card per use, notebook and example."""
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    ideas = dict(re.findall(r"^\| `(\w+\.py)` \| (.*) \|$", index, flags=re.MULTILINE))
    uses = [case_card(path, path.read_text(encoding="utf-8")) for path in CASES]
    sections: dict[str, list[str]] = {"Uses": uses}
    sections["Notebooks"] = [notebook_card(path) for path in NOTEBOOKS]
    sections["Examples"] = [
        card(f"/generated/examples/{name[:-3]}.md", f"`{name}`", idea, picture_of(Path(name)))
        for name, idea in ideas.items()
    ]
    pages = {
        "Notebooks": [f"notebooks/{path.stem}" for path in NOTEBOOKS],
        "Examples": [f"examples/{name[:-3]}" for name in ideas],
    }
    lines = ["# Gallery", ""]
    for title, cards in sections.items():
        if cards:
            lines += [f"## {title}", "", "{.gallery}", *cards, ""]
        if title in pages:
            lines += ["```{toctree}", ":hidden:", *pages[title], "```", ""]
    return "\n".join(lines)


def card(page: str, title: str, text: str, picture: str = "") -> str:
    """Return a list item that links to a page."""
    image = f"[![]({picture})]({page})\n\n  " if picture else ""
    return f"- {image}**[{title}]({page})**\n\n  {text}\n"


def case_card(path: Path, text: str) -> str:
    """Take title, first sentence and first picture from the page of a use."""
    title, _, rest = text.removeprefix("# ").partition("\n\n")
    paragraph = " ".join(rest.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=\.) (?=[A-Z])", paragraph)[0]
    picture = re.search(r"!\[[^]]*\]\(([^)\s]+)\)", text)
    shown = os.path.relpath(path.parent / picture[1], GENERATED) if picture else ""
    return card(
        f"/cases/{path.name}", title, adapt(sentence, path, GENERATED / "gallery.md"), shown
    )


def notebook_card(path: Path) -> str:
    """Take title and first paragraph from the first cell of a notebook."""
    title, text = nbformat.read(path, 4).cells[0].source.split("\n\n", 1)
    return card(
        f"/generated/notebooks/{path.name}", title.removeprefix("# "), text.split("\n\n")[0]
    )


# Links --------------------------------------------------------------------------------------------


def adapt_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Point the links of a page to the site; the front page is made of the README and the index."""
    if page == "index":
        source[0] = front_page(source[0])
    elif page in ORIGIN:
        source[0] = adapt(source[0], ROOT / ORIGIN[page], DOCS / page)
    elif not page.startswith("generated/"):
        source[0] = adapt(source[0], DOCS / f"{page}.md")


def front_page(index: str) -> str:
    """Put the animation into the README, the guides after it, and all pages into the sidebar."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    animation = "```{raw} html\n:file: generated/batching.svg\n```"
    readme = re.sub(r"^```\n.*?^```$", animation, readme, count=1, flags=re.M | re.S)
    readme = readme.partition("\n## Where to go next\n")[0]
    guides = index.partition("\n## ")[0]
    pages = re.findall(r"^\| [^|]*\]\((\w+)\.md\)", guides, flags=re.MULTILINE)
    elsewhere = ("benchmarks", "architecture", "glossary")
    trees = {
        "Guides": [page for page in pages if page not in elsewhere],
        "Uses": [f"cases/{path.stem}" for path in CASES],
        "Examples": ["generated/gallery"],
        "Measured": ["benchmarks", "generated/results"],
        "Reference": ["generated/api", "generated/configs", "glossary"],
        "Project": ["architecture", "generated/contributing", "generated/changelog"],
    }
    toctrees = "\n".join(
        "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", *pages, "```", ""])
        for caption, pages in trees.items()
    )
    front = adapt(readme, ROOT / "README.md", DOCS / "index.md")
    return f"{front}\n#{adapt(guides, DOCS / 'index.md')}\n\n{toctrees}"


def adapt(text: str, origin: Path, page: Path | None = None) -> str:
    """Point links outside code, which are relative to ``origin``, from ``page`` to the site."""

    def replace(link: re.Match[str]) -> str:
        return f"]({target(link[1], origin.parent, (page or origin).parent)}{link[2] or ''})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [re.sub(r"\]\(([^)#\s:]+)(#[^)\s]*)?\)", replace, part) for part in parts[::2]]
    return "".join(parts)


def target(link: str, origin: Path, page: Path) -> str:
    """Return where a file of the repository is on the site: its page, or else the file itself."""
    full = (origin / link).resolve()
    name = full.relative_to(ROOT).as_posix()
    if name in OUTSIDE:
        return f"/{OUTSIDE[name]}.md"
    if full in EXAMPLES:
        return f"/generated/examples/{full.stem}.md"
    if name.startswith("docs/") and full.suffix == ".md":
        return f"/{name.removeprefix('docs/')}"
    return os.path.relpath(full, page)
