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
        address = tensor.data_ptr()
        for number, (start, stop) in enumerate(self._ranges):
            if start <= address < stop:
                offset = (address - start) // tensor.element_size()
                return _Place(number, offset, tensor.shape, tensor.stride())
        return tensor

    def unpack(self, kept: Any) -> torch.Tensor:
        """Return the tensor that :meth:`pack` was given, with the present values. Not collective."""
        if not isinstance(kept, _Place):
            return kept
        flat = self.tensors[kept.parameter].detach().reshape(-1)
        return flat.as_strided(kept.shape, kept.strides, flat.storage_offset() + kept.offset)
