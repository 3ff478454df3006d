"""Adapt models that are not made of mpizero's layers, so that mpizero can train them."""

from importlib import import_module
from types import ModuleType

from mpizero._util.names import unknown_name
from mpizero.adapters.function import FunctionModel
from mpizero.errors import ConfigError

__all__ = ["FunctionModel"]
_LIBRARIES = ("jax", "torch")


def __getattr__(name: str) -> ModuleType:
    """Import the adapter of JAX or PyTorch when it is first used."""
    if name not in _LIBRARIES:
        raise unknown_name(__name__, name, [*__all__, *_LIBRARIES])
    try:
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ConfigError(
            f"mpizero.adapters.{name} needs {name}, which is not installed: pip install 'mpizero[{name}]'"
        ) from None
