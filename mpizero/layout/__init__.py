"""Compute which rank owns which elements, and which pipeline stage computes what, from integers and without MPI."""

from mpizero.layout.axes import AXES, Axes, Coordinates
from mpizero.layout.claims import claim_parts, claim_rows, rows_of_part
from mpizero.layout.flat import FlatLayout
from mpizero.layout.grains import GrainRule, Grains
from mpizero.layout.hyperslab import hyperslabs
from mpizero.layout.instructions import Instruction
from mpizero.layout.partition import Partition, owners_by_cost
from mpizero.layout.schedule import Schedule
from mpizero.layout.schedules import SCHEDULES, build_schedule, chunk_stages
from mpizero.layout.simulate import Costs, Simulation, TimedInstruction, bubble_formula, simulate
from mpizero.layout.stages import balanced_chunks, balanced_cuts, check_parts, explicit_cuts
from mpizero.layout.tree import (
    Folding,
    FoldPlan,
    FoldStep,
    Program,
    RowsPlan,
    TreeNode,
    Wave,
    WavePlan,
    cover,
    evaluate,
    fold_plan,
    leaves_program,
    merge,
    rows_plan,
    wave_plan,
)
from mpizero.layout.unit import ParameterUse, Span, Unit

__all__ = [
    "AXES",
    "SCHEDULES",
    "Axes",
    "Coordinates",
    "Costs",
    "ParameterUse",
    "TimedInstruction",
    "FlatLayout",
    "FoldPlan",
    "FoldStep",
    "Folding",
    "GrainRule",
    "Grains",
    "Instruction",
    "TreeNode",
    "Partition",
    "Program",
    "RowsPlan",
    "Schedule",
    "Simulation",
    "Span",
    "Unit",
    "Wave",
    "WavePlan",
    "balanced_chunks",
    "balanced_cuts",
    "bubble_formula",
    "build_schedule",
    "check_parts",
    "chunk_stages",
    "claim_parts",
    "claim_rows",
    "cover",
    "evaluate",
    "explicit_cuts",
    "fold_plan",
    "hyperslabs",
    "leaves_program",
    "merge",
    "owners_by_cost",
    "rows_of_part",
    "rows_plan",
    "simulate",
    "wave_plan",
]
