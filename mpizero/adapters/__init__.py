"""Adapt models that are not made of mpizero's layers."""

from mpizero.adapters.function import FunctionModel

__all__ = ["FunctionModel"]
