"""The example of a Bayesian inversion: heads, their gradient, the posterior of dense algebra, one set of bits."""

import numpy as np
import pytest

import mpizero as mz
from mpizero.testing import check_model, run_in_threads, taylor_test

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program(example):
    return example("bayesian_inversion")


def test_heads_in_a_uniform_ground_are_those_of_the_series_for_a_square(program):
    """The response to a point: the sum of 4 sin(a x) sin(a x') sin(b y) sin(b y') / (a^2 + b^2)."""
    aquifer = program.Aquifer(cells=24, wells=2)
    found = aquifer.heads(np.zeros(24**2), np.eye(4))
    waves = np.pi * np.arange(1, 400)
    rows, columns = (np.sin(np.outer(waves, (line + 0.5) / 24)) for line in divmod(aquifer.wells, 24))
    exact = np.einsum("ai,aj,bi,bj,ab->ij", *[rows] * 2, *[columns] * 2, 4 / np.add.outer(waves**2, waves**2))
    apart = ~np.eye(4, dtype=bool)
    np.testing.assert_allclose(found[apart], exact[apart], rtol=0.02)


def test_the_gradient_is_that_of_the_misfit(program):
    rng = np.random.default_rng(0)
    misfit = program.Misfit(program.Aquifer(cells=6, wells=2), noise=0.1)
    batch, whitened = (rng.normal(size=(4, 4)), rng.normal(size=(4, 4))), rng.normal(size=36)

    def evaluated(whitened):
        return misfit.loss_and_grad({"whitened": whitened}, batch)

    taylor_test(lambda z: evaluated(z)[0], lambda z: evaluated(z)[1]["whitened"], whitened)
    check_model(mz.FunctionModel({"whitened": whitened}, misfit.loss_and_grad), *batch, comm="self")


def test_the_posterior_is_that_of_dense_algebra_and_has_the_same_bits_on_any_ranks(program, capsys):
    alone = program.main(["--small"], "self")
    assert alone.field_error < 1e-6
    assert alone.variance_error < 1e-8
    assert capsys.readouterr().out.endswith(f"sha256 {alone.sha256} on 1 ranks\n")
    for ranks in (2, 3):
        assert set(run_in_threads(ranks, lambda comm: program.main(["--small"], comm))) == {alone}
    assert program.main(["--small", "--rank", "4"], "self").variance_error > 1e-3  # fewer directions than data


def test_more_directions_than_cells_are_refused_before_it_begins(program, capsys):
    with pytest.raises(SystemExit):
        program.main(["--small", "--rank", "60"], "self")
    assert "--rank 60: expected 1 to 59 directions for 8 x 8 cells" in capsys.readouterr().err


def test_a_picture_is_drawn_of_what_was_found(program, tmp_path):
    pytest.importorskip("matplotlib")
    program.main(["--small", "--picture", str(tmp_path / "field.svg")], "self")
    assert [path.name for path in tmp_path.iterdir()] == ["field.svg"]
    assert "<svg" in (tmp_path / "field.svg").read_text(encoding="utf-8")
