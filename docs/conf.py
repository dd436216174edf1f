"""Settings of the documentation site: ``python -m sphinx -W -b html docs site``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from pyg_dynbatch import __version__  # noqa: E402

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
    "site_pages",
]
exclude_patterns = ["_*"]
suppress_warnings = ["myst.xref_ambiguous"]

# Pages and notebooks
myst_enable_extensions = ["attrs_block", "attrs_inline", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_in_temp = True
nb_merge_streams = True
nb_output_stderr = "remove"
copybutton_prompt_text = ">>> "
copybutton_exclude = ".linenos, .gp, .go"

# API
autosummary_generate = False
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
toc_object_entries_show_parents = "hide"

# Look: everything is served from the site itself, so it also works without a network.
html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_math_renderer = "mathml"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#22609c", "color-brand-content": "#22609c"},
    "dark_css_variables": {"color-brand-primary": "#78b4f0", "color-brand-content": "#78b4f0"},
}
