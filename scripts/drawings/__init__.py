"""The drawings of the documentation, one module each, which ``scripts/draw.py`` writes."""
