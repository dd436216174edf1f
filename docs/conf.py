"""Settings of the documentation site: ``python -m sphinx -W -b html docs site``."""

from pygments.lexer import inherit
from pygments.lexers.shell import BashLexer
from pygments.token import Name
from sphinx.application import Sphinx

from pyg_dynbatch import __version__

project = "pyg_dynbatch"
author = "The pyg_dynbatch authors"
copyright = author
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
# Links of the pages to Markdown outside this folder are followed on GitHub, except the results.
suppress_warnings = ["myst.xref_missing", "myst.xref_ambiguous"]

# Pages and notebooks
myst_enable_extensions = ["alert", "attrs_inline", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_in_temp = True
nb_merge_streams = True
nb_output_stderr = "remove"
copybutton_prompt_text = ">>> "

# API
autodoc_default_options = {"members": True}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
add_module_names = False
python_use_unqualified_type_names = True
napoleon_use_rtype = False
napoleon_custom_sections = ["Shape", "Reference"]

html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]


class CommandLexer(BashLexer):
    """Mark the options of commands, so that a phone does not break a line inside of them."""

    tokens = {"data": [(r"--?[\w.-]+", Name.Attribute), inherit]}  # noqa: RUF012


def link_results(app: Sphinx, page: str, source: list[str]) -> None:
    """Let links to the results lead to their page on the site."""
    source[0] = source[0].replace("](../benchmarks/RESULTS.md", "](benchmarks/results.md")


def setup(app: Sphinx) -> None:
    """Add what Sphinx has no setting for."""
    app.add_lexer("bash", CommandLexer)
    app.connect("source-read", link_results)
