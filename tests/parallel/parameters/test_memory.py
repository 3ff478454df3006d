"""Memory: ranks hold what the formulas say, do without what a node lacks, and are all told what one is refused."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

import mpizero as mz
from mpizero.comm import as_communicator
from mpizero.comm.reduce import EXCHANGE_ELEMENTS
from mpizero.errors import OutOfMemoryError, RemoteError, SharedMemoryError
from mpizero.sharding import exactness, params
from mpizero.sharding.params import PAGE, Memory
from mpizero.testing import run_in_threads
from tests.parallel.models import PRIVATE, STRATEGIES, gpt, hard_function, mlp, part, sharded, tokens, vectors
from tests.parallel.parallel_layouts import Case, Way, placed
from tests.traced import traced_peak


def wide(**changes: Any) -> mz.nn.MLP:
    """Eight equal units of 65 * 64 parameters."""
    return mlp(features=64, hidden=(64,) * 7, outputs=64, task="regression", **changes)


PARAMETERS = 8 * 65 * 64
UNIT = 65 * 64


def measured(comm: Any, strategy: str, **settings: Any) -> tuple[dict[str, int], int, int]:
    """One step with one grain a rank; bytes by kind, peak, and bytes of the exchange's own buffers."""
    size = 1 if comm is None else comm.size
    with sharded(strategy, comm, wide(), micro_batch=1, **settings) as model:
        x = np.ones((size, 64), np.float32)
        model.train(*part(comm, x, x))
        memory = model._engine.memory
        told = model.metadata()
        assert told.bytes_on_rank == memory.kinds()
        assert told.peak_bytes == memory.peak_bytes >= memory.rank_bytes
        return memory.kinds(), memory.peak_bytes, memory.kinds().get("exchange buffers", 0)


@pytest.mark.parametrize(("strategy", "ranks"), [*zip(STRATEGIES, (2, 4, 3, 4), strict=True)])
def test_private_memory_follows_the_papers_formulas(strategy: str, ranks: int) -> None:
    # A unit of gradients is sent while the next is computed; with ZeRO-3 a unit of parameters is used, and one comes.
    n, units = ranks, {"zero2": 2, "zero3": 4}.get(strategy, 0)
    parameters = 4 * PARAMETERS / (n if strategy == "zero3" else 1)
    gradients = 4 * PARAMETERS / (n if strategy in ("zero2", "zero3") else 1)
    state = 8 * PARAMETERS / (1 if strategy == "ddp" else n)
    for kinds, peak, exchange in run_in_threads(ranks, lambda comm: measured(comm, strategy, **PRIVATE)):
        slack = 8 * 8 * 4  # the shard rule's remainders: an element a unit and array
        assert kinds["parameters"] == pytest.approx(parameters, abs=slack)
        assert kinds["optimizer state"] == pytest.approx(state, abs=slack)
        ring = 2 * (4 * UNIT + PAGE) if units else PAGE
        assert gradients - slack <= kinds["gradients"] <= gradients + slack + ring
        assert peak - exchange <= 1.02 * (parameters + gradients + state) + units * 4 * UNIT + 2 * PAGE
        assert 0 < exchange <= 2 * 4 * EXCHANGE_ELEMENTS
    if strategy == "ddp":
        assert parameters + gradients + state == 16 * PARAMETERS


@pytest.mark.slow
def test_shared_memory_holds_one_copy_of_parameters_and_state_a_node() -> None:
    for strategy in STRATEGIES:
        for kinds, _, exchange in run_in_threads(4, lambda comm, s=strategy: measured(comm, s)):
            assert kinds["parameters"] <= 4 * PARAMETERS / 4 + PAGE
            assert kinds["optimizer state"] <= 8 * PARAMETERS / 4 + 256
            assert exchange == 0


def test_evaluation_needs_no_gradient_memory() -> None:
    with sharded("zero2", None, wide(), accumulate=2) as model:
        before = model._engine.memory.private_bytes["gradients"]
        model.evaluate(np.ones((4, 64), np.float32), np.ones((4, 64), np.float32))
        assert model._engine.memory.private_bytes["gradients"] == before


def test_frozen_parameters_cost_no_gradient_and_no_state() -> None:
    sizes = {"w": 77, "nothing": 0, "b": 13, "one": 1}  # and 13 frozen ones
    for strategy in STRATEGIES:
        with sharded(strategy, None, hard_function(), mz.AdamW(lr=0.1)) as model:
            model.train(*vectors(1))
            assert model._engine.global_view.layout.gradient_size == sum(sizes.values())
            assert sum(a.size for a in model._engine.updater.state.values()) == 2 * sum(sizes.values())
            assert model.metadata().trainable_count == sum(sizes.values()) == model.parameter_count - 13
            assert set(model._engine.updater.state) == {"exp_avg", "exp_avg_sq"}


def test_a_new_model_holds_its_shard_and_no_more_than_a_unit_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"minimum_parameter_group_size": 1, **PRIVATE}
    models: list[Any] = []
    # A search for BLAS libraries takes up to 400 KB for a moment, the more the more libraries a process has loaded.
    libraries = ThreadpoolController()
    monkeypatch.setattr(exactness, "ThreadpoolController", lambda: libraries)

    def make() -> None:
        models[:] = run_in_threads(2, lambda comm: mz.ZeRO3Model(wide(), mz.ShardingConfig(comm=comm, **settings)))

    make()  # what a process imports and keeps once is not in the figure
    most = traced_peak(make)
    shards = sum(model._engine.memory.rank_bytes for model in models)
    assert shards <= 4 * (2 * PARAMETERS + 2 * 4 * UNIT) + 4 * PAGE
    # Both ranks' Python objects are in the figure too: half a megabyte of layouts, plans and views.
    assert most <= shards + 2 * 4 * UNIT + (1 << 19)


def test_a_window_that_is_not_the_newest_can_be_freed() -> None:
    def allocate(comm: Any) -> None:
        memory = Memory(comm.split_node())
        (first,) = memory.shared("parameters", [(8,)], np.float64)
        (middle,) = memory.shared("gradients", [(8,)], np.float64)
        (last,) = memory.shared("buffers", [(8,)], np.float64)
        first[comm.rank], last[comm.rank] = 1, 2
        memory.barrier()
        memory.free_shared("gradients", (middle,))
        assert (first[:2].tolist(), last[:2].tolist()) == ([1, 1], [2, 2])
        assert memory.kinds()["gradients"] == 0
        assert memory.kinds()["parameters"] == PAGE // 2
        memory.close()

    run_in_threads(2, allocate)


def test_setting_the_parameters_of_a_split_model_takes_no_copy_of_its_shard() -> None:
    """What could fail on one rank alone would leave the other ranks' parameters set."""

    def run(comm: Any) -> None:
        with mz.ShardingConfig(comm=comm) as config, mz.TensorParallelModel(wide(), config) as model:
            values = model.get_parameters()
            comm.barrier()
            fill, shard = partial(model._engine.global_view.fill, values), model.local_parameter_shard.nbytes
            if comm.rank:
                fill()
                fill()
            else:
                assert traced_peak(fill, tries=2) < shard

    run_in_threads(2, run)


def trained(comm: Any, strategy: str, samples: int = 6, **settings: Any) -> tuple[str, int]:
    """The hash after two steps, and how many ranks share memory."""
    with sharded(strategy, comm, gpt(), micro_batch=1, **settings) as model:
        for _ in range(2):
            model.train(*part(comm, *tokens(samples)))
        told = model.metadata()
        assert told.bytes_on_rank == model._engine.memory.kinds()
        return model.parameters_sha256(), told.ranks_per_node


def limit_windows(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Let nodes have no room for windows of more than ``limit`` bytes, which is found out when they are taken."""
    allocate = mz.InMemoryCommunicator._allocate_shared

    def limited(self: Any, nbytes: int) -> Any:
        if nbytes > limit:
            raise SharedMemoryError(f"a window of {nbytes} bytes does not fit")
        return allocate(self, nbytes)

    monkeypatch.setattr(mz.InMemoryCommunicator, "_allocate_shared", limited)


#: Bytes of a row of gradients, and of the parameters.
ROW = 4 * sum(spec.size for block in gpt().blocks.values() for spec in block.specs())


@pytest.mark.parametrize(
    ("strategy", "samples", "per_node", "limit"),
    [
        *((strategy, 6, None, None) for strategy in STRATEGIES),  # one node tells at the start that it is full
        ("zero2", 6, None, 0),  # another job takes the memory first
        ("ddp", 24, 2, 3 * ROW),  # the rows of the first step have no room
        ("zero1", 24, None, 3 * ROW),
        ("ddp", 24, None, 3 * ROW),
    ],
)
def test_where_shared_memory_is_short_all_ranks_keep_their_own_copies_and_the_bits_are_the_same(
    strategy: str, samples: int, per_node: int | None, limit: int | None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run = partial(trained, strategy=strategy, samples=samples, ranks_per_node=per_node)
    shared = run_in_threads(4, run)
    if limit is None:
        monkeypatch.setattr(mz.InMemoryCommunicator, "shared_space", lambda self: 1000 if self.rank == 2 else None)
    else:
        limit_windows(monkeypatch, limit)
    private = run_in_threads(4, run)
    assert {ranks for _, ranks in shared} == {per_node or 4}
    assert {(digest, 1) for digest, _ in shared} == set(private)
    assert capsys.readouterr().err.count("every rank keeps its own copy") == 1


def test_private_copies_keep_the_compression_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(comm: Any) -> str | None:
        optimizer = mz.GradientCompressionOptimizer(mz.SGD(lr=1e-2), compression="int8")
        with sharded("ddp", comm, gpt(), optimizer, micro_batch=1) as model:
            model.train(*part(comm, *tokens(24)))
            assert model.metadata().ranks_per_node == 1
            return model._engine.exchange.compression

    limit_windows(monkeypatch, 3 * ROW)
    assert run_in_threads(4, train) == ["int8"] * 4


def test_a_larger_batch_without_room_is_an_error_that_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = tokens(16)

    def train(comm: Any) -> None:
        with sharded("ddp", comm, gpt(), micro_batch=1) as model:
            model.train(*part(comm, x[:2], y[:2]))
            before = model.parameters_sha256()
            with pytest.raises(SharedMemoryError, match=r"does not fit.*reserve\(global_batch\)"):
                model.train(*part(comm, x, y))
            assert model.parameters_sha256() == before
            model.train(*part(comm, x[:2], y[:2]))
            assert model.last_step.step == 2
            assert model.metadata().ranks_per_node == 2

    limit_windows(monkeypatch, 3 * ROW)
    run_in_threads(2, train)


def test_what_is_reserved_before_a_checkpoint_is_loaded_falls_back_and_keeps_the_optimizers_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    x, y = tokens(16)

    def train(comm: Any, loads: bool) -> str:
        with sharded("ddp", comm, gpt(), micro_batch=1) as model:
            model.reserve(len(x))
            if loads:
                model.load_model(tmp_path / "saved")
            else:
                model.train(*part(comm, x, y))
                model.save_model(tmp_path / "saved")
            model.train(*part(comm, x, y))
            return model.parameters_sha256()

    shared = run_in_threads(2, lambda comm: train(comm, False))
    limit_windows(monkeypatch, 3 * ROW)
    assert run_in_threads(2, lambda comm: train(comm, True)) == shared


def on_uneven_nodes(comm: Any) -> tuple[float, int]:
    """Train two stages of two replicas on nodes of 3 and 1 ranks: only the first has both of its replicas on a node."""
    with placed(Case(gpt), comm, Way(2, zero=3), micro_batch=1, ranks_per_node=3) as model:
        return model.train(*part(model.batch_group, *tokens(4))), model.metadata().ranks_per_node


def test_data_groups_may_lie_on_nodes_in_different_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some take shared memory, others none, and where it is short all of them keep their own copies."""
    with sharded("ddp", None, gpt(), micro_batch=1) as model:
        alone = model.train(*tokens(4))
    assert run_in_threads(4, on_uneven_nodes) == [(alone, 2), (alone, 2), (alone, 1), (alone, 1)]
    limit_windows(monkeypatch, 1)
    assert set(run_in_threads(4, on_uneven_nodes)) == {(alone, 1)}


def test_a_model_that_finds_no_room_for_copies_of_its_own_either_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, in place of reading windows that are gone."""

    def no_memory(*_: Any, **__: Any) -> Any:
        raise OutOfMemoryError("no memory for parameters")

    def run(comm: Any) -> None:
        with sharded("ddp", comm, gpt(), micro_batch=1) as model:
            comm.barrier()
            if comm.rank == 0:
                limit_windows(monkeypatch, ROW)
                monkeypatch.setattr("mpizero.sharding.parameter_access.Engine", no_memory)
            comm.barrier()
            with pytest.raises(OutOfMemoryError, match="no memory for parameters"):
                model.train(*part(comm, *tokens(8)))
            for use in (model.get_parameters, model.parameters_sha256):
                with pytest.raises(RuntimeError, match="closed"):
                    use()

    run_in_threads(2, run)


def test_a_model_that_needs_more_than_the_job_may_take_is_told_before_it_is_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for limit, told in ((10**9, 0), (1000, 1)):
        monkeypatch.setattr(params, "available_memory", lambda limit=limit: limit)
        assert {ranks for _, ranks in run_in_threads(3, lambda comm: trained(comm, "zero1"))} == {3}
        assert capsys.readouterr().err.count("where this job may take 1000: a job that takes more is killed") == told


#: Elements that no address space has room for: the refusal is the system's own.
FAR_TOO_MUCH = 2**58


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the system refuse memory of a kind to this thread."""
    local, right, private = threading.local(), np.zeros, Memory.private

    def zeros(shape: Any, dtype: Any = float) -> Any:
        return right(FAR_TOO_MUCH if getattr(local, "refused", False) else shape, dtype)

    def asked(self: Memory, kind: str, shape: Any, dtype: Any) -> Any:
        local.refused = kind == getattr(local, "kind", None)
        try:
            return private(self, kind, shape, dtype)
        finally:
            local.refused = False

    monkeypatch.setattr(Memory, "private", asked)
    monkeypatch.setattr(np, "zeros", zeros)
    return lambda kind: setattr(local, "kind", kind)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("kind", ["parameters", "gradients", "optimizer state"])
def test_what_is_refused_to_one_rank_is_told_on_all(refusing: Any, kind: str, strategy: str) -> None:
    def train(comm: Any) -> None:
        with sharded(strategy, comm, **PRIVATE) as model:
            model.train(np.ones((4, 6), np.float32), np.zeros(4, np.int64))

    def run(comm: Any) -> Exception:
        refusing(kind if comm.rank == 1 else None)
        with pytest.raises((OutOfMemoryError, RemoteError)) as caught:
            train(comm)
        return caught.value

    first, own, last = run_in_threads(3, run)
    assert isinstance(own, OutOfMemoryError)
    assert isinstance(own, MemoryError)
    for words in (f"no memory for {kind}", "bytes wanted", "more ranks"):
        assert words in str(own)
    for error in (first, last):
        assert isinstance(error, RemoteError)
        assert f"rank 1: OutOfMemoryError: no memory for {kind}" in str(error)


def test_the_error_tells_how_much_was_wanted_and_held() -> None:
    memory = Memory(as_communicator(None))
    memory.private("parameters", 25, np.float32)
    with pytest.raises(OutOfMemoryError, match=rf"optimizer state: {8 * FAR_TOO_MUCH} bytes wanted, 100 held"):
        memory.private("optimizer state", FAR_TOO_MUCH, np.float64)
    assert memory.private_bytes == {"parameters": 100}


def test_memory_for_a_layers_values_is_refused_with_advice_for_micro_batches() -> None:
    def loss_and_grad(parameters: Any, batch: Any) -> None:
        np.empty(FAR_TOO_MUCH)

    model = sharded("ddp", None, mz.FunctionModel({"w": np.zeros(3)}, loss_and_grad))
    with model, pytest.raises(OutOfMemoryError, match="computing a micro-batch.*smaller micro_batch"):
        model.train(np.ones((2, 3)), np.ones(2))
