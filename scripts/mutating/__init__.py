"""The mistakes that scripts/mutants.py plants."""
