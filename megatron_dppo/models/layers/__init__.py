"""Modules of model families that Megatron-Core lacks; `Family.spec` puts them into its layer spec."""
