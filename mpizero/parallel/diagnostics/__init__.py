"""Find and explain steps that went wrong, and record where time goes."""
