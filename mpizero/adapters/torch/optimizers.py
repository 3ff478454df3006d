"""Convert optimizers of PyTorch to those of mpizero, with their groups of parameters.

A sharded optimizer updates ranges of one flat array and knows parameters by name, so an optimizer of PyTorch, which
holds tensors, cannot be run itself. Its class, its settings and, for each group, the learning rate and weight decay are
taken over. A setting without a counterpart in mpizero raises an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from mpizero import optim
from mpizero._util.names import shown
from mpizero.errors import ConfigError
from mpizero.optim.elementwise import CONVERTED, RATE_OF_STEP

#: Settings that change how PyTorch computes, and no result.
_WITHOUT_EFFECT = {"foreach", "fused", "capturable", "decoupled_weight_decay"}
#: Settings that groups may have; all others must be equal in all groups.
_OF_GROUPS = {"params", "param_names", "lr", "weight_decay"}


def convert_optimizer(optimizer: Any, module: Any, trained: Sequence[str]) -> Any:
    """Return an mpizero optimizer with the settings and groups of a PyTorch optimizer; return other objects unchanged.

    Parameters
    ----------
    optimizer : object
        A ``torch.optim.SGD``, ``Adam`` or ``AdamW``, made from the parameters of ``module``, is converted. From then
        on, calling its ``step`` or ``state_dict``, or setting a learning rate, raises an error. Not collective.
    module : torch.nn.Module or callable
        The module that is trained, or the function that makes it.
    trained : sequence of str
        Names of the parameters that are trained.

    Raises
    ------
    ConfigError
        If the optimizer has made steps, or has a scheduler, a setting without a counterpart, groups that differ in more
        than learning rate and weight decay, or parameters that the module does not have; or if it lacks trained
        parameters.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or type(optimizer).__name__ not in CONVERTED:
        return optimizer
    kind = type(optimizer).__name__
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ConfigError(
            f"a scheduler of PyTorch changes the rate of this torch.optim.{kind}, which nothing reads here: "
            f"{RATE_OF_STEP}"
        )
    if optimizer.state:
        raise ConfigError(f"this torch.optim.{kind} has made steps, whose averages are not taken over: give a new one")
    names, settings = _named_groups(optimizer, module, trained), _common_settings(optimizer)
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    decays = [float(group["weight_decay"]) for group in optimizer.param_groups]
    base = max(rates)
    groups = [
        optim.ParameterGroup(those, lr_scale=rate / base if base else 1.0, weight_decay=decay)
        for those, rate, decay in zip(names, rates, decays, strict=True)
        if those
    ]
    optimizer.register_step_pre_hook(_refuse_step)
    optimizer.register_state_dict_pre_hook(_refuse_state)
    optimizer.register_load_state_dict_pre_hook(_refuse_state)
    optimizer.param_groups[:] = map(_ConvertedGroup, optimizer.param_groups)
    return getattr(optim, kind)(lr=base, groups=groups, **settings)


def _named_groups(optimizer: torch.optim.Optimizer, module: Any, trained: Sequence[str]) -> list[Sequence[str]]:
    """Return the names of the trained parameters of each group."""
    kind = f"torch.optim.{type(optimizer).__name__}"
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(
            f"{kind}: TorchModel was given a function that makes the module: give it the module whose parameters the "
            "optimizer has"
        )
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups: list[Sequence[str]] = []
    for number, group in enumerate(optimizer.param_groups):
        if not all(id(parameter) in names for parameter in group["params"]):
            raise ConfigError(
                f"{kind}: group {number} has parameters that {type(module).__name__} does not have: make it from the "
                "parameters of the module that TorchModel is given"
            )
        groups.append([name for one in group["params"] if (name := names[id(one)]) in trained])
    grouped = {name for group in groups for name in group}
    if left := [name for name in trained if name not in grouped]:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise ConfigError(
            f"{kind} does not have {shown(left[0])}{more}, which would be trained: give it all parameters, or freeze "
            "them, TorchModel(frozen=[...])"
        )
    return groups


def _common_settings(optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
    """Return the settings that are the same in all groups, by their names in mpizero."""
    kind = type(optimizer).__name__
    known = set(inspect.signature(getattr(optim, kind)).parameters)
    first: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name in _OF_GROUPS | _WITHOUT_EFFECT or name == "initial_lr":
                continue
            if name not in known and value:
                raise ConfigError(f"torch.optim.{kind}: {name}={value!r} has no counterpart in mz.{kind}")
            if first.setdefault(name, value) != value:
                raise ConfigError(
                    f"torch.optim.{kind}: {name} is {first[name]!r} in one group and {value!r} in another; groups may "
                    "differ in lr and weight_decay"
                )
    return {name: value for name, value in first.items() if name in known}


class _ConvertedGroup(dict[str, Any]):
    """Hold the settings of a converted group, and refuse changes, which would have no effect."""

    def __setitem__(self, name: str, value: Any) -> None:
        """Raise :class:`ConfigError`."""
        raise ConfigError(
            f"{name}={value!r} of a group: the settings of PyTorch's optimizer were taken over by the model; "
            f"{RATE_OF_STEP}"
        )


def _refuse_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> NoReturn:
    raise ConfigError(
        f"torch.optim.{type(optimizer).__name__}.step: its settings were taken over, and model.train(x, y) makes the "
        "step; leave it out"
    )


def _refuse_state(optimizer: torch.optim.Optimizer, *state: Any) -> NoReturn:
    raise ConfigError(
        f"torch.optim.{type(optimizer).__name__} has no state: the model keeps it, model.save_model(path) saves it "
        "with the parameters, and model.load_model(path) loads it, both on all ranks; mz.Trainer does so by every= and "
        "resume()"
    )
