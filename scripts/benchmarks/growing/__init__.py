"""Measure and plan how the cost of training grows with the model: parts of scaling.py and scaling_page.py."""
