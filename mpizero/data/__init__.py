"""Provide sources of samples, their split into training and validation data, and global batches.

The samples of a global batch do not depend on the number of ranks.
"""

from typing import TYPE_CHECKING

from mpizero.data.batches import Batches, batches
from mpizero.names_on_use import names_on_use

if TYPE_CHECKING:
    from mpizero.data.arrays import ArraySource, NpySource, digits
    from mpizero.data.blocks.block_shuffle import BlockShuffledSource
    from mpizero.data.blocks.cache import CachedSource, cached
    from mpizero.data.files import FileSource
    from mpizero.data.hdf5 import Hdf5Source
    from mpizero.data.moments import Statistics, statistics
    from mpizero.data.netcdf import NetcdfSource
    from mpizero.data.online.job import OnlineJob
    from mpizero.data.online.producer import OnlineProducer
    from mpizero.data.online.spool import SpoolProducer, spool_source
    from mpizero.data.online.stream import OnlineBatches, OnlineSource
    from mpizero.data.source import Source, Subset, sample_order
    from mpizero.data.text import TextSource
    from mpizero.data.transforms import SampleRandom, TransformedSource
    from mpizero.data.zarr_source import ZarrSource

__all__ = [
    "ArraySource",
    "Batches",
    "BlockShuffledSource",
    "CachedSource",
    "FileSource",
    "Hdf5Source",
    "NetcdfSource",
    "NpySource",
    "OnlineBatches",
    "OnlineJob",
    "OnlineProducer",
    "OnlineSource",
    "SpoolProducer",
    "SampleRandom",
    "Source",
    "Statistics",
    "Subset",
    "TextSource",
    "TransformedSource",
    "ZarrSource",
    "batches",
    "cached",
    "digits",
    "sample_order",
    "spool_source",
    "statistics",
]

if not TYPE_CHECKING:  # a checker of types would take any name for known
    __getattr__ = names_on_use(__name__, __all__)
