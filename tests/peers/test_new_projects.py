"""The projects that ``mpizero new`` writes for PyTorch and for JAX pass their own tests and train."""

from __future__ import annotations

import pytest

from mpizero.tools.projects import new_project
from tests.projects.readme import STEPS, follow_readme


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_the_readme_leads_through_the_tests_to_a_training(kind, tmp_path):
    """Ranks are threads here, in the project's own test; ``scripts/own_models.py`` has such models on ranks of MPI."""
    pytest.importorskip(kind)
    (trained,) = follow_readme(new_project(tmp_path / "project", kind), launch=False)
    assert trained["steps"] == STEPS
