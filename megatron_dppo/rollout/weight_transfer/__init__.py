"""Moving weights from a trainer into a running engine: buckets of bounded size, by Hugging Face name."""
