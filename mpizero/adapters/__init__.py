"""Adapt models that are not made of mpizero's layers, so that mpizero can train them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mpizero.adapters.function import FunctionModel
from mpizero.names import unknown_names

__all__ = ["FunctionModel", "jax"]


def __getattr__(name: str) -> Any:
    """Import the adapter of a library when it is first used, and with it the library."""
    if name == "jax":
        return import_module("mpizero.adapters.jax")
    return unknown_names("mpizero.adapters", __all__)(name)
