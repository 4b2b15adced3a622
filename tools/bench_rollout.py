"""Tokens per second of vLLM with what training needs recorded: routes (R3) and top-20, against neither.

Two engines of one model live side by side, R3 off and R3 on; every other difference is an option of the requests, so
that the variants can be interleaved. The model is Qwen3-30B-A3B with fewer layers and random weights (written by this
script; nothing is downloaded). `--tiny` runs the whole path in a minute on a CPU. Besides tokens per second the table
gives the CPU seconds of vLLM's core and of the client.

    PYTHONPATH=. VLLM_USE_FLASHINFER_SAMPLER=0 python tools/bench_rollout.py --seconds 480 --out $OUT

writes `bench_rollout.json` and `bench_rollout.txt` to `--out`. With `--fp8` a bf16 and an FP8 engine live side by side,
first two without R3, then two with it: the weights of all 48 layers take 57 and 29 GiB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.paper.make_shapes import SHAPES
from megatron_dppo.launch import exit_status
from megatron_dppo.launch.arguments import out_folder, real, require_gpu, whole
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.vllm.record_frame import HOLD, ResponseRecord
from megatron_dppo.rollout.vllm.start import engine_environment, engine_options, quantization_options

K = 20


@dataclass(frozen=True)
class Variant:
    """One way to ask: `engine` is "off" or "on" (R3), or either with " fp8"; the rest are options of the requests."""

    name: str
    engine: str
    logprobs: int | None
    extra: tuple[tuple[str, int], ...] = ()
    seeded: bool = False


BASE = Variant("sampled log-probability, flat, R3 off", "off", 0)
FRAME = Variant("top-20 + R3, one frame per response", "on", K, tuple(HOLD.items()))
MAIN = (
    BASE,
    Variant("top-20 + R3, vLLM's own outputs", "on", K),
    FRAME,
    Variant("sampled + R3, vLLM's own outputs", "on", 0),
)
FP8 = {one: replace(one, name=f"{one.name}, fp8", engine=f"{one.engine} fp8") for one in (BASE, FRAME)}
EXTRA = (
    Variant("top-20, R3 off", "off", K),
    Variant("nothing recorded, R3 off", "off", None),
    Variant("sampled, R3 off, a seed per request", "off", 0, seeded=True),
    Variant("top-20 + R3, one frame, a seed per request", "on", K, tuple(HOLD.items()), seeded=True),
)


@dataclass(frozen=True)
class Load:
    """Shape of one run."""

    sequences: int
    prompt_tokens: int
    new_tokens: int


def write_model(folder: Path, *, layers: int, tiny: bool) -> Path:
    """config.json of Qwen3-30B-A3B with `layers` layers, or of a toy."""
    from transformers import Qwen3MoeConfig

    shape = {name: value for name, value in SHAPES.items() if name != "model_type"}
    if tiny:
        shape |= {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
        shape |= {"num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2}
        shape |= {"moe_intermediate_size": 32}
    config = Qwen3MoeConfig(
        **shape,
        num_hidden_layers=layers,
        max_position_embeddings=4096,
        dtype="float32" if tiny else "bfloat16",
    )
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    return folder


def start_engine(
    model: Path, kind: str, *, load: Load, tiny: bool, quick: bool, gpu_share: float, kv_gib: float | None
) -> Any:
    """An AsyncLLM of `Variant.engine`."""
    # Engines start in threads, side by side: a fork would copy the locks that another one holds.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    options: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": load.prompt_tokens + load.new_tokens + 16,
        "max_num_seqs": load.sequences,
        "gpu_memory_utilization": gpu_share,
        "kv_cache_memory_bytes": None if kv_gib is None else int(kv_gib * 2**30),
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "hf_overrides": {"head_dtype": "float32"},  # as `common_options`; in both, so that records alone differ
    }
    if quick:
        sizes = [load.sequences]
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sizes,
        }
    if kind.endswith("fp8") and not tiny:
        os.environ.setdefault("VLLM_USE_DEEP_GEMM_E8M0", "0")  # as in our engine on Hopper
        options |= quantization_options(RolloutConfig(quantization="fp8"))
    if kind.startswith("on"):
        options |= {
            "enable_return_routed_experts": True,
            "scheduler_cls": "megatron_dppo.rollout.vllm.record_scheduler.record_scheduler",
        }
    if tiny:
        config = RolloutConfig(max_num_seqs=load.sequences, max_prompt_tokens=64, max_response_tokens=64)
        os.environ.update(engine_environment(config))
        options |= engine_options(config)
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**options))


async def run_once(engine: Any, variant: Variant, load: Load, seed: int, layers: int) -> dict[str, float]:
    """All responses of one variant: seconds until the client holds everything as arrays, and CPU seconds."""
    import psutil
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    vocab = engine.model_config.get_vocab_size()
    prompts = np.random.default_rng(seed).integers(10, vocab, (load.sequences, load.prompt_tokens))
    await engine.reset_prefix_cache()
    client = psutil.Process()
    others = client.children(recursive=True)

    def cpu(processes: Sequence[Any]) -> float:
        seconds = 0.0
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # a compiler that an engine called has ended
                times = process.cpu_times()
                seconds += times.user + times.system
        return seconds

    async def one(index: int) -> Any:
        params = SamplingParams(
            temperature=1.0,
            max_tokens=load.new_tokens,
            ignore_eos=True,
            logprobs=variant.logprobs,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=dict(variant.extra) or None,
            seed=1000 * seed + index if variant.seeded else None,
        )
        name = f"{variant.name}/{seed}/{index}"
        async for output in engine.generate(tokens_input(prompts[index].tolist()), params, name):
            final = output
        return final

    before, start = (cpu([client]), cpu(others)), time.perf_counter()
    outputs = await asyncio.gather(*(one(i) for i in range(load.sequences)))
    tokens = sum(consume(o.outputs[0], variant, load, layers) for o in outputs)
    seconds = time.perf_counter() - start
    return {
        "tokens_per_second": tokens / seconds,
        "client_cpu_s": cpu([client]) - before[0],
        "core_cpu_s": cpu(others) - before[1],
    }


def consume(completion: Any, variant: Variant, load: Load, layers: int) -> int:
    """Turn one response into the arrays that training takes, and check that they are all there; returns its tokens."""
    tokens, experts = len(completion.token_ids), completion.routed_experts
    if dict(variant.extra) == HOLD:
        record = ResponseRecord.from_frame(experts)
        ids, logp, experts = record.ids, record.logp, record.experts
    elif variant.logprobs is not None:
        flat = completion.logprobs
        width = 1 + variant.logprobs
        ids = np.asarray(flat.token_ids, dtype=np.int32).reshape(-1, width)
        logp = np.asarray(flat.logprobs, dtype=np.float32).reshape(-1, width)
    if tokens != load.new_tokens:
        raise RuntimeError(f"{variant.name}: {tokens} tokens instead of {load.new_tokens}")
    if variant.logprobs is not None and (len(ids) != tokens or not np.isfinite(logp).all()):
        raise RuntimeError(f"{variant.name}: log-probabilities {logp.shape} of {tokens} tokens are not all there")
    if variant.engine.startswith("on"):
        rows = load.prompt_tokens + tokens - 1
        if experts.shape[:2] != (rows, layers) or not experts.any(axis=(0, 2)).all():
            raise RuntimeError(f"{variant.name}: routes {experts.shape} instead of [{rows}, {layers}, k], or all zero")
    return tokens


async def measure(options: argparse.Namespace, load: Load, layers: int) -> dict[str, Any]:
    """Every variant, on engines that live together; with `--fp8` those with R3 follow those without."""
    deadline = time.perf_counter() + options.seconds
    model = write_model(options.out / "bench_rollout_model", layers=layers, tiny=options.tiny)
    turns = [((one, FP8[one]), ()) for one in FP8] if options.fp8 else [(MAIN, EXTRA)]
    runs: dict[str, list[dict[str, float]]] = {v.name: [] for main, extra in turns for v in (*main, *extra)}
    for number, (main, extra) in enumerate(turns):
        left = deadline - time.perf_counter()
        await measure_together(
            options, load, layers, model, main, extra, runs, time.perf_counter() + left / (len(turns) - number)
        )
    return save(options, load, layers, runs)


async def measure_together(
    options: argparse.Namespace,
    load: Load,
    layers: int,
    model: Path,
    main: Sequence[Variant],
    extra: Sequence[Variant],
    runs: dict[str, list[dict[str, float]]],
    deadline: float,
) -> None:
    """Start the variants' engines, warm each variant up, then interleave repeats while there is time."""
    started = time.perf_counter()

    def start(kind: str) -> Any:
        sizes = {"gpu_share": options.gpu_share, "kv_gib": options.kv_gib}
        return start_engine(model, kind, load=load, tiny=options.tiny, quick=options.quick, **sizes)

    kinds = list(dict.fromkeys(variant.engine for variant in main))
    if options.kv_gib is None:  # each measures what is free, which nobody else may change meanwhile
        engines = {kind: start(kind) for kind in kinds}
    else:
        together = await asyncio.gather(*(asyncio.to_thread(start, kind) for kind in kinds))
        engines = dict(zip(kinds, together, strict=True))
    print(f"{len(engines)} engines started in {time.perf_counter() - started:.0f} s", flush=True)
    longest = 0.0
    try:
        warm = Load(load.sequences, load.prompt_tokens, min(32, load.new_tokens))
        for variant in (*main, *extra):
            await run_once(engines[variant.engine], variant, warm, 0, layers)
        for variants, repeats in ((main, options.repeats), (extra, 2)):
            for repeat in range(repeats):
                order = variants if repeat % 2 == 0 else variants[::-1]
                for variant in order:
                    if repeat and time.perf_counter() + 1.2 * longest > deadline:
                        print(f"out of time before {variant.name}, repeat {repeat + 1}", flush=True)
                        continue
                    start = time.perf_counter()
                    got = await run_once(engines[variant.engine], variant, load, 1 + repeat, layers)
                    longest = max(longest, time.perf_counter() - start)
                    runs[variant.name].append(got)
                    print(f"{repeat + 1}  {got['tokens_per_second']:9.0f} tokens/s  {variant.name}", flush=True)
                    save(options, load, layers, runs)
    finally:
        for engine in engines.values():
            engine.shutdown()


def save(
    options: argparse.Namespace, load: Load, layers: int, runs: dict[str, list[dict[str, float]]]
) -> dict[str, Any]:
    """The JSON file, rewritten after every run so that a cut-off leaves what was measured."""
    import torch
    import vllm

    def median(name: str, key: str) -> float:
        return statistics.median(run[key] for run in runs[name])

    base = median(BASE.name, "tokens_per_second") if runs[BASE.name] else float("nan")
    result = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "vllm": vllm.__version__,
        "load": asdict(load) | {"layers": layers, "tiny": options.tiny},
        "route_bytes_per_step": load.sequences
        * (load.prompt_tokens + load.new_tokens - 1)
        * layers
        * (2 if options.tiny else 8),
        "variants": [
            {"name": name, "runs": got}
            | {key: median(name, key) for key in ("tokens_per_second", "core_cpu_s", "client_cpu_s")}
            | {"ratio": median(name, "tokens_per_second") / base}
            for name, got in runs.items()
            if got
        ],
    }
    (options.out / "bench_rollout.json").write_text(json.dumps(result, indent=1))
    return result


def table(result: dict[str, Any]) -> str:
    """What a person reads."""
    lines = [
        f"{result['device']}, vLLM {result['vllm']}, {result['load']}",
        f"{'variant':<54}{'tokens/s':>10}{'ratio':>8}{'runs':>6}{'core CPU s':>12}{'client CPU s':>14}",
    ]
    lines += [
        f"{v['name']:<54}{v['tokens_per_second']:>10.0f}{v['ratio']:>8.3f}{len(v['runs']):>6}"
        f"{v['core_cpu_s']:>12.2f}{v['client_cpu_s']:>14.2f}"
        for v in result["variants"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out",
        type=out_folder,
        default=os.environ.get("OUT", "."),
        help="folder of the results (default: $OUT or here)",
    )
    parser.add_argument("--tiny", action="store_true", help="a toy on a CPU: the whole path, no figures worth keeping")
    parser.add_argument("--fp8", action="store_true", help="bf16 and FP8, with R3 off and on, and no others")
    parser.add_argument("--quick", action="store_true", help="engines that compile nothing and have one CUDA graph")
    parser.add_argument("--layers", type=whole(), default=16)
    parser.add_argument("--sequences", type=whole(), default=256)
    parser.add_argument("--prompt-tokens", type=whole(), default=128)
    parser.add_argument("--new-tokens", type=whole(), default=512)
    parser.add_argument("--repeats", type=whole(), default=5)
    parser.add_argument(
        "--seconds", type=real(), default=480.0, help="no second run is begun that would end after this"
    )
    parser.add_argument("--gpu-share", type=real(below=1), default=0.42, help="memory of each engine")
    parser.add_argument("--kv-gib", type=real(), help="keys and values of each engine; engines then start side by side")
    options = parser.parse_args()
    require_gpu(parser, tiny=options.tiny)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    load = Load(options.sequences, options.prompt_tokens, options.new_tokens)
    layers = options.layers
    if options.tiny:
        load, layers, options.repeats = Load(12, 10, 24), 2, 2
    text = table(asyncio.run(measure(options, load, layers)))
    (options.out / "bench_rollout.txt").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    sys.exit(exit_status(main))
