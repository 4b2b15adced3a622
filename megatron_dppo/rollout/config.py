"""Settings of the rollout engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue, model_validator

from megatron_dppo.config_base import ConfigModel, Folder
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.vllm_options import check_options

PAPERS_TOPK = 20
"""K of the paper's top-K divergences."""
ENGINES = {
    "vllm": "megatron_dppo.rollout.vllm.start:open_engine",
    "reference": "megatron_dppo.rollout.reference.core:ReferenceEngine",
}
"""Where the engines that have a name are made."""


class RolloutConfig(ConfigModel):
    """How responses are sampled, what is recorded of them, and what the engine may use."""

    engine: str = Field(default="vllm", pattern=r"^(vllm|reference|.+:\w+)$")
    """What samples: "vllm"; "reference", transformers' own modules on a CPU or one GPU, for models that vLLM does not
    run and for comparisons; or `package.module:factory` (`file.py:factory`), an engine of your own: a function of
    the model's folder and this section that makes a `RolloutEngine`. See docs/rollouts.md."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Divides the logits of training rollouts. Nothing else may change the distribution: the trainer
    recomputes `log mu`."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longer prompts are refused."""
    max_response_tokens: int = Field(default=16384, ge=1)
    """Most tokens sampled per response; a response cut here ends with finish reason "length"."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response beside the model's own end-of-sequence ids. The stop token is part of the response."""
    top_k_logprobs: int = Field(default=PAPERS_TOPK, ge=0)
    """K: likeliest ids recorded per sampled token; 0 records the sampled token alone. Left out in a run's
    configuration it is what the preset needs, or a reference KL over the top K (20, as in the paper), else 0."""
    router_replay: bool = True
    """Record the experts of every token (R3); ignored for models without experts. Left out in a run's configuration it
    is whether `actor.router_replay` is "r3"; beside another, true records them for the first step's parity check."""

    placement: Literal["fleet", "colocated"] = "fleet"
    """Where engines run: on GPUs of their own, or on the trainer's, which change hands twice a step with `enable_sleep`
    and are shared without it."""
    weight_transfer: Literal["auto", "object_store", "ipc", "broadcast"] = "auto"
    """How weights reach the engines: through Ray's object store by way of rank 0; through memory of the shared GPU
    (CUDA IPC, colocated only); by broadcast from the ranks that own them (NCCL, on a CPU gloo). "auto" takes ipc when
    colocated, broadcast for a fleet on GPUs and the object store on a CPU."""

    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    """Of the engine's weights and activations; "auto" takes the checkpoint's (vLLM: bfloat16 for one in float32)."""
    quantization: Literal["none", "fp8"] = "none"
    """"fp8" lets vLLM compute in FP8: weights in blocks of 128 x 128, activations in groups of 128, scaled at load and
    at every sync; routers, embedding and head as in `dtype`. `log mu` is the quantised engine's. GPUs only."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Of vLLM's keys and values: "fp8" (E4M3, scale 1) halves their memory and is further from the trainer. GPUs
    only."""
    load_format: Literal["auto", "dummy"] = "auto"
    """"dummy" starts from random weights and refuses to generate until the first sync."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs (or CPU processes) that share one engine."""
    expert_parallel: bool = False
    """Divide the experts among the `tensor_parallel` devices of an engine, each whole on one of them, in place of
    cutting every expert into slices. Attention and the rest are cut as ever."""
    enforce_eager: bool = False
    """Without CUDA graphs. A CPU has none."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    """Share of each GPU's memory for weights, activations and the KV cache."""
    kv_cache_mib: int | None = Field(default=None, ge=1)
    """Size of the KV cache per device; None lets the platform choose."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Sequences decoded together."""
    max_num_batched_tokens: int = Field(default=8192, ge=1)
    """Tokens per engine step; longer prompts are prefilled in chunks (on a CPU never: there it is raised to the longest
    sequence)."""
    enable_prefix_caching: bool = True
    """Samples of one prompt share its key-value cache. Emptied at every weight sync. vLLM goes without for models with
    gated delta layers, whose states are no such cache."""
    enable_sleep: bool = False
    """Let the engine give its GPU memory back between rollouts (`sleep` and `wake`). Where it is on the trainer's GPUs
    they take turns then; without it both keep theirs, and it has to hold both: for small models, since no time goes
    into handing over. A CPU has nothing to give back."""
    compile_cache: Folder | None = None
    """Folder in which vLLM keeps what it, Triton and torch's compiler make for a model and a GPU, for the next engine
    and the next run; on every node that has engines. Before it is ready an engine meets every shape then, which takes
    the first one longer. None leaves what is made where these have it, which a container forgets, and compiles in the
    first rollouts."""
    cpu_threads: int = Field(default=1, ge=1)
    """Threads of an engine on a CPU. One is best up to some millions of parameters: more wait for each other longer
    than they compute, above all on cores shared with others. On a GPU without effect."""

    vllm: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of vLLM's `AsyncEngineArgs` that have no setting here, e.g. `rollout.vllm.attention_backend=FLASHINFER`.
    See docs/configuration.md."""

    sequences_per_object: int = Field(default=64, ge=1)
    """Sequences per object in Ray's object store: the grain in which engines are given work and ranks pull rollouts.
    An object holds whole groups, at least one."""
    object_store_mib: int = Field(default=512, ge=80)
    """Size of the object store of a Ray that this run starts; reduced where /dev/shm is smaller."""
    weight_sync_bucket_mib: int = Field(default=256, ge=1)
    """Bytes of weights under way at once in a sync. A tensor larger than this travels alone."""
    start_timeout_s: float = Field(default=1800.0, gt=0.0)
    """From starting an engine until it must be ready. One that is not is a failed start like others: it is tried again
    where another engine has come up, and counted (`max_engine_failures`); where none has, the run ends."""
    request_timeout_s: float = Field(default=7200.0, gt=0.0)
    """For one request, from being given to an engine to its last token. Its group is then sampled once more, on another
    engine where there is one; the second time the run ends."""
    stall_timeout_s: float = Field(default=300.0, gt=0.0)
    """An engine with work whose core does not come back from a step for so long hangs, and is replaced."""
    max_engine_failures: int = Field(default=8, ge=0)
    """Engines that may die, hang or answer nonsense; every 50th sync of new weights takes one off the count. One more
    saves the state and ends the run with exit status 1, on which it is started again, as after a lost node. Two syncs
    that fail alike before any engine got weights end it with status 2."""

    engines: int = Field(default=1, ge=1)
    """Engines of a fleet."""
    schedule: Literal["synchronous", "one_step_off", "window"] = "synchronous"
    """"one_step_off" samples the next step's answers while this step's are trained on: they come from weights that are
    one step older (`log mu` is that of the weights which sampled). "window" has groups of several steps under way and
    trains on those that finish first; the others go on through the weight sync. See docs/rollouts.md."""
    max_staleness: int = Field(default=1, ge=1)
    """Steps that the weights of a token may be older than those it is first trained on. "one_step_off" samples so many
    steps ahead; "window", with 2 at least, begins groups half of them ahead and waits for those that are late by the
    rest."""
    partial_rollouts: bool = False
    """At a weight sync, cut responses that are under way and go on under the new weights, rather than wait for them."""
    oversample: float = Field(default=0.0, ge=0.0, le=4.0)
    """Sample so many prompts more than a step needs, as a fraction of `trainer.prompts_per_step`. The prompts whose
    answers are complete first are trained on and the others dropped, which favours short answers. 0 drops nothing."""
    dynamic_sampling: int = Field(default=0, ge=0, le=64)
    """Rounds, at most, in which a step's groups whose rewards are all equal are replaced by those of other prompts
    (DAPO). What is missing after them is filled up with such groups, which train nothing unless a KL in the reward or
    advantages of one's own tell their answers apart. 0 replaces none."""
    max_tokens_in_flight: int | None = Field(default=None, ge=1)
    """Most tokens, prompts and `max_response_tokens` together, of the requests that an engine is given at once; further
    groups wait for the first engine with room. None: twice what it decodes together (`max_num_seqs`)."""
    sync_timeout_s: float = Field(default=600.0, gt=0.0)
    """For each bucket of a weight sync."""

    @property
    def takes_turns(self) -> bool:
        """Whether the trainer's GPUs change hands between it and the engines."""
        return self.placement == "colocated" and self.enable_sleep

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt included."""
        return self.max_prompt_tokens + self.max_response_tokens

    def transfer_for(self, device: str) -> Literal["object_store", "ipc", "broadcast"]:
        """The way of `weight_transfer` on a device type."""
        if self.weight_transfer != "auto":
            return self.weight_transfer
        if device != "cuda":
            return "object_store"
        return "ipc" if self.placement == "colocated" else "broadcast"

    def weight_shares(self, device: str) -> int:
        """`tensor_parallel` where, in a sync on this device type, each worker of an engine gets only its part of the
        experts; 1 where every worker gets all of them.

        - `expert_parallel`: a worker's part is whole experts, by broadcast and IPC.
        - Otherwise it is a slice of each expert, by broadcast to vLLM. Not with quantization, for which vLLM pads
          slices, and not over IPC, where every rank that owns experts would bring slices for all workers.
        - Through the object store every worker gets all.
        """
        way = self.transfer_for(device)
        sliced = way == "broadcast" and self.engine == "vllm" and self.quantization == "none"
        return self.tensor_parallel if way != "object_store" and (self.expert_parallel or sliced) else 1

    @model_validator(mode="after")
    def _cross_check(self) -> RolloutConfig:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"rollout.max_num_batched_tokens={self.max_num_batched_tokens} cannot hold one token for each of "
                f"rollout.max_num_seqs={self.max_num_seqs} sequences; raise the first or lower the second"
            )
        try:
            check_options(self.vllm)
        except UserError as error:
            raise ValueError(str(error)) from None
        if self.vllm and self.engine != "vllm":
            raise ValueError(f"rollout.vllm is for rollout.engine=vllm, not {self.engine}; remove it")
        if self.quantization != "none" and self.dtype == "float32":
            raise ValueError(
                f"rollout.quantization={self.quantization} with rollout.dtype=float32: vLLM quantises bfloat16 and "
                "float16 only; set rollout.dtype=bfloat16"
            )
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "rollout.expert_parallel=true divides experts among the devices of one engine, and "
                "rollout.tensor_parallel=1 gives it a single one; raise that, or set expert_parallel=false"
            )
        if self.weight_transfer == "ipc" and self.placement != "colocated":
            raise ValueError(
                "rollout.weight_transfer=ipc needs trainer and engine on the same GPUs: set "
                "rollout.placement=colocated, or another weight_transfer"
            )
        if self.weight_transfer == "broadcast" and self.placement == "colocated":
            raise ValueError(
                "rollout.weight_transfer=broadcast: NCCL refuses two members on one GPU; with "
                "rollout.placement=colocated use ipc"
            )
        if self.takes_turns and self.schedule != "synchronous":
            raise ValueError(
                f"rollout.schedule={self.schedule} needs engines that are awake while the trainer works: on its GPUs "
                "(rollout.placement=colocated) set rollout.enable_sleep=false, if their memory holds both, or give "
                "engines GPUs of their own"
            )
        if self.schedule == "synchronous" and self.max_staleness != 1:
            raise ValueError(
                f"rollout.max_staleness={self.max_staleness} needs rollout.schedule=one_step_off or window; the "
                "synchronous schedule trains on tokens of the newest weights only"
            )
        if self.schedule == "window" and (self.max_staleness < 2 or not self.partial_rollouts):
            raise ValueError(
                f"rollout.schedule=window with rollout.max_staleness={self.max_staleness} and rollout.partial_rollouts="
                f"{self.partial_rollouts}: groups go on through weight syncs, which must not wait for them; set "
                "rollout.partial_rollouts=true and rollout.max_staleness to 2 or more"
            )
        if self.partial_rollouts and self.schedule == "synchronous":
            raise ValueError(
                "rollout.partial_rollouts=true needs rollout.schedule=one_step_off or window: with the synchronous "
                "schedule no response is under way at a weight sync"
            )
        if self.temperature < 0.01:
            raise ValueError(
                f"rollout.temperature={self.temperature}: vLLM silently raises temperatures below 0.01, so log mu "
                "would be of another distribution; use at least 0.01 (greedy decoding is for evaluation)"
            )
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"rollout.stop_token_ids={self.stop_token_ids} holds a negative token id")
        return self
