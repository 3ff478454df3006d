"""Adapt models that are not made of mpizero's layers, so that mpizero can train them."""

from mpizero.adapters.function import FunctionModel

__all__ = ["FunctionModel"]
