"""Disturb saves of checkpoints, and check the files that are left: the modules of ``scripts/torture.py``."""
