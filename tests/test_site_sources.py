"""What the documentation site is made of: each page has a place, each public name a page; needs no Sphinx."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import mpizero

DOCS = Path(__file__).resolve().parents[1] / "docs"

with mock.patch.object(sys, "path", [str(DOCS), *sys.path]):
    from generator import api_pages, program_pages, public_names


def test_every_page_has_one_place_in_the_navigation():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    trees = re.findall(r"^```\{toctree\}\n(?::[^\n]*\n)*\n(.*?)^```", index, re.MULTILINE | re.DOTALL)
    placed = Counter(name for tree in trees for name in tree.split())
    pages = [*DOCS.glob("*.md"), *DOCS.glob("examples/*.md")]
    names = [page.relative_to(DOCS).with_suffix("").as_posix() for page in pages]
    assert placed == Counter([name for name in names if name != "index"] + ["reference/index"])


def test_the_library_page_lists_every_public_name_once():
    listed = Counter(name for names, _ in public_names.library_groups() for name in names)
    assert listed == Counter(public_names.own_names(mpizero))


def test_every_public_name_has_a_page_of_its_own_that_an_index_links(tmp_path):
    installed = [m for m in public_names.public_modules() if m not in public_names.OF_OTHER_LIBRARIES]
    names = public_names.public_names(installed)
    with mock.patch.multiple(api_pages, public_names=lambda: names, public_modules=lambda: installed):
        pages = api_pages.write_reference(tmp_path)
    written = [path.name.rpartition(".")[0] for path in tmp_path.iterdir()]
    linked = {m for path in tmp_path.glob("*.md") for m in re.findall(r":doc:`\S+ <(\S+)>`", path.read_text("utf-8"))}
    assert {"index", *linked} == set(written)
    assert len({name.lower() for name in written}) == len(written), "some file systems take these for one"
    documented = {(one.name, id(one.value)) for one in names.values()}
    for module in installed:
        for name in public_names.own_names(sys.modules[module]):
            value = getattr(sys.modules[module], name)
            assert f"{module}.{name}" in pages or (name, id(value)) in documented, f"{module}.{name}"


def test_links_to_programs_become_links_to_their_pages():
    text = "[a](../examples/lbfgs.py) [b](gpu.md#what-holds) [c](../README.md) [d](https://mpi4py.readthedocs.io)"
    assert program_pages.rewritten(text, "examples.md") == (
        "[a](programs/examples/lbfgs.py.rst) [b](gpu.md#what-holds) [c](index.md) [d](https://mpi4py.readthedocs.io)"
    )
    readme = program_pages.rewritten("[a](docs/gpu.md) [b](LICENSE)", "index.md", home=DOCS.parent)
    assert readme == "[a](gpu.md) [b](programs/LICENSE.rst)"
