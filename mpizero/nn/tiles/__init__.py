"""Run several tiles of a split model on one rank, with the bits of a group that has one rank for each tile."""
