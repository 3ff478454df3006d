"""The Python of each section of docs/bring_your_model.md, and that of docs/pytorch.md, is a script that runs."""

from __future__ import annotations

import contextlib
import re
import runpy
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")

import mpizero.adapters.jax  # noqa: E402, F401 - before JAX computes anything, as the page says

DOCS = Path(__file__).resolve().parents[2] / "docs"
SECTIONS = re.split(r"^## ", (DOCS / "bring_your_model.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
SCRIPTS = {
    text.partition("\n")[0]: "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    for text in [*SECTIONS, (DOCS / "pytorch.md").read_text(encoding="utf-8")]
}
NEEDS = {"JAX": "optax", "PyTorch": "torch"}


@pytest.fixture(autouse=True)
def _settings_of_jax():
    before = jax.config.jax_enable_x64
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("title", [title for title, script in SCRIPTS.items() if script])
def test_the_script_of_a_section_runs(title, tmp_path):
    for word, library in NEEDS.items():
        if word in title:
            pytest.importorskip(library)
    (tmp_path / "script.py").write_text(SCRIPTS[title], encoding="utf-8")
    with contextlib.chdir(tmp_path):
        runpy.run_path("script.py", run_name="__main__")
