"""Disturb saves of checkpoints, and check the files that are left: the parts of ``scripts/torture.py``."""
