"""Build the model chunks of this rank."""

from __future__ import annotations

import copy
import math
import pkgutil

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_dppo.models.direct_norm import call_norms_directly
from megatron_dppo.models.experts.module import recompute_cheap_parts, take_over_experts
from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.layers.biased_router import add_router_biases
from megatron_dppo.models.layers.latent_attention import share_rotary
from megatron_dppo.models.rope import rope_frequencies


def build_model(model: HFConfig, config: TransformerConfig, groups: ProcessGroupCollection) -> list[GPTModel]:
    """The chunks this rank holds, one per virtual pipeline stage, weights allocated but not set.

    `groups` are the ones Megatron-Core's `parallel_state` was initialised with
    (`ProcessGroupCollection.use_mpu_process_groups()`): its pipeline helpers read the global state as well. Only the
    first chunk of the pipeline has an embedding, only the last an output layer, whose logits stay sharded
    (`parallel_output`). With a GPU the weights are on the current device, otherwise (and under `torch.device("meta")`)
    where torch's default device says. No collectives.
    """
    frequencies, rope_factor = rope_frequencies(model.config)
    if rope_factor != 1.0 and not model.latent:  # the fused kernel for packed sequences knows no such factor
        if 2 * len(frequencies) == model.head_dim:
            # of queries and keys as a whole, thus twice of scores
            config.softmax_scale, rope_factor = rope_factor**2 / math.sqrt(model.head_dim), 1.0
        else:
            config.apply_rope_fusion = False
    chunks = config.virtual_pipeline_model_parallel_size or 1
    stage, last = groups.pp.rank(), (groups.pp.size() - 1, chunks - 1)
    built = []
    for chunk in range(chunks):
        chunk_of_stage = chunk if chunks > 1 else None
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=_layer_spec(model, config, groups, chunk_of_stage),
            vocab_size=model.padded_vocab_size(config.tensor_model_parallel_size),
            max_sequence_length=model.max_position_embeddings,
            pre_process=(stage, chunk) == (0, 0),
            post_process=(stage, chunk) == last,
            parallel_output=True,
            share_embeddings_and_output_weights=model.tied,
            position_embedding_type="rope",
            pg_collection=groups,
            vp_stage=chunk_of_stage,
        )
        if model.latent:
            share_rotary(gpt, frequencies, rope_factor)
        else:
            gpt.rotary_pos_emb.inv_freq = frequencies.to(gpt.rotary_pos_emb.inv_freq.device, copy=True)
        if torch.cuda.is_available():
            for parameter in gpt.parameters():  # a shared expert's gate is made on the CPU, whatever is asked for
                if parameter.device.type == "cpu":
                    parameter.data = parameter.data.to(torch.cuda.current_device())
        for layer in gpt.decoder.layers:
            layer.self_attention._yarn_concentration_factor = rope_factor
        add_router_biases(gpt)
        _correct_marks(gpt)
        built.append(gpt)
    take_over_experts(built)
    for gpt in built:
        if config.recompute_method == "block":  # these layers are not computed again as a whole
            recompute_cheap_parts(gpt.decoder.layers[config.recompute_num_layers :])
        elif "moe_act" in (config.recompute_modules or ()):
            recompute_cheap_parts(gpt.decoder.layers)
    call_norms_directly(built)
    return built


def _correct_marks(gpt: GPTModel) -> None:
    """Marks by which gradients and their norm are summed over tensor-parallel ranks, where Megatron-Core has others: an
    expert's bias is summed among its own copies already, and each rank has the sinks of its own heads."""
    for name, parameter in gpt.named_parameters():
        if not getattr(parameter, "allreduce", True):
            parameter.sequence_parallel = False
        if name.endswith(".softmax_offset"):
            parameter.tensor_model_parallel = True
            parameter.partition_dim, parameter.partition_stride = 0, 1


def _layer_spec(
    model: HFConfig, config: TransformerConfig, groups: ProcessGroupCollection, chunk: int | None
) -> TransformerBlockSubmodules:
    stage = groups.pp.rank()
    if torch.cuda.is_available():
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=chunk, pp_rank=stage)
    else:
        from megatron_dppo.compat.packed_attention import local_block_spec

        spec = local_block_spec(config, vp_stage=chunk, pp_rank=stage)
    if model.family.spec:
        first = get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=stage)
        spec.layer_specs = [copy.deepcopy(layer) for layer in spec.layer_specs or ()]
        for number, layer in enumerate(spec.layer_specs, first):
            layer.metainfo = {**layer.metainfo, "number": number}
        pkgutil.resolve_name(model.family.spec)(spec, model, groups)
    return spec
