"""The examples of a physics-informed network and of a neural operator: right equations, one set of bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mpizero.testing import run_in_threads  # noqa: E402


@pytest.fixture(scope="module")
def programs(example: Any) -> Any:
    return SimpleNamespace(informed=example("physics_informed"), operator=example("neural_operator"))


def test_the_residual_is_that_of_differences_of_the_solution(programs: Any) -> None:
    torch.manual_seed(0)
    module, h = programs.informed.Residual(), 1e-3
    t, x = torch.rand(2, 20, dtype=torch.float64) * 0.8 + 0.1
    with torch.no_grad():
        u = module.solution(t, x)
        u_t = (module.solution(t + h, x) - module.solution(t - h, x)) / (2 * h)
        right, left = module.solution(t, x + h), module.solution(t, x - h)
    expected = u_t + u * (right - left) / (2 * h) - programs.informed.VISCOSITY * (right - 2 * u + left) / h**2
    found = module(torch.stack([t, x], dim=1)).detach()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_two_references_are_the_same_function(programs: Any) -> None:
    """With X = pi x and T = pi t the equation of one program is that of the other."""
    places = 2 * np.pi * np.arange(programs.operator.FINE) / programs.operator.FINE
    (found,) = programs.operator.solve(-np.sin(places)[None])
    x = (places / np.pi + 1) % 2 - 1
    np.testing.assert_allclose(found, programs.informed.exact(np.full_like(x, 1 / np.pi), x), rtol=0, atol=1e-8)


def same_on_several(main: Any, options: list[str]) -> bool:
    """Tell whether one rank and three find the same numbers."""
    return len({found for n in (1, 3) for found in run_in_threads(n, lambda comm: main(options, comm))}) == 1


def test_the_network_learns_the_equation_and_has_the_same_bits_on_any_ranks(programs: Any, capsys: Any) -> None:
    found = programs.informed.main(["--small"], "self")
    assert found.error < 0.25 * found.after_adam
    assert capsys.readouterr().out.endswith(f"sha256 {found.sha256} on 1 ranks\n")
    assert same_on_several(programs.informed.main, ["--small", "--steps", "3", "--iterations", "3"])


def test_the_operator_learns_on_all_grids_and_has_the_same_bits_on_any_ranks(programs: Any, capsys: Any) -> None:
    found = programs.operator.main(["--small"], "self")
    assert found.error < 0.6 * found.of_linear
    assert found.on_fine_grid == pytest.approx(found.error, rel=0.05)
    assert capsys.readouterr().out.endswith(f"sha256 {found.sha256} on 1 ranks\n")
    assert same_on_several(programs.operator.main, ["--small", "--steps", "3"])


@pytest.mark.parametrize("name", ["informed", "operator"])
def test_no_steps_are_refused(programs: Any, name: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        getattr(programs, name).main(["--steps", "0"], "self")
    assert "--steps 0: expected at least 1" in capsys.readouterr().err
