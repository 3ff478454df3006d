"""What one process does with checkpoints at rest, a block of an array at a time: look, compare, export, import."""

from mpizero.checkpoint.tools.difference import ArrayDifference, Difference, compare
from mpizero.checkpoint.tools.elements import element_types, matches
from mpizero.checkpoint.tools.export import FORMATS, export, export_bytes
from mpizero.checkpoint.tools.importing import Rules, write_imported
from mpizero.checkpoint.tools.listing import Listed, listing
from mpizero.checkpoint.tools.statistics import ArrayStatistics, statistics
from mpizero.checkpoint.tools.tensorfile import TensorFile

__all__ = [
    "FORMATS",
    "ArrayDifference",
    "ArrayStatistics",
    "Difference",
    "Listed",
    "Rules",
    "TensorFile",
    "compare",
    "element_types",
    "export",
    "export_bytes",
    "listing",
    "matches",
    "statistics",
    "write_imported",
]
