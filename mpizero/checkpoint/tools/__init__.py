"""List, compare, export and import stored checkpoints in one process.

Arrays are read in blocks of 4 MiB, so that large checkpoints need little memory.
"""

from mpizero.checkpoint.tools.difference import ArrayDifference, CheckpointDifference, compare
from mpizero.checkpoint.tools.elements import element_types, matches
from mpizero.checkpoint.tools.export import FORMATS, export, export_bytes
from mpizero.checkpoint.tools.importing import ImportRules, write_imported
from mpizero.checkpoint.tools.listing import ListedCheckpoint, listing
from mpizero.checkpoint.tools.statistics import ArrayStatistics, statistics
from mpizero.checkpoint.tools.tensorfile import TensorFile

__all__ = [
    "FORMATS",
    "ArrayDifference",
    "ArrayStatistics",
    "CheckpointDifference",
    "ListedCheckpoint",
    "ImportRules",
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
