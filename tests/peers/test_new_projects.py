"""The projects that ``mpizero new`` writes for PyTorch and for JAX lead to one hash."""

from __future__ import annotations

import pytest

from mpizero.tools.projects import new_project
from tests.projects.readme import assert_one_hash, follow_readme


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_the_readme_leads_to_one_hash_on_one_rank_and_on_four(kind, tmp_path):
    pytest.importorskip(kind)
    assert_one_hash(follow_readme(new_project(tmp_path / "project", kind)))
