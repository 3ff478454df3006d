"""Pass arrays between NumPy or CuPy and PyTorch without copies."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from mpizero._util.pytree import leaves_of
from mpizero.errors import DataError, LayoutError
from mpizero.types import Array

with warnings.catch_warnings():  # PyTorch warns once in a process of read-only arrays: parameters and samples are
    warnings.simplefilter("ignore")
    _read_only = np.zeros(1, np.float32)
    _read_only.flags.writeable = False
    torch.from_numpy(_read_only)


def as_tensor(array: Any) -> torch.Tensor:
    """Return a tensor that shares the memory of an array of NumPy or CuPy. Not collective."""
    if isinstance(array, np.ndarray):
        try:
            return torch.from_numpy(array)
        except TypeError as error:
            raise DataError(f"PyTorch takes no arrays of {array.dtype}: {error}") from None
        except ValueError:  # negative strides
            return torch.from_numpy(np.ascontiguousarray(array))
    return torch.as_tensor(array)


class Placed(torch.nn.Parameter):  # type: ignore[misc]
    """Share the memory of a parameter, and let autograd's count of changes see those made by way of ``.data``."""

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its graph."""
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        raise LayoutError(
            f"a parameter of shape {tuple(self.shape)} is given other data in a forward pass, which would be lost "
            "after it: compute with a changed copy"
        )

    @classmethod
    def of(cls, tensor: torch.Tensor) -> torch.Tensor:
        """Return a parameter that shares the memory of a tensor."""
        return torch.Tensor._make_subclass(cls, tensor)


def as_array(tensor: torch.Tensor) -> Array:
    """Return an array that shares the memory of a tensor: of NumPy on the host, else of CuPy. Not collective."""
    on_host = tensor.device.type == "cpu"
    try:
        array: Array = (tensor.detach() if on_host else torch.empty(0, dtype=tensor.dtype)).numpy()
    except TypeError:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise DataError(
            f"a block returned {kind}, which NumPy does not have: let it end with .float(), and "
            f"the next begin with .to(torch.{kind})"
        ) from None
    if on_host:
        return array
    from mpizero.kernels.gpu import of_tensor

    return of_tensor(tensor.detach())


def put(view: Array, tensor: torch.Tensor) -> None:
    """Copy a tensor to an array of the same shape. Not collective."""
    as_tensor(view).copy_(tensor)


def gradient_leaves(tree: Any) -> list[torch.Tensor]:
    """Return the leaves of a tree of tensors that may have a gradient: floating-point and complex numbers."""
    return [leaf for leaf in leaves_of(tree) if leaf.is_floating_point() or leaf.is_complex()]
