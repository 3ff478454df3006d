"""What a machine can do, what a step should take on it, and what it does take."""
