"""Low-rank adapters (LoRA, Hu et al., 2022) on Megatron-Core's linear layers, experts included."""
