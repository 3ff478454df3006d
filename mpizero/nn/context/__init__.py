"""Compute layers on sequences that are cut among ranks: context parallelism."""
