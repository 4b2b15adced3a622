"""From a Hugging Face config and a layout to Megatron-Core's `TransformerConfig`: the one place that sets flags."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_dppo.errors import UserError, first_line
from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.parallel import ParallelConfig, Recompute, uneven_layout


def transformer_config(
    model: HFConfig,
    parallel: ParallelConfig,
    *,
    params_dtype: torch.dtype = torch.float32,
    recompute: Recompute = "none",
    recompute_layers: int | None = None,
    router_dtype: Literal["fp32", "fp64"] | None = "fp32",
    token_dispatcher: Literal["alltoall", "allgather"] = "alltoall",
    load_balancing_loss: float = 0.0,
    router_z_loss: float = 0.0,
    router_bias_update_rate: float = 0.0,
    **overrides: Any,
) -> TransformerConfig:
    """Megatron-Core's config of `model` under `parallel`, for the device at hand.

    params_dtype      of weights and activations: float32, bfloat16 or float16
    recompute         activations kept: all, all but the experts' sorted rows and gated SiLU (activation) or the
                      attention core (selective), layer inputs only (full)
    recompute_layers  with full: of so many layers of each model chunk, the first, and of the others as with activation;
                      None is all
    router_dtype      of the router's logits and probabilities; None is params_dtype
    token_dispatcher  how tokens reach their experts; with allgather a pipeline's microbatches must be equally long
    load_balancing_loss, router_z_loss  coefficients; 0 leaves the loss out
    router_bias_update_rate  what a gradient step moves the routers' correction bias by; 0 holds it constant
    overrides         any field of `TransformerConfig`, set last

    Losses are summed, not averaged (`calculate_per_token_loss`): the caller divides by the global denominator.
    With a GPU: TransformerEngine, grouped GEMM for experts, fused rotary embedding, permutation and activation;
    without, the plain modules. Interleaved pipelines send every message on its own: batched ones reach the wrong peer
    when two stages exchange in both directions, with a loss that is silently wrong.
    """
    gpu = torch.cuda.is_available()
    described = model.family.megatron(model)
    fields: dict[str, Any] = described | {
        # The same for all models.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": params_dtype,
        "pipeline_dtype": params_dtype,
        "bf16": params_dtype == torch.bfloat16,
        "fp16": params_dtype == torch.float16,
        # Layout.
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.chunks if parallel.chunks > 1 else None,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "sequence_parallel": parallel.sequence_parallel,
        "variable_seq_lengths": token_dispatcher != "allgather",
        "moe_token_dispatcher_type": token_dispatcher,  # validated for dense models too
        "calculate_per_token_loss": True,
        "perform_initialization": False,  # every weight is loaded; a forgotten one stops the import
        # Kernels of the device.
        "use_cpu_initialization": not gpu,
        "transformer_impl": "transformer_engine" if gpu else "local",
        "masked_softmax_fusion": gpu,
        "bias_activation_fusion": gpu,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": gpu and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        "apply_rope_fusion": gpu and model.latent is None,  # latent attention rotates by itself
        # Pipeline messages.
        "overlap_p2p_comm": parallel.chunks > 1,
        "batch_p2p_comm": parallel.chunks == 1,
        "pipeline_model_parallel_layout": uneven_layout(model.layers, parallel.pipeline, parallel.chunks),
    }
    fields |= _recompute(recompute, recompute_layers, gpu and model.moe is not None)
    pre_softmax = described.get("moe_router_pre_softmax")
    if model.moe:
        fields |= {
            # Megatron-Core's check wants this for one expert a token, whose weight would not be 1 then: it is put right
            # below.
            "moe_router_pre_softmax": pre_softmax or model.moe.topk == 1,
            "moe_router_load_balancing_type": "aux_loss" if load_balancing_loss else "none",
            "moe_aux_loss_coeff": load_balancing_loss,
            "moe_z_loss_coeff": router_z_loss or None,
            "moe_router_bias_update_rate": router_bias_update_rate,
            "moe_router_dtype": router_dtype,
            "moe_router_fusion": False,  # the fused router returns before the replay hook
            "moe_grouped_gemm": gpu,
            "moe_permute_fusion": gpu,
        }
    try:
        config = (MLATransformerConfig if model.latent else TransformerConfig)(**(fields | overrides))
    except (AssertionError, ValueError, NotImplementedError) as error:
        if not overrides:
            raise
        raise UserError(
            f"actor.megatron={overrides}: Megatron-Core refuses it: {first_line(error)}; change or remove it"
        ) from error
    if model.moe:
        config.moe_router_pre_softmax = bool(pre_softmax)
    # Not among the fields: the check there wants half precision, for which nothing in the schedule asks.
    config.overlap_moe_expert_parallel_comm = parallel.overlap_expert_exchange
    return config


def _recompute(recompute: Recompute, layers: int | None, experts_in_one_launch: bool) -> dict[str, Any]:
    if recompute == "activation" and not experts_in_one_launch:
        raise UserError(
            "actor.recompute=activation is for experts on GPUs; a model without experts, or on a CPU, takes none, "
            "selective or full"
        )
    if recompute == "full" and layers is not None:
        return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": layers}
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if recompute == "activation":
        return {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
    if recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {}
