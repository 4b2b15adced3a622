"""All that imports vLLM: the engine, and what runs inside vLLM's own processes."""
