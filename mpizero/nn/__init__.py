"""Provide layers with hand-written backward passes, losses, and models of them; this package never imports MPI."""

from typing import TYPE_CHECKING

from mpizero._util.names import lazy_names

if TYPE_CHECKING:
    from mpizero.nn.context.context_forms import context_model as context_model
    from mpizero.nn.context.context_forms import cut_batch as cut_batch
    from mpizero.nn.context.ring import Zigzag as Zigzag
    from mpizero.nn.layer import Layer as Layer
    from mpizero.nn.layer import poll as poll
    from mpizero.nn.layers.activation import GELU as GELU
    from mpizero.nn.layers.activation import ReLU as ReLU
    from mpizero.nn.layers.activation import SiLU as SiLU
    from mpizero.nn.layers.activation import Tanh as Tanh
    from mpizero.nn.layers.attention import CausalSelfAttention as CausalSelfAttention
    from mpizero.nn.layers.block import FeedForward as FeedForward
    from mpizero.nn.layers.block import TransformerBlock as TransformerBlock
    from mpizero.nn.layers.checkpointed import Checkpointed as Checkpointed
    from mpizero.nn.layers.dropout import Dropout as Dropout
    from mpizero.nn.layers.embedding import Embedding as Embedding
    from mpizero.nn.layers.embedding import Position as Position
    from mpizero.nn.layers.embedding import TokenEmbedding as TokenEmbedding
    from mpizero.nn.layers.frozen import Frozen as Frozen
    from mpizero.nn.layers.language_head import LanguageHead as LanguageHead
    from mpizero.nn.layers.linear import Linear as Linear
    from mpizero.nn.layers.linear import Projection as Projection
    from mpizero.nn.layers.norm import LayerNorm as LayerNorm
    from mpizero.nn.layers.norm import RMSNorm as RMSNorm
    from mpizero.nn.losses.cross_entropy import CrossEntropy as CrossEntropy
    from mpizero.nn.losses.element_losses import BCEWithLogitsLoss as BCEWithLogitsLoss
    from mpizero.nn.losses.element_losses import GaussianNLLLoss as GaussianNLLLoss
    from mpizero.nn.losses.element_losses import HuberLoss as HuberLoss
    from mpizero.nn.losses.element_losses import L1Loss as L1Loss
    from mpizero.nn.losses.element_losses import MeanSquaredError as MeanSquaredError
    from mpizero.nn.losses.relative_error import RelativeL2Loss as RelativeL2Loss
    from mpizero.nn.malloc import keep_freed_memory as keep_freed_memory
    from mpizero.nn.models.block_model import bind as bind
    from mpizero.nn.models.block_model import evaluate as evaluate
    from mpizero.nn.models.block_model import export_computation_graph as export_computation_graph
    from mpizero.nn.models.block_model import gradient_slots as gradient_slots
    from mpizero.nn.models.block_model import initial_parameters as initial_parameters
    from mpizero.nn.models.block_model import loss_and_gradients as loss_and_gradients
    from mpizero.nn.models.block_model import model_operations as model_operations
    from mpizero.nn.models.block_model import model_specs as model_specs
    from mpizero.nn.models.frozen_model import freeze as freeze
    from mpizero.nn.models.gpt import GPT as GPT
    from mpizero.nn.models.mlp import MLP as MLP
    from mpizero.nn.models.mlp import Select as Select
    from mpizero.nn.models.weights import from_torch as from_torch
    from mpizero.nn.models.weights import to_torch as to_torch
    from mpizero.nn.operations import Operations as Operations
    from mpizero.nn.sequential import Sequential as Sequential
    from mpizero.nn.split.linear import ColumnLinear as ColumnLinear
    from mpizero.nn.split.linear import RowLinear as RowLinear
    from mpizero.nn.split.model import SplitModel as SplitModel
    from mpizero.nn.split.model import split_model as split_model
    from mpizero.nn.split.model import whole_prediction as whole_prediction
else:  # a checker of types would take any name for known
    __getattr__, __dir__, __all__ = lazy_names(__name__)
