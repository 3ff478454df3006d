"""Stages, schedules and micro-batches change no bit of a training."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError
from mpizero.layout import SCHEDULES
from mpizero.nn import GELU, Frozen
from mpizero.nn.models import Select
from mpizero.testing import parallel_assert, run_in_threads
from tests.parallel.models import MEMORIES, part
from tests.parallel.parallel_layouts import (
    CHUNKS,
    Blocks,
    Case,
    Chain,
    Product,
    Trained,
    Way,
    gpt,
    knotted,
    mlp,
    of_first,
    pipelines,
    placed,
    points,
    texts,
    trained,
    trained_alone,
    vectors,
)


def half_frozen() -> Blocks:
    """A GPT whose embedding, tied to its head, and first block are not trained."""
    return Blocks(gpt(dropout=0.0), {"embedding": Frozen, "blocks.0": Frozen})


CASES = {
    "11 samples": Case(gpt, batches=texts(2, 11)),
    "accumulate": Case(gpt, batches=texts(2, 23), config={"micro_batch": 5, "accumulate": 2}),
    "fewer grains than stages": Case(gpt, batches=texts(2, 2), config={"micro_batch": 1}),
    "one grain": Case(gpt, lambda: mz.SGD(lr=0.1, momentum=0.9), texts(3, 2)),
    "LAMB, clipping": Case(gpt, lambda: mz.LAMB(lr=1e-2), texts(2, 9), config={"clip": 0.3, "micro_batch": 1}),
    "LAMB": Case(gpt, lambda: mz.LAMB(lr=1e-2), texts(2, 8)),
    "untied": Case(lambda: gpt(tied=False), lambda: mz.Lion(lr=1e-3), texts(2, 10)),
    "checkpointing": Case(lambda: gpt(activation_checkpointing=True), batches=texts(2, 8)),
    "float64": Case(lambda: gpt(dtype="float64"), batches=texts(2, 8)),
    "large units": Case(gpt, batches=texts(2, 8), config={"minimum_parameter_group_size": 3000}),
    "loss scale": Case(gpt, batches=texts(2, 8), loss_scale=mz.DynamicLossScale(initial=2.0**10)),
    "half frozen": Case(half_frozen, batches=texts(2, 7), config={"clip": 0.1}),
    "MLP": Case(mlp, batches=points(3, 13)),
    "shared matrices": Case(knotted, lambda: mz.LAMB(lr=1e-2), vectors(2, 9), config={"clip": 0.1}),
    "growing and shrinking": Case(gpt, batches=[texts(1, n, n)[0] for n in (4, 16, 3, 2, 11)]),
}
BLOCKS = 6


@cache
def serial(name: str) -> Trained:
    return trained_alone(CASES[name])


def same_on_threads(size: int, name: str, way: Way, **memory: Any) -> None:
    for rank, found in enumerate(run_in_threads(size, lambda comm: trained(CASES[name], comm, way, **memory))):
        assert found == serial(name), (rank, name, way, memory)


@pytest.mark.mpi
def test_stages_of_processes_have_the_bits_of_one_process(world: Any) -> None:
    """Every second schedule on every factorization, each in two jobs of other sizes; options in turn."""
    for number, way in list(enumerate(pipelines(world.size, BLOCKS)))[world.size // 3 % 2 :: 2 + (world.size > 4)]:
        name, memory = list(CASES)[(2 * number + world.size) % len(CASES)], MEMORIES[(number + world.size) % 3]
        found = trained(CASES[name], world, way, **memory)
        parallel_assert(world, found == of_first(world, lambda n=name: serial(n)), f"{name} {way} {memory}")


@pytest.mark.parametrize("zero", range(4))
def test_every_schedule_with_every_zero_stage_has_the_bits_of_one_process(zero: int) -> None:
    case = Case(lambda: gpt(layers=2), batches=texts(2, 11))  # a block for each chunk
    expected = trained_alone(case)
    for number, schedule in enumerate(SCHEDULES):
        way, memory = Way(2, zero=zero, schedule=schedule), MEMORIES[(number + zero) % 3]
        for found in run_in_threads(4, lambda comm, w=way, m=memory: trained(case, comm, w, **m)):
            assert found == expected, (way, memory)


@pytest.mark.parametrize("name", CASES)
def test_every_option_on_threads_has_the_bits_of_one_process(name: str) -> None:
    number = list(CASES).index(name)
    size, stages = ((2, 2), (3, 3), (6, 2))[number % 3]
    schedule = SCHEDULES[(number + number // 5) % len(SCHEDULES)]
    same_on_threads(size, name, Way(stages, zero=number % 4, schedule=schedule))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_as_many_stages_as_blocks_have_the_bits_of_one_process(schedule: str) -> None:
    stages = BLOCKS // CHUNKS[schedule]
    same_on_threads(6, "accumulate", Way(stages, zero=3, schedule=schedule), share_node_memory=False)


@pytest.mark.parametrize(
    ("zero", "more"),
    [(0, {"cuts": [1]}), (3, {"cuts": [5]}), (3, {"costs": [9, 1, 1, 1, 1, 1]}), (0, {"costs": [0.0, 0, 0, 0, 0, 1]})],
)
def test_wherever_the_stages_are_cut_the_bits_are_those_of_one_process(zero: int, more: dict[str, Any]) -> None:
    """Tied tables lie in units of other sizes and owners then, on each of both stages."""
    if zero == 3:
        same_on_threads(4, "LAMB, clipping", Way(2, zero=3, more=more), share_node_memory=False)
    else:
        same_on_threads(4, "large units", Way(2, zero=2, more=more))


@pytest.mark.parametrize(("zero", "sizes"), [(1, [0, 11]), (2, [11, 0]), (2, [7, 4])])
def test_batches_of_any_sizes_have_the_bits_of_one_batch(zero: int, sizes: list[int]) -> None:
    way = Way(2, zero=zero, schedule="gpipe")
    found = run_in_threads(4, lambda comm: trained(CASES["11 samples"], comm, way, sizes))
    assert set(map(str, found)) == {str(serial("11 samples"))}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_keeps_no_more_caches_than_its_schedule_says(schedule: str) -> None:
    def run(comm: Any) -> tuple[int, int]:
        with placed(CASES["MLP"], comm, Way(3, schedule=schedule, more={})) as model:
            model.train(*CASES["MLP"].batches[0])
            runner = model._engine.runner
            return runner.most_caches, runner.schedule(7).caches()[runner.partitioned.stage]

    for held, allowed in run_in_threads(3, run):
        assert 0 < held <= allowed


def frozen_head() -> Blocks:
    """A GPT whose head is not trained, though it shares the embedding's table, which is."""
    return Blocks(gpt(dropout=0.0), {"head": Frozen})


@pytest.mark.slow
def test_a_frozen_layer_adds_nothing_to_the_gradient_of_what_it_shares() -> None:
    model, (x, y) = frozen_head(), texts(1, 8)[0]
    start = mz.nn.initial_parameters(model)
    gradients = mz.nn.loss_and_gradients(model, start, (x, y))[2]
    case = Case(frozen_head, lambda: mz.SGD(lr=1.0), [(x, y)] * 2)

    def run(comm: Any, way: Way) -> Any:
        with placed(case, comm, way, share_node_memory=False) as sharded:
            sharded.train(*part(sharded.batch_group, x, y))
            first = sharded.named_parameters()
            sharded.train(*part(sharded.batch_group, x, y))  # rows and rings are used again
            return first, sharded.parameters_sha256()

    expected = run(None, Way(zero=0))
    for name, gradient in gradients.items():
        np.testing.assert_allclose(expected[0][name], start[name] - gradient / y.size, rtol=1e-4, atol=1e-6)
    for way in (Way(zero=0), Way(zero=3), *(Way(2, zero=zero, schedule="zero_bubble_v") for zero in (1, 2))):
        for _, found in run_in_threads(4, lambda comm, w=way: run(comm, w)):
            assert found == expected[1], way


def test_a_frozen_layer_that_shares_what_another_stage_trains_is_refused() -> None:
    def run(comm: Any) -> str:
        with pytest.raises(ConfigError, match="'head' is frozen but shares 'embedding.token.weight'") as caught:
            placed(Case(frozen_head), comm, Way(2))
        return str(caught.value)

    assert "freeze both, or give cuts" in run_in_threads(2, run)[0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_matrices_shared_by_any_blocks_of_any_stages_have_the_bits_of_one_process(schedule: str) -> None:
    """Stages differ in which shared matrices they know of, and in how often they use them."""
    number = SCHEDULES.index(schedule)
    for zero, (size, stages) in list(enumerate(((2, 2), (3, 3), (4, 2), (6, 3))))[number % 2 :: 2]:
        memory = {**MEMORIES[(zero + number) % 3], "minimum_parameter_group_size": (1, 40)[number // 2 % 2]}
        same_on_threads(size, "shared matrices", Way(stages, zero=zero, schedule=schedule), **memory)


def unequal_stages() -> Chain:
    """The first stage has nothing to learn, nor has the third; the last has one matrix."""
    return Chain({"select": Select(5, (0, 1, 3)), "a": Product(5, ("w", "v")), "gelu": GELU(), "b": Product(5, ("w",))})


@pytest.mark.parametrize("zero", range(4))
def test_a_stage_may_have_no_parameters_at_all(zero: int) -> None:
    case = Case(unequal_stages, lambda: mz.LAMB(lr=1e-2), vectors(3, 9), config={"clip": 0.05})
    expected = trained_alone(case)
    size, stages = ((4, 4), (8, 4), (2, 2), (4, 2))[zero]
    way, memory = Way(stages, zero=zero, more={"costs": [1] * 4}), MEMORIES[zero % 3]
    assert run_in_threads(size, lambda comm: trained(case, comm, way, **memory)) == [expected] * size


def test_a_stage_may_pass_on_inputs_of_any_type() -> None:
    """The first stage keeps the type of its input: messages of the same shape may have several."""
    (x, y) = vectors(1, 6)[0]

    def body(comm: Any, way: Way) -> list[Any]:
        with placed(Case(unequal_stages), comm, way) as model:
            found: list[Any] = []
            for kind in (np.float32, np.float64, np.float32, np.float16):
                found += [model.predict(x[:2].astype(kind)).tobytes(), model.train(x.astype(kind), y)]
            return found

    way = Way(2, more={"cuts": [1]})
    assert run_in_threads(2, lambda comm: body(comm, way)) == [body(None, Way())] * 2
