"""Record what each rank calls and when, and describe the first call in which ranks differ."""
