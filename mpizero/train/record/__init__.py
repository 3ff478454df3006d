"""Record what happened in a run, beside its metrics, and read it back."""
