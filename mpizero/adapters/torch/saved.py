"""Keep the memory of parameters out of what autograd saves for the backward pass.

With ZeRO-3 on several nodes the parameters of a block are gathered for its forward pass, freed, and gathered again for
its backward pass; in the meantime their memory holds other parameters. Autograd saves weights for the backward pass,
and does not notice that NumPy has overwritten them. So what it saves of a parameter is replaced by the parameter's
number and the place in it, and read from the newly gathered parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class _Kept(NamedTuple):
    """Hold a tensor that autograd saves, and its version then."""

    tensor: torch.Tensor
    version: int


class _Place(NamedTuple):
    """Describe a tensor that lies in the memory of a parameter."""

    parameter: int
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]


class SavedParameters:
    """Replace saved tensors that lie in parameters by their places, and find them in the present parameters.

    Attributes
    ----------
    tensors : sequence of torch.Tensor
        The parameters as they are gathered now; to be replaced before the backward pass.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._ranges = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd keeps in place of ``tensor``. Not collective."""
        number = self.parameter_of(tensor)
        if number is None:
            return _Kept(tensor, tensor._version)
        if tensor.dtype != self.tensors[number].dtype or tensor.is_conj() or tensor.is_neg():
            return _Kept(tensor.detach().clone(), 0)  # a view with elements of another kind
        offset = (tensor.data_ptr() - self._ranges[number][0]) // tensor.element_size()
        return _Place(number, offset, tensor.shape, tensor.stride())

    def parameter_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the parameter in whose memory a tensor begins, None if in none. Not collective."""
        address = tensor.data_ptr()
        return next((i for i, (start, stop) in enumerate(self._ranges) if start <= address < stop), None)

    def unpack(self, kept: Any) -> torch.Tensor:
        """Return the tensor that :meth:`pack` was given, with the present values. Not collective."""
        if isinstance(kept, _Kept):
            if kept.tensor._version != kept.version:
                raise RuntimeError(
                    "a tensor that the backward pass needs was changed in place after the module had used it: compute "
                    "with a copy"
                )
            return kept.tensor
        flat = self.tensors[kept.parameter].detach().reshape(-1)
        return flat.as_strided(kept.shape, kept.strides, flat.storage_offset() + kept.offset)
