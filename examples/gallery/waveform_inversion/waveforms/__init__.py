"""Hold the parts of the program ``invert.py``."""
