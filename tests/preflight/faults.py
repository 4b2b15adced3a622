"""A configuration's faults, one for each rule: overrides, the check that finds it, and its words."""

from __future__ import annotations

LENGTHS = "(rollout.max_prompt_tokens and rollout.max_response_tokens)"
OVERLAPPED = ("parallel.expert=2", "parallel.overlap_expert_exchange=true")
PARTS = "parallel.overlap_expert_exchange=true runs layers in parts:"
FAULTS: dict[str, tuple[list[str], str, str]] = {
    "mini-batches": (
        ["trainer.prompts_per_mini_batch=3"],
        "batch",
        "trainer.prompts_per_mini_batch=3 does not divide trainer.prompts_per_step=8; choose a divisor",
    ),
    "oversample": (
        ["rollout.oversample=0.01"],
        "batch",
        "rollout.oversample=0.01 of trainer.prompts_per_step=8 is less than one prompt more; raise it, or set it to 0",
    ),
    "episodes that are dropped": (
        ["task.kind=environment", "task.environment={name: x}", "rollout.dynamic_sampling=4"],
        "task",
        "rollout.dynamic_sampling=4 drops groups of answers, which is not made for episodes; set it to 0",
    ),
    "a window of episodes": (
        [
            "task.kind=environment",
            "task.environment={name: x}",
            "rollout.schedule=window",
            "rollout.max_staleness=2",
            "rollout.partial_rollouts=true",
        ],
        "task",
        "rollout.schedule=window is not made for episodes; set it to one_step_off",
    ),
    "a window that drops": (
        [
            "rollout.schedule=window",
            "rollout.max_staleness=2",
            "rollout.partial_rollouts=true",
            "rollout.oversample=0.5",
        ],
        "batch",
        "rollout.schedule=window with rollout.oversample=0.5: both choose among groups; set rollout.oversample to 0",
    ),
    "a penalty of turns": (
        [
            "task.kind=agent",
            "task.agent={function: 'x:y', credit: turn}",
            "algorithm.reference_kl={coefficient: 0.1, place: reward}",
        ],
        "algorithm",
        "algorithm.reference_kl.place=reward with task.agent.credit=turn: the penalty is of whole sequences; set the "
        "place to loss, or the credit to episode",
    ),
    "equal groups without a baseline": (
        ["rollout.dynamic_sampling=4", "algorithm.baseline=none"],
        "algorithm",
        "rollout.dynamic_sampling=4 with algorithm.baseline=none: groups of equal rewards train too; choose another "
        "baseline, or set it to 0",
    ),
    "two that drop groups": (
        ["rollout.dynamic_sampling=4", "rollout.oversample=0.5"],
        "batch",
        "rollout.dynamic_sampling=4 with rollout.oversample=0.5: both drop groups; set one of them to 0",
    ),
    "one answer": (
        ["trainer.samples_per_prompt=1"],
        "algorithm",
        "trainer.samples_per_prompt=1 with algorithm.baseline=mean: an answer has no others to compare with, so every "
        "advantage would be 0; sample several, or set algorithm.baseline=none",
    ),
    "a correction bias that adapters do not have": (
        ["actor.router_bias_update_rate=0.001", "lora={rank: 4}"],
        "lora",
        "actor.router_bias_update_rate=0.001 would move a part of the model that adapters are not saved with; set "
        "it to 0, or train all weights",
    ),
    "weights that are their own masters": (
        ["optimizer.cpu_offload_fraction=0.5", "actor.dtype=float32"],
        "optimizer",
        "optimizer.cpu_offload_fraction=0.5 needs actor.dtype=bfloat16, not float32, as its "
        "HybridDeviceOptimizer looks for a master weight beside every weight; set it to 0 or change the dtype",
    ),
    "other top-K": (
        ["algorithm.preset=dppo-topk-tv", "rollout.top_k_logprobs=7"],
        "algorithm",
        "the preset dppo-topk-tv uses the top 20 tokens, but rollout.top_k_logprobs=7; leave that out, and set "
        "algorithm.overrides.topk to what is wanted",
    ),
    "a loss that is none": (
        ["algorithm.loss=math:fsum"],
        "algorithm",
        "algorithm.loss=math:fsum: raised TypeError: 'LossInputs' object is not iterable; docs/algorithms.md says what "
        "is asked of it",
    ),
    "a divergence of the whole vocabulary": (
        [
            "algorithm.divergence=tests.preflight.own_rows:EVERY_TOKEN",
            "algorithm.overrides.topk=7",
        ],
        "algorithm",
        "algorithm.divergence=tests.preflight.own_rows:EVERY_TOKEN is computed from all 300 tokens of the vocabulary, "
        "but K is 7; set algorithm.overrides.topk=300, or choose a divergence of fewer tokens",
    ),
    "top-K that nobody records": (
        ["algorithm.reference_kl={coefficient: 0.1, estimator: topk}", "rollout.top_k_logprobs=0"],
        "algorithm",
        "algorithm.reference_kl.estimator=topk needs the engine's top-K log-probabilities, but "
        "rollout.top_k_logprobs=0; leave that out, or set it to K",
    ),
    "profile": (
        ["trainer.profile_step=101"],
        "trainer",
        "trainer.profile_step=101 is beyond trainer.steps=100: nothing would be profiled; choose an earlier step, or "
        "set it to null",
    ),
    "impatient ranks": (
        ["run.collective_timeout_minutes=15", "run.hang_minutes=4"],
        "timeouts",
        "ranks give up after 15 min, but a weight sync may wait 20 min for an engine that hangs; raise "
        "run.collective_timeout_minutes",
    ),
    "an engine that is not there": (
        ["rollout.engine=no_such_package.engine:make"],
        "engines",
        "rollout.engine: no_such_package.engine:make cannot be imported: ModuleNotFoundError: No module named "
        "'no_such_package'; see docs/rollouts.md",
    ),
    "several devices of a reference engine": (
        ["rollout.engine=reference", "rollout.tensor_parallel=2"],
        "engines",
        "rollout.tensor_parallel=2 with rollout.engine=reference, which has one device; set it to 1 and "
        "rollout.expert_parallel=false, or rollout.engine=vllm",
    ),
    "FP8 of a reference engine": (
        ["rollout.engine=reference", "rollout.quantization=fp8"],
        "engines",
        "rollout.quantization=fp8 with rollout.engine=reference, which has no such kernels; set it to none, or "
        "rollout.engine=vllm",
    ),
    "an FP8 cache of a reference engine": (
        ["rollout.engine=reference", "rollout.kv_cache_dtype=fp8"],
        "engines",
        "rollout.kv_cache_dtype=fp8 with rollout.engine=reference, which has no such kernels; set it to auto, or "
        "rollout.engine=vllm",
    ),
    "world": (
        ["parallel.pipeline=3"],
        "layout",
        "parallel: world size 2 is not a multiple of tensor x pipeline x context = 1 x 3 x 1 = 3; change the number of "
        "ranks or these sizes",
    ),
    "sequence parallel": (
        ["parallel.tensor=2"],
        "layout",
        "parallel: a mixture-of-experts model with tensor > 1 needs sequence_parallel: true; the model has to fit 2 "
        "ranks",
    ),
    "layers": (
        ["parallel.pipeline=2", "parallel.virtual_pipeline=4"],
        "layout",
        "parallel: 3 layers are fewer than pipeline x virtual_pipeline = 2 x 4; the model has to fit 2 ranks",
    ),
    "few sequences": (
        ["trainer.prompts_per_mini_batch=1", "trainer.samples_per_prompt=1", "algorithm.baseline=none"],
        "batch",
        "a gradient step has 1 sequences for 2 data-parallel ranks: some would train on nothing; raise "
        "trainer.prompts_per_mini_batch, or use more model parallelism",
    ),
    "engines": (
        ["rollout.placement=colocated", "rollout.enable_sleep=true", "rollout.tensor_parallel=4"],
        "engines",
        "rollout.placement=colocated: 2 ranks are not a multiple of rollout.tensor_parallel=4; change one of them",
    ),
    "r3 without record": (
        ["rollout.router_replay=false"],
        "router-replay",
        "actor.router_replay=r3 needs the routes that rollout.router_replay=false does not record; leave that out, or "
        "set actor.router_replay=none",
    ),
    "r2 without a pass": (
        ["actor.router_replay=r2"],
        "router-replay",
        "actor.router_replay=r2 replays the trainer's own routes of the pass before the update, which the preset "
        "dppo-binary-tv does not run; set actor.router_replay=r3 or choose a preset with a recomputed anchor",
    ),
    "pack": (
        ["actor.max_tokens_per_microbatch=39"],
        "lengths",
        f"a sequence may have 40 tokens {LENGTHS}, but actor.max_tokens_per_microbatch=39: the first that long would "
        "stop the run; set it to 40, or actor.long_sequences=alone",
    ),
    "pack of context-parallel ranks": (
        ["parallel.context=2", "rollout.max_response_tokens=9", "actor.max_tokens_per_microbatch=41"],
        "lengths",
        f"a sequence may have 44 tokens {LENGTHS}, but actor.max_tokens_per_microbatch=41: the first that long would "
        "stop the run; set it to 44, or actor.long_sequences=alone",
    ),
    "positions": (
        ["rollout.max_response_tokens=481", "actor.max_tokens_per_microbatch=600"],
        "lengths",
        f"prompts and responses reach 513 tokens {LENGTHS}, the positions of the model 512; lower "
        "rollout.max_response_tokens",
    ),
    "parts of layers that are recomputed whole": (
        [*OVERLAPPED, "actor.recompute=full"],
        "layout",
        f"{PARTS} none can be recomputed as a whole, as actor.recompute=full does; set actor.recompute to none, "
        "activation or selective",
    ),
    "parts of layers that gather": (
        [*OVERLAPPED, "actor.token_dispatcher=allgather"],
        "layout",
        f"{PARTS} of the ways of actor.token_dispatcher it knows alltoall, not allgather; set it to alltoall",
    ),
    "parts of layers with adapters": (
        [*OVERLAPPED, "lora={rank: 4}"],
        "layout",
        f"{PARTS} with adapters alone to train some would have no gradient; set it to false, or train all weights",
    ),
}
