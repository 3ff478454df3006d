"""Hold what scaling.py and scaling_page.py measure and plan: how costs grow with model and ranks."""
