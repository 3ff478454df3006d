"""Training on GPUs, simulated ones: what the host computes within rounding, and the same bits on any layout.

Arrays of a simulated GPU do not mix with the host's, so a forgotten copy is an error here as on a real one.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

import mpizero as mz
from mpizero.cli.main import main
from mpizero.errors import ConfigError, DataError
from mpizero.kernels import gpu
from mpizero.kernels.cuda.launch import CudaKernel
from mpizero.kernels.gpu import HalfPrecisionArray, MatrixBatch
from mpizero.testing import run_in_threads
from tests.cuda.simulated import PRIVATE, bound
from tests.support.reference import layers
from tests.support.simulated.gpus import SimulatedDevice

pytestmark = pytest.mark.usefixtures("in_turn")

VOCABULARY = 5


def gpt(dtype="float32", **settings):
    settings = {"dim": 8, "layers": 1, "heads": 2, "sequence": 3, "vocabulary": VOCABULARY, "dropout": 0.1} | settings
    return mz.nn.GPT(dtype=dtype, **settings)


def ids(samples=2):
    drawn = np.random.default_rng(0).integers(0, VOCABULARY, (samples, 4))
    return drawn[:, :-1], drawn[:, 1:]


def trained(device, comm=None, *, place=mz.DDPModel, optimizer=None, batch=None, model=None, steps=2, **settings):
    """Train on this rank's part of a batch; return losses, the parameters, and a prediction."""
    of_model = {key for key in settings if key.endswith("_parallel_size") or key in ("schedule", "zero_stage")}
    layout = {key: settings.pop(key) for key in of_model}
    x, y = ids() if batch is None else batch
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    share = len(x) // size if place is not mz.HybridShardedModel else len(x)  # there ranks split the model
    own = slice(rank * share, (rank + 1) * share) if share < len(x) else slice(None)
    with (
        mz.ShardingConfig(comm=comm, device=device, **{"micro_batch": 1, **settings}) as sharding,
        place(gpt() if model is None else model, sharding, **layout) as placed,
    ):
        placed._engine.bind(optimizer or mz.AdamW(lr=1e-2))
        losses = [placed.train(x[own], y[own]) for _ in range(steps)]
        right = placed.evaluate(x[own], y[own])
        return losses, placed.gather_full_parameters(), placed.predict(x), right


@functools.cache
def one_step_alone():
    return trained("cuda", steps=1)


def close(first, second, rtol):
    for a, b in zip(first[:3], second[:3], strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)
    assert first[3][1:] == second[3][1:]


def test_a_gpu_trains_as_the_host_does(monkeypatch):
    started, call = set(), CudaKernel.__call__
    monkeypatch.setattr(CudaKernel, "__call__", lambda kernel, *args: (started.add(kernel.name), call(kernel, *args)))
    device, host = (trained(device, model=gpt("float64"), clip=1.0, accumulate=2) for device in ("cuda", "cpu"))
    close(device, host, 1e-10)
    assert started >= {"gather", "layernorm", "causal_softmax", "bias_gelu", "dropout", "softmax_cross_entropy"}


@pytest.mark.parametrize(
    ("activation", "task"),
    [("relu", "classification"), ("gelu", "regression"), ("silu", "classification"), ("tanh", "regression")],
)
def test_a_network_of_any_activation_and_task_trains_on_a_gpu(task, activation):
    rng = np.random.default_rng(1)
    y = rng.integers(0, 2, 4) if task == "classification" else rng.normal(size=(4, 2)).astype(np.float32)
    batch = (rng.normal(size=(4, 3)).astype(np.float32), y)
    model = mz.nn.MLP(3, (4,), 2, activation=activation, task=task)
    close(*(trained(device, batch=batch, model=model, micro_batch=2) for device in ("cuda", "cpu")), 2e-5)


@pytest.mark.parametrize(("place", "memory"), [(mz.DDPModel, {}), (mz.ZeRO3Model, PRIVATE)])
def test_bits_are_those_of_one_rank_for_any_strategy(place, memory):
    alone = one_step_alone()
    settings = {"place": place, "steps": 1, "minimum_parameter_group_size": 1, **memory}
    for losses, parameters, *_ in run_in_threads(2, lambda comm: trained("cuda", comm, **settings)):
        assert losses == alone[0]
        assert parameters.tobytes() == alone[1].tobytes()


@pytest.mark.parametrize(("schedule", "zero"), [("1f1b", 1), ("zero_bubble", 3)])
def test_a_pipeline_of_gpus_has_the_bits_of_one(schedule, zero):
    alone = one_step_alone()
    layout = {"pipeline_parallel_size": 2, "schedule": schedule, "zero_stage": zero, **PRIVATE}
    for found in run_in_threads(2, lambda comm: trained("cuda", comm, place=mz.HybridShardedModel, steps=1, **layout)):
        assert found[0] == alone[0]
        assert found[1].tobytes() == alone[1].tobytes()
        np.testing.assert_allclose(found[2], alone[2], rtol=1e-6)


@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_layers_split_over_gpus_give_what_one_does_and_the_bits_of_as_many_tiles(axis):
    alone, layout = trained("cpu", steps=1), {f"{axis}_parallel_size": 2}
    tiled = trained("cuda", steps=1, tiles={axis: 2})
    for found in run_in_threads(2, lambda comm: trained("cuda", comm, place=mz.HybridShardedModel, steps=1, **layout)):
        close(found, alone, 5e-5)
        assert found[0] == tiled[0]
        assert found[1].tobytes() == tiled[1].tobytes()


@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_the_products_of_split_layers_are_rounded_too(axis, monkeypatch):
    seen, multiply = [], gpu.multiply

    def watched(a, b, out):
        seen.append((len(out.shape), isinstance(a, HalfPrecisionArray) and isinstance(b, HalfPrecisionArray)))
        multiply(a, b, out)

    monkeypatch.setattr(gpu, "multiply", watched)
    layout = {f"{axis}_parallel_size": 2, "place": mz.HybridShardedModel, "mixed_precision": "bfloat16", "steps": 1}
    found = run_in_threads(2, lambda comm: trained("cuda", comm, **layout))
    close(found[0], trained("cpu", steps=1), 2e-2)
    assert set(seen) == {(2, True), (4, True)}


def test_ranks_of_a_node_take_its_gpus_in_turn():
    def number(comm):
        with mz.ShardingConfig(comm=comm, device="cuda") as config, mz.DDPModel(gpt(), config) as model:
            return model._engine.compute_device.device.number

    assert run_in_threads(3, number) == [0, 1, 0]


def test_a_rank_without_a_gpu_stops_all_of_them_with_the_reason(monkeypatch):
    def construct(comm):
        monkeypatch.setattr("mpizero.sharding.device.available_gpus", lambda: (0, "no package cupy; install it"))
        with mz.ShardingConfig(comm=comm, device="cuda") as config, pytest.raises(ConfigError) as caught:
            mz.DDPModel(gpt(), config)
        return str(caught.value)

    (told,) = set(run_in_threads(2, construct))
    assert told == (
        'device = "cuda": rank 0 of 2 has no GPU to train on: no package cupy; install it, or train with device = "cpu"'
    )


def test_what_is_missing_is_told_without_a_gpu(monkeypatch):
    monkeypatch.setattr(gpu, "gpus", gpu.Gpus)
    count, reason = gpu.available_gpus()
    assert count == 0
    assert reason
    with pytest.raises(ConfigError, match='device = "cpu"'):
        gpu.open_device(0)


@pytest.mark.filterwarnings("ignore:.* cannot be cut into samples:UserWarning")
def test_a_black_box_and_batches_without_numbers_are_refused():
    with mz.ShardingConfig(device="cuda", micro_batch=1) as config:
        box = mz.FunctionModel({"w": np.ones(2, np.float32)}, lambda parameters, batch: (0.0, parameters, 1.0))
        with pytest.raises(ConfigError, match="black box"):
            mz.DDPModel(box, config)
        with mz.DDPModel(gpt(), config) as model, pytest.raises(DataError, match="arrays of numbers, not int"):
            model.train([[1, 2, 3]], [[2, 3, 4]])
    with pytest.raises(ConfigError, match='one of "cpu", "cuda"'):
        mz.ShardingConfig(device="gpu")


@dataclass(frozen=True)
class Joined(mz.nn.Layer):
    """A first layer of the user's, whose input is a dictionary of arrays."""

    def forward(self, params, x, run=None):
        return mz.nn.arrays.namespace(x["a"]).concatenate([x["a"], x["b"][0]], axis=1), None

    def backward_input(self, params, cache, dy):
        return None, None


def test_trees_of_arrays_are_copied_to_the_gpu_leaf_by_leaf():
    x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    y = np.arange(6) % 3
    tree = {"a": x[:, :2], "b": (x[:, 2:],)}
    found = []
    for data, first in ((x, {}), (tree, {"joined": Joined()})):
        wrapped = mz.nn.MLP(4, (5,), 3, dtype="float32")
        wrapped = SimpleNamespace(
            blocks={**first, **wrapped.blocks}, loss=wrapped.loss, dtype=wrapped.dtype, seed=wrapped.seed
        )
        with mz.ShardingConfig(device="cuda", micro_batch=2) as config, mz.ZeRO2Model(wrapped, config) as model:
            found.append((model.train(data, y), model.evaluate(data, y), model.predict(data).tobytes()))
    assert found[0] == found[1]


def test_copies_longer_than_the_pinned_buffer_go_in_pieces(monkeypatch):
    monkeypatch.setattr(gpu, "STAGING", 64)
    device = gpu.open_device(0)
    values = np.arange(100, dtype=np.float32)
    there = device.empty(100, np.float32)
    device.write(there, values)
    assert np.array_equal(there.get(), values)
    parts = [np.zeros((2, 3), np.float32), np.zeros(50, np.float32)]
    device.read(there, [(7, parts[0]), (30, parts[1])])
    assert np.array_equal(parts[0].reshape(-1), values[7:13])
    assert np.array_equal(parts[1], values[30:80])


def test_the_pinned_buffer_is_not_written_to_before_its_last_copy_has_ended(monkeypatch):
    """CUDA copies from pinned memory while Python goes on: here at the latest moment that it may."""
    started = []

    def wait(device):
        while started:
            array, staged = started.pop()
            array.set(staged)

    monkeypatch.setattr(gpu, "STAGING", 64)
    monkeypatch.setattr(SimulatedDevice, "_copy_pinned", lambda device, *copy: started.append(copy))
    monkeypatch.setattr(SimulatedDevice, "_await_pinned", wait)
    device = gpu.open_device(0)
    values = np.arange(100, dtype=np.float32)
    there, back = device.empty(100, np.float32), np.empty(100, np.float32)
    device.write(there, values)
    device.read(there, [(0, back)])
    assert np.array_equal(back, values)


def test_arrays_of_a_gpu_do_not_mix_with_the_hosts():
    device = gpu.open_device(0)
    here = np.ones(3, np.float32)
    there = device.put(here)
    for mixed in (
        lambda: there + here,
        lambda: here + there,
        lambda: np.asarray(there),
        lambda: there.__setitem__(0, here),
    ):
        with pytest.raises(TypeError):
            mixed()
    assert float((there + there).sum()) == 6.0


def rounded(x, dtype):
    """Round to 16 bits and back by the oracle's kernels."""
    bits, wide = np.empty(x.size, np.uint16), np.empty(x.size, np.float32)
    getattr(layers, f"to_{dtype}")(np.ascontiguousarray(x).reshape(-1), bits)
    getattr(layers, f"from_{dtype}")(bits, wide)
    return wide.reshape(x.shape)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_product_in_16_bits_is_one_of_rounded_operands_added_in_float32(dtype):
    rng, device = np.random.default_rng(2), gpu.open_device(0)
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 5), (5, 4)))
    wanted = rounded(a, dtype) @ rounded(b, dtype)
    left = [device.put(a), device.put(a.T.copy()).T, device.put(np.repeat(a, 2, axis=1))[:, ::2]]
    right = [device.put(b), device.put(b.T.copy()).T]
    with device.multiplying_in(dtype):
        for x, y in itertools.product(left, right):
            np.testing.assert_allclose(gpu.matmul(x, y).get(), wanted, rtol=1e-6)
            for out in (device.empty(12, np.float32).reshape(3, 4), device.empty(24, np.float32).reshape(3, 8)[:, ::2]):
                assert gpu.matmul(x, y, out) is out
                np.testing.assert_allclose(out.get(), wanted, rtol=1e-6)
        assert gpu.matmul(device.put(a[:0]), right[0]).shape == (0, 4)
    np.testing.assert_allclose(gpu.matmul(left[0], right[0]).get(), a @ b, rtol=1e-6)  # and no longer than asked


class Memory:
    """What cuBLAS is told of an array."""

    def __init__(self, values):
        self.values, self.shape, self.size, self.strides = values, values.shape, values.size, values.strides
        self.itemsize, self.data = values.itemsize, SimpleNamespace(ptr=values.ctypes.data)


def by_columns(pointer, dtype, rows, columns, leading, step=0, count=1):
    """Show what cuBLAS finds at a pointer: ``count`` matrices whose columns are contiguous."""
    assert leading >= rows
    assert count == 1 or step > 0
    elements = step * (count - 1) + leading * (columns - 1) + rows
    kind = ctypes.c_char * (elements * np.dtype(dtype).itemsize)
    flat, size = np.frombuffer(kind.from_address(pointer), dtype), np.dtype(dtype).itemsize
    return np.lib.stride_tricks.as_strided(flat, (count, rows, columns), (step * size, size, leading * size))


def gemm_ex(handle, ta, tb, m, n, k, alpha, a, a_kind, lda, b, b_kind, ldb, beta, c, c_kind, ldc, compute, algorithm):
    """Do what cuBLAS's documentation says, which counts by columns."""
    strided_gemm_ex(
        handle, ta, tb, m, n, k, alpha, a, a_kind, lda, 0, b, b_kind, ldb, 0, beta, c, c_kind, ldc, 0, 1,
        compute, algorithm,
    )  # fmt: skip


def strided_gemm_ex(
    handle, ta, tb, m, n, k, alpha, a, a_kind, lda, a_step, b, b_kind, ldb, b_step, beta, c, c_kind, ldc, c_step, count,
    compute, algorithm,
):  # fmt: skip
    """Do what cuBLAS's documentation says of a stack of matrices."""
    assert (a_kind, b_kind, c_kind, compute) == (2, 2, 0, 68)
    assert by_columns(alpha, np.float32, 1, 1, 1) == 1
    assert by_columns(beta, np.float32, 1, 1, 1) == 0
    left = by_columns(a, np.float16, *((k, m) if ta else (m, k)), lda, a_step, count)
    right = by_columns(b, np.float16, *((n, k) if tb else (k, n)), ldb, b_step, count)
    left, right = left.swapaxes(1, 2) if ta else left, right.swapaxes(1, 2) if tb else right
    by_columns(c, np.float32, m, n, ldc, c_step, count)[...] = left.astype(np.float32) @ right.astype(np.float32)


@pytest.fixture
def cublas():
    """A GPU of CuPy's that hands its products to the emulation of cuBLAS."""
    device = gpu.CupyDevice.__new__(gpu.CupyDevice)
    device._cublas = SimpleNamespace(gemmEx=gemm_ex, gemmStridedBatchedEx=strided_gemm_ex)
    device._cupy = SimpleNamespace(cuda=SimpleNamespace(device=SimpleNamespace(get_cublas_handle=lambda: 0)))
    return device


def operands(shape, rng):
    """Give matrices that lie in memory in every way that attention has them."""
    *stack, rows, columns = shape
    yield rng.normal(size=shape).astype(np.float16)
    yield rng.normal(size=(*stack, columns, rows)).astype(np.float16).swapaxes(-1, -2)
    yield rng.normal(size=(*stack, rows + 3, columns + 2)).astype(np.float16)[..., 2 : 2 + rows, 1 : 1 + columns]
    yield rng.normal(size=(*stack, columns, rows + 1)).astype(np.float16)[..., :rows].swapaxes(-1, -2)


@pytest.mark.parametrize(
    ("stack", "sizes"),
    [
        ((), (3, 5, 4)),
        ((1,), (1, 5, 4)),
        ((3,), (3, 1, 4)),
        ((2, 1), (3, 5, 1)),
        ((2, 3), (3, 5, 4)),
        ((2, 3), (1, 1, 1)),
    ],
)
def test_cublas_is_asked_for_the_product_however_the_matrices_lie(cublas, stack, sizes):
    rng, (rows, inner, columns) = np.random.default_rng(3), sizes
    left, right = (list(operands((*stack, *shape), rng)) for shape in ((rows, inner), (inner, columns)))
    outs = np.zeros((*stack, rows, columns), np.float32), np.zeros((*stack, rows + 1, columns + 2), np.float32)
    for a, b, out in itertools.product(left, right, (outs[0], outs[1][..., :rows, :columns])):
        halves = (HalfPrecisionArray(Memory(x), cublas, "float16") for x in (a, b))
        out[...] = 0
        stacks = tuple(MatrixBatch.of(Memory(x)) for x in (a, b, out))
        assert None not in stacks
        cublas.multiply(*halves, Memory(out), stacks)
        np.testing.assert_allclose(out, a.astype(float) @ b.astype(float), rtol=1e-5, atol=1e-6)
    assert not outs[1][..., rows:, :].any()
    assert not outs[1][..., columns:].any()


def test_matrices_that_are_no_stack_are_not_taken_for_one():
    # (samples, heads, length, size) within (samples, length, dim)
    heads = np.zeros((2, 5, 3, 4), np.float32).swapaxes(1, 2)
    assert MatrixBatch.of(Memory(heads)) is None
    assert MatrixBatch.of(Memory(heads[:1])) == MatrixBatch(False, 12, 4, 3)
    flat = np.zeros((3, 4))
    for view in (flat[:, ::2], flat[::-1], np.broadcast_to(flat[0], (3, 4)), heads[::-1, 0]):
        assert MatrixBatch.of(Memory(view)) is None
    assert MatrixBatch.of(Memory(np.zeros((2, 3, 4)).swapaxes(1, 2))) == MatrixBatch(True, 4, 12, 2)


@pytest.mark.parametrize(("dtype", "heads", "length"), [("bfloat16", 2, 3), ("float16", 1, 7)])
def test_the_products_inside_attention_are_rounded_forward_and_backward(dtype, heads, length, monkeypatch):
    monkeypatch.setattr("mpizero.nn.transformer.BLOCK_ON_DEVICE", 4)
    device, rng = gpu.open_device(0), np.random.default_rng(5)
    layer = mz.nn.CausalSelfAttention(8, heads)
    qkv, dmixed = (rng.normal(size=(2, length, width)).astype(np.float32) for width in (24, 8))

    def both(mixed_in):
        with device.multiplying_in(mixed_in):
            mixed, seen = layer.attend(device.put(qkv), None, mz.types.EVALUATE)
            return mixed.get(), layer.attend_backward(seen, device.put(dmixed)).get()

    q, k, v = (rounded(x, dtype) for x in qkv.reshape(2, length, 3, heads, -1).transpose(2, 0, 3, 1, 4))
    do = rounded(dmixed.reshape(2, length, heads, -1).transpose(0, 2, 1, 3), dtype)
    scale, hidden = 1 / np.sqrt(8 // heads), np.triu(np.ones((length, length), bool), 1)
    scores = np.where(hidden, -np.inf, (q @ k.swapaxes(-1, -2)).astype(np.float64) * scale)
    probabilities = np.exp(scores - scores.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    kept = rounded(probabilities.astype(np.float32), dtype)
    dprobabilities = np.where(hidden, 0, do @ v.swapaxes(-1, -2))
    dscores = probabilities * (dprobabilities - (probabilities * dprobabilities).sum(-1, keepdims=True)) * scale
    dscores = rounded(dscores.astype(np.float32), dtype)
    gradients = dscores @ k, dscores.swapaxes(-1, -2) @ q, kept.swapaxes(-1, -2) @ do
    wanted = (kept @ v).transpose(0, 2, 1, 3).reshape(2, length, 8)
    dwanted = np.stack(gradients).transpose(1, 3, 0, 2, 4).reshape(2, length, 24)
    (mixed, dqkv), plain = both(dtype), both(None)
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]  # a value beside the oracle's may round the other way
    np.testing.assert_allclose(mixed, wanted, rtol=1e-4, atol=unit / 8)
    np.testing.assert_allclose(dqkv, dwanted, rtol=1e-4, atol=unit / 2)
    assert not np.array_equal(mixed, plain[0])
    np.testing.assert_allclose(dqkv, plain[1], atol=64 * unit)


def test_bfloat16_trains_near_float32_with_the_same_bits_on_two_ranks():
    found, whole = trained("cuda", mixed_precision="bfloat16", steps=1), one_step_alone()
    close(found[:2] + whole[2:], whole, 2e-2)
    assert found[0] != whole[0]
    assert found[1].dtype == np.float32
    settings = {"mixed_precision": "bfloat16", "steps": 1}
    for losses, parameters, *_ in run_in_threads(2, lambda comm: trained("cuda", comm, **settings)):
        assert losses == found[0]
        assert parameters.tobytes() == found[1].tobytes()


def test_rounded_sums_have_the_same_bits_on_one_gpu_where_rows_stay_there_and_on_two():
    alone = trained("cuda", batch=ids(4), wire="bfloat16", steps=1)
    assert alone[1].tobytes() != trained("cuda", batch=ids(4), steps=1)[1].tobytes()
    for place, memory in ((mz.DDPModel, PRIVATE), (mz.ZeRO2Model, {})):
        settings = {"place": place, "batch": ids(4), "wire": "bfloat16", "steps": 1, **memory}
        for losses, parameters, *_ in run_in_threads(2, lambda comm, s=settings: trained("cuda", comm, **s)):
            assert losses == alone[0]
            assert parameters.tobytes() == alone[1].tobytes()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the simulator looks at an infinite gradient
def test_float16_scales_its_loss_and_skips_what_overflows():
    with bound(gpt(dropout=0.0), mz.AdamW(lr=1e-2), micro_batch=1, mixed_precision="float16") as model:
        start = model.get_parameters()
        losses = [model.train(*ids()) for _ in range(3)]
        assert model.optimizer.loss_scale == mz.DynamicLossScale()
        assert losses[-1] < losses[0]
        assert np.isfinite(model.get_parameters()).all()
        model._engine.loss_scale = mz.DynamicLossScale(initial=2.0**24).start()  # above all that float16 can hold
        before = model.get_parameters()
        model.train(*ids())
        assert model.last_step.skipped
        assert np.array_equal(model.get_parameters(), before)
        assert not np.array_equal(start, before)
        assert model._engine.loss_scale.scale == 2.0**23


def test_16_bits_need_a_gpu_and_master_weights_in_float32():
    with pytest.raises(ConfigError, match='give device = "cuda"'):
        mz.ShardingConfig(mixed_precision="bfloat16")
    with pytest.raises(ConfigError, match='one of "bfloat16", "float16"'):
        mz.ShardingConfig(device="cuda", mixed_precision="int8")
    with (
        mz.ShardingConfig(device="cuda", mixed_precision="bfloat16") as config,
        pytest.raises(ConfigError, match="float64"),
    ):
        mz.DDPModel(gpt("float64"), config)


def test_a_run_of_the_command_line_begins_on_a_gpu_and_resumes_on_the_host(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", rng.normal(size=(20, 3)).astype(np.float32))
    np.save(tmp_path / "y.npy", rng.integers(0, 2, 20))
    (tmp_path / "c.toml").write_text(
        '[model]\nname = "mlp"\nhidden = [4]\n[data]\narrays = {x = "x.npy", y = "y.npy"}\n[optimizer]\nlr = 0.1\n'
        '[train]\nsteps = 2\nglobal_batch = 4\nvalidate_every = 0\ndevice = "cuda"\n'
    )
    told = []
    for options in ([], ["--resume", "--set", "train.steps=3", "--set", "train.device=cpu"]):
        assert run_in_threads(1, lambda comm, options=options: main(["train", "c.toml", *options], comm)) == [0]
        said = capsys.readouterr()
        told.append((json.loads(said.out.splitlines()[-1])["steps"], "layers compute on GPUs" in said.err))
    assert told == [(2, True), (3, False)]
