"""Measure and plan how cost grows: the parts of scaling.py and scaling_page.py."""
