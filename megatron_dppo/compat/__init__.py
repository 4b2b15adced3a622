"""Running Megatron-Core and vLLM on a CPU; what is for that does nothing on a GPU. `vllm_plugin` and `ray_daemons`
mend vLLM, torch and Ray on both."""
