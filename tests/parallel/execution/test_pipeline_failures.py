"""What goes wrong on one stage ends the step on all of them, says why, and leaves the model as it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, DataError, GridError
from mpizero.layout import SCHEDULES
from mpizero.nn import Layer
from mpizero.testing import parallel_assert, run_in_threads
from mpizero.types import EVALUATE
from tests.parallel.models import part, state_of, ten
from tests.parallel.parallel_layouts import (
    CHUNKS,
    Case,
    Chain,
    Product,
    Way,
    alone,
    gpt,
    mlp,
    of_first,
    placed,
    points,
    texts,
    trained_alone,
    vectors,
    with_traps,
)

BATCHES = points(4, 8)
#: One block of each of three stages or chunks, and the last block.
TRAPPED = ("hidden.0", "hidden.3", "hidden.6", "output")

SCALE_1 = mz.DynamicLossScale(initial=1.0)


def error_of(call: Callable[[], Any]) -> str:
    """The error that a call ends with, "" if it does not."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fails_and_goes_on(comm: Any, way: Way, warm: bool, expected: str) -> None:
    """Spring every trap at the first, a middle and the last micro-batch; between them the model learns as usual.

    Not ``warm``, the first trap springs before any stage has told another the shape of what it sends.
    """
    armed: dict[str, dict[str, Any]] = {name: {} for name in TRAPPED}
    case = Case(lambda: with_traps(mlp(), armed), batches=BATCHES)
    model = placed(case, comm, way)
    batches = iter(BATCHES)
    with model:
        if warm:
            model.train(*part(model.batch_group, *next(batches)))
        for number, name in enumerate(TRAPPED):
            before = state_of(model)
            for what in ("forward", "input", "weights"):
                first = (0, 4, 6)[number % 3]
                armed[name].update(what=what, first=first)
                told = error_of(lambda: model.train(*part(model.batch_group, *BATCHES[0])))
                armed[name].clear()
                parallel_assert(comm, f"trap in {what} at sample {first}" in told, f"{way}, {name}: {told!r}")
            parallel_assert(comm, state_of(model) == before, f"{way}, {name}: changed")
        for x, y in batches:
            model.train(*part(model.batch_group, x, y))
        parallel_assert(comm, model.parameters_sha256() == expected, f"{way}: other bits afterwards")


def expected_bits() -> str:
    return trained_alone(Case(mlp, batches=BATCHES)).sha256


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_error_in_a_layer_of_one_stage_is_raised_on_all_and_leaves_the_model_as_it_was(schedule: str) -> None:
    """Every second time with two replicas, in half of the cases before any step was made."""
    expected, number = expected_bits(), SCHEDULES.index(schedule)
    stages, replicas, warm = 4 // CHUNKS[schedule], 1 + number % 2, bool(number // 2 % 2)
    way = Way(stages, zero=1 + 2 * (number % 2), schedule=schedule)
    run_in_threads(stages * replicas, lambda comm: fails_and_goes_on(comm, way, warm, expected))


@pytest.mark.mpi(min_size=2)
def test_over_mpi_too_an_error_in_a_layer_is_raised_on_all_stages(world: Any) -> None:
    expected = of_first(world, expected_bits)
    schedule = SCHEDULES[world.size % len(SCHEDULES)]
    stages = world.size if world.size <= 4 // CHUNKS[schedule] else 2
    way = Way(stages if world.size % stages == 0 else world.size, zero=2, schedule=schedule)
    if way.pipeline * CHUNKS[schedule] <= len(mlp().blocks):
        fails_and_goes_on(world, way, world.size == 4, expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_error_while_predicting_or_evaluating_is_raised_on_all_and_disturbs_nothing(schedule: str) -> None:
    """The last stage must go on to take what the others send, whatever its loss thinks of the targets."""
    x, y = BATCHES[0]
    wrong = y.copy()
    wrong[0] = 99
    with alone(Case(mlp)) as model:
        expected = [model.evaluate(x, y), model.train(x, y), model.parameters_sha256()]

    def run(comm: Any) -> None:
        armed: dict[str, dict[str, Any]] = {name: {} for name in TRAPPED}
        with placed(Case(lambda: with_traps(mlp(), armed)), comm, Way(2, zero=3, schedule=schedule)) as model:
            for name in TRAPPED:
                armed[name].update(what="forward", first=0)
                for call in (lambda: model.predict(x), lambda: model.evaluate(*part(model.batch_group, x, y))):
                    told = error_of(call)
                    parallel_assert(comm, "trap in forward" in told, f"{name}: {told!r}")
                armed[name].clear()
            for call in (model.evaluate, model.train):
                told = error_of(lambda c=call: c(*part(model.batch_group, x, wrong)))
                parallel_assert(comm, "99" in told, f"{call.__name__}: {told!r}")
            found = [model.evaluate(*part(model.batch_group, x, y)), model.train(*part(model.batch_group, x, y))]
            parallel_assert(comm, [*found, model.parameters_sha256()] == expected, f"{found} {expected}")

    run_in_threads(4, run)


@dataclass(frozen=True)
class Moody(Layer):
    """Repeats its input as often as a dictionary says: the shape of the output does not follow from the input's."""

    times: dict[str, int] = field(compare=False, hash=False)

    def forward(self, params: Any, x: Any, run: Any = EVALUATE) -> tuple[Any, Any]:
        array = x["values"] if isinstance(x, dict) else x
        return np.repeat(array, self.times["now"], axis=0), self.times["now"]

    def backward_input(self, params: Any, cache: Any, dy: Any) -> tuple[Any, Any]:
        return dy.reshape(-1, cache, dy.shape[-1]).sum(1), None


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_an_output_of_another_shape_for_the_same_input_is_refused_on_all_stages(schedule: str) -> None:
    (x, y) = vectors(1, 8)[0]
    way = Way(2, schedule=schedule, more={"cuts": [1]})

    def body(comm: Any) -> None:
        times = {"now": 1}
        with placed(Case(lambda: Chain({"moody": Moody(times), "a": Product(5, ("w",))})), comm, way) as model:
            model.train(x, y)
            before = model.parameters_sha256()
            times["now"] = 2
            told = error_of(lambda: model.train(x, y))
            parallel_assert(
                comm,
                "block 'moody' returns is float32[4, 5] for a micro-batch that is like an earlier one" in told,
                told,
            )
            assert model.parameters_sha256() == before
            times["now"] = 1
            model.train(x, y)

    run_in_threads(2, body)


@pytest.mark.filterwarnings("ignore:.* cannot be cut into samples:UserWarning")
def test_dictionaries_of_arrays_may_have_another_shape_each_time_and_what_cannot_be_compared_is_refused() -> None:
    """Micro-batches of a tree go through the stages as arrays do, on one rank and on two with the same bits."""
    batches = [({"values": x}, y) for n in (2, 5, 3, 5) for x, y in vectors(1, n)]

    def body(comm: Any, way: Way) -> list[float]:
        with placed(Case(lambda: Chain({"moody": Moody({"now": 1}), "a": Product(5, ("w",))})), comm, way) as model:
            losses = [model.train(x, y) for x, y in batches]
            told = error_of(lambda: model.train({"values": "text"}, batches[0][1]))
            assert comm is None or "DataError: x['values'] is a str, not an array: ranks that share a batch" in told
            return [*losses, *(model.train(x, y) for x, y in batches)]

    expected = body(None, Way())
    for schedule in ("1f1b", "zero_bubble"):
        way = Way(2, schedule=schedule, more={"cuts": [1]})
        assert run_in_threads(2, lambda comm, w=way: body(comm, w)) == [expected] * 2


@pytest.mark.parametrize("number", range(len(TRAPPED)))
def test_an_infinite_gradient_on_one_stage_skips_the_step_on_all_and_is_named(number: int) -> None:
    name = TRAPPED[number]
    size, stages = ((2, 2), (3, 3), (4, 2), (8, 4))[number]
    scale = mz.DynamicLossScale(initial=8.0) if number % 2 else None
    way = Way(stages, zero=number, schedule=("zero_bubble", "1f1b")[number % 2])

    def run(comm: Any) -> None:
        armed: dict[str, Any] = {}
        with placed(Case(lambda: with_traps(mlp(), {name: armed}), loss_scale=scale), comm, way) as model:
            model.train(*part(model.batch_group, *BATCHES[0]))
            before = state_of(model)
            armed.update(what="infinite", first=6)
            loss = model.train(*part(model.batch_group, *BATCHES[1]))
            parallel_assert(comm, np.isfinite(loss) and state_of(model) == before, "changed")
            scales = comm.allgather_object(model._engine.loss_scale and model._engine.loss_scale.scale)
            assert scales == [4.0 if scale else None] * size
            holder = comm.allgather_object(f"{name}.linear.weight" in model._engine.layout.by_name)
            last = max(rank for rank, held in enumerate(holder) if held)  # the last replica has the last grain
            told = f"the gradient of '{name}.linear.weight' is not finite on rank {last}, samples 6 to 7"
            assert comm.allgather_object(model.last_step.skipped) == [told] * size
            armed.clear()
            model.train(*part(model.batch_group, *BATCHES[1]))
            assert model.last_step.skipped is None
            assert model._engine.updater.step_count == 2

    run_in_threads(size, run)


def test_parts_that_overflow_in_their_sum_on_one_stage_skip_the_step_on_all() -> None:
    """Each grain's gradient of the last bias is 9e37: finite in float32, four times that is not."""
    x, y = BATCHES[0][0], np.full((8, 1), 4.5e37)

    def run(comm: Any) -> Any:
        model = placed(Case(lambda: mlp(task="regression", outputs=1), loss_scale=SCALE_1), comm, Way(2))
        with model, np.errstate(over="ignore"):
            before = state_of(model)
            model.train(*part(model.batch_group, x, y))
            assert state_of(model) == before
            return model.last_step.skipped

    found = run_in_threads(4, run)
    assert len(set(found)) == 1
    assert re.fullmatch(
        r"the averaged gradient of '.*linear.bias' is not finite on rank [23], samples 0 to 7", found[0]
    )


@pytest.mark.parametrize("way", [Way(2), Way(tensor=2)], ids=str)
def test_peers_with_other_samples_types_or_numbers_of_them_are_told_on_all_ranks(way: Way) -> None:
    x, y = BATCHES[0]
    others = ((x[::-1].copy(), y), (x, y[::-1].copy()), (x.astype(np.float32), y), (x[:6], y[:6]))

    def run(comm: Any) -> None:
        with placed(Case(mlp), comm, way) as model:
            for other, call in product(others, (model.train, model.compute_gradients, model.evaluate)):
                what = "y" if other is others[1] else "x"
                with pytest.raises(
                    DataError, match=f"^rank 3 has another {what} than rank 1: the ranks of one replica"
                ):
                    call(*(other if comm.rank == 3 else (x, y)))
            with pytest.raises(DataError, match="no samples on any rank"):
                model.train(x[:0], y[:0])
            model.train(x, y)

    run_in_threads(4, run)


#: Settings of four ranks, the error, and what it says; ``p``, ``t`` and ``d`` are sizes of axes.
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"p": 2, "t": 1, "d": 3}, GridError, r"pipeline=2 x tensor=1 x data=3 x context=1 = 6 ranks, but there are 4"),
    ({"p": 0}, ConfigError, r"pipeline=0: expected a whole number >= 1"),
    ({"d": -2}, ConfigError, r"data=-2: expected -1 \(all remaining ranks\) or"),
    ({"p": 2, "schedule": "2f2b"}, ConfigError, r"schedule='2f2b': expected one of .gpipe., .1f1b."),
    ({"p": 2, "virtual_stages": 2}, ConfigError, r"'1f1b' cannot have 2 virtual stages"),
    ({"p": 2, "schedule": "interleaved"}, ConfigError, r"cannot have 1 virtual stages; expected at least 2"),
    ({"zero_stage": 4}, ConfigError, r"zero_stage=4: expected 0 \(DDP\), 1, 2 or 3"),
    ({"p": 2, "cuts": [9]}, ConfigError, r"9"),
    ({"p": 2, "cuts": [1, 2]}, ConfigError, r"cuts"),
    ({"p": 2, "costs": [float("nan")] * 8}, ConfigError, r"nan"),
]


@pytest.mark.parametrize(("settings", "kind", "told"), BAD)
def test_sizes_and_names_that_mean_nothing_are_told_with_all_numbers(
    settings: dict[str, Any], kind: type[Exception], told: str
) -> None:
    axes = {"p": "pipeline_parallel_size", "t": "tensor_parallel_size", "d": "data_parallel_size"}

    def run(comm: Any) -> str:
        with mz.ShardingConfig(comm=comm) as config:
            named = {axes.get(name, name): value for name, value in settings.items()}
            return error_of(lambda: mz.HybridShardedModel(mlp(), config, **named))

    for found in run_in_threads(4, run):
        assert found.startswith(f"{kind.__name__}: ")
        assert re.search(told, found), found


def test_more_stages_than_blocks_and_black_boxes_are_refused() -> None:
    def run(comm: Any, model: Any) -> str:
        with mz.ShardingConfig(comm=comm) as config:
            return error_of(lambda: mz.PipelineParallelModel(model, config))

    for found in run_in_threads(4, lambda comm: run(comm, mlp(hidden=(5,)))):
        assert found.startswith("ConfigError")
        assert "4" in found
        assert "2" in found
    for found in run_in_threads(2, lambda comm: run(comm, ten())):
        assert "FunctionModel is a black box, which cannot be split (pipeline=2, tensor=1, context=1)" in found


def test_a_split_model_cannot_train_by_local_steps() -> None:
    def run(comm: Any) -> None:
        with placed(Case(gpt), comm, Way(2)) as model:
            with pytest.raises(ConfigError, match="belongs to a model of strategy 'ddp', got HybridShardedModel"):
                mz.LocalSGDOptimizer(mz.SGD(lr=0.1), model.config, every=2).set_model(model)
            with pytest.raises(ConfigError, match="cannot train by local steps: a rank holds only its part"):
                model._become_local(2)
            model.train(*texts(1, 4)[0])

    run_in_threads(2, run)
