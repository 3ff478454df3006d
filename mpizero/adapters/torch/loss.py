"""Use a function or module of PyTorch as the loss of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch

from mpizero.adapters.torch.arrays import as_array, as_tensor, gradient_leaves
from mpizero.adapters.torch.process import TorchSettings, drawn_since, random_state, set_random_state, torch_pass
from mpizero.errors import ConfigError, DataError, LayoutError
from mpizero.sampletree import leaves_of, map_leaves
from mpizero.signatures import named
from mpizero.types import Array

#: Largest relative difference between the loss of samples and the sum of the losses of their two halves.
_ROUNDING = 1e-3


@dataclass(frozen=True, eq=False)
class TorchLoss:
    """Call ``function(prediction, target)``, which returns a sum over samples, or that and its weight.

    Without a weight, it is the number of samples. The first batch of several samples is also evaluated in two halves,
    whose losses must add up.
    """

    function: Callable[..., Any]
    settings: TorchSettings
    _checked: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError(f"TorchModel: loss is a function of prediction and target, got {self.function!r:.80}")
        if isinstance(self.function, torch.nn.Module) and any(True for _ in self.function.parameters()):
            raise ConfigError("TorchModel: the loss has parameters, which would stay: put them into the module")
        if (reduction := getattr(self.function, "reduction", "sum")) != "sum":
            raise ConfigError(
                f"TorchModel: the loss {type(self.function).__name__} has reduction={reduction!r}: it must be a sum "
                "over samples, reduction='sum'; mpizero divides the sum of the global batch by its weight"
            )

    @property
    def fingerprint(self) -> Any:
        """Parts of the loss that ranks compare."""
        return {"function": self.function}

    def forward(self, prediction: Any, target: Any) -> tuple[float, float, Any]:
        """Return the sum of the losses, the weight, and the graph for :meth:`backward`. Not collective."""
        with torch_pass(self.settings), torch.enable_grad():
            given, wanted = map_leaves(as_tensor, prediction), map_leaves(as_tensor, target)
            leaves = gradient_leaves(given)
            for leaf in leaves:
                leaf.requires_grad_()
            before = random_state()
            loss, weight = self._value(given, wanted)
            if drawn_since(before):
                set_random_state(before)
                raise LayoutError(
                    f"{named(self.function, 'loss')} draws random numbers, which would depend on the rank that "
                    "computes it: draw them in the module, where mpizero seeds them"
                )
            if not self._checked:
                self._check_sum(given, wanted, loss)
            return float(loss.detach()), weight, (loss, leaves, prediction)

    def backward(self, cache: Any, scale: float = 1.0) -> Any:
        """Return ``scale`` times the gradient of the loss sum by the prediction, a tree like it. Not collective."""
        loss, leaves, prediction = cache
        with torch_pass(self.settings):
            if not loss.requires_grad:
                raise LayoutError(
                    f"{named(self.function, 'loss')} returned a loss that does not depend on the prediction: does it "
                    "use .detach(), .item() or torch.no_grad()?"
                )
            found = torch.autograd.grad(loss, leaves, torch.full_like(loss, scale), allow_unused=True)
        left = iter(zip(leaves, found, strict=True))

        def gradient(leaf: Any) -> Array | None:
            if leaf.dtype.kind not in "fc":
                return None
            tensor, value = next(left)
            return as_array(torch.zeros_like(tensor) if value is None else value)

        return map_leaves(gradient, prediction)

    def _value(self, prediction: Any, target: Any) -> tuple[torch.Tensor, float]:
        result = self.function(prediction, target)
        loss, weight = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            is_tensor = isinstance(loss, torch.Tensor)
            told = f"a tensor of shape {tuple(loss.shape)}" if is_tensor else f"a {type(loss).__name__}"
            raise LayoutError(
                f"{named(self.function, 'loss')} returned {told}: expected one number, the sum over samples "
                "(reduction='sum'), or that number and its weight"
            )
        if weight is None:
            return loss, float(self._count(prediction, target))
        return loss, float(weight.detach() if isinstance(weight, torch.Tensor) else weight)

    @staticmethod
    def _count(*trees: Any) -> int:
        leaves = [leaf for tree in trees for leaf in leaves_of(tree) if leaf.ndim]
        if not leaves:
            raise DataError("TorchModel: neither prediction nor target has an axis of samples")
        return int(leaves[-1].shape[0])

    def _check_sum(self, prediction: Any, target: Any, loss: torch.Tensor) -> None:
        """Raise :class:`LayoutError` if the losses of the two halves of the samples do not add up to the whole one."""
        count = self._count(prediction, target)
        if count < 2 or any(not leaf.ndim or len(leaf) != count for t in (prediction, target) for leaf in leaves_of(t)):
            return
        halves = []
        with torch.no_grad():
            for part in (slice(0, count // 2), slice(count // 2, count)):
                cut = [map_leaves(itemgetter(part), tree) for tree in (prediction, target)]
                halves.append(float(self._value(*cut)[0]))
        whole = float(loss.detach())
        apart, size = abs(whole - sum(halves)), abs(whole) + sum(map(abs, halves))
        self._checked.append(True)
        if apart > _ROUNDING * size:  # also False where one is NaN, which the step tells
            raise LayoutError(
                f"{named(self.function, 'loss')} is no sum over samples: it is {whole:.6g} for {count} samples, "
                f"{halves[0]:.6g} and {halves[1]:.6g} for their halves; use reduction='sum', or return the sum and a "
                "weight"
            )
