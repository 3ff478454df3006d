"""What depends on ranks or grains is named in the first step: random numbers, state, means, terms added once a call."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy, mse_loss, one_hot, softmax  # noqa: E402

import mpizero as mz  # noqa: E402
from mpizero.adapters.torch import TorchModel  # noqa: E402
from mpizero.errors import MpizeroError  # noqa: E402
from tests.peers import placing  # noqa: E402

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 5, 3)).astype(np.float32), RNG.integers(0, 2, (8, 5))
HERE = r"\(test_first_pass\.py:\d+ in "
GENERATOR, SEEN, MEMORY = np.random.default_rng(0), {"count": 0}, []


def trained(module: Any, loss: Any, *, ranks: int = 1, x: Any = X, y: Any = Y, **given: Any) -> Any:
    """Train for two steps; return the hash of the parameters."""
    layout = {"micro_batch": None, "optimizer": mz.SGD(0.1)}
    layout |= {key: given.pop(key) for key in ("micro_batch", "pipeline_parallel_size") if key in given}
    return placing.trained(lambda: TorchModel(module, loss, **given), (x, y), ranks, **layout)


class Net(nn.Module):
    """Two linear layers; ``how`` says what the first does besides, and ``before`` and ``kept`` are there for that."""

    calls = 0

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(3, 4), nn.Linear(4, 2)
        self.generator, self.own = torch.Generator(), np.random.default_rng(0)
        self.kept: Any = {"list": [], "dictionary": {"n": 0}, "array": np.zeros(1)}.get(how)
        self.seen = None

    def forward(self, x: Any) -> Any:
        return self.last(getattr(self, self.how.replace(" ", "_") or "plainly")(self.first(x)))

    def plainly(self, x: Any) -> Any:
        return x

    def python(self, x: Any) -> Any:
        return x * random.random()

    def numpy(self, x: Any) -> Any:
        return x * float(np.random.rand())  # noqa: NPY002

    def of_torch(self, x: Any) -> Any:
        return x * torch.rand(4, generator=self.generator)

    def of_numpy(self, x: Any) -> Any:
        return x * float(self.own.random())

    def everywhere(self, x: Any) -> Any:
        return x * float(GENERATOR.random())

    def list(self, x: Any) -> Any:
        self.kept.append(1)
        return x * len(self.kept)

    def dictionary(self, x: Any) -> Any:
        self.kept["n"] += 1
        return x * self.kept["n"]

    def array(self, x: Any) -> Any:
        self.kept += 1
        return x * float(self.kept[0])

    def tensor(self, x: Any) -> Any:
        self.seen = x.detach().mean() if self.seen is None else 0.9 * self.seen + 0.1 * x.detach().mean()
        return x - self.seen

    def first_samples(self, x: Any) -> Any:
        if self.seen is None:
            self.seen = x.detach().mean()
        return x - self.seen

    def last_samples(self, x: Any) -> Any:
        before, self.seen = self.seen, x.detach()
        return x if before is None or before.shape != x.shape else x + before

    def of_class(self, x: Any) -> Any:
        Net.calls += 1
        return x * Net.calls

    def of_script(self, x: Any) -> Any:
        SEEN["count"] += 1
        return x * SEEN["count"]


def total(prediction: Any, target: Any) -> Any:
    return cross_entropy(prediction.flatten(0, 1), target.flatten(), reduction="sum")


HIDDEN = {
    "python": "draws random numbers of random " + HERE + r"python\)",
    "numpy": r"draws random numbers of numpy\.random " + HERE + r"numpy\)",
    "of torch": "changes its attribute 'generator' in its forward pass " + HERE + r"of_torch\)",
    "of numpy": "changes its attribute 'own' in its forward pass " + HERE + r"of_numpy\)",
    "everywhere": "everywhere: the global GENERATOR' in its forward pass " + HERE,
    "list": "changes its attribute 'kept' in its forward pass " + HERE + r"list\)",
    "dictionary": "changes its attribute 'kept' in its forward pass " + HERE + r"dictionary\)",
    "array": "changes its attribute 'kept' in its forward pass " + HERE + r"array\)",
    "tensor": "changes its attribute 'seen' in its forward pass " + HERE + r"tensor\)",
    "first samples": "changes its attribute 'seen' in its forward pass " + HERE + r"first_samples\)",
    "last samples": "computes another output when it runs again",
    "of class": r"changes its attribute '.*\.calls' in its forward pass " + HERE + r"of_class\)",
    "of script": r"changes its attribute '.*: the global SEEN' in its forward pass " + HERE + r"of_script\)",
}


@pytest.mark.parametrize(("how", "micro_batch"), [(how, (1, 4)[k % 2]) for k, how in enumerate(HIDDEN)])
def test_what_a_module_keeps_or_draws_by_itself_is_named_with_its_line(how: str, micro_batch: int) -> None:
    with pytest.raises(MpizeroError, match=HIDDEN[how]):
        trained(lambda: Net(how), total, micro_batch=micro_batch)


def test_it_is_named_in_a_block_of_a_pipeline_and_in_evaluate() -> None:
    def net() -> Any:
        return nn.Sequential(nn.Linear(3, 3), Net("tensor"))

    with pytest.raises(MpizeroError, match="block '1', Net changes its attribute 'seen'"):
        trained(net, total, ranks=2, blocks=["0", "1"], micro_batch=2, pipeline_parallel_size=2)
    with (
        mz.distribute(TorchModel(net, total), mz.SGD(0.1), mesh=mz.Mesh("self")) as placed,
        pytest.raises(MpizeroError),
    ):
        placed.evaluate(X, Y)


class Caches(nn.Module):
    """Keep what depends on shapes alone, and what only others read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.angles, self.attention, self.shapes = nn.Linear(3, 2), None, None, {}

    def forward(self, x: Any) -> Any:
        if self.angles is None or len(self.angles) < x.shape[1]:
            self.angles = torch.cos(torch.arange(x.shape[1]))[:, None]
        if x.shape not in self.shapes:
            self.shapes[x.shape] = len(x) + 1.0
        y = self.linear(x * self.angles)
        self.attention = softmax(y, 1)
        return y


def test_a_cache_and_a_result_for_others_are_no_state() -> None:
    shas = {trained(Caches, total, ranks=ranks, micro_batch=micro) for ranks in (1, 2) for micro in (3,)}
    assert len(shas) == 1


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.GRU(3, 4), nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.head(self.recurrent(x.transpose(0, 1))[0])


class Beside(Net):
    """Return beside the output a sum over the samples, or a mean."""

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        beside = (y**2).mean((1, 2))
        return self.last(y), beside.mean() if self.how == "mean" else beside.sum()

    mean = plainly = Net.plainly


def mean_of_time_first(prediction: Any, target: Any) -> Any:
    return cross_entropy(prediction.flatten(0, 1), target.T.flatten())


def sum_of_time_first(prediction: Any, target: Any) -> Any:
    return cross_entropy(prediction.flatten(0, 1), target.T.flatten(), reduction="sum"), target.numel()


def with_beside(prediction: Any, target: Any) -> Any:
    return total(prediction[0], target) + prediction[1]


def mean(prediction: Any, target: Any) -> Any:
    return cross_entropy(prediction.flatten(0, 1), target.flatten())


def contrastive(prediction: Any, target: Any) -> Any:
    flat = prediction.flatten(1)
    return cross_entropy(flat @ flat.T, torch.arange(len(flat)), reduction="sum")


def centred(prediction: Any, target: Any) -> Any:
    return ((prediction - prediction.mean(0)) ** 2).sum()


def with_penalty(prediction: Any, target: Any) -> Any:
    return total(prediction, target) + 1e-4 * (prediction**2).mean().sqrt()


def mean_weight(prediction: Any, target: Any) -> Any:
    return total(prediction, target), 1.0


NO_SUMS = {
    "a mean": (Net, mean, "is no sum over samples"),
    "a mean of one sample's": (Net, lambda p, t: mse_loss(softmax(p, -1), one_hot(t, 2).float()), "is no sum over"),
    "a mean, time first": (TimeFirst, mean_of_time_first, r"mean_of_time_first at .*is no sum over samples"),
    "a mean beside": (lambda: Beside("mean"), with_beside, "is no sum over samples"),
    "samples that see each other": (Net, contrastive, "is no sum over samples"),
    "a centred prediction": (Net, centred, "is no sum over samples"),
    "a penalty once a call": (Net, with_penalty, "is no sum over samples"),
    "a constant weight": (Net, mean_weight, "returns a weight that is no sum over samples"),
}


@pytest.mark.parametrize("what", NO_SUMS)
@pytest.mark.parametrize("micro_batch", [1, 5])
def test_a_loss_that_is_no_sum_is_told_on_grains_of_any_size(what: str, micro_batch: int) -> None:
    module, loss, message = NO_SUMS[what]
    with pytest.raises(MpizeroError, match=message):
        trained(module, loss, micro_batch=micro_batch)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_target_without_an_axis_is_told_with_both_shapes() -> None:
    loss, targets = nn.MSELoss(reduction="sum"), X[:, 0, 0].copy()
    with pytest.raises(MpizeroError, match=r"prediction \(4, 1\), target \(4,\); do the shapes fit"):
        trained(lambda: nn.Linear(3, 1), loss, x=X[:, 0], y=targets, micro_batch=4)


@pytest.mark.parametrize("micro_batch", [1, 5])
def test_sums_pass_whatever_the_order_of_the_axes(micro_batch: int) -> None:
    trained(TimeFirst, sum_of_time_first, micro_batch=micro_batch)
    trained(lambda: Beside("sum"), with_beside, micro_batch=micro_batch)
    trained(lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)), total, micro_batch=micro_batch)


class Counts:
    """Keep a count, or numbers of a generator of its own."""

    def __init__(self, how: str) -> None:
        self.how, self.count, self.generator = how, 0, random.Random(0)

    def __call__(self, prediction: Any, target: Any) -> Any:
        if self.how == "count":
            self.count += 1
        return total(prediction, target) * (1 + self.count + (self.generator.random() if self.how == "own" else 0))


def numpy_in_the_loss(prediction: Any, target: Any) -> Any:
    return total(prediction * float(np.random.rand()), target)  # noqa: NPY002


def remembers(prediction: Any, target: Any) -> Any:
    MEMORY.append(float(prediction.detach().mean()))
    return total(prediction - MEMORY[-1], target)


LOSSES = {
    "numpy": (numpy_in_the_loss, r"draws random numbers of numpy\.random " + HERE + r"numpy_in_the_loss\)"),
    "own generator": (Counts("own"), r"loss changes 'loss\.generator' in each call " + HERE + r"__call__\)"),
    "count": (Counts("count"), r"loss changes 'loss\.count' in each call " + HERE + r"__call__\)"),
    "memory": (remembers, "changes 'loss: the global MEMORY' in each call " + HERE + r"remembers\)"),
}


@pytest.mark.parametrize("what", LOSSES)
def test_what_a_loss_keeps_or_draws_is_named_with_its_line(what: str) -> None:
    loss, message = LOSSES[what]
    with pytest.raises(MpizeroError, match=message):
        trained(Net, loss)


def test_what_was_refused_is_refused_again() -> None:
    for module, loss, message in ((lambda: Net("tensor"), total, "'seen'"), (Net, Counts("count"), "loss.count")):
        with mz.distribute(TorchModel(module, loss), mz.SGD(0.1), mesh=mz.Mesh("self")) as placed:
            for _ in range(2):
                with pytest.raises(MpizeroError, match=message):
                    placed.train(X, Y)


class SeesOthers(Net):
    def forward(self, x: Any) -> Any:
        y = self.first(x)
        return self.last(y - y.mean(0) if self.how == "mean" else y)

    mean = Net.plainly


class Clips(Net):
    def forward(self, x: Any) -> Any:
        y = self.first(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient / gradient.norm())
        return self.last(y)


def counted() -> Any:
    return nn.Sequential(nn.Embedding(2, 4, scale_grad_by_freq=True), nn.Linear(4, 2))


def hooked() -> Any:
    net = Net()
    net.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return net


@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize(
    ("module", "x", "message"),
    [
        (lambda: SeesOthers("mean"), X, r"output for a sample depends on the other samples .*compare_forward=False"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.TransformerEncoderLayer(3, 1, 4, dropout=0.1), nn.Linear(3, 2)), X,
         r"batch_first=True"),
        (Clips, X, r"the gradient of 'first\.(weight|bias)' for \d samples is not the sum"),
        (counted, Y, r"the gradient of '0\.weight' for \d samples is not the sum .*scale_grad_by_freq"),
        (hooked, X, r"parameter 'first\.weight' has a hook on its gradient"),
    ],
    ids=["mean", "batch first", "clips", "by frequency", "hook"],
)  # fmt: skip
def test_a_module_whose_grains_do_not_add_up_is_told(module: Any, x: Any, message: str, micro_batch: int) -> None:
    with pytest.raises(MpizeroError, match=message):
        trained(module, total, x=x, micro_batch=micro_batch)


def test_a_module_that_is_meant_to_see_a_grain_trains() -> None:
    trained(lambda: SeesOthers("mean"), total, micro_batch=4, compare_forward=False)
    trained(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(5), nn.Linear(4, 2)), total, micro_batch=2)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(4, 2))
    trained(net, total, micro_batch=4)


def test_a_measurement_before_the_training_hides_nothing() -> None:
    model = TorchModel(lambda: nn.Sequential(nn.Linear(3, 3), Net("tensor")), total, blocks=["0", "1"])
    with mz.ShardingConfig(comm="self", micro_batch=4) as config:
        with pytest.raises(MpizeroError, match="'seen'"):
            mz.sharding.measured_costs(model, X[:4], Y[:4], config)
        with mz.distribute(model, mz.SGD(0.1), config=config) as placed, pytest.raises(MpizeroError, match="'seen'"):
            placed.train(X, Y)


# ------------------------------------------------------------------ a sum is not refused for its rounding

POINTS = RNG.normal(size=(12, 24)).astype(np.float32)
SQUARES = nn.MSELoss(reduction="sum")


def trained_and_scored(model: Any, x: Any, y: Any, micro_batch: int) -> None:
    """Train for a step, and evaluate."""
    with placing.placed(model, "self", "zero2", optimizer=mz.SGD(1e-3), micro_batch=micro_batch) as one:
        one.train(x, y)
        one.evaluate(x, y)


def convolutions() -> Any:
    parts = nn.Conv1d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv1d(8, 4, 3, padding=1), nn.Flatten()
    return nn.Sequential(nn.Unflatten(1, (4, 6)), *parts)


def linear() -> Any:
    return nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 24))


@pytest.mark.parametrize(
    ("make", "micro_batch", "error"),
    [(convolutions, 1, 1.0), (convolutions, 5, 1e-6), (linear, 5, 1.0), (linear, 1, 1e-6)],
)
def test_an_error_near_the_rounding_of_the_prediction_is_no_difference(
    make: Any, micro_batch: int, error: float
) -> None:
    torch.manual_seed(0)
    net = make()
    near = net(torch.from_numpy(POINTS)).detach().numpy()
    target = (near + error * np.random.default_rng(1).normal(size=near.shape)).astype(np.float32)
    for blocks in (None, list(net)):
        trained_and_scored(TorchModel(net, SQUARES, blocks=blocks), POINTS, target, micro_batch)


class Coarse(nn.Module):
    """Compute in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = linear()

    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.net(x)
        return y.float()


class Noisy(nn.Module):
    """Draw the hidden state of a variational autoencoder, in evaluation mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(24, 8), nn.Linear(4, 24)

    def forward(self, x: Any) -> Any:
        mean, spread = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + spread.exp() * torch.randn_like(mean))


@pytest.mark.parametrize("make", [Coarse, Noisy])
@pytest.mark.parametrize("micro_batch", [1, 5])
def test_rounding_to_16_bits_and_noise_in_evaluation_are_no_difference(make: Any, micro_batch: int) -> None:
    torch.manual_seed(0)
    trained_and_scored(TorchModel(make(), SQUARES), POINTS, POINTS, micro_batch)
