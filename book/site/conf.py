"""How Sphinx turns the folder that build_site.py lays out into the site."""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # cheems_ref, and the extensions

from book.site import interactive_pages

project = "Cheems Reference"
html_title = project
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "book.site.extensions.cross_references",
    "book.site.extensions.api_reference",
    "book.site.extensions.claims_table",
]
exclude_patterns = ["downloads"]
# Every reference is resolved, or the build stops; but nothing is fetched, so the types of other
# packages lead nowhere.
smartquotes_action = "D"  # dashes; a quotation, a value such as "rope", stays as it is written
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!cheems_ref\.).*")]

# Chapters are shown as they were run. Only what they print is kept of what is raised and drawn.
nb_execution_mode = "off"
nb_render_markdown_format = "myst"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

# Triton is for Linux; elsewhere the page of the room that needs it is made without it.
autodoc_mock_imports = [name for name in ("triton",) if find_spec(name) is None]
# A name has one place: what a room hands on stands in the room that defines it.
autodoc_default_options = {
    "members": True,
    "member-order": "bysource",
    "ignore-module-all": True,
}
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # torch's `forward` says nothing of ours
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 72
add_module_names = False
toc_object_entries_show_parents = "hide"

# All of MathJax in one file: from a folder, too, there is nothing more to ask for, and no font.
MATHJAX = Path(next(iter(find_spec("sphinx-mathjax-offline").submodule_search_locations)))
mathjax_path = "tex-svg-full.js"
mathjax3_config = {
    "svg": {"fontCache": "global"},
    "options": {"enableMenu": False},
}

html_theme = "furo"
templates_path = ["templates"]
html_context = {"play_pages": [(page.name, page.title) for page in interactive_pages.PAGES]}
places = ("brand", "search", "scroll-start", "play", "navigation", "scroll-end")
html_sidebars = {"**": [f"sidebar/{name}.html" for name in places]}
html_static_path = ["static", str(MATHJAX / "static" / "mathjax" / mathjax_path)]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_favicon = "static/favicon.svg"
html_copy_source = False
html_show_copyright = False
html_domain_indices = False
html_search_scorer = str(
    Path(__file__).with_name("search_order.js")
)  # lessons before the reference, and how excerpts are made
highlight_language = "none"  # what a docstring or the README sets apart is no Python; cells say so
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
