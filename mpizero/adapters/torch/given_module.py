"""Compute module and loss together, for a loss that is given the module, or the input that a prediction comes from.

Such a loss has terms that the prediction alone does not tell: a penalty on weights, a residual of derivatives by the
input. It needs all parameters while it runs, so module and loss are one function as a model, as in
:class:`~mpizero.adapters.FunctionModel`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from mpizero._util.pytree import map_leaves
from mpizero.adapters.grain_cost import PassTimes
from mpizero.adapters.torch.arrays import as_array, as_tensor, gradient_leaves, put
from mpizero.adapters.torch.calling import called
from mpizero.adapters.torch.loss import TorchLoss
from mpizero.adapters.torch.module_call import ModuleCall, Passed
from mpizero.errors import ConfigError, LayoutError
from mpizero.layout.flat import nested
from mpizero.types import EVALUATE, Array, Run

#: The keywords by which a loss is given more than prediction and target.
KEYWORDS = ("module", "x")


def given_besides(loss: Callable[..., Any]) -> tuple[str, ...]:
    """Return those of :data:`KEYWORDS` that a loss takes after prediction and target. Not collective."""
    try:
        parameters = list(inspect.signature(loss).parameters.values())
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(one.name for one in parameters[2:] if one.name in KEYWORDS and one.kind in kinds)


def check_alone(besides: tuple[str, ...], blocks: Any, activation_checkpointing: Any) -> None:
    """Raise :class:`ConfigError` if there are blocks, though the loss is given ``besides``. Not collective."""
    if besides and (blocks is not None or activation_checkpointing):
        raise ConfigError(
            f"TorchModel: the loss has a parameter {besides[0]}, so module and loss run together: leave blocks and "
            "activation_checkpointing out, or the parameter"
        )


class ModuleAndLoss(torch.nn.Module):  # type: ignore[misc]
    """Return the sum of the losses of samples, and their weight, as a module whose input is samples and targets.

    ``names`` are the keywords that the loss is given. ``forward`` computes gradients in evaluation, too, because the
    loss may differentiate.
    """

    def __init__(self, module: torch.nn.Module, loss: TorchLoss, names: tuple[str, ...]) -> None:
        super().__init__()
        self.module, self.loss, self.names = module, loss, names
        self.function = loss.function

    def forward(self, x: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the module on ``x``, and the loss."""
        with torch.enable_grad():
            if "x" in self.names:
                for leaf in gradient_leaves(x):
                    leaf.requires_grad_()
            prediction = called(self.module, x)
            given = {name: {"module": self.module, "x": x}[name] for name in self.names}
            loss, weight = self.loss.value(prediction, target, **given)
        return loss, torch.tensor(weight, dtype=torch.float64)


@dataclass(frozen=True)
class JointFunctions:
    """Compute loss, gradients and predictions from parameters by name.

    Parameters
    ----------
    together : ModuleCall
        Calls a :class:`ModuleAndLoss`.
    alone : ModuleCall
        Calls the module in it, which holds the same parameters.
    shown : str
        The loss's name, for messages.
    times : PassTimes
        Times the first passes.
    """

    together: ModuleCall
    alone: ModuleCall
    shown: str
    times: PassTimes

    def loss_and_grad(
        self, parameters: Mapping[str, Array], batch: Any, gradients: Mapping[str, Array], run: Run = EVALUATE
    ) -> tuple[float, float]:
        """Write gradients and new values of buffers to ``gradients``; return the sum of losses and its weight."""
        start = perf_counter()
        passed, found = self._differentiated(parameters, batch, run)
        self._write(gradients, found, passed)
        if run.training and self.times.timed(0, run.count, perf_counter() - start):
            with suppress(Exception):  # not every module takes a single sample
                start, one = perf_counter(), map_leaves(lambda leaf: leaf[:1], batch)
                self._differentiated(parameters, one, replace(run, count=0))
                self.times.one_timed(0, perf_counter() - start)
        loss, weight = passed.output
        return float(loss.detach()), float(weight)

    def _differentiated(
        self, parameters: Mapping[str, Array], batch: Any, run: Run
    ) -> tuple[Passed, dict[str, torch.Tensor | None]]:
        """Return the results of a pass, and the gradients of the loss by name."""
        call, params = self.together, nested(dict(parameters))
        specs = call.tensors.specs
        with call.prepared(run), torch.enable_grad():
            given = call.given(params)
            weights = {s.name: t.requires_grad_() for t, s in zip(given, specs, strict=True) if s.optimized}
            passed = call(params, given, map_leaves(as_tensor, batch), run)
            loss, _ = passed.output
            if not loss.requires_grad:
                raise LayoutError(f"{self.shown} returned a loss that depends on no parameter: does it use .detach()?")
            with call.placed(params):
                found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        return passed, dict(zip(weights, found, strict=True))

    def _write(self, gradients: Mapping[str, Array], found: Mapping[str, Any], passed: Passed) -> None:
        tensors, statistics = self.together.tensors, iter(passed.averages)
        for integer, number in zip(tensors.integer_specs, passed.numbers, strict=True):
            put(gradients[integer.name], number)
        for spec in tensors.specs:
            value = next(statistics) if spec.averaged else found.get(spec.name)
            if value is not None:
                put(gradients[spec.name], value)
            elif spec.name in tensors.unused:
                gradients[spec.name][...] = 0
            elif spec.optimized:
                raise LayoutError(
                    f"{self.shown} does not depend on parameter {spec.name!r}, so it has no gradient: freeze it "
                    "(frozen=), or name it in unused= if only some samples use it"
                )

    def loss(self, parameters: Mapping[str, Array], batch: Any, run: Run = EVALUATE) -> tuple[float, float]:
        """Return the sum of losses and its weight."""
        loss, weight = self._output(self.together, parameters, batch, run)
        return float(loss.detach()), float(weight)

    def predict(self, parameters: Mapping[str, Array], x: Any) -> Any:
        """Return what the module returns for ``x``."""
        return map_leaves(as_array, self._output(self.alone, parameters, x, EVALUATE))

    @staticmethod
    def _output(call: ModuleCall, parameters: Mapping[str, Array], x: Any, run: Run) -> Any:
        params = nested(dict(parameters))
        with call.prepared(run), torch.no_grad():
            return call(params, call.given(params), map_leaves(as_tensor, x), run).output
