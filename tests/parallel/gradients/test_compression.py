"""Compressed gradients: nothing is lost for good, copies stay equal, and the bytes are those of the formula."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.comm.reduce import codec_of
from mpizero.layout import Partition
from mpizero.testing import parallel_assert, run_in_threads
from tests.parallel.covering import covering
from tests.parallel.models import ECHO_SHAPES, ECHO_SIZE, PRIVATE, STRATEGIES, echo, echoed, mlp, part, points, sharded
from tests.parallel.normalized import network, samples
from tests.parallel.parallel_layouts import Case, Way, gpt, placed, texts

KINDS = ("int8", "topk:0.1")


def model_of(strategy: str, comm: Any, optimizer: Any = None, **settings: Any) -> Any:
    return sharded(strategy, comm, echo(), optimizer or mz.SGD(lr=1.0), **settings)


def mine(comm: Any, step: int, samples: int) -> tuple[Any, Any]:
    x, y = echoed(step, samples)
    own = Partition(samples, comm.size).shard(comm.rank)
    return x[own.start : own.stop], y[own.start : own.stop]


def unsent(model: Any) -> Any:
    """What all ranks together have left out of means, in the order of the parameters."""
    engine, total = model._engine, np.zeros(ECHO_SIZE)
    exchange, layout = engine.exchange, engine.layout
    exchange.begin(1, 1.0)
    exchange.weigh(1.0, sent=False)  # of a batch of one sample whose weight is 1, sums are means
    for peer, share in enumerate(exchange.shards):
        for unit in layout.units:
            left, place = exchange.left_for(peer, unit.index), 0
            for span in share.gradient_spans[unit.index] if left.size else ():
                start = layout.gradient_bases[unit.index] + span.start  # no frozen nor tied parameters here
                total[start : start + span.size] += left[place : place + span.size]
                place += span.size
    everyone = np.empty(ECHO_SIZE * engine.grid.world.size)
    engine.grid.world.allgather(total, everyone)
    return everyone.reshape(-1, ECHO_SIZE).sum(0)


def lost(strategy: str, comm: Any, kind: str, memory: dict[str, Any]) -> float:
    """The largest difference of sent and kept from what was to be sent, over four steps, relative to the largest.

    Batches have other numbers of samples, and samples other weights, in each step.
    """
    model = model_of(strategy, comm, micro_batch=1, gradient_compression=kind, **memory)
    wanted = np.zeros(ECHO_SIZE)
    with model:
        for step, samples in enumerate((12, 3, 24, 12)):
            x, y = mine(comm, step, samples)
            model.train(x, y + step)
            wanted += echoed(step, samples)[0].astype(float).mean(0) / (1 + step)
        sent = -model.get_parameters().astype(float)
        left = unsent(model)
        assert (np.abs(left).max() > 0) == (model._engine.grid.inter_node.size > 1)
        return float(np.abs(sent + left - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize(
    ("n", "kind", "strategy", "private"), covering((1, 2, 3, 4, 8), KINDS, STRATEGIES, (True, False))
)
def test_what_was_sent_and_what_is_kept_add_up_to_all_gradients(
    n: int, kind: str, strategy: str, private: bool
) -> None:
    memory = PRIVATE if private else {"ranks_per_node": max(1, n // 2)}
    assert max(run_in_threads(n, lambda comm: lost(strategy, comm, kind, memory))) < 1e-5


@pytest.mark.mpi
def test_nothing_is_lost_between_processes(world: Any) -> None:
    for number, kind in enumerate(KINDS):
        strategy = STRATEGIES[(world.size + 2 * number) % 4]
        found = lost(strategy, world, kind, PRIVATE)
        parallel_assert(world, found < 1e-5, f"{strategy} {kind}: {found}")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "zero"), [*zip(("bf16", *KINDS), STRATEGIES[1:], strict=True)])
def test_all_copies_have_the_same_bits_and_a_second_run_too(kind: str, zero: str) -> None:
    def run(comm: Any, strategy: str) -> bytes:
        with model_of(strategy, comm, mz.AdamW(lr=0.1), gradient_compression=kind, **PRIVATE) as model:
            for step in range(3):
                model.train(*mine(comm, step, 12))
            values = model._engine.store.values if strategy == "ddp" else model.get_parameters()
            return bytes(values.tobytes())

    for strategy in ("ddp", zero):
        runs = [set(run_in_threads(3, lambda comm, s=strategy: run(comm, s))) for _ in range(2)]
        assert len(runs[0] | runs[1]) == 1, strategy


#: Models with copies that several ranks update: tables tied over two stages, unsplit parameters of tensor groups.
COPIES = (
    (Way(2, 1, zero=0), "bf16"),
    (Way(1, 2, zero=1), "int8"),
    (Way(1, 2, zero=3), "bf16"),
    (Way(2, 2, zero=0), "int8"),
    (Way(2, 2, zero=2), "topk:0.1"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "kind"), COPIES, ids=str)
def test_copies_on_other_stages_and_tensor_ranks_stay_equal(way: Way, kind: str) -> None:
    """Copies are compared in each step, and those of a tensor group have the gradient of a training that sends all."""
    case = Case(lambda: gpt(layers=2, dropout=0.0), batches=texts(3, 8))

    def run(comm: Any, compression: str | None) -> Any:
        settings = {"gradient_compression": compression, "check_every": 1, "micro_batch": 1}
        with placed(replace(case, optimizer=lambda: mz.SGD(lr=0.1)), comm, way, **settings, **PRIVATE) as model:
            for number, batch in enumerate(case.batches):
                model.train(*part(model.batch_group, *batch))
                model._engine.integrity.check()
                if number == 0:
                    first = dict(model._engine.global_view.named(model.get_parameters().copy()))
        return first

    exact = run_in_threads(2 * way.pipeline * way.tensor, lambda comm: run(comm, None))[0]
    found = run_in_threads(2 * way.pipeline * way.tensor, lambda comm: run(comm, kind))[0]
    same = {name for name in exact if np.array_equal(found[name], exact[name])}
    assert same < set(exact)
    unsplit = {name for name in exact if "norm" in name or "position" in name}
    assert unsplit
    assert way.tensor == 1 or unsplit <= same


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16", *KINDS])
def test_averaged_parameters_are_sent_exactly(kind: str) -> None:
    def run(comm: Any, strategy: str, compression: str | None) -> Any:
        settings = {"gradient_compression": compression, "micro_batch": 5, **PRIVATE}
        with sharded(strategy, comm, network("float32"), mz.SGD(lr=0.1), **settings) as model:
            model.train(*part(comm, *samples(1, 23, "float32")[0]))
            return {name: value.tobytes() for name, value in model.named_parameters().items()}

    for strategy in STRATEGIES[len(kind) % 2 :: 2]:
        exact, found = (run_in_threads(3, lambda c, s=strategy, k=k: run(c, s, k))[0] for k in (None, kind))
        averaged = {name for name in exact if "norm" in name and name.endswith(("mean", "variance"))}
        assert averaged <= {name for name in exact if exact[name] == found[name]} < set(exact), strategy


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_bytes_are_those_of_the_formula(n: int) -> None:
    """A message of c values: int8 c bytes and 4 a block of 256; top-k 8 bytes for each of ceil(share * c)."""
    formulas = {
        "bf16": lambda c: 2 * c,
        "int8": lambda c: 4 * (-(-c // 256)) + -(-c // 4) * 4,
        "topk:0.1": lambda c: 8 * int(np.ceil(c * 0.1)),
        "fp16": lambda c: 2 * c,
    }

    def sent(comm: Any, kind: str, strategy: str) -> int:
        with model_of(strategy, comm, micro_batch=1, gradient_compression=kind, **PRIVATE) as model:
            model.train(*mine(comm, 0, n))
            if kind in ("bf16", "fp16"):
                wanted = -echoed(0, n)[0].mean(0)
                np.testing.assert_allclose(model.get_parameters(), wanted, rtol=2.0**-6, atol=2.0**-6)
            return int(model._engine.grid.gradients.counters.bytes_by_tag["gradients"])

    for kind, bytes_of in formulas.items():
        strategy = ("ddp", "zero1")[(n + len(kind)) % 2]
        units = [ECHO_SIZE] if strategy == "ddp" else [int(np.prod(shape)) for shape in ECHO_SHAPES.values()]
        sizes = [sum(owned) for owned in zip(*(Partition(unit, n).sizes() for unit in units), strict=True)]
        for rank, found in enumerate(run_in_threads(n, lambda c, k=kind, s=strategy: sent(c, k, s))):
            assert found == sum(bytes_of(size) for peer, size in enumerate(sizes) if peer != rank)


@pytest.mark.slow
def test_a_skipped_step_leaves_parameters_and_residuals_as_they_were() -> None:
    def run(comm: Any, strategy: str, kind: str, clip: float | None) -> bool:
        settings = {"micro_batch": 1, "gradient_compression": kind, "clip": clip, **PRIVATE}
        with model_of(strategy, comm, **settings) as model:
            model.train(*mine(comm, 0, 12))
            before, left = model.get_parameters().copy(), unsent(model)
            x, y = mine(comm, 1, 12)
            if comm.rank == 1 and clip is None:
                x[1, 100:110] = np.nan
            elif comm.rank == 1:
                y[1] = np.inf  # the weight of the batch
            model.train(x, y)
            skipped = model.last_step.skipped is not None
            same = np.array_equal(before, model.get_parameters()) and np.array_equal(left, unsent(model))
            model.compute_gradients(*mine(comm, 2, 12))  # looks, and changes nothing
            same &= np.array_equal(left, unsent(model))
            return skipped and same and bool(left.any())

    for number, (strategy, kind) in enumerate(product(STRATEGIES, KINDS)):
        clip = (None, 1e9)[(number + number // 2) % 2]
        assert all(run_in_threads(3, lambda c, a=(strategy, kind, clip): run(c, *a)))


def test_a_sum_that_overflows_between_ranks_is_skipped_as_without_compression() -> None:
    def run(comm: Any, kind: str | None) -> Any:
        with model_of("ddp", comm, micro_batch=1, gradient_compression=kind, clip=1.0, **PRIVATE) as model:
            x, y = mine(comm, 0, 2)
            x[:, 7] = 3e38
            model.train(x, y)
            return model.last_step.skipped is not None and not model.get_parameters().any()

    for kind in (None, "bf16", *KINDS):
        assert all(run_in_threads(2, lambda comm, k=kind: run(comm, k)))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_large_batch_left_out_is_no_larger_part_of_a_small_one(kind: str) -> None:
    """A batch of 64 samples, then empty gradients of 2 samples: what is sent late are parts of the first mean."""

    def run(comm: Any, strategy: str) -> Any:
        model = model_of(strategy, comm, micro_batch=1, gradient_compression=kind, **PRIVATE)
        changes = []
        with model:
            for step, samples in enumerate((64, 2, 2)):
                x, y = mine(comm, 0, samples)
                before = model.get_parameters().copy()
                model.train(x if step == 0 else np.zeros_like(x), y)
                changes.append(float(np.abs(model.get_parameters() - before).max()))
        return changes

    largest = np.abs(echoed(0, 64)[0].mean(0)).max()
    for strategy in STRATEGIES:
        for changes in run_in_threads(2, lambda comm, s=strategy: run(comm, s)):
            assert max(changes) <= 1.01 * largest, (strategy, changes, largest)


def test_residuals_are_parts_of_means_whatever_the_loss_scale() -> None:
    """With scales that grow in each step, what was sent and what is kept are those of a training without a scale."""

    def run(comm: Any, scale: Any) -> Any:
        settings = {"gradient_compression": "int8", "micro_batch": 1, **PRIVATE}
        with sharded("zero1", comm, mlp(), mz.SGD(lr=0.1), **settings) as model:
            model._engine.bind(model.optimizer.wrapped_optimizer, scale)
            for _ in range(3):
                model.train(*part(comm, *points(4)))
            return model.get_parameters().tobytes(), model._engine.exchange._residual.tobytes()

    plain, scaled = (
        run_in_threads(2, lambda comm, s=s: run(comm, s)) for s in (None, mz.DynamicLossScale(initial=4.0, interval=1))
    )
    assert plain == scaled


def test_a_copy_goes_on_with_the_residuals_and_a_loaded_model_without(capfd: Any, tmp_path: Any) -> None:
    def run(comm: Any) -> Any:
        with model_of("zero2", comm, gradient_compression="topk:0.1", micro_batch=1, **PRIVATE) as model:
            model.train(*mine(comm, 0, 12))
            with model.deep_copy() as copy:
                left = unsent(model)
                same = np.array_equal(left, unsent(copy))
                for one in (model, copy):
                    one.train(*mine(comm, 1, 12))
                same &= model.parameters_sha256() == copy.parameters_sha256()
            model.save_model(tmp_path / "saved")
            model.load_model(tmp_path / "saved")
            return bool(same and left.any() and not unsent(model).any())

    assert all(run_in_threads(2, run))
    assert capfd.readouterr().err.count("has not sent yet") == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_optimizer_compresses_what_its_model_sends_until_another_is_bound(strategy: str) -> None:
    def run(comm: Any) -> Any:
        reference = model_of(strategy, comm, gradient_compression="topk:0.1", micro_batch=1, **PRIVATE)
        model = model_of(strategy, comm, micro_batch=1, **PRIVATE)
        plain = model.optimizer
        packed = mz.GradientCompressionOptimizer(mz.SGD(lr=1.0), model.config, compression="topk:0.1")
        with reference, model:
            for _ in range(2):  # the first also agrees that there is memory for gradients
                model.train(*mine(comm, 0, 12))
            before = model.last_step.bytes_sent
            model.set_parameters(np.zeros(ECHO_SIZE, np.float32))
            packed.set_model(model)
            for step in range(2):
                model.train(*mine(comm, step, 12))
                reference.train(*mine(comm, step, 12))
            same = model.parameters_sha256() == reference.parameters_sha256()
            fewer = model.last_step.bytes_sent == reference.last_step.bytes_sent < before
            rounds = "gradient_compression='topk:0.1' rounds what ranks send"
            assert model.metadata().within_rounding == reference.metadata().within_rounding == (rounds,)
            plain.set_model(model)
            model.train(*mine(comm, 0, 12))
            freed = model.metadata().bytes_on_rank.get("residuals", 0) == 0
            assert model.metadata().exactness == "the bits of one process"
            return same and fewer and freed and model.last_step.bytes_sent == before

    assert all(run_in_threads(3, run))


def test_residuals_are_counted() -> None:
    def run(comm: Any) -> Any:
        found = []
        for strategy in ("ddp", "zero2"):
            with model_of(strategy, comm, gradient_compression="int8", **PRIVATE) as model:
                told = model.metadata()
                found.append((told.bytes_on_rank["residuals"], told.formula_bytes["residuals"]))
        return found

    for rank, (ddp, zero2) in enumerate(run_in_threads(4, run)):
        own = sum(Partition(size, 4).sizes()[rank] for size in (185, 211))  # one unit each
        assert ddp == (8 * ECHO_SIZE, 8 * ECHO_SIZE)
        assert zero2 == (8 * (ECHO_SIZE - own), 8 * ECHO_SIZE * 3 / 4)


@pytest.mark.parametrize("name", ["bf16", "fp16", "int8", "topk:0.3"])
@pytest.mark.parametrize("count", [0, 1, 3, 255, 257, 1001])
def test_a_message_has_the_bytes_that_were_promised(name: str, count: int) -> None:
    codec = codec_of(name)
    assert codec is not None
    x = np.random.default_rng(0).standard_normal(count).astype(np.float32)
    message, out = np.zeros(codec.packed(count), np.uint8), np.empty(count, np.float32)
    left = np.zeros(count if codec.feedback else 0, np.float32)
    codec.encode(x, left, message)
    codec.decode(message, out)
    np.testing.assert_allclose(out + (left if codec.feedback else 0), x, rtol=2**-8, atol=1e-6)
