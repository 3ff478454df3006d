"""Training data: sources of samples, the validation split, and batches that do not depend on the number of ranks."""

from mpizero.data.arrays import ArraySource, NpySource, digits
from mpizero.data.batches import Batches, batches, sample_order
from mpizero.data.hdf5 import Hdf5Source
from mpizero.data.source import Source, Subset
from mpizero.data.text import TextSource

__all__ = [
    "ArraySource",
    "Batches",
    "Hdf5Source",
    "NpySource",
    "Source",
    "Subset",
    "TextSource",
    "batches",
    "digits",
    "sample_order",
]
