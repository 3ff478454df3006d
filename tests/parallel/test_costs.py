"""What is planned without starting a rank is what ranks then hold and send, to the byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

import mpizero as mz
from mpizero.comm import Communicator
from mpizero.layout import SCHEDULES, Grains
from mpizero.parallel.costs import PARTS, PURPOSES, RankPlan, Sent, TrainingPlan
from mpizero.parallel.hybrid import ZERO_STAGES
from mpizero.parallel.placement import placement
from mpizero.parallel.spread import Spread
from mpizero.testing import parallel_assert, run_in_threads
from tests.parallel.models import MEMORIES
from tests.parallel.spreads import VIRTUAL, gpt, texts

#: The parts of memory that the library's own allocator counts.
COUNTED = PARTS[: PARTS.index("group buffers")]
#: What the tags of the engine's own collectives are for; all others are those of split layers.
TAGS = {
    "batch sizes": "control",
    "same batch": "control",
    "losses": "control",
    "samples": "samples",
    "gradients": "gradients",
    "unit gradients": "gradients",
    "tensor sums": "norms",
    "sums of parameters": "norms",
    "gather": "parameters",
}
POINT_TO_POINT = "point to point"


class Job(NamedTuple):
    """A training to be planned and to be run."""

    zero: int = 1
    spread: Mapping[str, Any] = {}
    optimizer: Any = mz.AdamW(lr=1e-3)
    batch: int = 8
    model: Any = gpt
    config: Mapping[str, Any] = {}
    data: Any = texts

    @property
    def settings(self) -> dict[str, Any]:
        return {"micro_batch": 1, "minimum_parameter_group_size": 1, **self.config}

    @property
    def samples(self) -> Any:
        return self.data(1, self.batch)[0]


class Measured(NamedTuple):
    """What one rank has done in its second step, and holds then."""

    sent: dict[str, Sent]
    bytes_sent: int
    memory: dict[str, int]
    group_buffers: int
    caches: int | None


def planned(job: Job, ranks: int, **more: Any) -> TrainingPlan:
    x, y = job.samples
    return TrainingPlan(
        model=job.model(),
        optimizer=job.optimizer,
        config=mz.ShardingConfig(**job.settings),
        row=placement(ZERO_STAGES[job.zero]),
        spread=Spread(**job.spread),
        ranks=ranks,
        global_batch=job.batch,
        x=x,
        y=y,
        **more,
    )


def measured(job: Job, comm: Communicator) -> Measured:
    """Train two steps, with batches as ``mpizero.data.batches`` deals them."""
    sizes = {axis: job.spread.get(axis, 1) for axis in ("pipeline", "tensor", "context")}
    rest = {key: value for key, value in job.spread.items() if key not in sizes}
    config = mz.ShardingConfig(comm=comm, **job.settings)
    model = mz.HybridShardedModel(
        job.model(), config, sizes["pipeline"], sizes["tensor"], zero_stage=job.zero,
        context_parallel_size=sizes["context"], **rest,
    )  # fmt: skip
    optimizer = mz.HybridShardedOptimizer(job.optimizer, config)
    optimizer.set_model(model)
    x, y = job.samples
    group = model.batch_group
    own = Grains(job.batch, config.grain_size(job.batch)).samples_of(group.rank, group.size)
    with model:
        model.train(x[own], y[own])
        engine = model.engine
        before = counted(engine, job)
        model.train(x[own], y[own])
        groups = engine.grid.tensor_group, engine.grid.context_group
        held = sum(g.private_bytes + g.shared_bytes // g.size for g in groups)
        found = Measured(
            difference(counted(engine, job), before),
            model.last_step.bytes_sent,
            {kind: size for kind, size in engine.memory.kinds().items() if size},
            held,
            getattr(engine.runner, "most_caches", None),
        )
    config.close()
    return found


def counted(engine: Any, job: Job) -> tuple[Counter[str], Counter[str]]:
    """Bytes and messages so far, by purpose, from the counters of all communicators."""
    nbytes: Counter[str] = Counter()
    messages: Counter[str] = Counter()
    for comm in (engine.grid.world, *engine.grid.communicators):
        for tag, sent in comm.counters.bytes_by_tag.items():
            purpose = TAGS.get(tag, "tensor" if engine.grid.tensor.size > 1 else "context")
            if tag == POINT_TO_POINT:
                kinds = {id(engine.grid.world): "ties", id(engine.grid.pipeline): "activations"}
                purpose = kinds.get(id(comm), "context")
            if tag == "gather" and job.zero == 0:
                purpose = "gradients"  # replicated state: what is gathered is the reduced gradient
            nbytes[purpose] += sent
            messages[purpose] += comm.counters.messages_by_tag[tag]
    return nbytes, messages


def difference(after: tuple[Counter[str], ...], before: tuple[Counter[str], ...]) -> dict[str, Sent]:
    nbytes, messages = (late - early for late, early in zip(after, before, strict=True))
    return {purpose: Sent(nbytes[purpose], messages[purpose]) for purpose in PURPOSES if nbytes[purpose]}


def wrong(plan: RankPlan, found: Measured) -> dict[str, Any]:
    """Everything in which a rank's plan and its run differ: planned, then measured."""
    held = {part: plan.memory[part].mine for part in COUNTED if part in plan.memory}
    group = plan.memory["group buffers"].mine if "group buffers" in plan.memory else 0
    pairs = {
        "sent": (plan.sent, found.sent),
        "bytes_sent": (plan.bytes_sent, found.bytes_sent),
        "memory": (held, found.memory),
        "group buffers": (group, found.group_buffers),
        "caches": (plan.caches if found.caches is not None else None, found.caches),
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def check_on_threads(job: Job, ranks: int) -> None:
    plan = planned(job, ranks)
    for rank, found in enumerate(run_in_threads(ranks, lambda comm: measured(job, comm))):
        assert not wrong(plan.by_rank[rank], found), (rank, job)


def check_on_mpi(job: Job, world: Communicator) -> None:
    with world.split(0) as comm:
        difference = wrong(planned(job, comm.size).by_rank[comm.rank], measured(job, comm))
    parallel_assert(world, not difference, f"{job} {difference}")


OPTIMIZERS = (
    {"optimizer": mz.AdamW(lr=1e-3)},
    {"optimizer": mz.SGD(lr=1e-2, momentum=0.9), "config": {"clip": 1.0}},
    {"optimizer": mz.LAMB(lr=1e-3)},
)


def batches(ranks: int) -> tuple[dict[str, Any], ...]:
    """One grain a rank; two; more than two, the last one short; fewer grains than ranks; two micro-batches a grain."""
    return (
        {"batch": ranks},
        {"batch": 2 * ranks},
        {"batch": 5 * ranks + 1, "config": {"micro_batch": 2}},
        {"batch": ranks, "config": {"micro_batch": 2}},
        {"batch": 3 * ranks, "config": {"micro_batch": 1, "accumulate": 2}},
    )


def job(*parts: Mapping[str, Any], **more: Any) -> Job:
    """A job of several parts, whose settings are joined."""
    settings = {key: value for part in parts for key, value in part.get("config", {}).items()}
    fields = {key: value for part in (*parts, more) for key, value in part.items() if key != "config"}
    return Job(**{**fields, "config": {**settings, **more.get("config", {})}})


def replicas(ranks: int) -> list[Job]:
    """Every strategy with every kind of memory, batches and optimizers in turn."""
    found = []
    for zero in range(4):
        for number, memory in enumerate(MEMORIES):
            turn = zero + number + ranks
            found.append(
                job({"config": memory}, batches(ranks)[turn % 5], OPTIMIZERS[(turn + zero) % 3], zero=zero, model=gpt)
            )
    return found


def spreads(ranks: int) -> list[Job]:
    """Every pipeline x tensor and pipeline x context; schedules, stages of ZeRO, memories and batches in turn."""
    found: list[Job] = []
    sizes = [s for s in (1, 2, 3, 4, 8) if ranks % s == 0]
    for pipeline in (s for s in sizes if s <= 4):
        schedules = SCHEDULES if pipeline > 1 else ("1f1b",)
        for tensor, context in [(s, 1) for s in sizes] + [(1, s) for s in sizes if s > 1]:
            if ranks % (pipeline * tensor * context) or pipeline * tensor * context == 1:
                continue
            for schedule in schedules if tensor * context == 1 else (schedules[len(found) % len(schedules)],):
                chunks = pipeline * (2 if schedule in ("interleaved", "zero_bubble_v") else 1)
                if chunks > 6:
                    continue
                turn = len(found)
                way = {"pipeline": pipeline, "tensor": tensor, "context": context, "schedule": schedule}
                way["virtual_stages"] = VIRTUAL[schedule]
                heads = {"heads": 24, "dim": 24} if tensor > 2 else {}
                found.append(
                    job(
                        {"config": MEMORIES[turn % 3]}, batches(ranks)[turn % 5], OPTIMIZERS[(turn // 2) % 3],
                        zero=(turn + ranks) % 4, spread=way, model=lambda h=heads: gpt(**h),
                    )
                )  # fmt: skip
    return found


# ---------------------------------------------------------------------- planned = measured


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_replicas_hold_and_send_what_was_planned(ranks: int) -> None:
    for each in replicas(ranks):
        check_on_threads(each, ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_stages_tensor_parts_and_contexts_hold_and_send_what_was_planned(ranks: int) -> None:
    for each in spreads(ranks):
        check_on_threads(each, ranks)


@pytest.mark.mpi
def test_ranks_of_a_real_job_hold_and_send_what_was_planned(world: Any) -> None:
    found = [*replicas(world.size), *spreads(world.size)]
    for each in found[:: 1 if world.size <= 4 else 3]:
        check_on_mpi(each, world)


@pytest.mark.parametrize("zero", range(4))
def test_two_by_two_by_two_holds_and_sends_what_was_planned(zero: int) -> None:
    for memory in MEMORIES:
        way = {"pipeline": 2, "tensor": 2}
        check_on_threads(job({"config": memory}, zero=zero, spread=way, batch=9, config={"micro_batch": 2}), 8)


@pytest.mark.parametrize("order", ["data,tensor,pipeline", "tensor,pipeline,data", "context,data,tensor,pipeline"])
def test_another_order_of_ranks_is_planned_as_it_runs(order: str) -> None:
    for way in ({"tensor": 2}, {"context": 2}, {"pipeline": 2}):
        check_on_threads(Job(3, {**way, "order": order}, config={"ranks_per_node": 2}), 4)
