"""Hold modules of scaling.py and scaling_page.py, which measure and plan how costs grow with model and ranks."""
