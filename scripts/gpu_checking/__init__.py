"""Check on a GPU, part by part, what this library does there: the modules of ``scripts/gpu_check.py``."""
