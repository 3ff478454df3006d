"""Provide sources of samples, their split into training and validation data, and global batches; write fields.

The samples of a global batch do not depend on the number of ranks.
"""

from typing import TYPE_CHECKING

from mpizero._util.names import lazy_names

# Not lazily: the function has its module's name, which would refer to the module as soon as that is imported.
from mpizero.data.batches import Batches as Batches
from mpizero.data.batches import batches as batches

if TYPE_CHECKING:
    from mpizero.data.cache import BlockShuffledSource as BlockShuffledSource
    from mpizero.data.cache import CachedSource as CachedSource
    from mpizero.data.cache import cached as cached
    from mpizero.data.files import FileSource as FileSource
    from mpizero.data.files import Hdf5Source as Hdf5Source
    from mpizero.data.files import NetcdfSource as NetcdfSource
    from mpizero.data.files import ZarrSource as ZarrSource
    from mpizero.data.moments import Statistics as Statistics
    from mpizero.data.moments import statistics as statistics
    from mpizero.data.online import OnlineBatches as OnlineBatches
    from mpizero.data.online import OnlineJob as OnlineJob
    from mpizero.data.online import OnlineProducer as OnlineProducer
    from mpizero.data.online import OnlineSource as OnlineSource
    from mpizero.data.online import SpoolProducer as SpoolProducer
    from mpizero.data.online import spool_source as spool_source
    from mpizero.data.source import ArraySource as ArraySource
    from mpizero.data.source import DatasetSource as DatasetSource
    from mpizero.data.source import NpySource as NpySource
    from mpizero.data.source import SampleRandom as SampleRandom
    from mpizero.data.source import Source as Source
    from mpizero.data.source import Subset as Subset
    from mpizero.data.source import TextSource as TextSource
    from mpizero.data.source import TransformedSource as TransformedSource
    from mpizero.data.source import digits as digits
    from mpizero.data.source import sample_order as sample_order
    from mpizero.data.writing import write_fields as write_fields
else:  # a checker of types would take any name for known
    __getattr__, __dir__, __all__ = lazy_names(__name__)
