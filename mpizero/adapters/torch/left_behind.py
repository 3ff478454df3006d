"""Say when a module is used that was given for training, and still has its start values."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Self

import torch

from mpizero._util.text import Line, is_users, notice
from mpizero.adapters.torch.first.originals import Originals


class LeftBehind:
    """Say once, at the first use of a module that was trained as a copy, that it is not the trained one.

    It is a hook of the module and of its submodules, which are called, and whose ``state_dict()`` is taken. Copies of
    the module, pickled ones too, have one that says nothing, and so has a module whose parameters were changed since,
    for example by ``load_state_dict``.

    Parameters
    ----------
    module : torch.nn.Module
        The module that was given.
    originals : Originals or None
        Its tensors, which know whether a copy is trained.
    """

    def __init__(self, module: torch.nn.Module | None = None, originals: Originals | None = None) -> None:
        self._originals = originals
        inside = [] if module is None else list(module.modules())
        self._versions = {id(inner): _versions(inner) for inner in inside}
        for inner in inside:
            inner.register_forward_pre_hook(self)
            inner.register_state_dict_pre_hook(self.before_state_dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a hook that says nothing."""
        return type(self)()

    def __reduce__(self) -> Any:
        """Pickle a hook that says nothing."""
        return type(self), ()

    def __call__(self, module: torch.nn.Module, given: Any) -> None:
        """Look at one call of the module, or of a submodule."""
        self._used(module, "is called")

    def before_state_dict(self, module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        """Look at one call of ``state_dict()`` of the module, or of a submodule."""
        self._used(module, "is asked for its state_dict")

    def _used(self, module: torch.nn.Module, how: str) -> None:
        if self._originals is None or not self._originals.trained:
            return
        frame, line = sys._getframe(2), None
        while frame is not None:
            if frame.f_globals.get("__name__", "").startswith("mpizero.adapters"):
                return  # compares it with its blocks
            line = line or _users(frame)
            frame = frame.f_back  # type: ignore[assignment]
        if _versions(module) == self._versions.get(id(module)):
            at = "" if line is None else f" ({line})"
            notice(
                f"{type(module).__name__} {how}{at}, but mpizero trains a copy of it, and it still has its start "
                "values: TorchModel.fill(model.named_parameters()) gives it the trained ones; model.predict has them"
            )
        self._originals = None


def _users(frame: FrameType) -> Line | None:
    code = frame.f_code
    return Line(code.co_filename, frame.f_lineno, code.co_name) if is_users(code.co_filename) else None


def _versions(module: torch.nn.Module) -> list[int]:
    return [parameter._version for parameter in module.parameters()]
