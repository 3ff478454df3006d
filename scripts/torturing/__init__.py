"""Damage saves and check what is left: the parts of ``scripts/torture.py``."""
