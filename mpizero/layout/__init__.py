"""Who owns what, in integers only: no arrays, no MPI."""

from mpizero.layout.axes import AXES, Axes, Coordinates
from mpizero.layout.flat import Entry, FlatLayout, Span, Unit
from mpizero.layout.grains import Grains
from mpizero.layout.hyperslab import hyperslabs
from mpizero.layout.partition import Partition
from mpizero.layout.stages import balanced_cuts, check_parts, explicit_cuts
from mpizero.layout.tree import (
    FoldPlan,
    Node,
    Program,
    RowsPlan,
    Wave,
    WavePlan,
    cover,
    fold_plan,
    merge,
    rows_plan,
    wave_plan,
)

__all__ = [
    "AXES",
    "Axes",
    "Coordinates",
    "Entry",
    "FlatLayout",
    "FoldPlan",
    "Grains",
    "Node",
    "Partition",
    "Program",
    "RowsPlan",
    "Span",
    "Unit",
    "Wave",
    "WavePlan",
    "balanced_cuts",
    "check_parts",
    "cover",
    "explicit_cuts",
    "fold_plan",
    "hyperslabs",
    "merge",
    "rows_plan",
    "wave_plan",
]
