"""The Megatron actor: turns an aligned batch into an optimizer step on any number of ranks."""
