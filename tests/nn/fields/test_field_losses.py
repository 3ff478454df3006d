"""Losses of fields: relative to norms, of differences in space, with latitudes and land; the same bits on every cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero import nn
from mpizero.comm.model_group import CommunicatorGroup
from mpizero.errors import ConfigError, DataError
from mpizero.layout.fields import Cut
from mpizero.nn.domain_parallel import loss_on_domain
from mpizero.nn.space import Domain
from mpizero.testing import run_in_threads, taylor_test

SPACES = {1: (9,), 2: (7, 5), 3: (3, 5, 4)}
HIGHEST = {1: (4,), 2: (2, 2), 3: (1, 2, 1)}


def equation(u: Any, x: Any, last: Any, xx: Any, forcing: Any) -> Any:
    """Return a residual of two channels from four."""
    first = u[..., :2] * x[..., 2:] - 0.3 * xx[..., :2] + np.exp(0.1 * last[..., 1:3]) ** 2
    return np.sqrt(1 + u[..., 1:2] * u[..., 1:2]) / 2 - first * forcing[..., :1] + np.sin(last[..., :2])


def residual(axes: int, **settings: Any) -> nn.ResidualLoss:
    return nn.ResidualLoss(equation, ("u", "x", {1: "x", 2: "xy", 3: "yz"}[axes], "xx", "target"), **settings)


LOSSES = {
    "relative": lambda axes: nn.RelativeL2Loss(),
    "h1": lambda axes: nn.H1Loss(),
    "h1 periodic": lambda axes: nn.H1Loss(0.1, lengths=(2.0, 1.0, 0.5)[:axes], periodic=True),
    "squared": lambda axes: nn.MeanSquaredError(),
    "gaussian": lambda axes: nn.GaussianNLLLoss(),
    "classes": lambda axes: nn.CrossEntropy(),
    "spectral": lambda axes: nn.SpectralLoss(HIGHEST[axes], [1.0, 0.5, 3.0, 0.1]),
    "residual": lambda axes: residual(axes),
    "residual periodic": lambda axes: residual(axes, spacing=(0.5, 1.0, 2.0)[:axes], periodic=True),
    "sum": lambda axes: nn.SumLoss([nn.MeanSquaredError(), nn.SumLoss([residual(axes)], [0.6])], [1.0, 0.5]),
}
CASES = [(name, axes) for name in LOSSES for axes in SPACES]


def fields(name: str, axes: int, rng: Any, dtype: str = "f8") -> tuple[Any, Any]:
    """Return predictions, and targets with weights of samples and a mask under which the targets are NaN."""
    shape = (3, *SPACES[axes])
    prediction, mask = rng.normal(size=(*shape, 4)).astype(dtype), rng.random(shape) > 0.3
    if name == "classes":
        return prediction, {"target": rng.integers(-1, 4, shape), "mask": mask, "weight": np.array([1.0, 0.0, 2.5])}
    target = rng.normal(size=(*shape, 2 if name == "gaussian" else 4)).astype(dtype)
    if name == "spectral":
        return prediction, {"target": target, "weight": np.array([1.0, 0.0, 2.5])}
    if name != "gaussian":
        target[~mask] = np.nan
    if name.startswith(("residual", "sum")):
        return prediction, {"target": target, "mask": mask}
    return prediction, {"target": target, "mask": mask, "weight": np.array([1.0, 0.0, 2.5])}


def latitudes(axes: int, name: str = "") -> tuple[float, ...] | None:
    if name == "spectral":  # modes have no latitude
        return None
    n = SPACES[axes][0]
    return tuple(np.cos(np.pi * ((np.arange(n) + 0.5) / n - 0.5)))


@pytest.mark.parametrize(("name", "axes"), CASES)
def test_gradients_are_those_of_finite_differences(name, axes, rng):
    """Every loss with one to three axes, and with targets alone, with weights inside of samples, and with masks."""
    loss = nn.FieldLoss(LOSSES[name](axes), weights=latitudes(axes, name))
    prediction, target = fields(name, axes, rng)
    inside = {**target, "weight": rng.uniform(0, 2, (3, *SPACES[axes])[: 1 if name == "spectral" else None])}
    given = {1: np.nan_to_num(target["target"]), 2: inside, 3: target}[axes]
    gradient = loss.backward(loss.forward(prediction, given)[2], 0.5)
    assert gradient.shape == prediction.shape
    taylor_test(lambda point: 0.5 * loss.forward(point, given)[0], gradient, prediction)


def by_numpy(loss: nn.RelativeL2Loss, prediction: Any, target: Any, weight: Any, lengths: Any) -> Any:
    """Return the relative error of each sample."""

    def norm(u: Any) -> Any:
        u, space = np.where(weight[..., None] > 0, u, 0), range(1, u.ndim - 1)
        terms = [weight[..., None] * u**2]
        for axis in space if lengths else ():
            h = lengths[axis - 1] / u.shape[axis]
            both = np.sqrt(weight * np.roll(weight, -1, axis))[..., None]
            terms.append(both * ((np.roll(u, -1, axis) - u) / h) ** 2)
            if not loss.periodic:
                np.moveaxis(terms[-1], axis, 0)[-1] = 0
        return np.sqrt(sum(term.sum(axis=(*space, -1)) for term in terms))

    return norm(prediction - target) / (norm(target) + loss.eps)


@pytest.mark.parametrize("axes", SPACES)
@pytest.mark.parametrize("name", ["relative", "h1", "h1 periodic"])
def test_relative_losses_are_those_of_the_formula(name, axes, rng):
    loss, (prediction, given) = LOSSES[name](axes), fields(name, axes, rng)
    lengths = {"relative": None, "h1": (1.0,) * axes, "h1 periodic": (2.0, 1.0, 0.5)[:axes]}[name]
    weight = given["mask"] * np.array(latitudes(axes)).reshape(1, -1, *(1,) * (axes - 1))
    expected = by_numpy(loss, prediction, given["target"], weight / np.mean(latitudes(axes)), lengths)
    total, count, _ = nn.FieldLoss(loss, weights=latitudes(axes)).forward(prediction, given)
    assert count == 3.5
    assert total == pytest.approx((expected * given["weight"]).sum(), rel=1e-12)
    if name == "relative":  # the loss of whole samples is the same within rounding
        whole = nn.RelativeL2Loss().forward(prediction, given)
        assert nn.FieldLoss(loss).forward(prediction, given)[0] == pytest.approx(whole[0], rel=1e-12)


@pytest.mark.parametrize("cut", [(2,), (3,), (8,), (2, 2), (1, 3), (4, 2), (2, 2, 2), (1, 2, 3)], ids=str)
def test_losses_have_the_bits_of_one_process_on_every_cut(cut, rng):
    axes = len(cut)
    for number, (name, make) in enumerate(LOSSES.items()):
        loss = nn.FieldLoss(make(axes), weights=latitudes(axes, name))
        prediction, target = fields(name, axes, rng, ("f4", "f8")[number % 2])
        total, weight, cache = loss.forward(prediction, target)
        gradient = loss.backward(cache, 0.25)

        def on_rank(comm: Any, loss: Any = loss, prediction: Any = prediction, target: Any = target) -> Any:
            domain = Domain(Cut(cut), CommunicatorGroup(comm))
            here = (slice(None), *Cut(cut).box(SPACES[axes], comm.rank))
            part = {key: value[here] if value.ndim > 1 else value for key, value in target.items()}
            form = loss_on_domain(loss, domain, "model")
            *sums, cache = form.forward(prediction[here], part)
            return here, sums, form.backward(cache, 0.25)

        found = run_in_threads(Cut(cut).size, on_rank)
        assert [sum(one) for one in zip(*(sums for _, sums, _ in found), strict=True)] == [total, weight], name
        for here, _, part in found:
            np.testing.assert_array_equal(part, gradient[here], name)


@pytest.mark.parametrize("axes", SPACES)
def test_a_spectral_loss_is_that_of_numpy_fft(axes, rng):
    space, highest = SPACES[axes], HIGHEST[axes]
    weights, (prediction, given) = [1.0, 0.5, 3.0], fields("spectral", axes, rng)
    modes = np.fft.fftn(prediction - given["target"], axes=range(1, axes + 1)) / np.prod(space)
    waves = np.meshgrid(*(np.rint(np.fft.fftfreq(n) * n) for n in space), indexing="ij")
    shell = np.rint(np.sqrt(sum(k**2 for k in waves))).astype(int)
    kept = np.all([abs(k) <= most for k, most in zip(waves, highest, strict=True)], axis=0) & (shell < 3)
    factor = np.where(kept, np.array(weights)[np.minimum(shell, 2)], 0)[..., None]
    expected = (factor * abs(modes) ** 2).sum(axis=tuple(range(1, axes + 1))).mean(axis=-1)
    total, weight, _ = nn.FieldLoss(nn.SpectralLoss(highest, weights)).forward(prediction, given)
    assert weight == 3.5
    assert total == pytest.approx((expected * given["weight"]).sum(), rel=1e-12)


@pytest.mark.parametrize("extent", [5, 9])
def test_all_modes_make_the_mean_squared_error(extent, rng):
    prediction, target = rng.normal(size=(2, 3, extent, 7, 2))
    total, weight, _ = nn.FieldLoss(nn.SpectralLoss((extent // 2, 3))).forward(prediction, target)
    assert total / weight == pytest.approx(((prediction - target) ** 2).mean(), rel=1e-12)


@pytest.mark.parametrize("periodic", [False, True, (True, False)])
def test_a_residual_is_that_of_differences_by_numpy(periodic, rng):
    """Of u u_x - 0.1 (u_xx + u_yy) + u_xy = f, where all neighbours are."""
    u, f = rng.normal(size=(2, 2, 8, 9, 1))
    hx, hy = 0.5, 0.25

    def moved(x: Any, y: Any) -> Any:
        return np.concatenate([u, u, u], axis=1)[:, 8 + x : 16 + x].take(np.arange(9) + y, axis=2, mode="wrap")

    expected = u * (moved(1, 0) - moved(-1, 0)) / (2 * hx) - f
    expected -= 0.1 * ((moved(1, 0) + moved(-1, 0) - 2 * u) / hx**2 + (moved(0, 1) + moved(0, -1) - 2 * u) / hy**2)
    expected += (moved(1, 1) - moved(1, -1) - moved(-1, 1) + moved(-1, -1)) / (4 * hx * hy)
    across, along = periodic if isinstance(periodic, tuple) else (periodic, periodic)
    expected = expected[:, slice(None) if across else slice(1, -1), slice(None) if along else slice(1, -1)]
    loss = nn.ResidualLoss(
        lambda u, x, xx, yy, xy, f: u * x - 0.1 * (xx + yy) + xy - f,
        ("u", "x", "xx", "yy", "xy", "target"),
        spacing=(hx, hy),
        periodic=periodic,
    )
    total, weight, _ = nn.FieldLoss(loss).forward(u, f)
    assert weight == expected.size
    assert total == pytest.approx((expected**2).sum(), rel=1e-12)


def test_a_residual_may_look_up_coefficients_by_kinds_of_positions(rng):
    u, kinds, table = rng.normal(size=(2, 8, 9, 1)), rng.integers(0, 3, (2, 8, 9, 1)), np.array([1.0, 2.0, 5.0])
    loss = nn.FieldLoss(nn.ResidualLoss(lambda u, kind: table[kind.astype(int)] * u, ("u", "target")))
    for numbers in (kinds, kinds * 1.0, np.full(kinds.shape, 2.0)):
        total, weight, _ = loss.forward(u, numbers)
        assert total / weight == pytest.approx(((table[numbers.astype(int)] * u) ** 2).mean(), rel=1e-12)


def test_a_residual_that_cancels_to_rounding_errors_is_one_of_the_position():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        weights = rng.normal(size=(3, 3)).astype(np.float32)
        weights -= weights.mean(axis=0)
        u = np.full((1, 8, 3), rng.normal(), np.float32)
        nn.FieldLoss(nn.ResidualLoss(lambda u, weights=weights: u @ weights, ("u",))).forward(u, np.zeros((1, 8, 1)))


def test_a_sum_of_losses_has_the_mean_of_each(rng):
    prediction, target = rng.normal(size=(2, 3, 9, 2))
    inner = nn.SumLoss([nn.RelativeL2Loss(), nn.SumLoss([nn.L1Loss()], [0.25])], [0.5, 2.0])
    parts = [nn.MeanSquaredError(), inner, nn.SpectralLoss(3), nn.H1Loss()]
    means = [total / weight for total, weight, _ in (nn.FieldLoss(one).forward(prediction, target) for one in parts)]
    loss = nn.FieldLoss(nn.SumLoss(parts, [1.0, 0.5, 2.0, 0.0]))
    total, weight, cache = loss.forward(prediction, target)
    relative, absolute = (nn.FieldLoss(one).forward(prediction, target) for one in (nn.RelativeL2Loss(), nn.L1Loss()))
    assert means[1] == pytest.approx(0.5 * relative[0] / relative[1] + 0.5 * absolute[0] / absolute[1], rel=1e-14)
    assert total / weight == pytest.approx(means[0] + 0.5 * means[1] + 2 * means[2], rel=1e-14)
    assert loss.backward(cache).shape == prediction.shape


def test_a_model_trained_by_weighted_and_masked_losses_has_one_hash_on_every_cut(rng):
    x, y = (rng.normal(size=(4, 9, 8, 1)).astype("f4") for _ in range(2))
    land = rng.random((4, 9, 8)) > 0.2
    equation = nn.ResidualLoss(lambda u, xx, yy, f: u - 0.1 * (xx + yy) - f, ("u", "xx", "yy", "target"))
    loss = nn.FieldLoss(nn.SumLoss([nn.H1Loss(), equation], [1.0, 0.1]), weights=np.arange(1.0, 10.0))
    net = nn.FNO(1, 1, modes=4, width=4, layers=1, space=(9, 8), loss=loss)

    def train(comm: Any, domain: Any = (1, 1)) -> Any:
        with mz.Mesh(comm, domain=domain) as mesh, mz.distribute(net, mz.Adam(lr=0.01), "zero2", mesh=mesh) as model:
            here = (slice(None), *mesh.slab(net.space))
            losses = [model.train(x[here], {"target": y[here], "mask": land[here]}) for _ in range(3)]
            return losses, model.parameters_sha256()

    alone = train("self")
    assert alone[0][-1] < alone[0][0]
    for cut in ((2, 1), (1, 3), (2, 2)):
        assert all(found == alone for found in run_in_threads(cut[0] * cut[1], lambda comm, c=cut: train(comm, c)))


def test_a_sample_that_a_mask_leaves_out_whole_does_not_count(rng):
    prediction, target = rng.normal(size=(2, 2, 8, 3))
    mask = np.array([[True] * 8, [False] * 8])
    for loss in (nn.RelativeL2Loss(), nn.H1Loss()):
        total, weight, cache = nn.FieldLoss(loss).forward(prediction, {"target": target, "mask": mask})
        assert weight == 1
        assert total == pytest.approx(nn.FieldLoss(loss).forward(prediction[:1], target[:1])[0], rel=1e-14)
        assert not nn.FieldLoss(loss).backward(cache)[1].any()


def residual_of(function: Any, u: Any = None, **settings: Any) -> Any:
    u = np.ones((1, 8, 1)) if u is None else u
    return nn.FieldLoss(nn.ResidualLoss(function, ("u",), **settings)).forward(u, np.zeros((1, 8, 1)))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nn.FieldLoss(nn.MeanSquaredError(), weights=[1, -1]), r"weights=-1\.0: expected a finite number >= 0"),
        (lambda: nn.FieldLoss(nn.MeanSquaredError(), weights=[0, 0]), "weights, their sum=0.0"),
        *(
            (
                lambda wrong=wrong: nn.FieldLoss(nn.MeanSquaredError(), weights=wrong),
                "weights=.*: expected a list with a number for",
            )
            for wrong in ("abc", [1.0, None], np.ones((2, 2)), 3.0)
        ),
        (lambda: nn.SpectralLoss(-1), "frequencies=-1 is not allowed"),
        (lambda: nn.SpectralLoss(2, [1, -1]), "weights=-1"),
        (lambda: nn.SpectralLoss(2, "ab"), "weights='ab': expected a list with a number for each rounded norm"),
        (lambda: nn.SpectralLoss(2, []), "weights, their sum=0"),
        (lambda: nn.SumLoss([nn.MeanSquaredError()], [None]), r"factors=\[None\]: expected a list with a number for"),
        (lambda: nn.SpectralLoss(2).forward(np.zeros((1, 8, 1)), np.zeros((1, 8, 1))), r"FieldLoss\(SpectralLoss"),
        (lambda: nn.ResidualLoss(None, ("u",)), "residual=None must be a function"),
        *(
            (lambda wrong=wrong: nn.ResidualLoss(np.exp, wrong), "terms=.* is not allowed")
            for wrong in ("u", ("w",), ("xxx",), ("target",), (), (1,), None, {"u", "x"})
        ),
        (lambda: nn.ResidualLoss(np.exp, ("u",), periodic=(True, "no")), "periodic='no': expected True or False"),
        (lambda: nn.ResidualLoss(np.exp, ("u",), spacing=0), "spacing=0"),
        (lambda: nn.SumLoss([nn.MeanSquaredError()], [1.0, 2.0]), "1 losses have 2 factors"),
        *(
            (lambda wrong=wrong: nn.SumLoss([wrong], [1.0]), "SumLoss: .* is no loss that adds up over positions")
            for wrong in ("mse", nn.MeanSquaredError, nn.FieldLoss(nn.MeanSquaredError()))
        ),
        (lambda: nn.SumLoss(nn.MeanSquaredError(), 1.0), r"factors=1\.0: expected a list"),
        (lambda: nn.FieldLoss(nn.L1Loss), "FieldLoss: <class.*L1Loss.* is no loss that adds up over positions"),
        *(
            (lambda function=function: residual_of(function), f"calls numpy.{name}, which has no derivative")
            for name, function in {
                "absolute": abs,
                "maximum": lambda u: np.maximum(u, 0),
                "greater": lambda u: u * (u > 0),
                "sign": lambda u: u * np.sign(u),
                "conjugate": np.conj,
                "linalg.norm": lambda u: u * np.linalg.norm(u, axis=-1, keepdims=True),
                "real": lambda u: u * u.real,
            }.items()
        ),
        *(
            (lambda function=function: residual_of(function), "at a position depends on others")
            for function in (
                lambda u: u - u.mean(),
                lambda u: u - np.roll(u, 1, axis=1),
                lambda u: u[:, ::-1] * u,
                lambda u: np.gradient(u, axis=1),
                lambda u: u * np.random.normal(size=u.shape),  # noqa: NPY002
            )
        ),
        (lambda: residual_of(lambda u: u.real), "is real for complex arguments"),
        (lambda: nn.H1Loss(lengths=0), "lengths=0"),
        (lambda: nn.H1Loss(periodic=1), "periodic=1"),
        (lambda: nn.H1Loss().forward(np.zeros((1, 2)), np.zeros((1, 2))), r"loss=mpizero\.nn\.FieldLoss\(H1Loss"),
    ],
)
def test_settings_that_are_not_allowed_are_told(make, why):
    with pytest.raises(ConfigError, match=why):
        make()


@pytest.mark.parametrize("loss", [nn.RelativeL2Loss(), nn.H1Loss()])
def test_a_target_of_zeros_is_told_by_the_name_of_the_loss(loss):
    name = type(loss).__name__
    with pytest.raises(DataError, match=rf"^{name}: the target of sample 0 of 1 .* such as {name}\(eps"):
        nn.FieldLoss(loss).forward(np.ones((1, 4, 1)), np.zeros((1, 4, 1)))


def test_weights_and_lengths_of_other_fields_are_told():
    with pytest.raises(DataError, match="3 weights are given for 4 positions"):
        nn.FieldLoss(nn.MeanSquaredError(), weights=[1, 2, 1]).forward(np.zeros((1, 4, 1)), np.zeros((1, 4, 1)))
    with pytest.raises(DataError, match="must have a number for each of 1 axes"):
        nn.FieldLoss(nn.H1Loss(lengths=(1.0, 2.0))).forward(np.zeros((1, 4, 1)), np.ones((1, 4, 1)))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda u, y: nn.SpectralLoss(4), r"frequencies=4 do not fit a field of \(8,\) positions"),
        (lambda u, y: nn.SpectralLoss((1, 1)), "frequencies="),
        (
            lambda u, y: nn.ResidualLoss(lambda y: y, ("y",)),
            r"terms=\('y',\), spacing=1.0 and periodic=False do not fit",
        ),
        (lambda u, y: nn.ResidualLoss(lambda x: x, ("x",), spacing=(1.0, 2.0)), "do not fit a field of 1 axes"),
        (lambda u, y: nn.ResidualLoss(np.fft.fft, ("u",)), "the residual returned complex128"),
        (lambda u, y: nn.ResidualLoss(lambda x: x[0], ("x",)), r"the residual returned float64 of shape \(2, 1\)"),
    ],
)
def test_fields_that_a_loss_does_not_fit_are_told(make, why):
    u = np.ones((1, 8, 1))
    with pytest.raises(DataError, match=why):
        nn.FieldLoss(make(u, u)).forward(u, u)


@pytest.mark.parametrize(
    ("loss", "target", "why"),
    [
        (nn.MeanSquaredError(), np.ones((3, 8, 6)), r"prediction's shape \(3, 8, 2\).* target has shape \(3, 8, 6\)"),
        *(
            (nn.MeanSquaredError(), np.ones(shape), r"prediction, \(3, 8\); one of them has shape \(.*2\)")
            for shape in ((2, 8, 2), (3, 7, 2), (3, 1, 2), (3, 2))
        ),
        (
            nn.MeanSquaredError(),
            {"mask": np.ones((3, 8, 1), bool)},
            r"shape \(3, 8, 2\).* the mask has shape \(3, 8, 1\)",
        ),
        (nn.CrossEntropy(), np.ones((3, 8, 2), int), r"integers of shape \(3, 8\), .* is int64 of shape \(3, 8, 2\)"),
        (nn.ResidualLoss(np.exp, ("u",)), {"weight": np.ones((3, 8, 2))}, r"the weight has shape \(3, 8, 2\)"),
        (nn.ResidualLoss(np.exp, ("u",)), {"mask": np.ones((3, 8, 2), bool)}, r"the mask has shape \(3, 8, 2\)"),
    ],
)
def test_targets_of_other_shapes_are_told_with_the_shape_of_the_field(loss, target, why):
    given = {"target": np.ones((3, 8, 2)), **target} if isinstance(target, dict) else target
    with pytest.raises(DataError, match=why):
        nn.FieldLoss(loss).forward(np.ones((3, 8, 2)), given)


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda u, f: u.__imul__(f), "read-only"),
        (lambda u: u, "positional argument"),
        (lambda u, f: u * np.ones((8, 1)), "broadcast"),
    ],
)
def test_an_error_in_a_residual_says_how_it_is_called(function, error):
    u = np.ones((1, 8, 1))
    with pytest.raises((TypeError, ValueError), match=error) as found:
        nn.FieldLoss(nn.ResidualLoss(function, ("u", "target"))).forward(u, u)
    assert "ResidualLoss calls it with the terms ('u', 'target')" in found.value.__notes__[0]


def test_settings_may_be_numbers_of_numpy_and_lists(rng):
    u, y = rng.normal(size=(2, 1, 8, 9, 1))
    for given, plain in (
        (nn.SpectralLoss(np.int64(2)), nn.SpectralLoss(2)),
        (nn.H1Loss(lengths=[1.0, 2.0]), nn.H1Loss(lengths=(1.0, 2.0))),
    ):
        assert nn.FieldLoss(given).forward(u, y)[:2] == nn.FieldLoss(plain).forward(u, y)[:2]


def test_a_mode_has_no_mask():
    u = np.ones((1, 8, 1))
    with pytest.raises(DataError, match="a mode has no position"):
        nn.FieldLoss(nn.SpectralLoss(2)).forward(u, {"target": u, "mask": np.ones((1, 8), bool)})
    with pytest.raises(DataError, match="a mode has no position"):
        nn.FieldLoss(nn.SpectralLoss(2), weights=np.ones(8)).forward(u, u)
