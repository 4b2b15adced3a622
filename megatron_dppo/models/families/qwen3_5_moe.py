"""Qwen3.5 and Qwen3.6 with experts (35B-A3B to 397B-A17B): every layer has some, with a gated shared one beside."""

from transformers import PreTrainedConfig

from megatron_dppo.models.architecture import Architecture
from megatron_dppo.models.families.decoder import whole
from megatron_dppo.models.families.qwen3_5 import COMMON, HERE
from megatron_dppo.models.families.qwen3_next import READS, hybrid
from megatron_dppo.models.families.tables import STACKED_EXPERTS
from megatron_dppo.models.family import Family


def _read(config: PreTrainedConfig) -> Architecture:
    return hybrid(config, (True,) * whole(config, "num_hidden_layers"))


FAMILY = Family(
    model_type="qwen3_5_moe",
    text_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForConditionalGeneration",
    read=_read,
    reads=READS,
    stacked={parameter: tensor.replace(*HERE, 1) for parameter, tensor in STACKED_EXPERTS.items()},
    writes_stacked=True,
    **COMMON,
)
