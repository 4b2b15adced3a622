"""Looks at recorded routes: load balance by layer, overlap between rollout and trainer, a heat map as PNG.

    python tools/inspect_routes.py rollout.routes --train train.routes -o routes.png

Route files are what `megatron_dppo.router_replay.wire.routes_to_bytes` makes. To get a pair of them from a model that
fits this machine (a rollout by vLLM, and the same tokens through transformers):

    python tools/inspect_routes.py --model runs/tiny_moe_model --record runs/routes -o routes.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from megatron_dppo.errors import UserError
from megatron_dppo.router_replay.routes import Routes
from megatron_dppo.router_replay.statistics import Load, Overlap, load, overlap
from megatron_dppo.router_replay.wire import BadRouteBytes, routes_from, routes_to_bytes


def read(path: Path) -> Routes:
    try:
        return routes_from(np.fromfile(path, dtype=np.uint8))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a file written by routes_to_bytes") from error
    except BadRouteBytes as error:
        raise UserError(f"{path}: {error}") from error


def record(model: Path, folder: Path, *, prompts: int, tokens: int, rollout_dtype: str) -> tuple[Path, Path]:
    """Sample `prompts` responses of `tokens` tokens with vLLM, run them through transformers in float32, and write the
    routes of both; returns the two files."""
    import torch
    from transformers import AutoModelForCausalLM

    from megatron_dppo.rollout.config import RolloutConfig
    from megatron_dppo.rollout.engine import GenerationRequest, SamplingLaw
    from megatron_dppo.rollout.vllm.engine import VllmEngine

    config = RolloutConfig(max_prompt_tokens=16, max_response_tokens=tokens, dtype=rollout_dtype)
    engine = VllmEngine(model, config)
    try:
        if engine.facts.routes is None:
            raise UserError(f"{model}: the model has no experts, so there are no routes to look at")
        rng = np.random.default_rng(0)
        requests = [
            GenerationRequest(
                request_id=f"0/{i}/0",
                prompt_ids=rng.integers(2, engine.facts.vocab_size, 8).astype(np.int32),
                seed=i,
            )
            for i in range(prompts)
        ]
        batch = engine.generate(requests, SamplingLaw(max_tokens=tokens), training=True)
    finally:
        engine.close()
    rollout = batch.routes
    assert rollout is not None
    trainer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    experts = np.zeros_like(rollout.experts)
    with torch.no_grad():
        for start, stop in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            ids = torch.from_numpy(batch.token_ids[start:stop].astype(np.int64))[None]
            logits = trainer(ids, output_router_logits=True).router_logits
            chosen = [layer.topk(rollout.topk, dim=-1).indices.numpy() for layer in logits]
            experts[start:stop] = np.stack(chosen, axis=1)
    train = Routes(experts, np.ones(len(experts), dtype=np.bool_), rollout.num_experts)
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "rollout.routes", folder / "train.routes"
    for file, routes in zip(files, (rollout, train), strict=True):
        file.write_bytes(routes_to_bytes(routes))
    return files


def table(routes: Routes, loads: Load, shared: Overlap | None) -> str:
    """One line per MoE layer."""
    lines = [
        f"{len(routes)} tokens, {int(routes.valid.sum())} routed, {routes.moe_layers} MoE layers, top-{routes.topk} of "
        f"{routes.num_experts} experts, {routes.bytes_per_token} bytes per token, weight versions "
        f"{', '.join(str(v) for v in np.unique(routes.spans[:, 1]))}",
        f"{'layer':>6}{'busiest/mean':>14}{'effective':>11}{'unused':>8}"
        + (f"{'common':>9}{'identical':>11}" if shared else ""),
    ]
    for layer in range(routes.moe_layers):
        line = f"{layer:>6}{loads.busiest[layer]:>14.2f}{loads.effective[layer]:>11.1f}{loads.unused[layer]:>8}"
        if shared:
            line += f"{shared.common[layer]:>9.4f}{shared.identical[layer]:>11.4f}"
        lines.append(line)
    if shared:
        lines.append(f"overlap with the trainer's routes over {shared.rows} tokens that both have")
    return "\n".join(lines)


def draw(path: Path, routes: Routes, loads: Load, shared: Overlap | None) -> None:
    """Heat map of each layer's load, and beside it what one number per layer says."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layers = np.arange(routes.moe_layers)
    panels = 3 if shared else 2
    figure, axes = plt.subplots(
        1,
        panels,
        figsize=(6 + 2.6 * (panels - 1), max(2.6, 1.4 + 0.16 * len(layers))),
        width_ratios=[3] + [1] * (panels - 1),
        sharey=True,
        layout="constrained",
    )
    relative = loads.share * routes.num_experts
    image = axes[0].imshow(relative, aspect="auto", cmap="viridis", vmin=0, vmax=max(2.0, np.quantile(relative, 0.99)))
    axes[0].set(xlabel="expert", ylabel="MoE layer", title="Load of each expert (1 = even)")
    axes[0].set_yticks(layers[:: max(1, len(layers) // 12)])
    figure.colorbar(image, ax=axes[0], location="left", pad=0.02)
    axes[1].barh(layers, loads.busiest, color="tab:orange")
    axes[1].axvline(1, color="black", linewidth=0.8)
    axes[1].set(title="Busiest expert\nover the mean", xlim=(0, None))
    if shared:
        axes[2].barh(layers, 1 - shared.identical, color="tab:blue")
        axes[2].set(title="Tokens routed\notherwise in training", xlabel="fraction")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("routes", nargs="?", type=Path, help="routes of a rollout")
    parser.add_argument("--train", type=Path, help="routes of the same tokens in training")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder to record both from")
    parser.add_argument("--record", type=Path, default=Path("routes"), help="where --model writes its two files")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32, help="sampled per prompt")
    parser.add_argument("--rollout-dtype", default="bfloat16", choices=["bfloat16", "float32", "float16"])
    parser.add_argument("-o", "--output", type=Path, default=Path("routes.png"))
    options = parser.parse_args(arguments)
    try:
        if (options.routes is None) == (options.model is None):
            raise UserError("give a file with routes, or --model to record some")
        if options.model is not None:
            options.routes, options.train = record(
                options.model,
                options.record,
                prompts=options.prompts,
                tokens=options.tokens,
                rollout_dtype=options.rollout_dtype,
            )
        routes = read(options.routes)
        try:
            loads = load(routes)
            shared = overlap(routes, read(options.train)) if options.train else None
        except ValueError as error:
            raise UserError(f"{options.routes}: {error}") from error
        print(table(routes, loads, shared))
        draw(options.output, routes, loads, shared)
        print(f"heat map: {options.output}")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
