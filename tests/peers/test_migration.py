"""The programs of the pages for users of other libraries leave the same parameters on one rank and on two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.peers.test_recipes import alone, together

jax = pytest.importorskip("jax")
pytest.importorskip("torch")

import mpizero.adapters.jax  # noqa: E402, F401 - before JAX computes anything

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs").glob("from_*.md"))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_program_of_a_page_leaves_the_same_bits_on_one_rank_and_on_two(page, tmp_path):
    program = tmp_path / "train.py"
    (text,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    program.write_text(text, encoding="utf-8")
    found = alone([str(program)], [], tmp_path)
    assert all(re.search(r", [0-9a-f]{64}$", line) for line in found)
    assert together([str(program)], [], tmp_path, 2) == found
