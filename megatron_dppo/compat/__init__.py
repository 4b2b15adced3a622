"""Running Megatron-Core and vLLM on a CPU. Nothing outside this package knows how; on a GPU it does nothing."""
