"""Find the library's losses by the names that models and configuration files use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpizero._util.names import nearest
from mpizero.errors import ConfigError
from mpizero.nn.losses.cross_entropy import CrossEntropy
from mpizero.nn.losses.element_losses import BCEWithLogitsLoss, GaussianNLLLoss, HuberLoss, L1Loss, MeanSquaredError
from mpizero.nn.losses.relative_error import RelativeL2Loss
from mpizero.types import Loss

#: The losses for each task by name; the first is the task's default.
TASKS: Mapping[str, Mapping[str, type[Any]]] = {
    "classification": {"cross_entropy": CrossEntropy, "bce": BCEWithLogitsLoss},
    "regression": {
        "mse": MeanSquaredError,
        "l1": L1Loss,
        "huber": HuberLoss,
        "relative_l2": RelativeL2Loss,
        "gaussian": GaussianNLLLoss,
    },
}


def loss_for(where: str, task: str, loss: Any) -> Loss:
    """Return the loss that a model for ``task`` is given: by name, or an object with ``forward`` and ``backward``.

    None gives the task's default. ``where`` is the model's name for error messages.

    Raises
    ------
    ConfigError
        The name is unknown or belongs to another task, or the object is no loss.
    """
    own = TASKS[task]
    if loss is None:
        made: Loss = next(iter(own.values()))()
        return made
    if isinstance(loss, str):
        if loss not in own:
            other = [name for name, losses in TASKS.items() if loss in losses]
            known = [name for losses in TASKS.values() for name in losses]
            advice = f"set task={other[0]!r}" if other else f"choose one of {', '.join(known)}{nearest(loss, known)}"
            raise ConfigError(f"{where}: loss={loss!r} does not belong to task={task!r}; {advice}")
        named: Loss = own[loss]()
        return named
    if isinstance(loss, type) or not (callable(getattr(loss, "forward", None)) and hasattr(loss, "backward")):
        raise ConfigError(
            f"{where}: loss={loss!r:.80} must be the name of a loss, such as {list(own)[-1]!r}, or an object with "
            "forward and backward, such as mpizero.nn.HuberLoss(delta=0.5)"
        )
    given: Loss = loss
    return given
