"""Use a function or module of PyTorch as the loss of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from mpizero._util.checks import named
from mpizero._util.pytree import leaves_of, map_leaves
from mpizero._util.text import users_line
from mpizero.adapters.torch.arrays import as_array, as_tensor, gradient_leaves
from mpizero.adapters.torch.backward import gradients_of
from mpizero.adapters.torch.calling import UNDIFFERENTIATED
from mpizero.adapters.torch.first.first_loss import FirstLoss
from mpizero.adapters.torch.first.originals import Originals
from mpizero.adapters.torch.first.parts import Trial, parts_of
from mpizero.adapters.torch.kernels_of_pass import Allocations
from mpizero.adapters.torch.process import TorchSettings, drawn_since, random_state, set_random_state, torch_pass
from mpizero.errors import ConfigError, DataError, LayoutError
from mpizero.types import Array


@dataclass(frozen=True, eq=False)
class TorchLoss:
    """Call ``function(prediction, target)``, which returns a sum over samples, or that and its weight.

    Without a weight, it is the number of samples. On the first batches it is looked at by :class:`FirstLoss`.
    """

    function: Callable[..., Any]
    settings: TorchSettings
    originals: Originals
    trial: Trial | None = None
    _first: FirstLoss = field(init=False)
    #: Counts the arrays of a pass for the planner.
    allocations: ClassVar[Any] = Allocations

    def __post_init__(self) -> None:
        if isinstance(self.function, type):
            raise ConfigError(
                f"TorchModel: loss is the class {self.function.__name__}: make one of it, "
                f"{self.function.__name__}(reduction='sum')"
            )
        if not callable(self.function):
            raise ConfigError(f"TorchModel: loss is a function of prediction and target, got {self.function!r:.80}")
        if isinstance(self.function, torch.nn.Module) and any(True for _ in self.function.parameters()):
            raise ConfigError("TorchModel: the loss has parameters, which would stay: put them into the module")
        if (reduction := getattr(self.function, "reduction", "sum")) != "sum":
            raise ConfigError(
                f"TorchModel: the loss {type(self.function).__name__} has reduction={reduction!r}: it must be a sum "
                "over samples, reduction='sum'; mpizero divides the sum of the global batch by its weight"
            )
        object.__setattr__(self, "_first", FirstLoss(self.function, self.value, self.originals))

    @property
    def fingerprint(self) -> Any:
        """Parts of the loss that ranks compare."""
        return {"function": self.function}

    def forward(self, prediction: Any, target: Any) -> tuple[float, float, Any]:
        """Return the sum of the losses, the weight, and the graph for :meth:`backward`. Not collective."""
        with torch_pass(self.settings), torch.enable_grad():
            given, wanted = map_leaves(as_tensor, prediction), map_leaves(as_tensor, target)
            kind = self._first.new_kind((given, wanted))
            if kind is not None:
                self._first.check(given, wanted)
                self._first.seen.add(kind)
            if self._first.is_wanted(new=kind is not None) and self._adds_up(prediction, given, wanted):
                self._first.added = True
                if self.trial is not None:
                    self.trial.done = True
            leaves = gradient_leaves(given)
            for leaf in leaves:
                leaf.requires_grad_()
            before = random_state()
            loss, weight = self.value(given, wanted)
            if drawn_since(before):
                set_random_state(before)
                raise self._first.draws("PyTorch's generator", "")
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
            found = gradients_of([loss], leaves, [torch.full_like(loss, scale)])
        left = iter(zip(leaves, found, strict=True))

        def gradient(leaf: Any) -> Array | None:
            if leaf.dtype.kind not in "fc":
                return None
            tensor, value = next(left)
            return as_array(torch.zeros_like(tensor) if value is None else value)

        return map_leaves(gradient, prediction)

    def value(self, prediction: Any, target: Any, **given: Any) -> tuple[torch.Tensor, float]:
        """Call the function, with what it is ``given`` besides; return the sum as a tensor, and the weight."""
        try:
            result = self.function(prediction, target, **given)
        except RuntimeError as error:
            if not given and any(words in str(error) for words in UNDIFFERENTIATED):
                line = users_line(error.__traceback__)
                at = "" if line is None else f" ({line})"
                raise LayoutError(
                    f"{named(self.function, 'loss')}{at} differentiates what it has no graph of: let it have a "
                    "parameter x, loss(prediction, target, x), which is given the input by which the prediction can be "
                    "differentiated, or a parameter module, which is given the module"
                ) from error
            raise
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

    def _adds_up(self, given: Any, prediction: Any, target: Any) -> bool:
        """Compare the loss of samples with those of their parts; tell whether it was possible. Not collective."""
        count = self._count(prediction, target)
        trial = self.trial or Trial()
        wanted = parts_of(target, count, changed=False)
        ways = trial.prediction(given, prediction, count)
        return wanted is not None and any(n == count and self._first.adds_up(way, wanted, count) for way, n in ways)
