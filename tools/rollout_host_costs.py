"""What one step of a rollout costs the host in Python, of tools/bench_rollout.py."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from megatron_dppo.rollout.vllm.record_frame import ResponseRecord


def host_costs(load: Any, *, recorded: int, layers: int, topk: int, steps: int = 30) -> dict[str, dict[str, float]]:
    """Milliseconds of Python per decode step of all sequences: encoding in the core, decoding and bookkeeping in the
    client. One process, no engine: vLLM's own encoder, decoder and output processor on what a step would send.
    `load` is a `Load` of `bench_rollout`, `recorded` the K of its top-K."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    rng = np.random.default_rng(0)
    result = {}
    for name, width, routed, whole in (
        ("sampled", 1, False, False),
        ("top-20", 1 + recorded, False, False),
        ("sampled + R3", 1, True, False),
        ("top-20 + R3", 1 + recorded, True, False),
        ("top-20 + R3, one frame (at the end, per token)", 1 + recorded, True, True),
    ):
        processor = OutputProcessor(None, log_stats=False)
        params = SamplingParams(
            max_tokens=10**6,
            logprobs=width - 1,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for i in range(load.sequences):
            request = EngineCoreRequest(
                request_id=str(i),
                prompt_token_ids=[1],
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
                external_req_id=str(i),
            )
            processor.add_request(request, None)
        ids = rng.integers(0, 1000, (load.sequences, width)).astype(np.int32)
        logp = rng.standard_normal((load.sequences, width)).astype(np.float32)
        ranks = np.ones(load.sequences, dtype=np.int32)
        experts = rng.integers(0, 100, (load.sequences, layers, topk)).astype(np.uint8)
        encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)

        def message(number: int) -> Any:
            if whole:  # noqa: B023
                n = load.new_tokens
                frame = ResponseRecord(
                    np.zeros((n, 1 + recorded), np.int32), np.zeros((n, 1 + recorded)), np.zeros((n, layers, topk))
                )
                frame = ResponseRecord(frame.ids, frame.logp, frame.experts.astype(np.uint8)).to_frame()
                output = EngineCoreOutput(str(number), list(range(n)), routed_experts=frame)
                return EngineCoreOutputs(outputs=[output])
            return EngineCoreOutputs(
                outputs=[
                    EngineCoreOutput(
                        str(i),
                        [7],
                        new_logprobs=LogprobsLists(ids[i : i + 1], logp[i : i + 1], ranks[i : i + 1]),  # noqa: B023
                        routed_experts=experts[i : i + 1] if routed else None,  # noqa: B023
                    )
                    for i in range(load.sequences)
                ]
            )

        spent = [0.0, 0.0, 0.0]
        for number in range(steps):
            outgoing = message(number % load.sequences)
            t0 = time.perf_counter()
            frames = [bytes(part) for part in encoder.encode(outgoing)]
            t1 = time.perf_counter()
            incoming = decoder.decode(frames)
            t2 = time.perf_counter()
            processor.process_outputs(incoming.outputs)
            t3 = time.perf_counter()
            spent = [s + t for s, t in zip(spent, (t1 - t0, t2 - t1, t3 - t2), strict=True)]
        # A frame holds all tokens of one sequence; a step is one token of every sequence.
        per_step = 1e3 / steps * (load.sequences / load.new_tokens if whole else 1.0)
        result[name] = dict(
            zip(("encode_ms", "decode_ms", "bookkeeping_ms"), (s * per_step for s in spent), strict=True)
        )
    return result
