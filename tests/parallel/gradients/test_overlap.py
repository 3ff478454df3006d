"""Messages that are on their way while ranks compute: begun ahead, waited for in time, and gone after every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.comm import reduce as exchanges
from mpizero.errors import CollectiveMismatch, MpizeroError
from mpizero.kernels import matmul as products
from mpizero.sharding import params as publication
from mpizero.sharding import update
from mpizero.testing import parallel_assert, run_in_threads
from tests.faults.jobs import launchers, run_job
from tests.parallel.models import MEMORIES, PRIVATE, STRATEGIES, part, points, sharded, tokens
from tests.parallel.models import gpt as small_gpt
from tests.parallel.normalized import network, samples
from tests.parallel.parallel_layouts import Blocks, Wrapped, gpt, known, texts, with_traps

#: A bucket of 64 float32 values, in MiB: even small models have many.
FINE = 256 / 2**20


def begun(store: Any) -> int:
    """Collectives of the peers that have begun."""
    return int(store.grid.inter_node.trace.started)


def values(lent: Any) -> list[float]:
    """All values of lent parameters, taken name by name as layers do."""
    if isinstance(lent, np.ndarray):
        return list(lent.reshape(-1).tolist())
    return [value for name in sorted(lent) for value in values(lent[name])]


def take(store: Any, block: str) -> None:
    """Wait for the parameters of a block as runners do."""
    store.wait(block)
    store.progress.poll()


@pytest.mark.parametrize("memory", MEMORIES[1:])
def test_the_next_unit_comes_while_one_is_used(memory: dict[str, Any]) -> None:
    """Every order of units, announced or not, lends the same values."""

    def lend(comm: Any, orders: Sequence[Sequence[tuple[int, int | None]]]) -> list[list[tuple[int, Any]]]:
        model = sharded("zero3", comm, mz.nn.MLP(6, (7, 5, 4), 3), **memory)
        found = []
        with model:
            store = model._engine.store
            units = store.layout.units
            for order in orders:
                rows = []
                for number, following in order:
                    before = begun(store)
                    with store.unshard(units[number], None if following is None else units[following]) as lent:
                        rows.append((begun(store) - before, values(lent)))
                found.append(rows)
        return found

    plain: list[tuple[int, int | None]] = [(0, None), (1, None), (2, None), (2, None), (0, None)]
    announced: list[tuple[int, int | None]] = [(0, 1), (1, 2), (2, 2), (2, 0), (0, None)]
    mistaken: list[tuple[int, int | None]] = [(0, 3), (1, 3), (2, None), (2, 1), (0, None)]
    for alone, ahead, wrong in run_in_threads(4, lambda comm: lend(comm, (plain, announced, mistaken))):
        assert [count for count, _ in alone] == [1, 1, 1, 1, 1]
        assert [count for count, _ in ahead] == [2, 1, 1, 1, 0]
        assert [row for _, row in alone] == [row for _, row in ahead] == [row for _, row in wrong]


def after_failures(comm: Any, strategy: str, places: Sequence[str], memory: dict[str, Any]) -> list[str]:
    """The hash after each step of a training in which a layer raises before some steps, each time at a later grain."""
    ((x, y),) = texts(1, 6)
    switch: dict[str, Any] = {}
    model = sharded(strategy, comm, with_traps(gpt(layers=2), {"blocks.1": switch}), micro_batch=2, **memory)
    found = []
    with model:
        for number, what in enumerate((*places, "")):
            if what:
                switch.update(what=what, first=2 * number)
                with pytest.raises((ArithmeticError, MpizeroError), match="trap in"):
                    model.train(*part(comm, x, y))
                switch.clear()
            model.train(*part(comm, x, y))
            found.append(model.parameters_sha256())
    return found


@cache
def without_failure() -> list[str]:
    return after_failures(None, "ddp", [""] * 3, {})


@pytest.mark.slow
def test_a_step_that_fails_leaves_nothing_in_flight() -> None:
    fine = {"bucket_mb": FINE}
    cases = (
        ("zero3", PRIVATE), ("zero3", MEMORIES[2]), ("zero2", MEMORIES[2]),
        ("ddp", {**PRIVATE, **fine}), ("ddp", {**MEMORIES[2], **fine}),
    )  # fmt: skip
    places = ("forward", "input", "weights")
    assert after_failures(None, "ddp", places, {}) == without_failure()
    for strategy, memory in cases:
        for failed in run_in_threads(4, lambda comm, s=strategy, m=memory: after_failures(comm, s, places, m)):
            assert failed == without_failure()


@pytest.mark.mpi
def test_a_step_that_fails_leaves_nothing_in_flight_between_processes(world: Any) -> None:
    cases = (
        ("zero3", "forward", PRIVATE),
        ("zero3", "weights", MEMORIES[2]),
        ("zero2", "weights", PRIVATE),
        ("zero2", "input", MEMORIES[2]),
        ("zero1", "input", PRIVATE),
        ("ddp", "weights", {**MEMORIES[2], "bucket_mb": FINE}),
        ("ddp", "forward", {**PRIVATE, "bucket_mb": FINE}),
    )
    for strategy, what, memory in cases[world.size % 4 :: 4]:
        failed = after_failures(world, strategy, [what], memory)
        parallel_assert(world, failed == known(world, without_failure)[:2], f"{strategy} {what} {memory}")


@dataclass(frozen=True)
class Noted(Wrapped):
    """A layer that calls ``note`` when its backward pass begins."""

    note: Callable[[], None] = field(compare=False, hash=False)

    def backward_input(self, params: Any, cache: Any, dy: Any) -> Any:
        self.note()
        return self.layer.backward_input(params, cache, dy)


def noted(note: Callable[[], None]) -> Blocks:
    """A network of four blocks, each of which calls ``note`` when its backward pass begins."""
    plain = mz.nn.MLP(6, (7, 5, 4), 3)
    return Blocks(plain, {name: lambda block: Noted(block, note) for name in plain.blocks})


def in_flight(comm: Any, strategy: str, memory: dict[str, Any]) -> tuple[list[bool], bool, int]:
    """Whether sums travel once the backward of each block begins, and still after the step; the number of messages."""
    placed: list[Any] = []
    found: list[bool] = []

    def messages() -> int:
        by_tag = placed[0]._engine.grid.gradients.counters.messages_by_tag
        return by_tag["unit gradients"] + by_tag["gradients"]

    def under_way() -> bool:
        engine = placed[0]._engine
        if engine.reducer.in_rounds:
            return bool(engine.reducer._queue)
        sums = engine.all_reduce.overlapped
        return sums is not None and (bool(sums._queue) or bool(sums._gatherings))

    with sharded(strategy, comm, noted(lambda: found.append(messages() > 0)), micro_batch=2, **memory) as model:
        placed.append(model)
        model.train(*part(comm, *points(2 * comm.size)))
        return found, under_way(), messages()


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_the_sums_of_a_unit_travel_while_the_next_one_computes(strategy: str) -> None:
    for memory in MEMORIES[1:]:
        for blocks, after, messages in run_in_threads(4, lambda comm, m=memory: in_flight(comm, strategy, m)):
            assert blocks == [False, True, True, True]
            assert not after
            assert messages == 4
    for blocks, after, messages in run_in_threads(2, lambda comm: in_flight(comm, strategy, {})):  # one group
        assert (blocks, after, messages) == ([False] * 4, False, 0)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_unit_of_more_messages_than_travel_at_a_time_does_not_hold_up_the_next_one(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanges, "EXCHANGE_ELEMENTS", 8)
    monkeypatch.setattr(exchanges, "IN_FLIGHT", 1)
    x, y = points(8)

    def left(comm: Any) -> tuple[list[bool], str]:
        """Whether messages of the units after it wait when a block's backward begins, and the hash."""
        placed: list[Any] = []
        found: list[bool] = []
        network = noted(lambda: found.append(bool(placed[0]._engine.reducer._queue._waiting)))
        with sharded(strategy, comm, network, micro_batch=2, ranks_per_node=1) as model:
            placed.append(model)
            for _ in range(2):
                model.train(*part(comm, x, y))
            return found, str(model.parameters_sha256())

    ((_, expected),) = run_in_threads(1, left)
    for found, sha256 in run_in_threads(4, left):
        assert found == [False, True, True, True] * 2
        assert sha256 == expected


def test_what_blocks_have_finished_travels_while_the_others_compute() -> None:
    """Of 49, 40, 24 and 15 parameters in buckets of 16 the last are on their way when the second block computes.

    On nodes of two ranks those from 96 on are summed by the second of each, those from 64 on by the first.
    """
    bucket = {"bucket_mb": 64 / 2**20}
    late, early = [False, False, False, True], [False, False, True, True]
    private = run_in_threads(4, lambda comm: in_flight(comm, "ddp", {**PRIVATE, **bucket}))
    assert private == [(early, False, 8)] * 4
    nodes = run_in_threads(4, lambda comm: in_flight(comm, "ddp", {**MEMORIES[2], **bucket}))
    assert nodes == [(late, False, 4), (early, False, 4)] * 2


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("zero1", {}),
        ("zero2", {"clip": 0.1}),
        *product(("zero1", "zero2"), ({"wire": "bfloat16", "wire_parameters": True}, None)),
        ("ddp", {}),
    ],
)
def test_the_first_parameters_travel_while_the_others_are_updated(
    strategy: str, settings: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first region has the embedding, to which the head is tied; or (None) the second one has running means."""
    monkeypatch.setattr(publication, "REGION", 1)
    monkeypatch.setattr(update, "_MOST_RECORDED", 0)
    begun: list[int] = []
    begin = publication.ParameterStore.begin_all_gather

    def noted(store: Any) -> None:
        begin(store)
        begun.append(len(store._begun._gatherings))

    monkeypatch.setattr(publication.ParameterStore, "begin_all_gather", noted)

    def run(comm: Any, **memory: Any) -> str:
        model = network() if settings is None else small_gpt(dim=24, dtype="float32", tied=True)
        batches = samples(3, 9) if settings is None else [tokens(7, number) for number in range(3)]
        with sharded(strategy, comm, model, micro_batch=2, **memory, **(settings or {})) as trained:
            for batch in batches:
                trained.train(*part(comm, *batch))
            return str(trained.parameters_sha256())

    expected = run(None)
    assert not begun
    for memory in MEMORIES[1:]:
        assert set(run_in_threads(4, lambda comm, m=memory: run(comm, **m))) == {expected}
        # Four ranks, three steps; the other regions begin with the next step. DDP sends no parameters.
        assert begun == [1] * (0 if strategy == "ddp" else 12)
        begun.clear()


class Gate:
    """Messages that arrive when the test says so."""

    def __init__(self) -> None:
        self.open, self.waited = False, False

    def test(self) -> bool:
        return self.open

    def wait(self) -> None:
        self.waited = self.open = True


def test_who_takes_a_block_waits_for_what_it_uses_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "REGION", 1)
    made: tuple[list[Gate], list[Gate]] = ([], [])

    def begin(peers: Any, *_: Any, **settings: Any) -> Gate:
        made[peers.rank].append(Gate())
        return made[peers.rank][-1]

    def waits(comm: Any) -> list[list[bool]]:
        model = sharded("zero1", comm, mz.nn.MLP(6, (7, 5, 4), 3), **PRIVATE)
        gates, found = made[comm.rank], []
        with model:
            store = model._engine.store
            comm.barrier()
            monkeypatch.setattr(publication, "begin_gather", begin)
            comm.barrier()
            units = store.layout.units
            names = [name for unit in units for name in unit.blocks]

            def note() -> None:
                found.append([gate.waited for gate in gates])

            store.all_gather(later=True)
            note()
            for name in names[:2]:
                take(store, name)
                note()
            gates[2].open = True
            take(store, names[0])
            take(store, names[2])
            note()
            store.owned(0)
            note()
        return found

    for steps in run_in_threads(2, waits):
        assert steps == [
            [False],  # the others begin when a block is taken
            [True, False, False, False],
            [True, True, False, False],
            [True, True, False, False],
            [True] * 4,
        ]


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_the_first_call_after_a_step_is_collective_and_then_a_rank_may_predict_alone(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others then wait outside of the library, so whatever the rank needs of them must have come."""
    monkeypatch.setattr(exchanges, "EXCHANGE_ELEMENTS", 16)
    x = np.ones((8, 6), np.float32)

    def alone(comm: Any, memory: dict[str, Any]) -> str:
        with sharded(strategy, comm, mz.nn.MLP(6, (7, 5, 4), 3), micro_batch=2, **memory) as model:
            model.train(*part(comm, x, np.zeros(8, np.int64)))
            if comm.rank == 1:
                assert model.local_parameter_shard.size  # what a rank owns it may always read alone
            comm.barrier()
            model.predict(x[:1])
            for _ in range(2 if comm.rank == 1 else 0):
                model.predict(x[:1])
            comm.barrier()
            return str(model.parameters_sha256())

    for kind in MEMORIES[1:]:
        assert len(set(run_in_threads(4, lambda comm, m=kind: alone(comm, m)))) == 1

    def instead_of_training(comm: Any, memory: dict[str, Any]) -> None:
        with sharded(strategy, comm, mz.nn.MLP(6, (7, 5, 4), 3), micro_batch=2, **memory) as model:
            mine = part(comm, x, np.zeros(8, np.int64))
            model.train(*mine)
            if comm.rank == 1:
                model.predict(x[:1])
            model.train(*mine)

    for kind in MEMORIES[1:]:
        with pytest.raises(CollectiveMismatch, match="predict"):
            run_in_threads(4, lambda comm, m=kind: instead_of_training(comm, m))


@pytest.mark.skipif(not products.fuses(), reason="needs the kernel of products")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_messages_that_progress_amid_products_change_no_bit(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    by_parts = products.KernelProducts.product_by_parts

    def counted(self: Any, a: Any, b: Any, out: Any, between: Callable[[], object]) -> bool:
        return bool(by_parts(self, a, b, out, lambda: called.append(True) or between()))

    def run(comm: Any, **memory: Any) -> str:
        with sharded(strategy, comm, small_gpt(dim=24, dtype="float32"), micro_batch=1, **memory) as model:
            for number in range(3):
                model.train(*part(comm, *tokens(7, number)))
            return str(model.parameters_sha256())

    monkeypatch.setattr(products, "library", products.KernelProducts)
    expected = run(None)
    monkeypatch.setattr(products, "_LONG", 1 << 9)
    monkeypatch.setattr(products.KernelProducts, "product_by_parts", counted)
    for memory in MEMORIES[1:]:
        assert set(run_in_threads(4, lambda comm, m=memory: run(comm, **m))) == {expected}
    assert len(called) > 1000


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_ranks_without_samples_send_the_parameters_that_others_wait_for(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before they wait themselves: for the sums of gradients, of which few are in flight at a time."""
    monkeypatch.setattr(exchanges, "EXCHANGE_ELEMENTS", 8)
    monkeypatch.setattr(exchanges, "IN_FLIGHT", 1)
    monkeypatch.setattr(publication, "REGION", 1)

    def run(comm: Any, **memory: Any) -> str:
        x, y = points(1)
        mine = (x, y) if comm.rank == 0 else (x[:0], y[:0])
        with sharded(strategy, comm, mz.nn.MLP(6, (7, 5, 4), 3), micro_batch=1, timeout=60, **memory) as model:
            for _ in range(2):
                model.train(*mine)
            model.predict(mine[0])
            model.train(*mine)
            model.evaluate(*mine)
            return str(model.parameters_sha256())

    expected = run_in_threads(1, run)[0]
    groups = {"shard_nodes": 2} if strategy == "zero3" else {}
    for memory in ({**PRIVATE, "ranks_per_node": 1}, {"ranks_per_node": 1}):
        assert set(run_in_threads(4, lambda comm, m=memory: run(comm, **m, **groups))) == {expected}


def look(model: Any, how: str, x: Any, y: Any) -> Any:
    """Use parameters, or gradients by hand, in one of many ways."""
    if how == "shard":
        shard, whole = model.local_parameter_shard, model.get_parameters()
        return np.array_equal(shard, np.concatenate([whole[span.start : span.stop] for span in model.owned]))
    ways = {
        "hash": model.parameters_sha256,
        "vector": model.get_parameters,
        "predict": lambda: model.predict(x[:1]),
        "evaluate": lambda: model.evaluate(x, y)[:2],
        "integrity": model.check_integrity,
        "set": lambda: model.set_parameters(model.get_parameters() * np.float32(0.5)),
        "gradients": lambda: model.compute_gradients(x, y).loss,
        "apply": lambda: model.apply_gradients(model.compute_gradients(x, y), 0.1),
        "restore": lambda: model.deserialize(model.serialize()),
        "clone": lambda: cloned(model),
    }
    return ways[how]()


def cloned(model: Any) -> str:
    with model.clone() as copy:
        return str(copy.parameters_sha256())


LOOKS = (
    "hash", "vector", "predict", "evaluate", "integrity", "shard", "set", "gradients", "apply", "restore",
    "clone",
)  # fmt: skip
#: With fewer grains than ranks some ranks read nothing.
BATCHES = ((9,), (2, 5))


def looked(comm: Any, strategy: str, memory: dict[str, Any], ways: Sequence[str]) -> list[tuple[str, Any]]:
    """What is seen in some ways, each after one step and after two more, and the hash at the end."""
    model = sharded(strategy, comm, gpt(layers=2), micro_batch=2, **memory)
    found = []
    with model:
        for how, sizes in product(ways, BATCHES):
            for samples in sizes:
                ((x, y),) = texts(1, samples)
                mine = part(comm, x, y)
                model.train(*mine)
            seen = look(model, how, *(mine if how in ("evaluate", "gradients", "apply") else (x, y)))
            found.append((how, seen))
        return [*found, ("hash at the end", model.parameters_sha256())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "memory", "ways"),
    [
        ("zero1", MEMORIES[1], LOOKS[::4]),
        ("zero2", MEMORIES[1], LOOKS[1::4]),
        ("zero1", MEMORIES[2], LOOKS[2::4]),
        ("zero2", MEMORIES[2], LOOKS[3::4]),
        ("ddp", {**MEMORIES[1], "bucket_mb": FINE}, ("predict", "gradients", "clone")),
        ("ddp", {**MEMORIES[2], "bucket_mb": FINE}, ("evaluate", "apply", "integrity")),
    ],
)
def test_every_use_sees_all_that_was_published_or_summed_behind_computing(
    strategy: str, memory: dict[str, Any], ways: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication, "REGION", 1)  # as many as there are blocks
    expected = looked(None, strategy, {}, ways)
    for found in run_in_threads(4, lambda comm: looked(comm, strategy, memory, ways)):
        for (how, seen), (_, wanted) in zip(found, expected, strict=True):
            np.testing.assert_array_equal(seen, wanted, err_msg=how)


DROPPED = """
import numpy as np
from mpi4py import MPI
import mpizero as mz
x = np.ones((4, 64), np.float32)
for memory in ({"ranks_per_node": 1}, {"share_node_memory": False}):
    model = None  # dropped with its values on their way
    model = mz.ZeRO1Model(mz.nn.MLP(64, (1000, 1000), 3), mz.ShardingConfig(comm=MPI.COMM_WORLD, **memory))
    for _ in range(2):
        model.train(x, np.zeros(4, np.int64))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("then", "well"), [("MPI.Finalize()", True), ("1 / (1 - MPI.COMM_WORLD.rank)", False)])
@pytest.mark.parametrize("launcher", launchers() or [None], ids=lambda pair: "" if pair is None else Path(pair[0]).name)
def test_a_program_may_end_while_values_are_on_their_way(launcher: Any, then: str, well: bool, tmp_path: Path) -> None:
    if launcher is None:
        pytest.skip("no mpiexec")
    program = tmp_path / "program.py"
    program.write_text(f'{DROPPED}{then}\nprint("end", flush=True)\n')
    done = run_job(launcher, tmp_path, [program])
    assert (done.status == 0) == well, done.err
    assert not well or done.out.count("end") == 2
