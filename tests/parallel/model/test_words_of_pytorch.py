"""What a program for PyTorch does with a model or an optimizer is an error that says what to do here, never nothing."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import mpizero as mz
from mpizero._util.names import INSTEAD

X, Y = np.eye(4, dtype=np.float32), np.arange(4) % 2


def placed(**given):
    return mz.distribute(mz.nn.MLP(4, [], 2), mz.SGD(0.1), config=mz.ShardingConfig(comm="self"), **given)


@pytest.mark.parametrize("name", ["lr", "weight_decay", "momentum", "param_groups"])
def test_a_setting_of_the_optimizer_is_not_set_without_effect(name):
    with placed() as model:
        with pytest.raises(AttributeError, match=rf"{name} cannot be set: .*SGD\(lr=lambda step"):
            setattr(model.optimizer, name, 0.2)
        model.train(X, Y)


def test_what_is_missing_says_what_takes_its_place():
    with placed() as model:
        for owner, names in ((model, ("zero_grad", "eval", "state_dict")), (model.optimizer, ("param_groups",))):
            for name in names:
                with pytest.raises(AttributeError, match=name) as told:
                    getattr(owner, name)
                assert INSTEAD[name] in str(told.value)
        assert not hasattr(model, "misspelt")
        twin = model.deep_copy()
        assert twin.parameters_sha256() == model.parameters_sha256()
        twin.close()
        assert copy.copy(model.optimizer).wrapped_optimizer is model.optimizer.wrapped_optimizer


def test_a_step_after_several_gradients_says_that_it_takes_the_last(capfd):
    with placed() as model:
        for _ in range(2):
            for part in (slice(2), slice(2, 4)):
                model.compute_gradients(X[part], Y[part])
            model.optimizer.step()
        assert capfd.readouterr().err.count("the last of 2 calls of compute_gradients") == 1
    with placed() as model:
        model.compute_gradients(X, Y)
        model.optimizer.step()
        assert "compute_gradients" not in capfd.readouterr().err


def test_a_dataset_of_other_libraries_says_what_a_source_is():
    with mz.ShardingConfig(comm="self") as config, pytest.raises(mz.errors.DataError, match=r"ArraySource\(x, y\)"):
        next(iter(mz.data.batches([(X[0], 0), (X[1], 1)], config, global_batch=2)))
