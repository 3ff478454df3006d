"""Provide sources of samples, their split into training and validation data, and global batches.

The samples of a global batch do not depend on the number of ranks.
"""

from typing import TYPE_CHECKING

from mpizero._util.names import lazy_names

# Not lazily: the module has the function's name, which would mean the module as soon as that is imported.
from mpizero.data.batches import Batches as Batches
from mpizero.data.batches import batches as batches

if TYPE_CHECKING:
    from mpizero.data.arrays import ArraySource as ArraySource
    from mpizero.data.arrays import NpySource as NpySource
    from mpizero.data.arrays import digits as digits
    from mpizero.data.blocks.block_shuffle import BlockShuffledSource as BlockShuffledSource
    from mpizero.data.blocks.cache import CachedSource as CachedSource
    from mpizero.data.blocks.cache import cached as cached
    from mpizero.data.files import FileSource as FileSource
    from mpizero.data.hdf5 import Hdf5Source as Hdf5Source
    from mpizero.data.moments import Statistics as Statistics
    from mpizero.data.moments import statistics as statistics
    from mpizero.data.netcdf import NetcdfSource as NetcdfSource
    from mpizero.data.online.job import OnlineJob as OnlineJob
    from mpizero.data.online.producer import OnlineProducer as OnlineProducer
    from mpizero.data.online.spool import SpoolProducer as SpoolProducer
    from mpizero.data.online.spool import spool_source as spool_source
    from mpizero.data.online.stream import OnlineBatches as OnlineBatches
    from mpizero.data.online.stream import OnlineSource as OnlineSource
    from mpizero.data.source import Source as Source
    from mpizero.data.source import Subset as Subset
    from mpizero.data.source import sample_order as sample_order
    from mpizero.data.text import TextSource as TextSource
    from mpizero.data.transforms import SampleRandom as SampleRandom
    from mpizero.data.transforms import TransformedSource as TransformedSource
    from mpizero.data.zarr_source import ZarrSource as ZarrSource
else:  # a checker of types would take any name for known
    __getattr__, __dir__, __all__ = lazy_names(__name__)
