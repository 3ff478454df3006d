"""A node without enough shared memory: all ranks keep private copies, with a message and the same bits."""

from __future__ import annotations

from typing import Any

import pytest

import mpizero as mz
from mpizero.errors import ConfigError, OutOfMemoryError, SharedMemoryError
from mpizero.sharding import params
from mpizero.testing import run_in_threads
from tests.parallel.models import STRATEGIES, gpt, part, tokens


def trained(comm: Any, strategy: str) -> tuple[str, int]:
    x, y = tokens(6)
    with mz.ShardingConfig(comm=comm, micro_batch=1) as config:
        model = mz.distribute(gpt(), mz.AdamW(lr=1e-2), strategy=strategy, config=config)
        with model:
            for _ in range(2):
                model.train(*part(comm, x, y))
            return model.parameters_sha256(), model.metadata().ranks_per_node


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_full_node_makes_all_ranks_keep_their_own_copies(
    strategy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = run_in_threads(3, lambda comm: trained(comm, strategy))
    monkeypatch.setattr(mz.InMemoryCommunicator, "shared_space", lambda self: 1000 if self.rank == 2 else None)
    private = run_in_threads(3, lambda comm: trained(comm, strategy))
    assert {ranks for _, ranks in shared} == {3}
    assert {ranks for _, ranks in private} == {1}
    assert {digest for digest, _ in shared} == {digest for digest, _ in private}
    assert capsys.readouterr().err.count("every rank keeps its own copy") == 1


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


@pytest.mark.parametrize("per_node", [None, 2])
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_rows_that_the_first_step_has_no_room_for_make_all_ranks_keep_their_own_copies(
    strategy: str, per_node: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = tokens(24)

    def train(comm: Any) -> tuple[str, int]:
        with mz.ShardingConfig(comm=comm, micro_batch=1, ranks_per_node=per_node) as config:
            model = mz.distribute(gpt(), mz.AdamW(lr=1e-2), strategy=strategy, config=config)
            with model:
                for _ in range(2):
                    model.train(*part(comm, x, y))
                told = model.metadata()
                assert told.bytes_on_rank == model.engine.memory.kinds()
                return model.parameters_sha256(), told.ranks_per_node

    shared = run_in_threads(4, train)
    limit_windows(monkeypatch, 3 * ROW)
    private = run_in_threads(4, train)
    assert {ranks for _, ranks in shared} == {per_node or 4}
    assert {ranks for _, ranks in private} == {1}
    assert {digest for digest, _ in shared} == {digest for digest, _ in private}
    assert capsys.readouterr().err.count("every rank keeps its own copy") == 1


def test_private_copies_keep_the_compression_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(comm: Any) -> str | None:
        with mz.ShardingConfig(comm=comm, micro_batch=1) as config:
            optimizer = mz.GradientCompressionOptimizer(mz.SGD(lr=1e-2), compression="int8")
            with mz.DDPModel(gpt(), config, optimizer=optimizer) as model:
                model.train(*part(comm, *tokens(24)))
                assert model.metadata().ranks_per_node == 1
                return model.engine.exchange.compression

    limit_windows(monkeypatch, 3 * ROW)
    assert run_in_threads(4, train) == ["int8"] * 4


def test_a_larger_batch_without_room_is_an_error_that_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = tokens(16)

    def train(comm: Any) -> None:
        with mz.ShardingConfig(comm=comm, micro_batch=1) as config:
            model = mz.distribute(gpt(), mz.AdamW(lr=1e-2), strategy="ddp", config=config)
            with model:
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
        with mz.ShardingConfig(comm=comm, micro_batch=1) as config:
            model = mz.distribute(gpt(), mz.AdamW(lr=1e-2), strategy="ddp", config=config)
            with model:
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


def test_memory_that_another_job_takes_first_is_done_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = run_in_threads(3, lambda comm: trained(comm, "zero2"))
    limit_windows(monkeypatch, 0)
    private = run_in_threads(3, lambda comm: trained(comm, "zero2"))
    assert {(digest, 1) for digest, _ in shared} == set(private)
    assert capsys.readouterr().err.count("every rank keeps its own copy") == 1


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, None])
def test_reserve_refuses_what_is_no_number_of_samples(wrong: Any) -> None:
    with (
        mz.ShardingConfig() as config,
        mz.DDPModel(gpt(), config) as model,
        pytest.raises(ConfigError, match="reserve"),
    ):
        model.reserve(wrong)


def on_uneven_nodes(comm: Any) -> tuple[float, int]:
    """Train two stages of two replicas on nodes of 3 and 1 ranks: only the first has both of its replicas on a node."""
    with (
        mz.ShardingConfig(comm=comm, micro_batch=1, ranks_per_node=3) as config,
        mz.HybridShardedModel(gpt(), config, pipeline_parallel_size=2, zero_stage=3) as model,
    ):
        return model.train(*part(model.batch_group, *tokens(4))), model.metadata().ranks_per_node


def test_data_groups_may_lie_on_nodes_in_different_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some take shared memory, others none, and where it is short all of them keep their own copies."""
    alone = run_in_threads(1, trained_once)[0]
    assert run_in_threads(4, on_uneven_nodes) == [(alone, 2), (alone, 2), (alone, 1), (alone, 1)]
    limit_windows(monkeypatch, 1)
    assert set(run_in_threads(4, on_uneven_nodes)) == {(alone, 1)}


def trained_once(comm: Any) -> float:
    with mz.ShardingConfig(comm=comm, micro_batch=1) as config, mz.DDPModel(gpt(), config) as model:
        return model.train(*tokens(4))


def test_a_model_that_finds_no_room_for_copies_of_its_own_either_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, in place of reading windows that are gone."""

    def no_memory(*_: Any, **__: Any) -> Any:
        raise OutOfMemoryError("no memory for parameters")

    def run(comm: Any) -> None:
        with mz.ShardingConfig(comm=comm, micro_batch=1) as config, mz.DDPModel(gpt(), config) as model:
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
