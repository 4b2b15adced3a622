"""Memory, time and traffic of a run before a GPU is rented. Reads a model's config.json; needs no GPU."""
