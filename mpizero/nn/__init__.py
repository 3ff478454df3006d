"""Provide layers with hand-written backward passes, losses, and models of them; this package never imports MPI."""

from typing import TYPE_CHECKING

from mpizero.names_on_use import names_on_use
from mpizero.nn.split import split_forms  # noqa: F401 - fills the table of split forms

if TYPE_CHECKING:
    from mpizero.nn.context.context_forms import context_model, cut_batch
    from mpizero.nn.context.ring import Zigzag
    from mpizero.nn.layer import Layer, poll
    from mpizero.nn.layers.activation import GELU, ReLU, SiLU, Tanh
    from mpizero.nn.layers.attention import CausalSelfAttention
    from mpizero.nn.layers.block import FeedForward, TransformerBlock
    from mpizero.nn.layers.checkpointed import Checkpointed
    from mpizero.nn.layers.dropout import Dropout
    from mpizero.nn.layers.embedding import Embedding, Position, TokenEmbedding
    from mpizero.nn.layers.frozen import Frozen
    from mpizero.nn.layers.language_head import LanguageHead
    from mpizero.nn.layers.linear import Linear, Projection
    from mpizero.nn.layers.norm import LayerNorm, RMSNorm
    from mpizero.nn.losses.cross_entropy import CrossEntropy
    from mpizero.nn.losses.element_losses import (
        BCEWithLogitsLoss,
        GaussianNLLLoss,
        HuberLoss,
        L1Loss,
        MeanSquaredError,
    )
    from mpizero.nn.losses.relative_error import RelativeL2Loss
    from mpizero.nn.malloc import keep_freed_memory
    from mpizero.nn.models.block_model import (
        bind,
        evaluate,
        export_computation_graph,
        gradient_slots,
        initial_parameters,
        loss_and_gradients,
        model_operations,
        model_specs,
    )
    from mpizero.nn.models.frozen_model import freeze
    from mpizero.nn.models.gpt import GPT
    from mpizero.nn.models.mlp import MLP, Select
    from mpizero.nn.models.weights import from_torch, to_torch
    from mpizero.nn.operations import Operations
    from mpizero.nn.sequential import Sequential
    from mpizero.nn.split.linear import ColumnLinear, RowLinear
    from mpizero.nn.split.model import SplitModel, split_model, whole_prediction

__all__ = [
    "GELU",
    "GPT",
    "MLP",
    "BCEWithLogitsLoss",
    "CausalSelfAttention",
    "Checkpointed",
    "ColumnLinear",
    "CrossEntropy",
    "Dropout",
    "Embedding",
    "FeedForward",
    "Frozen",
    "GaussianNLLLoss",
    "HuberLoss",
    "L1Loss",
    "LanguageHead",
    "Layer",
    "LayerNorm",
    "Linear",
    "MeanSquaredError",
    "Operations",
    "Position",
    "Projection",
    "RMSNorm",
    "ReLU",
    "RelativeL2Loss",
    "RowLinear",
    "Select",
    "Sequential",
    "SiLU",
    "SplitModel",
    "Tanh",
    "TokenEmbedding",
    "TransformerBlock",
    "Zigzag",
    "bind",
    "context_model",
    "cut_batch",
    "evaluate",
    "export_computation_graph",
    "freeze",
    "from_torch",
    "gradient_slots",
    "initial_parameters",
    "keep_freed_memory",
    "loss_and_gradients",
    "model_operations",
    "model_specs",
    "poll",
    "split_model",
    "to_torch",
    "whole_prediction",
]

if not TYPE_CHECKING:  # a checker of types would take any name for known
    __getattr__ = names_on_use(__name__, __all__)
