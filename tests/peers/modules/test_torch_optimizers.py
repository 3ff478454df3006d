"""What PyTorch users give by habit: their optimizers are taken over, everything else is answered by name."""

from __future__ import annotations

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ArgumentError, CheckpointError, ConfigError, DataError

torch = pytest.importorskip("torch")
from mpizero.adapters.torch import TorchModel  # noqa: E402

LOSS = torch.nn.CrossEntropyLoss(reduction="sum")
X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
Y = np.arange(16) % 2
OPTIM = torch.optim


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    )  # fmt: skip


def two_groups(kind, net, **settings):
    """Matrices decay; norms and biases do not, and have another rate."""
    matrices = [one for one in net.parameters() if one.ndim > 1]
    others = [one for one in net.parameters() if one.ndim == 1]
    return kind([{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}], lr=1e-2, **settings)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (OPTIM.AdamW, {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.0}),
        (OPTIM.Adam, {}),
        (OPTIM.SGD, {"momentum": 0.9, "nesterov": True}),
        (OPTIM.SGD, {}),
    ],
)
def test_an_optimizer_with_groups_trains_as_it_does_in_pytorch(kind, settings):
    net, reference = network(), network()
    own = two_groups(kind, reference, **settings)
    with mz.distribute(
        TorchModel(net, LOSS, blocks=net), two_groups(kind, net, **settings), mesh=mz.Mesh("self")
    ) as model:
        for _ in range(20):
            model.train(X, Y)
            own.zero_grad()
            torch.nn.functional.cross_entropy(reference(torch.from_numpy(X)), torch.from_numpy(Y)).backward()
            own.step()
        for name, values in model.named_parameters().items():
            np.testing.assert_allclose(values, reference.get_parameter(name).detach(), rtol=0, atol=1e-6)


def made(optimizer_of, **settings):
    net = network()
    return mz.distribute(TorchModel(net, LOSS, **settings), optimizer_of(net), mesh=mz.Mesh("self"))


def scheduled(net):
    optimizer = OPTIM.AdamW(net.parameters())
    OPTIM.lr_scheduler.StepLR(optimizer, 3)
    return optimizer


def stepped(net):
    optimizer = OPTIM.Adam(net.parameters())
    net(torch.from_numpy(X)).sum().backward()
    optimizer.step()
    return optimizer


REFUSED = [
    (stepped, "this torch.optim.Adam has made steps, whose averages are not taken over"),
    (lambda net: OPTIM.AdamW(net.parameters(), amsgrad=True), "amsgrad=True has no counterpart in mz.AdamW"),
    (lambda net: OPTIM.AdamW(net[0].parameters()), r"does not have '1.weight' and 3 more, which would be trained"),
    (lambda net: OPTIM.SGD(network().parameters(), lr=0.1), "group 0 has parameters that Sequential does not have"),
    (
        lambda net: OPTIM.AdamW([{"params": net[:2].parameters(), "eps": 0.1}, {"params": net[2:].parameters()}]),
        "eps is 0.1 in one group and 1e-08 in another",
    ),
    (scheduled, r"a scheduler of PyTorch changes the rate.*lr=mz.optim.cosine"),
    (lambda net: OPTIM.lr_scheduler.StepLR(OPTIM.SGD(net.parameters()), 3), "StepLR is a scheduler of PyTorch"),
    (lambda net: OPTIM.Adagrad(net.parameters()), "torch.optim.Adagrad is not converted: give mz.RMSprop"),
]


@pytest.mark.parametrize(("optimizer_of", "message"), REFUSED)
def test_what_has_no_counterpart_is_refused_with_the_way_out(optimizer_of, message):
    with pytest.raises((ConfigError, ArgumentError), match=message):
        made(optimizer_of)


def test_parameters_that_are_frozen_may_be_left_out():
    with made(lambda net: OPTIM.AdamW(net[0].parameters()), frozen=["1.*", "3.*"]) as model:
        assert model.optimizer.wrapped_optimizer.groups[0].pattern == ("0.weight", "0.bias")


def test_a_function_that_makes_the_module_has_no_parameters_that_an_optimizer_could_hold():
    with pytest.raises(ConfigError, match="give it the module whose parameters the optimizer has"):
        mz.distribute(TorchModel(network, LOSS), OPTIM.SGD(network().parameters()), mesh=mz.Mesh("self"))


def test_a_rate_that_is_changed_later_a_step_and_a_state_are_errors_and_not_ignored():
    optimizers = []
    with made(lambda net: optimizers.append(OPTIM.SGD(net.parameters(), lr=0.1)) or optimizers[0]):
        (optimizer,) = optimizers
        with pytest.raises(ConfigError, match="model.train.* makes the step"):
            optimizer.step()
        state = OPTIM.SGD(network().parameters(), lr=0.1).state_dict()
        for use in (optimizer.state_dict, lambda: optimizer.load_state_dict(state)):
            with pytest.raises(ConfigError, match=r"SGD has no state: the model keeps it, model.save_model\(path\)"):
                use()
        with pytest.raises(ConfigError, match="were taken over"):
            optimizer.param_groups[0]["lr"] = 1.0
        with pytest.raises(ConfigError, match="a rate that changes is a function of the step"):
            OPTIM.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def test_a_module_without_its_loss_is_told_the_adapter():
    with pytest.raises(ArgumentError, match=r"Sequential is a module of PyTorch.*TorchModel\(module, loss\)"):
        mz.distribute(network(), mz.AdamW(), mesh=mz.Mesh("self"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: mz.AdamW(network().parameters()), r"AdamW is given no parameters.*mz.AdamW\(lr=1e-3\)"),
        (lambda: mz.AdamW(network().parameters(), lr=1e-3), "'lr', which is also the first one without a name"),
        (lambda: mz.SGD(scheduled(network())), "torch.optim.AdamW is taken with its groups"),
        (lambda: mz.SGD(OPTIM.lr_scheduler.StepLR(OPTIM.SGD(network().parameters()), 3)), "StepLR is a scheduler"),
        (lambda: TorchModel(torch.nn.DataParallel(network()), LOSS), "give the module inside, .module"),
        (lambda: TorchModel(torch.nn.SyncBatchNorm(4), LOSS), "is a SyncBatchNorm.*take a BatchNorm"),
        (lambda: TorchModel(network, LOSS)(X), "a TorchModel is not called"),
        (lambda: TorchModel(network, LOSS).eval(), "'TorchModel' object has no attribute 'eval': leave it out"),
    ],
)
def test_what_else_is_given_by_habit_is_answered_by_name(wrong, message):
    with pytest.raises((TypeError, ConfigError, AttributeError), match=message):
        wrong()


def test_a_module_that_is_saved_although_its_copy_was_trained_says_so(tmp_path, capsys):
    net = network()
    with mz.distribute(TorchModel(net, LOSS), mz.SGD(lr=0.1), mesh=mz.Mesh("self")) as model:
        torch.save(net, tmp_path / "before.pt")
        model.train(X, Y)
        assert "is pickled" not in capsys.readouterr().err
        torch.save(net, tmp_path / "after.pt")
    assert "Sequential is pickled" in capsys.readouterr().err


def test_a_dataset_is_a_source_and_a_loader_is_told_so():
    from torch.utils.data import DataLoader, IterableDataset, TensorDataset

    class Own(DataLoader):
        """A loader of one's own is a loader."""

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    dataset = TensorDataset(torch.arange(8.0).reshape(4, 2), torch.arange(4))
    x, y = mz.data.DatasetSource(dataset).samples([3, 1])
    assert (x.tolist(), y.tolist()) == ([[6.0, 7.0], [2.0, 3.0]], [3, 1])
    with mz.Mesh("self") as mesh:
        for given, message in (
            (dataset, r"mz.data.DatasetSource\(dataset"),
            (DataLoader(dataset, batch_size=2), r"mz.data.DatasetSource\(loader.dataset\)"),
            (Own(dataset), r"mz.data.DatasetSource\(loader.dataset\)"),
            (Stream(), "its samples have no numbers"),
        ):
            with pytest.raises(DataError, match=message):
                mz.data.batches(given, mesh, global_batch=2)


def test_the_classes_of_single_strategies_take_such_an_optimizer_too():
    net, config = network(), mz.ShardingConfig(comm="self")
    with config, mz.ZeRO1Model(TorchModel(net, LOSS), config, optimizer=OPTIM.SGD(net.parameters(), lr=0.5)) as model:
        assert model.optimizer.wrapped_optimizer.lr == 0.5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch, when it compiles
def test_a_file_of_torch_save_and_a_compiled_module_are_answered_by_name(tmp_path):
    torch.save(network().state_dict(), tmp_path / "weights.pt")
    with made(lambda net: OPTIM.SGD(net.parameters())) as model:
        with pytest.raises(
            CheckpointError, match=r"weights.pt is a file of torch.save: .*before TorchModel.*load_named"
        ):
            model.load_parameters(tmp_path / "weights.pt")
        model.load_named(torch.load(tmp_path / "weights.pt"))
    with pytest.raises(ConfigError, match="torch.compile has made one function of the module"):
        TorchModel(torch.compile(network()), LOSS, blocks=["0", "1"])
