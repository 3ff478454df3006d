"""Adapt models that are not made of the library's layers."""

from mpizero.adapters.function import FunctionModel

__all__ = ["FunctionModel"]
