"""Methods of whole vectors, with regularization: the bits of one process on every layout, minima of other solvers."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, LayoutError, MpizeroError, NonFiniteError
from mpizero.testing import run_in_threads
from tests.parallel.models import MEMORIES, STRATEGIES, mlp, points, sharded

METHODS = ("l-bfgs", "cg", "newton-cg")


def rosenbrock(parameters, batch):
    """Two parameters are one vector: its elements at even and at odd places."""
    x = np.empty(17)
    x[::2], x[1::2] = parameters["even"], parameters["odd"]
    a, b = x[1:] - x[:-1] ** 2, 1.0 - x[:-1]
    slope = np.zeros(17)
    slope[1:] += 200.0 * a
    slope[:-1] -= 400.0 * x[:-1] * a + 2.0 * b
    return float((100.0 * a**2 + b**2).sum()), {"even": slope[::2].copy(), "odd": slope[1::2].copy()}, 1.0


def curved(**changes: Any) -> mz.FunctionModel:
    start = {"even": np.full(9, -1.2), "odd": np.full(8, 1.0)} | changes
    return mz.FunctionModel({name: np.array(values) for name, values in start.items()}, rosenbrock)


RNG = np.random.default_rng(3)
MATRIX = RNG.normal(size=(40, 6)) * np.logspace(0, -1, 6)
TARGETS = RNG.normal(size=40)


def squares(parameters, batch):
    """Least squares: half a squared residual a sample."""
    a, t = batch
    residual = a @ parameters["w"] - t
    return 0.5 * float((residual**2).sum()), {"w": a.T @ residual}, float(len(a))


def linear() -> mz.FunctionModel:
    return mz.FunctionModel({"w": np.zeros(6)}, squares)


SCALES = np.logspace(0, 3, 6)


def scaled() -> mz.FunctionModel:
    """Least squares in unknowns of very different sizes."""

    def loss_and_grad(parameters: Any, batch: Any) -> tuple[float, Any, float]:
        value, slope, weight = squares({"w": parameters["w"] * SCALES}, batch)
        return value, {"w": slope["w"] * SCALES}, weight

    return mz.FunctionModel({"w": np.zeros(6)}, loss_and_grad)


TIMES = np.linspace(0.0, 4.0, 21)
CURVE = 2.5 * np.exp(-1.3 * TIMES) + 0.5 + 0.05 * np.sin(40.0 * TIMES)


def curve_fit() -> mz.FunctionModel:
    """Fit ``a exp(-b t) + c``: residuals whose Jacobian is known."""

    def jacobian(p, t):
        return np.stack([np.exp(-p[1] * t), -p[0] * t * np.exp(-p[1] * t), np.ones_like(t)], 1)

    def loss_and_grad(parameters, batch):
        (t, y), p = batch, parameters["p"]
        residual = p[0] * np.exp(-p[1] * t) + p[2] - y
        return 0.5 * float((residual**2).sum()), {"p": jacobian(p, t).T @ residual}, float(len(t))

    def gauss_newton(parameters, batch, direction):
        j = jacobian(parameters["p"], batch[0])
        return {"p": j.T @ (j @ direction["p"])}, float(len(j))

    return mz.FunctionModel({"p": np.array([1.0, 0.5, 0.0])}, loss_and_grad, product=gauss_newton)


PLANE = np.random.default_rng(5).normal(size=(40, 12))


def plane(**more: Any) -> mz.FunctionModel:
    """Least squares in two parameters, one of two axes, with the products of Gauss-Newton."""

    def vector(parameters: Any) -> Any:
        return np.concatenate([parameters["w"].reshape(-1), parameters["b"]])

    def named(values: Any) -> dict[str, Any]:
        return {"w": values[:8].reshape(2, 4), "b": values[8:]}

    def loss_and_grad(parameters: Any, batch: Any) -> tuple[float, Any, float]:
        a, t = batch
        residual = a @ vector(parameters) - t
        return 0.5 * float(residual @ residual), named(a.T @ residual), float(len(a))

    def product(parameters: Any, batch: Any, direction: Any) -> tuple[Any, float]:
        a, _ = batch
        return named(a.T @ (a @ vector(direction))), float(len(a))

    return mz.FunctionModel({"w": np.zeros((2, 4)), "b": np.zeros(4)}, loss_and_grad, product=product, **more)


TERMS = {"w": mz.TotalVariation(0.1), "b": mz.Tikhonov(0.2)}
#: Models, and what minimize is asked for besides few iterations.
PROBLEMS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{method: (curved, {"method": method}) for method in METHODS},
    "least squares": (linear, {"data": (MATRIX, TARGETS)}),
    "gauss-newton": (curve_fit, {"data": (TIMES, CURVE), "method": "gauss-newton"}),
    "bounds": (linear, {"data": (MATRIX, TARGETS), "bounds": {"w": (np.full(6, -0.05), [0.1] * 6)}}),
    "factors": (scaled, {"data": (MATRIX, TARGETS), "options": {"preconditioner": {"w": SCALES**-2.0}}}),
    "one factor in bounds": (
        scaled, {"data": (MATRIX, TARGETS), "bounds": (-0.5, 0.5), "options": {"preconditioner": {"*": 0.1}}}
    ),
    "learned": (scaled, {"data": (MATRIX, TARGETS), "options": {"initial": "diagonal", "history": 3}}),
    "learned in bounds": (
        scaled,
        {"data": (MATRIX, TARGETS), "bounds": (-0.5, 0.5), "options": {"initial": "diagonal", "history": 3}},
    ),
    "regularized": (plane, {"data": (PLANE, TARGETS), "regularization": TERMS}),
    "regularized products": (plane, {"data": (PLANE, TARGETS), "regularization": TERMS, "method": "gauss-newton"}),
}  # fmt: skip


def problem(name: str, iterations: int) -> tuple[mz.FunctionModel, dict[str, Any]]:
    make, choice = PROBLEMS[name]
    return make(), choice | {"options": {**choice.get("options", {}), "maxiter": iterations}}


def minimized(comm, model, data=None, strategy="zero1", then=lambda placed, found: None, settings=None, **choice):
    """Return the result, the hash of the parameters, and what ``then`` returns of model and result."""
    with (
        mz.ShardingConfig(comm=comm, **{"minimum_parameter_group_size": 1, "micro_batch": 3} | (settings or {})) as c,
        mz.distribute(model, None, strategy=strategy, config=c) as placed,
    ):
        found = mz.minimize(placed, data, **choice)
        told = (found.fun, found.norm, found.nit, found.nfev, found.success, found.message)
        return told, placed.parameters_sha256(), found.x, then(placed, found)


@pytest.mark.parametrize("name", PROBLEMS)
def test_iterates_have_the_bits_of_one_process_on_every_layout(name):
    """With two strategies each, on numbers of ranks and with kinds of memory in turn."""
    model, choice = problem(name, 2 if name == "regularized products" else 6)
    expected = minimized("self", model, **choice)[:2]
    number = list(PROBLEMS).index(name)
    for turn, strategy in enumerate(STRATEGIES[number % 2 :: 2], 2 * number):
        ranks, memory = 2 + turn % 3, MEMORIES[turn // 3 % 3]
        found = run_in_threads(
            ranks, lambda comm, s=strategy, m=memory: minimized(comm, model, strategy=s, settings=m, **choice)[:2]
        )
        assert found == [expected] * ranks, (strategy, memory)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_minimum_is_found(method):
    told, _, x, _ = minimized("self", curved(), method=method, options={"gtol": 1e-9})
    assert told[4], told
    np.testing.assert_allclose(x, 1.0, rtol=0, atol=1e-8)
    told, _, x, _ = minimized("self", linear(), (MATRIX, TARGETS), method=method, options={"gtol": 1e-12})
    expected = np.linalg.lstsq(MATRIX, TARGETS, rcond=None)[0]
    np.testing.assert_allclose(x, expected, rtol=1e-7)
    assert told[0] == pytest.approx(0.5 * np.mean((MATRIX @ expected - TARGETS) ** 2), rel=1e-12)


@pytest.mark.slow
def test_gauss_newton_with_the_models_products_finds_the_least_squares():
    choice = {"method": "gauss-newton", "options": {"gtol": 1e-12}}
    told, _, x, _ = minimized("self", curve_fit(), (TIMES, CURVE), **choice)
    assert told[4]
    # the solver of this problem without a tolerance: Newton's steps on the normal equations
    p = np.array([2.5, 1.3, 0.5])
    for _ in range(60):
        decay = np.exp(-p[1] * TIMES)
        j = np.stack([decay, -p[0] * TIMES * decay, np.ones_like(TIMES)], 1)
        p = p - np.linalg.lstsq(j, p[0] * decay + p[2] - CURVE, rcond=None)[0]
    np.testing.assert_allclose(x, p, rtol=1e-9)
    fewer = minimized("self", curve_fit(), (TIMES, CURVE), method="l-bfgs", options={"gtol": 1e-12})[0]
    assert told[2] < fewer[2], "it takes fewer iterations than a method that does not know the curvature"


def test_what_a_product_returns_is_checked():
    model = curve_fit()
    model.product = lambda parameters, batch, direction: {"p": direction["p"]}
    with pytest.raises(LayoutError, match=r"product must return \(products by name, weight\)"):
        minimized("self", model, (TIMES, CURVE), method="gauss-newton")
    with pytest.raises(ConfigError, match="needs products of the model"):
        minimized("self", linear(), (MATRIX, TARGETS), method="gauss-newton")
    with pytest.raises(ConfigError, match="needs products .* and no options"):
        minimized("self", curve_fit(), (TIMES, CURVE), method="gauss-newton", options={"exact": False})


def best_in_box(lower, upper):
    """The minimizer of the least squares in a box, by trying which elements are at which bound."""
    best = (np.inf, None)
    for sides in itertools.product((None, lower, upper), repeat=6):
        fixed = np.array([side is not None for side in sides])
        x = np.array([0.0 if side is None else side for side in sides])
        x[~fixed] = np.linalg.lstsq(MATRIX[:, ~fixed], TARGETS - MATRIX[:, fixed] @ x[fixed], rcond=None)[0]
        if ((x >= lower) & (x <= upper)).all():
            best = min(best, (float(((MATRIX @ x - TARGETS) ** 2).sum()), tuple(x)))
    return np.array(best[1])


@pytest.mark.slow
def test_with_bounds_the_minimum_in_the_box_is_found_and_no_trial_leaves_it():
    seen = []

    def watched(parameters, batch):
        seen.append((parameters["w"].min(), parameters["w"].max()))
        return squares(parameters, batch)

    model = mz.FunctionModel({"w": np.full(6, 9.0)}, watched)  # outside: it starts at the bound
    bounds = (-0.05, 0.1)
    told, _, x, _ = minimized("self", model, (MATRIX, TARGETS), bounds=bounds, options={"gtol": 1e-12})
    expected = best_in_box(*bounds)
    assert ((expected == bounds[0]) | (expected == bounds[1])).any(), "no bound is active: the test shows nothing"
    np.testing.assert_allclose(x, expected, rtol=0, atol=1e-9)
    assert told[4]
    assert seen[0] == (9.0, 9.0)
    assert all(low >= bounds[0] and high <= bounds[1] for low, high in seen[len(TARGETS) // 3 + 1 :])


def test_one_sided_bounds_of_one_parameter_leave_the_others_free():
    told, _, x, _ = minimized("self", curved(), bounds={"ev*": (None, 0.5)}, options={"gtol": 1e-8})
    even, odd = x[:9], x[9:]
    assert told[4]
    assert even.max() == 0.5
    assert odd.max() > 0.5 or odd.min() < 0.5


def trained(comm, model, steps, optimizer, layout=None, **settings):
    config = mz.ShardingConfig(comm=comm, micro_batch=3, **settings)
    x, y = RNG_BATCH
    kind = {"optimizer": optimizer, **(layout or {})}
    with config, mz.HybridShardedModel(model, config, **kind) as placed:
        group = placed.batch_group
        share = np.array_split(np.arange(len(x)), group.size)[group.rank]
        return [placed.train(x[share], y[share]) for _ in range(steps)], placed.parameters_sha256()


RNG_BATCH = np.random.default_rng(5).normal(size=(14, 6)).astype(np.float32), np.arange(14) % 3


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [mz.LBFGS(history=3), mz.NonlinearCG(), mz.NewtonCG()], ids=METHODS)
def test_as_the_optimizer_of_a_model_it_lowers_the_loss_and_keeps_its_bits_in_stages_and_tiles(optimizer):
    losses, digest = trained("self", mlp(), 8, optimizer)
    assert min(losses) < 0.9 * losses[0]
    for layout in ({"pipeline_parallel_size": 3, "zero_stage": 2}, {"pipeline_parallel_size": 1, "zero_stage": 3}):
        everyone = run_in_threads(3, lambda comm, la=layout: trained(comm, mlp(), 8, optimizer, la))
        assert all(rank == (losses, digest) for rank in everyone)
    tiled = trained("self", mlp(), 4, optimizer, tiles={"tensor": 2})
    everyone = run_in_threads(2, lambda comm: trained(comm, mlp(), 4, optimizer, {"tensor_parallel_size": 2}))
    assert all(rank == tiled for rank in everyone)


@pytest.mark.parametrize(
    ("name", "stop"),
    [*zip(METHODS, (1, 4, 1), strict=True), ("l-bfgs", 4), ("newton-cg", 4), ("l-bfgs", 12), ("learned", 4),
     ("learned in bounds", 4)],
)  # fmt: skip
def test_a_minimization_goes_on_from_a_checkpoint_on_other_ranks_with_the_same_bits(name, stop, tmp_path):
    """The twelfth iteration is the last."""
    model, choice = problem(name, 12)
    whole = minimized("self", model, **choice)

    def save(found):
        if found.nit == stop:
            found.model.save_model(tmp_path / "saved")
            raise StopIteration

    first = run_in_threads(3, lambda comm: minimized(comm, model, strategy="zero3", **choice, callback=save)[0])
    assert {told[2] for told in first} == {stop}
    assert first[0][5] == "the callback has raised StopIteration"
    found = run_in_threads(2, lambda comm: minimized(comm, model, strategy="ddp", **choice, resume=tmp_path / "saved"))
    assert {digest for _, digest, *_ in found} == {whole[1]}


def test_state_that_is_returned_and_loaded_goes_on_with_the_same_bits():
    x, y = RNG_BATCH

    def train(steps, state=None, values=None):
        with sharded("zero1", None, mlp(), mz.LBFGS(history=2), micro_batch=3) as model:
            if state is not None:
                model.set_parameters(values)
                model.optimizer.load_state_dict(state)
            losses = [model.train(x, y) for _ in range(steps)]
            return losses, model.optimizer.state_dict(), model.get_parameters()

    whole, half = train(9), train(4)
    rest = train(5, *half[1:])
    assert half[0] + rest[0] == whole[0]
    np.testing.assert_array_equal(rest[2], whole[2])
    with pytest.raises(LayoutError, match="progress"):
        train(1, {**half[1], "progress": {"stage": "lost"}}, half[2])


def test_the_callback_sees_iterates_and_changes_no_bit():
    losses = []

    def look(found):
        value = rosenbrock(dict(zip(("even", "odd"), np.split(found.x, [9]), strict=True)), None)[0]
        losses.append((found.nit, found.fun, value))

    options = {"maxiter": 9}
    watched = minimized("self", curved(), callback=look, options=options)[:2]
    assert watched == minimized("self", curved(), options=options)[:2]
    assert [nit for nit, _, _ in losses] == list(range(1, 10))
    assert all(told == found for _, told, found in losses)
    falls = [told for _, told, _ in losses]
    assert falls == sorted(falls, reverse=True)


def test_the_limit_that_ends_a_minimization_is_told():
    for limit in ("maxiter", "maxfun"):
        told = minimized("self", curved(), options={limit: 3})[0]
        assert not told[4]
        assert f"{limit}=3 " in told[5]


def test_a_trial_at_which_the_loss_is_not_finite_is_shortened():
    def barrier(parameters, batch):
        x = parameters["x"]
        with np.errstate(invalid="ignore", divide="ignore"):
            return float((x - np.log(x)).sum() * 1e3), {"x": 1e3 * (1.0 - 1.0 / x)}, 1.0

    settings = {"bad_steps": mz.BadSteps(warn=False, limit=20)}
    for method in METHODS:
        model = mz.FunctionModel({"x": np.array([1e-3, 30.0])}, barrier)
        x = minimized("self", model, method=method, options={"gtol": 1e-6}, settings=settings)[2]
        np.testing.assert_allclose(x, 1.0, atol=1e-8)
    with pytest.raises(NonFiniteError):  # there is no step to shorten before the first one
        minimized("self", mz.FunctionModel({"x": np.array([-1.0])}, barrier), settings=settings)


def test_state_takes_twice_the_history_and_four_vectors():
    def held(placed, found):
        return placed._engine.memory.kinds()["optimizer state"]

    choice = {"method": mz.LBFGS(history=5), "options": {"maxiter": 1}}  # the history has its place from the start
    for size in (1, 2, 4):
        for *_, bytes_held in run_in_threads(
            size, lambda comm: minimized(comm, mlp(), RNG_BATCH, "zero2", held, **choice)
        ):
            assert bytes_held == pytest.approx((2 * 5 + 4) * 4 * 107 / size, abs=(2 * 5 + 4) * 4 * 7)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"method": "lbfgs"}, "method='lbfgs' .did you mean 'l-bfgs'"),
        ({"options": {"histroy": 3}}, "histroy.*did you mean 'history'"),
        ({"options": {"history": 0}}, "LBFGS: history"),
        ({"options": {"maxiter": 0}}, "maxiter"),
        ({"method": "cg", "bounds": (0, 1)}, "'cg' has no bounds"),
        ({"method": mz.LBFGS(), "bounds": (0, 1)}, "bounds is a setting of the method"),
        ({"bounds": (1, 0)}, "lower bound is above"),
        ({"bounds": 3}, "expected a pair"),
        ({"bounds": {"evn": (0, 1)}}, "evn.*even"),
        ({"bounds": {"even": (np.zeros(4), None)}}, r"shape \(4,\), the parameter \(9,\)"),
        ({"options": {"initial": "identity"}}, 'LBFGS: initial=\'identity\': expected one of "scalar", "diagonal"'),
        ({"options": {"preconditioner": {"even": 0.0}}}, r"preconditioner\['even'\]=0.0: expected positive factors"),
        ({"options": {"preconditioner": 2.0}}, "preconditioner=2.0: expected positive factors by the names"),
        ({"options": {"preconditioner": {"v": 1.0}}}, "preconditioner"),
        ({"options": {"preconditioner": {"even": np.ones(5)}}}, r"of 'even' has shape \(5,\), the parameter \(9,\)"),
        ({"settings": {"clip": 1.0}}, "leave out clip=1.0"),
        ({"settings": {"ema": 0.9}}, "leave out ema=0.9"),
        ({"settings": {"gradient_compression": "bf16"}}, "leave out gradient_compression='bf16'"),
    ],
)
def test_what_does_not_fit_is_named(choice, expected):
    with pytest.raises(ConfigError, match=expected):
        minimized("self", curved(), **choice)


@pytest.mark.parametrize(
    ("differs", "expected"),
    [
        (lambda rank: {"method": ("l-bfgs", "cg")[rank]}, "the optimizer"),
        (lambda rank: {"bounds": (-1.0 - rank, 2.0)}, "the optimizer"),
        (lambda rank: {"options": {"maxiter": 5 + rank}}, "maxiter and maxfun"),
        (lambda rank: {"data": (MATRIX, TARGETS + rank)}, r"the data \(y\)"),
        (lambda rank: {"options": {"gtoll": 1.0}} if rank else {}, "gtoll"),
    ],
)
def test_ranks_that_differ_are_told_on_all(differs, expected):
    def run(comm):
        choice = {"data": (MATRIX, TARGETS), **differs(comm.rank)}
        with pytest.raises(MpizeroError, match=expected):
            minimized(comm, linear(), choice.pop("data"), **choice)

    run_in_threads(2, run)


@pytest.mark.parametrize("kind", [mz.LocalSGDOptimizer, mz.GradientCompressionOptimizer])
def test_ranks_that_do_not_have_the_exact_gradient_refuse_it(kind):
    with pytest.raises(ConfigError, match="LBFGS needs the exact gradient"):
        kind(mz.LBFGS())


def test_data_may_be_trees_of_arrays_and_are_compared_by_their_paths() -> None:
    """A dictionary of inputs, for ``minimize`` and ``optimize``."""

    def loss_and_grad(parameters: Any, batch: Any) -> tuple[float, Any, float]:
        return squares(parameters, (batch[0]["matrix"], batch[1]))

    def run(comm: Any, data: Any) -> str:
        function = mz.FunctionModel({"w": np.zeros(6)}, loss_and_grad)
        with sharded("zero1", comm, function, mz.SGD(lr=1e-3), micro_batch=3) as model:
            model.optimizer.optimize(data, mz.OptimizationOptions(epochs=1, batch_size=8, validation=0.0))
            mz.minimize(model, data, options={"maxiter": 3})
            return model.parameters_sha256()

    whole = ({"matrix": MATRIX}, TARGETS)
    (expected,) = run_in_threads(1, lambda comm: run(comm, whole))
    assert set(run_in_threads(2, lambda comm: run(comm, whole))) == {expected}
    with pytest.raises(ConfigError, match=r"the data \(x\['matrix'\]\)"):
        run_in_threads(2, lambda comm: run(comm, ({"matrix": MATRIX + comm.rank}, TARGETS)))


@pytest.mark.slow
def test_a_preconditioner_of_the_right_scales_makes_the_steps_of_the_problem_in_these_scales() -> None:
    model = scaled()
    choice = {"data": (MATRIX, TARGETS), "options": {"gtol": 1e-9}}
    natural = minimized("self", linear(), **choice)
    found = minimized("self", model, **choice | {"options": {"gtol": 1e-9, "preconditioner": {"w": SCALES**-2.0}}})
    plain = minimized("self", model, **choice)
    assert plain[0][4]
    assert found[0][4]
    np.testing.assert_allclose(found[2] * SCALES, natural[2], rtol=1e-7)
    assert found[0][3] <= natural[0][3] + 3 < plain[0][3]


@pytest.mark.parametrize("method", ["l-bfgs", "cg"])
def test_losses_with_the_errors_of_long_sums_do_not_end_a_search_early(method: str) -> None:
    """Values are wrong by up to 2,000 units of rounding, gradients are exact."""

    def noisy(parameters: Any, batch: Any) -> tuple[float, Any, float]:
        x = parameters["w"]
        value = 1.0 + float(np.log(np.cosh(MATRIX @ x - TARGETS)).sum())
        noise = np.random.default_rng(np.frombuffer(x.tobytes(), np.uint32)).uniform(-1.0, 1.0)
        slope = MATRIX.T @ np.tanh(MATRIX @ x - TARGETS)
        return value * (1.0 + 2000.0 * np.finfo(float).eps * noise), {"w": slope}, 1.0

    model = mz.FunctionModel({"w": np.ones(6)}, noisy)
    told = minimized("self", model, method=method, options={"gtol": 1e-10})[0]
    assert told[4], told[5]
    assert told[1] <= 1e-10


@pytest.mark.slow
def test_a_learned_diagonal_needs_fewer_evaluations_where_scales_differ() -> None:
    model = scaled()
    choice = {"data": (MATRIX, TARGETS)}
    plain = minimized("self", model, **choice, options={"gtol": 1e-9, "history": 3})
    found = minimized("self", model, **choice, options={"gtol": 1e-9, "history": 3, "initial": "diagonal"})
    assert plain[0][4]
    assert found[0][4]
    np.testing.assert_allclose(found[2], plain[2], rtol=1e-6)
    assert found[0][3] < plain[0][3]


def test_a_learned_diagonal_is_that_of_the_bfgs_update() -> None:
    """The first two updates, once more in NumPy, from the pairs that the method keeps."""
    model = mz.FunctionModel({"w": np.zeros(6)}, squares)
    learned: list[Any] = []

    def look(placed: Any, found: Any) -> Any:
        return {slot: array.copy() for slot, array in placed._engine.updater.state.items()}

    options = {"initial": "diagonal", "preconditioner": {"w": SCALES}, "history": 5}
    for iterations in (2, 3):
        choice = {"options": options | {"maxiter": iterations, "gtol": 0.0}, "then": look}
        learned.append(minimized("self", model, (MATRIX, TARGETS), **choice)[3])
    s, y = ([learned[1][f"{kind}_difference_{i}"] for i in (0, 1)] for kind in ("parameter", "gradient"))
    b = 1.0 / SCALES
    b *= (y[0] @ (y[0] / b)) / (s[0] @ y[0])
    b = b + y[1] ** 2 / (s[1] @ y[1]) - (b * s[1]) ** 2 / (s[1] @ (b * s[1]))
    b *= (y[1] @ (y[1] / b)) / (s[1] @ y[1])
    np.testing.assert_allclose(learned[0]["diagonal"], b, rtol=1e-10)


def regularized(comm: Any, terms: Any, **choice: Any) -> Any:
    return minimized(comm, plane(), (PLANE, TARGETS), regularization=terms, **choice)


def test_tikhonov_gives_the_solution_of_the_normal_equations() -> None:
    found = regularized("self", {"w": mz.Tikhonov(0.3), "b": mz.Tikhonov(0.3, 2.0)}, options={"gtol": 1e-11})
    reference = np.repeat([0.0, 2.0], [8, 4])
    normal = PLANE.T @ PLANE / 40 + 0.3 * np.eye(12)
    expected = np.linalg.solve(normal, PLANE.T @ TARGETS / 40 + 0.3 * reference)
    np.testing.assert_allclose(found[2], expected, atol=1e-9)
    residual = PLANE @ expected - TARGETS
    loss = 0.5 * residual @ residual / 40 + 0.5 * 0.3 * ((expected - reference) ** 2).sum()
    assert found[0][0] == pytest.approx(loss, rel=1e-12)


@pytest.mark.slow
def test_every_method_finds_the_same_minimum() -> None:
    terms = {"w": mz.TotalVariation(0.1, smoothing=0.1), "b": mz.Tikhonov(0.2)}
    found = [regularized("self", terms, method=m, options={"gtol": 1e-9}) for m in (*METHODS, "gauss-newton")]
    for told, _, x, _ in found:
        assert told[4]
        np.testing.assert_allclose(x, found[0][2], atol=1e-7)


@pytest.mark.slow
def test_stages_of_a_pipeline_count_each_term_once() -> None:
    x, y = points(12)

    def run(comm: Any, stages: int = 2) -> tuple[float, str]:
        config = mz.ShardingConfig(comm=comm, micro_batch=3)
        with config, mz.HybridShardedModel(mlp(dtype="float64"), config, stages, zero_stage=1) as placed:
            terms = {"*.weight": mz.Tikhonov(0.01)}
            found = mz.minimize(placed, (x.astype("f8"), y), regularization=terms, options={"maxiter": 5})
            return found.fun, placed.parameters_sha256()

    expected = run("self", 1)
    for ranks in (2, 4):
        assert set(run_in_threads(ranks, run)) == {expected}


def test_each_term_is_computed_by_one_rank() -> None:
    def run(comm: Any) -> int:
        calls = []

        def counted(values: Any) -> Any:
            calls.append(1)
            return 0.0, np.zeros_like(values)

        with mz.ShardingConfig(comm=comm, micro_batch=3) as config, mz.ZeRO3Model(plane(), config) as placed:
            found = mz.minimize(placed, (PLANE, TARGETS), regularization={"w": counted}, options={"maxiter": 2})
            assert found.nfev >= 2
        return len(calls)

    assert sorted(run_in_threads(3, run))[:2] == [0, 0]


def failing(values: Any) -> Any:
    raise ZeroDivisionError("in my term")


WRONG_TERMS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no such parameter": ({"v": mz.Tikhonov(1.0)}, {}, ConfigError, "regularization"),
    "an error": ({"w": failing}, {}, Exception, "in my term"),
    "another shape": ({"w": lambda v: (0.0, v[:1])}, {}, Exception, r"gradient of shape \(1, 4\)"),
    "not a number": ({"w": lambda v: (np.nan, v)}, {}, NonFiniteError, "start values"),
    "no product": (
        {"w": lambda v: (0.0, v)},
        {"method": "gauss-newton"},
        MpizeroError,
        r"no method product\(values, direction\)",
    ),
}


@pytest.mark.parametrize("name", WRONG_TERMS)
def test_wrong_terms_are_told_on_all_ranks(name: str) -> None:
    terms, more, kind, said = WRONG_TERMS[name]

    def run(comm: Any) -> None:
        with pytest.raises(kind, match=said):
            regularized(comm, terms, **more)

    run_in_threads(2, run)


def test_an_infinite_term_at_a_trial_shortens_the_step() -> None:
    """A barrier: the logarithm of what must stay positive."""

    def barrier(values: Any) -> Any:
        if (values <= -0.1).any():
            return np.inf, np.zeros_like(values)
        return -1e-3 * float(np.log(values + 0.1).sum()), -1e-3 / (values + 0.1)

    found = regularized("self", {"w": barrier}, options={"gtol": 1e-7})
    assert found[0][4]
    assert found[2][:8].min() > -0.1


def test_a_split_parameter_is_refused() -> None:
    def run(comm: Any) -> None:
        with (
            mz.ShardingConfig(comm=comm) as config,
            mz.HybridShardedModel(mlp(hidden=(8,)), config, tensor_parallel_size=2) as placed,
            pytest.raises(ConfigError, match="a tensor group splits"),
        ):
            mz.minimize(placed, points(8), regularization={"*": mz.Tikhonov(1.0)})

    run_in_threads(2, run)


@pytest.mark.parametrize("kind", ["int64", "float32", ">f8"])
def test_a_term_may_return_its_gradient_in_any_type_of_numbers(kind: str) -> None:
    """As numpy.sign of whole numbers does; elements travel to other ranks in the parameter's type."""

    def run(comm: Any, kind: str = "f8") -> Any:
        terms = {"*": lambda values: (float(2 * values.sum()), np.full(values.shape, 2, kind))}
        return regularized(comm, terms, settings={"share_node_memory": False}, options={"maxiter": 3})[:2]

    for ranks in (1, 3):
        assert run_in_threads(ranks, partial(run, kind=kind)) == [run("self")] * ranks
