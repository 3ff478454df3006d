"""Run an optimizer on the ranges of the parameters that a rank updates."""
