"""Build the documentation site: ``python -m sphinx -W --keep-going -b html docs build/site``.

Needs the extras ``docs`` and an MPI, for example ``mpich``. Nothing is fetched, neither now nor when the site is read.
"""

from __future__ import annotations

import configparser
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

from generator import references  # noqa: E402 - found by the line before

_setup = configparser.ConfigParser()
_setup.read(DOCS.parent / "setup.cfg", encoding="utf-8")

project = "mpizero"
author = _setup["metadata"]["author"]
release = version = _setup["metadata"]["version"]
copyright = author

extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc"]
exclude_patterns = ["generator"]
highlight_language = "none"  # of blocks without a language
nitpicky = True

myst_heading_anchors = 6  # the anchors that code hosts give
myst_links_external_new_tab = False

# Libraries whose adapters are documented where they are not installed.
autodoc_mock_imports = [name for name in ("jax", "torch") if references.missing(name)]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_type_aliases = {name: name for name in ("Array", "ArrayLike", "DTypeLike")}
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries = False
numpydoc_show_class_members = False  # autodoc lists them
numpydoc_xref_param_type = True
numpydoc_xref_ignore = "all"  # but the public names
numpydoc_xref_aliases = references.short_names(autodoc_mock_imports)

html_theme = "furo"
html_title = f"mpizero {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_search_scorer = str(DOCS / "static" / "scorer.js")
html_show_search_summary = False  # fetched from the pages, which browsers refuse where the site is a folder of files


def setup(app: object) -> None:
    """Connect the parts of the build that are ours."""
    references.connect(app)
