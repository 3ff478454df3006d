"""A PyTorch module trains as PyTorch trains it, with the same bits on every layout, and says what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import mpizero as mz  # noqa: E402
from mpizero.adapters.torch import autograd, blocks, call  # noqa: E402
from mpizero.adapters.torch.autograd import Pass, full_backward, input_half, weight_half  # noqa: E402
from mpizero.cli.main import main  # noqa: E402
from mpizero.errors import ConfigError, MpizeroError  # noqa: E402
from mpizero.guard.reports import describe_error  # noqa: E402
from mpizero.sharding.params import ParameterStore  # noqa: E402
from mpizero.testing import run_in_threads  # noqa: E402
from tests.peers import placing  # noqa: E402
from tests.peers.placing import placed  # noqa: E402
from tests.peers.torch_nets import Transformer, next_word, resnet  # noqa: E402

WORDS = np.random.default_rng(0).integers(0, 31, (60, 9))
PIXELS = np.random.default_rng(1).normal(size=(120, 1, 8, 8)).astype(np.float32)
CLASSES = np.random.default_rng(2).integers(0, 10, 120)
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble_v", 1)]


@pytest.fixture(autouse=True)
def _kernels_for_small_attention_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, "FEW_SCORES", -1)


def transformer(**given: Any) -> mz.adapters.torch.TorchModel:
    return mz.adapters.torch.TorchModel(Transformer, next_word, **{"blocks": Transformer.blocks, "seed": 5, **given})


def cnn(**given: Any) -> mz.adapters.torch.TorchModel:
    loss = nn.CrossEntropyLoss(reduction="sum")
    return mz.adapters.torch.TorchModel(resnet, loss, **{"blocks": ["0", "1", "2", "3"], "seed": 5, **given})


def data(name: str) -> Any:
    if name == "transformer":
        return mz.data.ArraySource(WORDS[:, :-1].copy(), WORDS[:, 1:].copy())
    return mz.data.ArraySource(PIXELS, CLASSES)


def trained(name: str, comm: Any, strategy: str, **layout: Any) -> str:
    network = cnn() if name == "cnn" else transformer(kernels="mpizero")
    with placed(network, comm, strategy, **layout) as model:
        for x, y in mz.data.batches(data(name), model, global_batch=9, seed=0, steps=3):
            model.train(x, y)
        return str(model.parameters_sha256())


LAYOUTS = [
    (2, "ddp", {}),
    (3, "zero1", {"share_node_memory": False}),
    (2, "zero2", {"ranks_per_node": 1}),
    (4, "zero3", {"ranks_per_node": 1}),
    (3, "zero3", {}),
    *((4, z, {"pipeline_parallel_size": 2, "schedule": s, "virtual_stages": v})
      for (s, v), z in zip(SCHEDULES, ("ddp", "zero3", "zero1", "zero3", "ddp"), strict=True)),
]  # fmt: skip


@pytest.mark.slow
def test_a_training_imports_neither_the_compiler_of_pytorch_nor_sympy() -> None:
    """They take seconds, and nothing is compiled."""
    program = """
import sys
import numpy as np, torch
import mpizero as mz
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 2))
loss = torch.nn.CrossEntropyLoss(reduction="sum")
model = mz.adapters.torch.TorchModel(net, loss, blocks=net, activation_checkpointing=["0"])
x, y = np.eye(6, 3, dtype=np.float32), np.arange(6) % 2
with mz.distribute(model, mz.AdamW(1e-3), strategy="zero3") as placed:
    placed.train(x, y), placed.predict(x)
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ended.stdout.splitlines()[-1:] == ["[]"], ended.stderr


@pytest.mark.parametrize("name", ["transformer", "cnn"])
def test_dropout_statistics_and_parameters_have_the_same_bits_on_every_layout(name: str) -> None:
    expected = run_in_threads(1, lambda comm: trained(name, comm, "ddp"))
    for ranks, strategy, layout in LAYOUTS[name == "cnn" :: 3]:
        found = run_in_threads(ranks, lambda comm, s=strategy, o=layout: trained(name, comm, s, **o))
        assert set(found) == set(expected), (ranks, strategy, layout)


def test_a_backward_pass_reads_no_parameters_that_were_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_in_threads(1, lambda comm: trained("transformer", comm, "ddp"))
    unshard = ParameterStore.unshard

    @contextmanager
    def filled(store: Any, unit: Any, *args: Any, **kwargs: Any) -> Any:
        with unshard(store, unit, *args, **kwargs) as params:
            yield params
            if store.sharded:
                store.unsharded(unit)[:] = np.nan

    monkeypatch.setattr(ParameterStore, "unshard", filled)
    for more in ({}, {"pipeline_parallel_size": 2, "schedule": "zero_bubble"}):
        found = run_in_threads(4, lambda comm, o=more: trained("transformer", comm, "zero3", ranks_per_node=1, **o))
        assert set(found) == set(expected), more


def plain(net: Any, loss: Any, batches: Any, optimizer: Any, grain: int) -> None:
    """Train a module as PyTorch does; batches are cut into grains, and statistics are averaged over them."""
    for x, y in batches:
        optimizer.zero_grad()
        before = {name: b.clone() for name, b in net.named_buffers()}
        sums = {name: torch.zeros_like(b) for name, b in before.items() if b.is_floating_point()}
        for start in range(0, len(x), grain):
            for name, buffer in net.named_buffers():
                buffer.copy_(before[name])
            part = torch.from_numpy(x[start : start + grain]), torch.from_numpy(y[start : start + grain])
            (loss(net(part[0]), part[1]) / len(x)).backward()
            for name, total in sums.items():
                total += net.get_buffer(name) * len(part[0]) / len(x)
        for name, total in sums.items():
            net.get_buffer(name).copy_(total)
        optimizer.step()


OPTIMIZERS = {
    "sgd": (lambda: mz.SGD(1e-3, momentum=0.9), lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9)),
    "adamw": (lambda: mz.AdamW(1e-3, weight_decay=0.0), lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.0)),
}


@pytest.mark.parametrize(
    ("name", "kind", "kernels"),
    [("transformer", "sgd", "mpizero"), ("transformer", "adamw", "torch"), ("cnn", "adamw", "mpizero")],
)
def test_twenty_steps_in_float64_are_those_of_plain_pytorch(name: str, kind: str, kernels: str) -> None:
    ours, theirs = OPTIMIZERS[kind]
    torch.manual_seed(3)
    net = Transformer(dropout=0.0).double() if name == "transformer" else resnet(dropout=0.0).double()
    loss = (lambda p, t: next_word(p, t)[0]) if name == "transformer" else nn.CrossEntropyLoss(reduction="sum")
    blocks = Transformer.blocks if name == "transformer" else net
    x, y = (WORDS[:, :-1], WORDS[:, 1:]) if name == "transformer" else (PIXELS.astype(np.float64), CLASSES)
    source = mz.data.ArraySource(x, y)

    def body(comm: Any) -> dict[str, Any]:
        model = mz.adapters.torch.TorchModel(net, loss, blocks=blocks, kernels=kernels)
        with placed(model, comm, "zero2", optimizer=ours(), micro_batch=5) as sharded:
            for part in mz.data.batches(source, sharded, global_batch=10, seed=0, steps=20):
                sharded.train(*part)
            return dict(sharded.named_parameters())

    found = run_in_threads(2, body)[0]
    alone = mz.ShardingConfig(comm="self")
    batches = mz.data.batches(source, alone, global_batch=10, seed=0, steps=20)
    plain(net, loss, batches, theirs(net.parameters()), grain=5)
    state = net.state_dict()
    expected = np.concatenate([state[key].numpy().ravel() for key in found])
    got = np.concatenate([value.ravel() for value in found.values()])
    assert np.linalg.norm(got - expected) <= 1e-11 * np.linalg.norm(expected)
    assert set(state) - set(found) <= {"head.out.weight"}  # tied


def test_ranks_that_are_threads_may_make_models_of_one_module_at_once() -> None:
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(3):
            run_in_threads(4, lambda comm: mz.adapters.torch.TorchModel(net, CE))
    finally:
        sys.setswitchinterval(interval)


def test_a_block_may_change_its_input_in_place() -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    net = nn.Sequential(first, nn.ReLU(inplace=True), nn.Linear(4, 3))
    x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    kept = x.copy()

    def body(comm: Any) -> Any:
        blocks = net if comm.size > 1 else None
        with placed(mz.adapters.torch.TorchModel(net, CE, blocks=blocks), comm, "ddp", micro_batch=4) as model:
            for _ in range(2):
                model.train(x if comm.rank == 0 else x[:0], Y if comm.rank == 0 else Y[:0])
            return dict(model.named_parameters())

    whole, blocks = run_in_threads(1, body)[0], run_in_threads(2, body)[0]
    assert x.tobytes() == kept.tobytes()
    for name, value in whole.items():
        np.testing.assert_allclose(value, blocks[name], rtol=1e-6)


class Repeated(nn.Module):
    """Add to its input what layers with random numbers and statistics compute, which torch may recompute."""

    def __init__(self, by_torch: bool) -> None:
        super().__init__()
        self.by_torch = by_torch
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))

    def forward(self, x: Any) -> Any:
        return x + (checkpoint(self.body, x, use_reentrant=False) if self.by_torch else self.body(x))


def test_recomputed_activations_leave_the_same_bits() -> None:
    def model(by_torch: bool, repeated: Any) -> Any:
        def make() -> Any:
            return nn.Sequential(nn.Linear(4, 4), Repeated(by_torch), Repeated(by_torch), nn.Linear(4, 3))

        return mz.adapters.torch.TorchModel(make, CE, blocks=["0", "1", "2", "3"], activation_checkpointing=repeated)

    layouts = [(1, {}), (2, {"ranks_per_node": 1}), (2, {"pipeline_parallel_size": 2, "schedule": "zero_bubble"})]
    kinds: list[tuple[bool, list[str]]] = [(False, []), (True, []), (False, ["1", "2"]), (True, ["*"])]
    found = {
        placing.trained(lambda k=kind: model(*k), (NOISE, Y), ranks, "zero3", steps=3, **layout)
        for kind in kinds
        for ranks, layout in layouts
    }
    assert len(found) == 1


class Keeps(torch.autograd.Function):
    """Keep a parameter for the backward pass behind autograd's back."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.x, ctx.weight = x, weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return dy * ctx.weight, (dy * ctx.x).sum(0)


def test_a_function_that_keeps_a_parameter_by_itself_is_told() -> None:
    def kept() -> Any:
        return nn.Sequential(nn.Linear(4, 4), Scaled(Keeps), nn.Linear(4, 3))

    def make() -> Any:
        return mz.adapters.torch.TorchModel(kept, CE, blocks=["0", "1", "2"])

    for ranks, layout in ((2, {}), (4, {"pipeline_parallel_size": 2, "schedule": "zero_bubble"})):
        with pytest.raises(MpizeroError, match=r"block '1', Scaled: its .* by ctx\.save_for_backward\(weight\)"):
            placing.trained(make, (NOISE, Y), ranks, "zero3", ranks_per_node=1, **layout)


def test_an_embedding_with_sparse_gradients_trains_as_a_dense_one() -> None:
    def trained_by(sparse: bool) -> Any:
        def make() -> Any:
            return nn.Sequential(nn.EmbeddingBag(31, 4, sparse=sparse), nn.Linear(4, 3))

        return placing.trained(lambda: mz.adapters.torch.TorchModel(make, CE), (WORDS[:4], Y), strategy="zero1")

    assert trained_by(False) == trained_by(True)


def take(seconds: float) -> float:
    """Let this thread's made up time pass; the thread keeps it, as a module or a global name would be told as state."""
    thread = vars(threading.current_thread())
    thread["made_up"] = thread.get("made_up", 0.0) + seconds
    return float(thread["made_up"])


def made_up_time() -> float:
    """Return that time; every call takes 1 us of it."""
    return take(1e-6)


class Slow(torch.autograd.Function):
    """Compute both gradients whatever is asked for, in 10 ms of a time that is made up."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight = ctx.saved_tensors
        take(0.01)
        return dy * weight, (dy * x).sum(0)


class Scaled(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(4))

    def forward(self, x: Any) -> Any:
        return self.function.apply(x, self.weight)


def slow() -> Any:
    return nn.Sequential(nn.Linear(4, 4), Scaled(Slow), Scaled(Slow), nn.Linear(4, 3))


def piped(schedule: str, make: Any = slow) -> Any:
    def model() -> Any:
        return mz.adapters.torch.TorchModel(make, CE, blocks=["0", "1", "2", "3"])

    return placing.trained(model, (NOISE, Y), 2, steps=4, pipeline_parallel_size=2, schedule=schedule)


def test_halves_that_take_long_are_told_once_and_train_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(autograd, "thread_time", made_up_time)
    assert piped("zero_bubble") == piped("1f1b")
    told = [line for line in capfd.readouterr().err.splitlines() if "zero-bubble" in line]
    assert len(told) == 2  # blocks of this kind
    assert "for Scaled both halves took 2.00 times as long" in told[0]
    assert "schedule '1f1b' or 'interleaved' may be faster" in told[0]


def test_no_clock_refuses_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    times = np.random.default_rng(0)
    monkeypatch.setattr(autograd, "thread_time", lambda: float(times.exponential(100)))
    monkeypatch.setattr(blocks, "MEASURED", 1)
    resting = lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 3))  # noqa: E731
    assert piped("zero_bubble", resting) == piped("1f1b", resting)


@pytest.mark.parametrize("name", ["transformer", "cnn"])
def test_a_saved_training_loads_into_the_module(name: str, tmp_path: Any) -> None:
    model = {"transformer": transformer, "cnn": cnn}[name]()

    def body(comm: Any) -> dict[str, Any]:
        with placed(model, comm, "zero3", ranks_per_node=1) as sharded:
            x, y = data(name).samples(np.arange(4) + 4 * comm.rank)
            sharded.train(x, y)
            sharded.save_model(tmp_path / "saved")
            return dict(sharded.named_parameters())

    arrays = run_in_threads(2, body)[0]
    net = Transformer() if name == "transformer" else resnet()
    net.load_state_dict(model.state_dict(arrays), strict=True)
    file = tmp_path / "model.npz"
    assert main(["checkpoint", "export", str(tmp_path / "saved"), str(file), "--tied"]) == 0
    with np.load(file) as exported:
        net.load_state_dict({key: torch.from_numpy(exported[key]) for key in exported.files}, strict=True)
        assert set(exported.files) == set(net.state_dict())
    for key, value in net.named_parameters():
        assert value.detach().numpy().tobytes() == arrays[key].tobytes()


def test_a_trained_module_predicts_as_the_sharded_model_does() -> None:
    torch.manual_seed(1)
    net = resnet()

    def body(comm: Any) -> tuple[Any, Any]:
        model = mz.adapters.torch.TorchModel(net, nn.CrossEntropyLoss(reduction="sum"), blocks=net)
        with placed(model, comm, "zero2") as sharded:
            found = sharded.predict(PIXELS[:6]), sharded.evaluate(PIXELS[:6], CLASSES[:6])
            start = sharded.parameters_sha256()
            sharded.train(PIXELS[:6], CLASSES[:6])
            assert sharded.parameters_sha256() != start
            return found

    (prediction, scored), *_ = run_in_threads(2, body)
    with torch.no_grad():
        expected = net.eval()(torch.from_numpy(PIXELS[:6])).numpy()
    net.train()
    np.testing.assert_allclose(prediction, expected, rtol=1e-5, atol=1e-6)
    assert scored.correct == 2 * int((expected.argmax(1) == CLASSES[:6]).sum())


class Recurrent(nn.Module):
    """Use a bias in every step, which autograd cannot divide between the halves."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.read = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: Any) -> Any:
        state = torch.zeros(x.shape[0], 8)
        for i in range(x.shape[1]):
            state = torch.tanh(self.step(state) + self.read(x[:, i]))
        return state * self.step.weight.sum()


@pytest.mark.parametrize("needs_input", [True, False])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0), (4, 6, 32)),
        (lambda: resnet()[1], (4, 7, 8, 8)),
        (Recurrent, (4, 5, 8)),
        (lambda: nn.GRU(8, 8, 2, batch_first=True), (4, 5, 8)),
        (lambda: nn.LayerNorm(8), (4, 8)),
        (lambda: nn.ReLU(), (4, 8)),
    ],
)
def test_the_halves_of_a_backward_pass_have_the_bits_of_the_whole(make: Any, shape: Any, needs_input: bool) -> None:
    torch.manual_seed(0)
    net, x = make(), torch.randn(shape, requires_grad=needs_input)
    y = net(x)
    y = y[0] if isinstance(y, tuple) else y
    if not y.requires_grad:
        return
    graph = Pass([y], [x] if needs_input else [], list(net.parameters()))
    gradients = [torch.randn_like(y)]
    inputs, weights = full_backward(graph, gradients, keep=True)
    again, pending = input_half(graph, gradients)
    for expected, found in zip([*inputs, *weights], [*again, *weight_half(graph, pending)], strict=True):
        assert torch.equal(expected, found)


class Spectral(nn.Module):
    """Look at a parameter as complex numbers, as spectral layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Any) -> Any:
        return (torch.fft.fft(x) * torch.view_as_complex(self.weight).conj()).real + x


class Scale(nn.Module):
    """Return a parameter beside the output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.full((4,), 1.5))

    def forward(self, x: Any) -> Any:
        return self.linear(x), self.scale, torch.complex(x, 2 * x)


class Use(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.large = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any, scale: Any, number: Any) -> Any:
        return self.large(self.linear(x) * scale) + (number * number).imag


class ReadsInBackward(nn.Module):
    """Read a parameter in a hook that runs in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        y = torch.tanh(self.linear(x))
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient @ self.linear.weight.detach())
        return y


@pytest.mark.parametrize(
    "make", [Spectral, lambda: Twice("method", 4), lambda: nn.Sequential(Scale(), Use()), ReadsInBackward]
)
def test_unusual_uses_of_parameters_are_as_in_pytorch_with_gathered_parameters(make: Any) -> None:
    torch.manual_seed(0)
    inner = make()
    parts = list(inner) if isinstance(inner, nn.Sequential) else [inner]
    net = nn.Sequential(nn.Linear(4, 4), *parts, nn.Linear(4, 3))
    x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)

    def whole(x: Any) -> Any:
        for layer in net:
            x = layer(*x) if isinstance(x, tuple) else layer(x)
        return x

    def body(comm: Any, schedule: str = "") -> dict[str, Any]:
        model = mz.adapters.torch.TorchModel(net, CE, blocks=net)
        layout = {"pipeline_parallel_size": 2, "schedule": schedule} if schedule else {"ranks_per_node": 1}
        with placed(model, comm, "zero3", optimizer=mz.SGD(0.1), micro_batch=2, **layout) as sharded:
            here = slice(None) if schedule else slice(2 * comm.rank, 2 * comm.rank + 2)
            for _ in range(2):
                sharded.train(x[here], Y[here])
            return {**sharded.named_parameters(), "prediction": sharded.predict(x)}

    founds = [run_in_threads(2, body)[0], run_in_threads(2, lambda comm: body(comm, "zero_bubble"))[0]]
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (CE(whole(torch.from_numpy(x)), torch.from_numpy(Y)) / 4).backward()
        optimizer.step()
    for found in founds:
        for name, value in (*net.named_parameters(), ("prediction", whole(torch.from_numpy(x)))):
            np.testing.assert_allclose(found[name], value.detach().numpy(), rtol=2e-5, atol=2e-6)


class Changes(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.linear = what, nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("ids", torch.zeros(1, dtype=torch.int64), persistent=False)

    def forward(self, x: Any) -> Any:
        if self.what == "parameter":
            with torch.no_grad():
                self.linear.weight.add_(1)
        if self.what == "buffer":
            self.count += 1
        if self.what in ("later", "other data") and x.sum() > 100:
            if self.what == "later":
                self.linear.weight.data.clamp_(-0.01, 0.01)
            else:
                self.linear.weight.data = self.linear.weight.data / 2
        if self.what == "number":
            self.ids = self.ids + 1
        y = self.linear(x)
        return y.detach() if self.what == "detached" else [3, y] if self.what == "list" else y


def hooked() -> Any:
    net = nn.Linear(4, 3)
    net.weight.register_hook(lambda gradient: gradient * 0)
    return net


def listed() -> Any:
    net = nn.Linear(4, 3)
    net.extra = [net.weight]
    return net


def rooted() -> Any:
    net = nn.Module()
    net.inner = nn.Linear(4, 3)
    net.register_buffer("mean", torch.zeros(4))
    return net


class Between(nn.Module):
    """Do something between its blocks, which a chain of them would not do."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.first, self.drop, self.last = what, nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        if self.what == "before":
            x = x + 1
        x = self.first(x)
        x = torch.relu(x) if self.what == "relu" else x.reshape(-1, 2, 2).flatten(1) if self.what == "shape" else x
        if self.what == "in place":
            x += 1
        if self.what != "skipped":
            x = self.drop(self.drop(x) if self.what == "twice" else x)
        x = self.last(x)
        return x if self.training or self.what != "evaluation" else torch.softmax(x, 1)


BETWEEN = {
    "relu": "block 'drop' is given something else than the output of block 'first' (other values of shape (2, 4))",
    "in place": "block 'drop' is given something else than the output of block 'first'",
    "before": "block 'first' is given something else than the samples",
    "twice": "it runs block 'drop' where blocks= has block 'last'",
    "skipped": "it runs block 'last' where blocks= has block 'drop'",
}


def test_blocks_that_are_not_the_modules_own_forward_are_told() -> None:
    def run(what: str, use: str = "train", **layout: Any) -> None:
        given = {"compare_forward": False} if layout.pop("meant", False) else {}

        def body(comm: Any) -> None:
            model = mz.adapters.torch.TorchModel(lambda: Between(what), CE, blocks=["first", "drop", "last"], **given)
            with placed(model, comm, "zero3", **layout) as sharded:
                getattr(sharded, use)(X, Y)

        run_in_threads(2, body)

    for what, message in BETWEEN.items():
        with pytest.raises(MpizeroError) as error:
            run(what, **({"pipeline_parallel_size": 2, "schedule": "1f1b"} if what == "twice" else {}))
        assert message in str(error.value), what
        assert "compare_forward=False" in str(error.value)
    run("relu", meant=True)
    run("shape")
    for use in ("train", "evaluate"):
        with pytest.raises(
            MpizeroError, match="in evaluation: after the last block, it changes the output of block 'last'"
        ):
            run("evaluation", use)
    torch.manual_seed(0)  # the first samples must have something that ReLU changes
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    with pytest.raises(
        MpizeroError,
        match=r"Sequential\.forward in training: block '2' is given something else than the output of block '0'",
    ):
        run_in_threads(1, lambda comm: fitted(mz.adapters.torch.TorchModel(net, CE, blocks=["0", "2"]), comm))


def fitted(model: Any, comm: Any) -> None:
    with placed(model, comm, "ddp") as sharded:
        sharded.train(X[2 * comm.rank :][:2], Y[2 * comm.rank :][:2])


class Twice(nn.Module):
    """Compute with a scale that a function, or something else that a copy shares, takes from the module itself."""

    def __init__(self, how: str, width: int = 3) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, width), nn.Parameter(torch.ones(width))
        self.scaled: Any = lambda m, x: x * m.scale
        if how == "lambda":
            self.scaled = lambda m, x: x * self.scale
        if how == "hook":
            self.linear.register_forward_hook(lambda m, x, y: nn.functional.dropout(y, 0.5, self.training))
        if how == "reference":
            self.scaled = Reference(self)
        if how == "method":
            self.scaled = self.own

    def own(self, m: Any, x: Any) -> Any:
        return x * self.scale

    def forward(self, x: Any) -> Any:
        return self.scaled(self, self.linear(x))


class Reference:
    """Keep an object that ``copy.deepcopy`` does not copy."""

    def __init__(self, module: Any) -> None:
        self.module = weakref.ref(module)

    def __call__(self, m: Any, x: Any) -> Any:
        return x * self.module().scale


def buffered(**given: Any) -> Any:
    net = nn.Linear(4, 3)
    net.register_buffer("extra", **given)
    return net


def two_norms() -> Any:
    norm = nn.BatchNorm1d(4)
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), norm), nn.Sequential(norm, nn.Linear(4, 3)))


CE = nn.CrossEntropyLoss(reduction="sum")
X, Y = np.ones((4, 4), np.float32), np.zeros(4, np.int64)
NOISE = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
KEPT = Twice("reference")
MISTAKES = [
    ("evaluation mode", lambda: (Changes("").eval(), CE, {}), "is in evaluation mode"),
    ("no module", lambda: (nn.Linear, CE, {}), "module is a torch.nn.Module, or a function"),
    ("made something", lambda: ((lambda: 3), CE, {}), "the function made a int"),
    ("nothing to train", lambda: (nn.ReLU(), CE, {}), "has no parameters"),
    ("function", lambda: (Twice("lambda"), CE, {}), "scaled holds the function Twice.__init__"),
    ("hook of self", lambda: (Twice("hook"), CE, {}), "linear._forward_hooks holds the function"),
    ("original read", lambda: (KEPT, CE, {}), "reads 'scale' of the module that was given"),
    ("two dtypes", lambda: (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), CE, {}), "'1.weight' is float64"),
    ("bfloat16", lambda: (nn.Linear(4, 3).bfloat16(), CE, {}), "is bfloat16"),
    ("lazy", lambda: (nn.LazyLinear(3), CE, {}), "has no shape yet"),
    ("mean loss", lambda: (nn.Linear(4, 3), nn.CrossEntropyLoss(), {}), "reduction='mean'"),
    ("losses", lambda: (nn.Linear(4, 3), lambda p, t: p.sum(1), {}), "a tensor of shape (2,)"),
    ("no tensor", lambda: (nn.Linear(4, 3), lambda p, t: 3.0, {}), "returned a float"),
    ("detached loss", lambda: (nn.Linear(4, 3), lambda p, t: p.detach().sum(), {}), "not depend on the prediction"),
    ("unknown block", lambda: (Transformer(), CE, {"blocks": ["embeding"]}), "did you mean 'embedding'"),
    ("left out", lambda: (Transformer(), CE, {"blocks": ["layers.*"]}), "no block holds 'embedding.places'"),
    ("nested", lambda: (Transformer(), CE, {"blocks": ["embedding", "layers", "layers.0"]}), "is a part of 'layers'"),
    ("twice", lambda: (Transformer(), CE, {"blocks": ["head", "head"]}), "names 'head' twice"),
    ("one text", lambda: (Transformer(), CE, {"blocks": "head"}), "list of submodules or of their names"),
    ("frozen name", lambda: (nn.Linear(4, 3), CE, {"frozen": ["wieght"]}), "did you mean 'weight'"),
    ("loss with parameters", lambda: (nn.Linear(4, 3), nn.Linear(2, 2), {}), "the loss has parameters"),
    ("changed parameter", lambda: (Changes("parameter"), CE, {}), "changes its parameter 'linear.weight'"),
    ("one norm", lambda: (two_norms(), CE, {"blocks": ["0", "1"]}), "buffer '1.0.running_mean' is in block '0', too"),
    ("wide buffer", lambda: (buffered(tensor=torch.ones(2).double()), CE, {}), "'extra' is float64"),
    (
        "passing",
        lambda: (buffered(tensor=torch.ones(2), persistent=False), CE, {"averaged": ["extra"]}),
        "persistent=False",
    ),
    ("data later", lambda: (Changes("later"), CE, {}), "changes its parameter 'linear.weight'"),
    ("other data", lambda: (Changes("other data"), CE, {}), "shape (3, 4) is given other data in a forward pass"),
    ("random loss", lambda: (nn.Linear(4, 3), lambda p, t: nn.functional.dropout(p, 0.5).sum(), {}), "draws random"),
    ("hook", lambda: (hooked(), CE, {}), "'weight' has a hook on its gradient"),
    ("listed", lambda: (listed(), CE, {}), "extra holds parameter 'weight' beside"),
    ("root buffer", lambda: (rooted(), CE, {"blocks": ["inner"]}), "no block holds 'mean'"),
    ("changed buffer", lambda: (Changes("buffer"), CE, {}), "changes its buffer 'count'"),
    ("changed number", lambda: (Changes("number"), CE, {}), "changes its buffer 'ids'"),
    ("not tensors", lambda: (Changes("list"), CE, {}), "returned a int"),
    ("no gradient", lambda: (Changes("detached"), CE, {}), "has no gradient: freeze it"),
    ("wrong argument", lambda: (nn.Linear(4, 3), CE, {"block": None}), "blocks"),
]


@pytest.mark.parametrize(("make", "message"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_told_before_the_first_step_ends(make: Any, message: str) -> None:
    module, loss, given = make()

    def body(comm: Any) -> None:
        with placed(mz.adapters.torch.TorchModel(module, loss, **given), comm, "ddp") as model:
            before = model.parameters_sha256()
            try:
                model.train(X[2 * comm.rank :][:2], Y[2 * comm.rank :][:2])
                before = ""  # the first step may train, and the second tells
                model.train(100 * X[2 * comm.rank :][:2], Y[2 * comm.rank :][:2])
            finally:
                assert before in ("", model.parameters_sha256())

    with pytest.raises((MpizeroError, TypeError)) as error:
        run_in_threads(2, body)
    assert message in str(error.value)


class Half(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.bfloat16()


class Raises(nn.Module):
    def forward(self, x: Any) -> Any:
        if x.min() < 1:
            raise ValueError("the user's own words")
        return x


RAW_WORDS = [
    (nn.BatchNorm1d(4), X[:3], "block '1', BatchNorm1d: a batch norm has one sample in a micro-batch of 1"),
    (nn.ReLU(), X[:3].astype(np.float64), "block '0', Linear: its input is float64, its parameters are float32"),
    (Half(), X[:3], "block '1', a block returned bfloat16, which NumPy does not have: let it end with .float()"),
    (nn.Sequential(Raises(), nn.Linear(4, 4)), X[:3] * [[1], [1], [0]], "In block '1': TorchBlock.forward"),
]


@pytest.mark.parametrize(("middle", "x", "message"), RAW_WORDS, ids=["one sample", "wide", "bfloat16", "remote"])
def test_all_ranks_tell_what_torch_says_on_one(middle: Any, x: Any, message: str) -> None:
    first = nn.Linear(4, 4)
    with torch.no_grad():
        first.weight.copy_(torch.eye(4))
        first.bias.zero_()
    net = nn.Sequential(first, middle, nn.Linear(4, 3))
    x = x if message.startswith("block '0'") else x.astype(np.float32)

    def body(comm: Any) -> str:
        with placed(mz.adapters.torch.TorchModel(net, CE, blocks=net), comm, "ddp") as model:
            here = slice(2 * comm.rank, 2 * comm.rank + 2)
            with pytest.raises((MpizeroError, ValueError)) as error:
                model.train(x[here], Y[:3][here])
            return describe_error(error.value)

    for found in run_in_threads(2, body):
        assert message in found


def test_a_model_with_dropout_is_checked_as_one_with_random_numbers() -> None:
    report = mz.testing.check_model(transformer(), WORDS[:2, :-1], WORDS[:2, 1:])
    assert "random numbers depend on where a grain begins" in str(report)
    report = mz.testing.check_model(mz.adapters.torch.TorchModel(nn.Linear(4, 3), CE), NOISE, Y)
    assert "random numbers" not in str(report)


def test_ranks_with_other_weights_or_other_code_are_told() -> None:
    def body(what: str) -> Any:
        def on(comm: Any) -> None:
            torch.manual_seed(comm.rank if what == "weights" else 0)
            net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.1 * (1 + comm.rank) if what == "rate" else 0.1))
            with placed(mz.adapters.torch.TorchModel(net, CE), comm, "ddp"):
                pass

        return on

    with pytest.raises(MpizeroError, match=r"0\.weight of the start values .* on rank 1"):
        run_in_threads(2, body("weights"))
    with pytest.raises(MpizeroError, match=r"module\.1\.p of the only block 0\.1 on rank 0, 0\.2 on rank 1"):
        run_in_threads(2, body("rate"))


def test_random_numbers_and_settings_of_the_caller_stay_as_they_were() -> None:
    torch.manual_seed(1)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    run_in_threads(2, lambda comm: trained("cnn", comm, "ddp"))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()


def test_modules_that_do_not_round_in_one_way_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "_placed", lambda array, offset: array + offset)
    with pytest.raises(ConfigError, match="MKL_CBWR=AUTO"):
        transformer()


def test_random_numbers_of_a_gpu_are_seeded_and_the_callers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator of the host stands for that of the GPU."""
    host, gpu = torch.default_generator, torch.Generator().manual_seed(7)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (gpu,))
    before, drawn = [g.get_state() for g in (host, gpu)], []
    for _ in range(2):
        with call.torch_pass(call.TorchSettings(), seed=3):
            state = call.random_state()
            drawn.append([torch.rand(2, generator=g).tolist() for g in (host, gpu)])
            assert call.drawn_since(state)
    assert drawn[0] == drawn[1]
    assert drawn[0][0] == drawn[0][1], "both have the seed"
    assert all(torch.equal(g.get_state(), was) for g, was in zip((host, gpu), before, strict=True))


def test_products_on_a_gpu_may_be_deterministic() -> None:
    """PyTorch raises an error for each product on a GPU otherwise."""
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")


def test_buffers_that_stay_in_the_module_go_to_where_the_parameters_are() -> None:
    """PyTorch's device "meta" stands for the GPU."""
    net = nn.Module()
    net.first = nn.Module()
    net.first.register_buffer("mask", torch.ones(3), persistent=False)
    net.first.register_buffer("same", net.first.mask)
    call.bring(list(call.module_tensors(net, "_buffers").values()), torch.device("meta"))
    assert net.first.mask.is_meta
    assert net.first.same is net.first.mask


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch finds a GPU")
def test_a_pytorch_without_a_gpu_is_refused_before_anything_is_placed() -> None:
    with pytest.raises(ConfigError, match=r'device = "cuda": PyTorch .* finds no GPU to use'):
        cnn().set_sharding_config(mz.ShardingConfig(comm="self", device="cuda"))
