"""Rollout engines: vLLM behind one protocol, in this process or as Ray actors, and the weight sync that feeds them."""
