"""Adapt PyTorch modules, so that every strategy can train them (``pip install mpizero[torch]``)."""

from mpizero.adapters.torch.module import TorchModel

__all__ = ["TorchModel"]
