"""Write small projects to begin with, from templates."""
