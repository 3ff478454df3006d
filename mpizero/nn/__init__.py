"""Provide layers with hand-written backward passes, losses, and models of them; this package never imports MPI."""

from typing import TYPE_CHECKING

from mpizero._util.names import lazy_names

if TYPE_CHECKING:
    from mpizero.nn.arrays import keep_freed_memory as keep_freed_memory
    from mpizero.nn.context_parallel import Zigzag as Zigzag
    from mpizero.nn.context_parallel import context_model as context_model
    from mpizero.nn.context_parallel import cut_batch as cut_batch
    from mpizero.nn.convolution import Conv as Conv
    from mpizero.nn.convolution import ConvTranspose as ConvTranspose
    from mpizero.nn.field_losses import FieldLoss as FieldLoss
    from mpizero.nn.field_losses import H1Loss as H1Loss
    from mpizero.nn.field_losses import SumLoss as SumLoss
    from mpizero.nn.fields import AvgPool as AvgPool
    from mpizero.nn.fields import ChannelLayerNorm as ChannelLayerNorm
    from mpizero.nn.fields import Concatenate as Concatenate
    from mpizero.nn.fields import GroupNorm as GroupNorm
    from mpizero.nn.fields import InstanceNorm as InstanceNorm
    from mpizero.nn.fields import MaxPool as MaxPool
    from mpizero.nn.fields import Residual as Residual
    from mpizero.nn.fields import Upsample as Upsample
    from mpizero.nn.halos import domain_sum as domain_sum
    from mpizero.nn.halos import domain_sum_adjoint as domain_sum_adjoint
    from mpizero.nn.halos import halo_exchange as halo_exchange
    from mpizero.nn.halos import halo_exchange_adjoint as halo_exchange_adjoint
    from mpizero.nn.halos import redistribute as redistribute
    from mpizero.nn.halos import redistribute_adjoint as redistribute_adjoint
    from mpizero.nn.layer import Layer as Layer
    from mpizero.nn.layer import Operations as Operations
    from mpizero.nn.layer import poll as poll
    from mpizero.nn.layers import GELU as GELU
    from mpizero.nn.layers import Checkpointed as Checkpointed
    from mpizero.nn.layers import Dropout as Dropout
    from mpizero.nn.layers import Frozen as Frozen
    from mpizero.nn.layers import LayerNorm as LayerNorm
    from mpizero.nn.layers import Linear as Linear
    from mpizero.nn.layers import Projection as Projection
    from mpizero.nn.layers import ReLU as ReLU
    from mpizero.nn.layers import RMSNorm as RMSNorm
    from mpizero.nn.layers import Sequential as Sequential
    from mpizero.nn.layers import SiLU as SiLU
    from mpizero.nn.layers import Tanh as Tanh
    from mpizero.nn.losses import BCEWithLogitsLoss as BCEWithLogitsLoss
    from mpizero.nn.losses import CrossEntropy as CrossEntropy
    from mpizero.nn.losses import GaussianNLLLoss as GaussianNLLLoss
    from mpizero.nn.losses import HuberLoss as HuberLoss
    from mpizero.nn.losses import L1Loss as L1Loss
    from mpizero.nn.losses import MeanSquaredError as MeanSquaredError
    from mpizero.nn.losses import RelativeL2Loss as RelativeL2Loss
    from mpizero.nn.models import GPT as GPT
    from mpizero.nn.models import MLP as MLP
    from mpizero.nn.models import Select as Select
    from mpizero.nn.models import bind as bind
    from mpizero.nn.models import evaluate as evaluate
    from mpizero.nn.models import export_computation_graph as export_computation_graph
    from mpizero.nn.models import freeze as freeze
    from mpizero.nn.models import from_torch as from_torch
    from mpizero.nn.models import gradient_slots as gradient_slots
    from mpizero.nn.models import initial_parameters as initial_parameters
    from mpizero.nn.models import loss_and_gradients as loss_and_gradients
    from mpizero.nn.models import model_operations as model_operations
    from mpizero.nn.models import model_specs as model_specs
    from mpizero.nn.models import to_torch as to_torch
    from mpizero.nn.rollout import Repeat as Repeat
    from mpizero.nn.rollout import Rollout as Rollout
    from mpizero.nn.space_losses import ResidualLoss as ResidualLoss
    from mpizero.nn.space_losses import SpectralLoss as SpectralLoss
    from mpizero.nn.spectral import FNO as FNO
    from mpizero.nn.spectral import SpectralConv as SpectralConv
    from mpizero.nn.tensor_parallel import ColumnLinear as ColumnLinear
    from mpizero.nn.tensor_parallel import RowLinear as RowLinear
    from mpizero.nn.tensor_parallel import SplitModel as SplitModel
    from mpizero.nn.tensor_parallel import split_model as split_model
    from mpizero.nn.tensor_parallel import whole_prediction as whole_prediction
    from mpizero.nn.transformer import CausalSelfAttention as CausalSelfAttention
    from mpizero.nn.transformer import Embedding as Embedding
    from mpizero.nn.transformer import FeedForward as FeedForward
    from mpizero.nn.transformer import LanguageHead as LanguageHead
    from mpizero.nn.transformer import Position as Position
    from mpizero.nn.transformer import TokenEmbedding as TokenEmbedding
    from mpizero.nn.transformer import TransformerBlock as TransformerBlock
    from mpizero.nn.unet import UNet as UNet
else:  # a checker of types would take any name for known
    __getattr__, __dir__, __all__ = lazy_names(__name__)
