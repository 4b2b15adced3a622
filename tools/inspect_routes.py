"""Looks at recorded routes: load balance by layer, overlap between rollout and trainer, a heat map as PNG.

    python tools/inspect_routes.py rollout.npz --train train.npz -o routes.png

A file of routes is what `save` writes: the arrays of a `Routes` in NumPy's `.npz` format. To get a pair of them from a
model that fits this machine (a rollout by vLLM, and the same tokens through transformers):

    python tools/inspect_routes.py --model runs/tiny_moe_model/seed-0 --record runs/routes -o routes.png
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_dppo.errors import UserError
from megatron_dppo.launch import exit_status
from megatron_dppo.launch.arguments import model_folder, whole
from megatron_dppo.launch.folders import require_writable
from megatron_dppo.router_replay.routes import Routes


@dataclass(frozen=True)
class Load:
    """Of `L` MoE layers with `E` experts, over the rows that have a route.

    share      float64 `[L, E]`, fraction of a layer's assignments that each expert got; even is 1 / E
    busiest    float64 `[L]`, share of the busiest expert times E (1 = even): by how much it outlasts the average
    effective  float64 `[L]`, exp of the entropy of `share`: as many evenly used experts have that entropy
    unused     int64 `[L]`, experts that got nothing
    """

    share: np.ndarray
    busiest: np.ndarray
    effective: np.ndarray
    unused: np.ndarray


@dataclass(frozen=True)
class Overlap:
    """Of two records, over the `rows` that have a route in both, by layer.

    common     float64 `[L]`, mean fraction of a token's experts that both chose
    identical  float64 `[L]`, fraction of tokens whose sets of experts are equal
    """

    rows: int
    common: np.ndarray
    identical: np.ndarray


def load(routes: Routes) -> Load:
    """Raises ValueError where no row has a route."""
    experts = routes.experts[routes.valid]
    if len(experts) == 0:
        raise ValueError("no token of these routes has a route")
    counts = np.stack([np.bincount(layer.ravel(), minlength=routes.num_experts) for layer in experts.swapaxes(0, 1)])
    share = counts / counts.sum(axis=1, keepdims=True)
    entropy = -np.sum(share * np.log(np.where(share > 0, share, 1.0)), axis=1)
    return Load(share, share.max(axis=1) * routes.num_experts, np.exp(entropy), (counts == 0).sum(axis=1))


def overlap(one: Routes, other: Routes) -> Overlap:
    """Raises ValueError unless both are of the same tokens and model."""
    if one.experts.shape != other.experts.shape or one.num_experts != other.num_experts:
        raise ValueError(
            f"routes {one.experts.shape} of {one.num_experts} experts and {other.experts.shape} of "
            f"{other.num_experts} are not of the same tokens and model"
        )
    both = one.valid & other.valid
    a, b = one.experts[both], other.experts[both]
    shared = (a[..., :, None] == b[..., None, :]).any(axis=-1).sum(axis=-1)
    rows = max(len(a), 1)
    return Overlap(
        rows=int(both.sum()),
        common=shared.sum(axis=0) / (rows * one.topk),
        identical=(shared == one.topk).sum(axis=0) / rows,
    )


def save(routes: Routes, file: Path) -> None:
    """Write routes for this tool; `file` ends in `.npz`."""
    np.savez(file, experts=routes.experts, valid=routes.valid, num_experts=routes.num_experts, spans=routes.spans)


def read(path: Path) -> Routes:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return Routes(arrays["experts"], arrays["valid"], int(arrays["num_experts"]), arrays["spans"])
    except FileNotFoundError as error:
        raise UserError(f"{path}: {error.strerror}; give a file that this tool wrote") from error
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: holds no routes; give a file that this tool wrote ({error})") from error


def record(model: Path, folder: Path, *, prompts: int, tokens: int, rollout_dtype: str) -> tuple[Path, Path]:
    """Sample `prompts` responses of `tokens` tokens with vLLM, run them through transformers in float32, and write the
    routes of both; returns the two files."""
    import torch
    from transformers import AutoModelForCausalLM

    from megatron_dppo.rollout.config import RolloutConfig
    from megatron_dppo.rollout.engine import GenerationRequest, SamplingConfig
    from megatron_dppo.rollout.vllm.start import open_engine

    config = RolloutConfig(max_prompt_tokens=16, max_response_tokens=tokens, dtype=rollout_dtype)
    engine = open_engine(model, config)
    try:
        if engine.core.routes is None:
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
        batch = engine.generate(requests, SamplingConfig(max_tokens=tokens), training=True)
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
    files = folder / "rollout.npz", folder / "train.npz"
    for file, routes in zip(files, (rollout, train), strict=True):
        save(routes, file)
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
    from matplotlib.figure import Figure

    from megatron_dppo.trainer.plots import write_png

    layers = np.arange(routes.moe_layers)
    panels = 3 if shared else 2
    size = (6 + 2.6 * (panels - 1), max(2.6, 1.4 + 0.16 * len(layers)))
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    axes = figure.subplots(1, panels, width_ratios=[3] + [1] * (panels - 1), sharey=True)
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
    write_png(figure, path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("routes", nargs="?", type=Path, help="routes of a rollout")
    parser.add_argument("--train", type=Path, help="routes of the same tokens in training")
    parser.add_argument("--model", type=model_folder, help="a Hugging Face folder to record both from")
    parser.add_argument("--record", type=Path, default=Path("routes"), help="where --model writes its two files")
    parser.add_argument("--prompts", type=whole(), default=64)
    parser.add_argument("--tokens", type=whole(), default=32, help="sampled per prompt")
    parser.add_argument("--rollout-dtype", default="bfloat16", choices=["bfloat16", "float32", "float16"])
    parser.add_argument("-o", "--output", type=Path, default=Path("routes.png"))
    options = parser.parse_args(arguments)
    return exit_status(lambda: inspect(options))


def inspect(options: argparse.Namespace) -> None:
    """The table on standard output, and the heat map."""
    if (options.routes is None) == (options.model is None):
        raise UserError("give a file with routes, or --model to record some")
    if options.model is not None:
        require_writable(options.record, named=f"--record {options.record}", make=True)
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


if __name__ == "__main__":
    sys.exit(main())
