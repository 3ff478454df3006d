"""Say when a module is used that was given for training, and still has its start values."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Self

import torch

from mpizero.adapters.torch.first.originals import Originals
from mpizero.frames import Line, is_users
from mpizero.text import notice


class LeftBehind:
    """Say once, at the first call of a module that was trained as a copy, that it is not the trained one.

    It is a hook of the module. Copies of the module, pickled ones too, have one that says nothing, and so has a module
    whose parameters were changed since, for example by ``load_state_dict``.

    Parameters
    ----------
    module : torch.nn.Module
        The module that was given.
    originals : Originals or None
        Its tensors, which know whether a copy is trained.
    """

    def __init__(self, module: torch.nn.Module | None = None, originals: Originals | None = None) -> None:
        self._originals, self._versions = originals, _versions(module)
        if module is not None:
            module.register_forward_pre_hook(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a hook that says nothing."""
        return type(self)()

    def __reduce__(self) -> Any:
        """Pickle a hook that says nothing."""
        return type(self), ()

    def __call__(self, module: torch.nn.Module, given: Any) -> None:
        """Look at one call of the module."""
        if self._originals is None or not self._originals.trained:
            return
        frame, line = sys._getframe(1), None
        while frame is not None:
            if frame.f_globals.get("__name__", "").startswith("mpizero.adapters"):
                return  # compares it with its blocks
            line = line or _users(frame)
            frame = frame.f_back  # type: ignore[assignment]
        if _versions(module) == self._versions:
            at = "" if line is None else f" ({line})"
            notice(
                f"{type(module).__name__} is called{at}, but mpizero trains a copy of it, and it still has its start "
                "values: TorchModel.fill(model.named_parameters()) gives it the trained ones; model.predict has them"
            )
        self._originals = None


def _users(frame: FrameType) -> Line | None:
    code = frame.f_code
    return Line(code.co_filename, frame.f_lineno, code.co_name) if is_users(code.co_filename) else None


def _versions(module: torch.nn.Module | None) -> list[int]:
    return [] if module is None else [parameter._version for parameter in module.parameters()]
