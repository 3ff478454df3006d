"""Disturb saves of checkpoints, and check the files that are left: the modules of ``scripts/torture.py``.

In all of them ``how`` is the way to save: "direct", "background" or "mpio".
"""
