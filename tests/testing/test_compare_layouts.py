from __future__ import annotations

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError
from mpizero.testing import compare_layouts
from tests.parallel.parameters.test_memory import limit_windows
from tests.testing import planted
from tests.testing.planted import causes, compared, finding, gpt, texts

FAR = [0.0] * 4


def function(noise=lambda comm: FAR, calls=None):
    """A black box; ``noise(comm)`` is added to the gradient, and its first element to the loss."""

    def make(comm):
        def loss_and_grad(p, batch):
            x, y = batch
            error = x @ p["w"] + p["b"] - y
            extra = np.asarray(noise(comm))
            return float((error**2).sum()) / 2 + extra[0], {"w": x.T @ error + extra, "b": error.sum()}, float(len(x))

        return mz.FunctionModel({"w": np.zeros(4), "b": np.zeros(())}, loss_and_grad)

    return make


def lines(count):
    rng = np.random.default_rng(1)
    return [(rng.normal(size=(7, 4)), rng.normal(size=7)) for _ in range(count)]


# ------------------------------------------------------------------ no false alarm


@pytest.mark.parametrize(
    "layout", ["1", "zero1*2, private", "zero3*3", "pipeline=3, data=2", "ddp*4, ranks_per_node=2"]
)
def test_layouts_that_are_right_have_the_same_bits(layout):
    report = compared(layout, model=lambda comm: gpt(dropout=0.1), clip=0.1)
    one, other = report.verdicts
    assert (report.agrees, other.steps, other.tolerance) == (True, 3, None)
    assert other.sha256 == one.sha256
    report.check()


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "dtype"), [("tensor=2, data=2", "float64"), ("context=2", "float32")])
def test_groups_have_the_bits_of_one_process_with_their_tiles(layout, dtype):
    settings = {"model": lambda comm: gpt(dtype=dtype, dropout=0.1), "clip": 0.1, "batches": texts(2, 4)}
    own = compared(layout, **settings)
    one, other = own.verdicts
    axis = "context" if "context" in layout else "tensor"
    assert (own.agrees, other.verdict) == (True, f"same bits with tiles={{'{axis}': 2}}")
    assert other.sha256 != one.sha256
    given = compared(layout, **settings, tiles={axis: 2})
    assert given.agrees
    assert {verdict.sha256 for verdict in given.verdicts} == {other.sha256}


def test_a_black_box_is_compared_too_and_global_batches_may_be_uneven():
    report = compare_layouts(function(), lines(4), ["2", "zero3*3", "ddp*8"], micro_batch=2)
    assert [v.steps for v in report.verdicts] == [4] * 4
    assert report.agrees, report


@pytest.mark.slow
def test_lamb_and_momentum_are_compared_with_their_state():
    assert compared("zero3*3, private", make_optimizer=lambda: mz.LAMB(lr=1e-2)).agrees
    assert compared("tensor=2", make_optimizer=lambda: mz.LAMB(lr=1e-2)).agrees
    assert compared("zero2*2", make_optimizer=lambda: mz.SGD(lr=0.1, momentum=0.9)).agrees


def test_batches_that_are_not_finite_are_skipped_everywhere_and_agree():
    bad = [(x.copy(), y) for x, y in lines(3)]
    bad[1][0][3, 2] = np.nan
    assert compare_layouts(function(), bad, ["zero2*3"], clip=1.0).agrees


# ------------------------------------------------------------------ planted faults


def missed_clip(patch):
    planted.missed_clip(patch, first=2)


def clip_missed_by_one(patch):
    planted.missed_clip(patch, first=2, ranks=lambda rank: rank == 1)


def stale_parameters(patch):
    planted.stale_parameters(patch, first=2, rank=1)


TOLD = "wrong count: every gradient is {n} times too small, and {n} is the number of ranks"
TIED = "a tied gradient counted twice: the part of 'head.projection.weight'"
#: A fault, layouts of so many ranks each, step and quantity of the finding, its ranks, cause and words.
FAULTS = (
    (
        planted.wrong_divisor,
        {"zero1*{n}": 3, "pipeline=2, data=2": 4, "tensor=2": 2},
        (1, "gradient before clipping", None, "wrong count", TOLD),
    ),
    (missed_clip, {"zero2*{n}": 3}, (2, "clip factor", None, "clip", "a missed clip")),
    (
        clip_missed_by_one,
        {"zero1*{n}": 4, "zero2*{n}, private": 4, "tensor=2, data=2": 4},
        (2, "gradient after clipping", (1,), "clip", "a missed clip"),
    ),
    (
        planted.tie_counted_twice,
        {"zero1*{n}": 2, "zero3*{n}": 3},
        (1, "gradient before clipping", None, "tied gradient", TIED),
    ),
    (stale_parameters, {"zero1*{n}, private": 3}, (2, "parameter", (1,), "stale parameters", "stale parameters")),
    (planted.stale_halo, {"context=2": 2}, (2, "loss", None, "stale data", "stale data")),
    (
        planted.skipped_reduction,
        {"zero1*{n}": 2, "ddp*{n}, private": 4},
        (1, "gradient before clipping", None, "skipped reduction", "a skipped reduction"),
    ),
    (
        planted.rank_keyed_dropout,
        {"zero1*{n}": 2, "zero2*{n}": 3},
        (1, "loss", "all but 0", "keyed by the rank", "random numbers keyed by the rank"),
    ),
)


def check_finding(patch, plant, layout, ranks, expected, dtype="float32", comm=None):
    plant(patch)
    found = finding(
        layout.format(n=ranks),
        comm=comm,
        model=lambda comm: gpt(dtype=dtype, dropout=0.2 * (plant is planted.rank_keyed_dropout)),
        clip=0.1,
        micro_batch=8 if plant is planted.stale_halo else 1,
        batches=texts(2),
    )
    step, quantity, of, cause, told = expected
    assert (found.step, found.quantity) == (step, quantity)
    assert of is None or found.ranks == (tuple(range(1, ranks)) if of == "all but 0" else of)
    assert causes(found) == {cause}
    assert told.format(n=ranks) in found.diagnosis
    return found


@pytest.mark.parametrize(
    ("plant", "layout", "ranks", "expected"),
    [(plant, layout, ranks, expected) for plant, layouts, expected in FAULTS for layout, ranks in layouts.items()],
)
def test_classic_faults_are_named_and_nothing_else_is(monkeypatch, plant, layout, ranks, expected):
    dtype = ("float32", "float64")[(len(layout) + ranks) % 2]
    found = check_finding(monkeypatch, plant, layout, ranks, expected, dtype)
    if plant is planted.wrong_divisor:
        assert found.found * ranks == pytest.approx(found.expected)
    if plant is planted.tie_counted_twice:
        assert (found.tensor, found.tensors) == ("embedding.token.weight", 1)


def test_a_fault_is_explained_also_where_the_gradients_find_no_shared_memory(monkeypatch, capsys):
    limit_windows(monkeypatch, 20_000)  # the parameters have room, a row of gradients for each of two ranks has not
    planted.wrong_divisor(monkeypatch)
    assert "wrong count: every gradient is 2 times too small" in str(finding("ddp*2"))
    assert "every rank keeps its own copy" in capsys.readouterr().err


def test_noise_of_the_users_function_that_depends_on_the_rank_is_named():
    model = function(lambda comm: np.random.default_rng(comm.rank).normal(size=4))
    found = finding("zero2*3", model=model, batches=lines(2), micro_batch=2)
    assert (found.step, found.quantity, found.ranks) == (1, "loss", (1, 2))
    assert "depends on the rank" in found.diagnosis


def test_a_generator_that_keeps_a_state_is_named():
    def make(comm):
        rng = np.random.default_rng(0)
        return function(lambda comm: rng.normal(size=4))(comm)

    assert "no function of parameters and batch" in finding("2", model=make, batches=lines(2)).diagnosis


def test_start_values_that_depend_on_the_rank_are_found_before_the_first_step():
    found = finding("zero1*2, pipeline=2", model=lambda comm: gpt(seed=int(comm.size > 1)))
    assert (found.step, found.quantity, found.ranks) == (0, "start value", (0,))
    assert "start values" in found.diagnosis


class Unrepeatable(mz.optim.TensorOptimizer):
    """An optimizer whose state of whole tensors has random numbers without a seed, which no parameter sees."""

    tensor_slots = ("noise",)

    def state_shapes(self, shape):
        return {"noise": (2,)}

    def cost(self, shape):
        return 1

    def update_tensor(self, w, g, state, step):
        w -= step.lr * g
        state["noise"][:] = np.random.default_rng().random(2)


def test_state_of_whole_tensors_is_compared_and_named():
    assert compared("zero2*3", make_optimizer=lambda: mz.Muon(lr=1e-2), clip=0.1).agrees
    found = finding("zero2*3", make_optimizer=lambda: Unrepeatable(lr=1e-2))
    assert (found.step, found.quantity, found.index) == (1, "optimizer slot 'noise'", (0,))
    assert (found.tensor, found.size, found.differing, found.ranks) == ("blocks.0.attention.qkv.weight", 2, 2, ())


@pytest.mark.slow
def test_state_of_whole_tensors_follows_a_layout_that_rounds():
    report = compared("context=3", make_optimizer=lambda: mz.SOAP(lr=1e-2, frequency=1))
    assert report.agrees
    assert report.verdicts[1].tolerance is not None


def test_a_slot_that_changes_after_the_update_is_named(monkeypatch):
    planted.halved_slots(monkeypatch)
    found = finding("zero1*3", clip=0.1)
    assert (found.step, found.quantity, found.tensors) == (1, "optimizer slot 'exp_avg'", 16)
    assert found.found == pytest.approx(0.5 * found.expected)


def test_a_training_that_is_another_when_it_is_run_again_is_called_so():
    rates = iter([0.1, 0.2, 0.1, 0.1])  # one process, the layout, and both again
    optimizer = lambda: mz.SGD(lr=next(rates))  # noqa: E731
    found = finding("1", model=function(), batches=lines(2), make_optimizer=optimizer)
    assert (found.step, found.quantity, found.tensor) == (1, "parameter", "w")
    assert found.diagnosis.startswith("a race, or random numbers without a seed")


# ------------------------------------------------------------------ the report


def test_the_report_has_a_line_for_each_layout_and_raises_when_asked(monkeypatch):
    planted.wrong_divisor(monkeypatch)
    report = compare_layouts(gpt, texts(2), ["1", "zero1*2"], steps=1)
    lines_of_table = str(report).splitlines()[:4]
    assert [line.split("  ")[0] for line in lines_of_table] == ["layout", "one process", "zero2*1", "zero1*2"]
    assert [line.split("  ")[-1] for line in lines_of_table[1:]] == ["same bits", "same bits", "differs at step 1"]
    with pytest.raises(AssertionError, match="every gradient is 2 times too small"):
        report.check()
    assert report.to_dict()["layouts"][2]["finding"]["step"] == 1


def test_unknown_layouts_are_refused_with_what_is_allowed():
    for text in ("zero9*2", "pipeline=2*3", "", "pipeline=2, pipeline=3", "tensor=0"):
        with pytest.raises(ConfigError, match="layout"):
            compare_layouts(gpt, texts(1), [text])


def test_a_layout_that_the_model_cannot_have_is_named():
    with pytest.raises(ConfigError, match=r"layout 'zero2\*5, tensor=5': heads=\d cannot be split evenly"):
        compare_layouts(gpt, texts(1), ["tensor=5"])


def test_progress_is_told_after_every_step():
    told = []
    compare_layouts(function(), lines(2), ["2"], progress=lambda layout, step: told.append((layout, step)))
    assert told == [(name, step) for name in ("one process", "zero2*2") for step in range(3)]


# ------------------------------------------------------------------ ranks of MPI


@pytest.mark.mpi
def test_all_ranks_get_the_same_report_and_small_layouts_leave_ranks_waiting(world):
    layouts = [f"zero2*{world.size}", "1", f"pipeline={min(3, world.size)}, private"]
    model, settings = (lambda comm: gpt(dropout=0.1)), {"clip": 0.1, "micro_batch": 1}
    report = compare_layouts(model, texts(2), layouts, comm=world, **settings)
    assert report.agrees, report
    assert len(set(map(str, world.allgather_object(report.to_dict())))) == 1


@pytest.mark.mpi(min_size=2)
def test_planted_faults_are_named_on_ranks_of_mpi(world, monkeypatch):
    """On each number of ranks some of them, the others on another."""
    first, every = {2: (0, 3), 3: (1, 3), 4: (2, 3)}.get(world.size, (4, 4))
    for plant, layouts, expected in FAULTS[first::every]:
        layout = next(iter(layouts))
        with monkeypatch.context() as patch:
            found = check_finding(patch, plant, layout, world.size, expected, comm=world)
        assert len({str(other) for other in world.allgather_object(found)}) == 1


@pytest.mark.mpi
def test_a_layout_with_too_many_ranks_is_refused_on_all(world):
    with pytest.raises(ConfigError, match=f"needs {world.size + 1} ranks, this job has {world.size}"):
        compared(f"ddp*{world.size + 1}", comm=world)
