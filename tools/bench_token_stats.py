"""Time, memory and error of token_stats beside the matrix products it cannot do without and beside its peers.

One process, one table, one GPU; several ranks (torchrun) split the vocabulary and show this op alone::

    python tools/bench_token_stats.py --tokens 16384 --hidden 2048 --vocab 151936 --topk 20
    torchrun --nproc-per-node 4 tools/bench_token_stats.py --tokens 8192 --hidden 4096

Peers (liger-kernel with nvidia-cutlass-dsl, cut-cross-entropy) run where they are installed and are named where not.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.launch import exit_status
from megatron_dppo.launch.arguments import whole
from megatron_dppo.vocab_parallel import VocabShard, token_stats

# Per-token outputs whose first is log pi of the token (None: the contender has no per-token result).
Forward = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
GIB = 1 << 30


@dataclass
class Problem:
    """Inputs of one run: logits of standard deviation 4, so that probabilities range as a language model's do."""

    hidden: Tensor
    weight: Tensor
    token_ids: Tensor
    topk_ids: Tensor
    grad_logp: Tensor
    grad_entropy: Tensor
    grad_topk: Tensor
    shard: VocabShard

    @classmethod
    def make(
        cls, tokens: int, width: int, vocab: int, topk: int, rank: int, world: int, device: torch.device
    ) -> Problem:
        generator = torch.Generator(device).manual_seed(7)
        rows = -(-vocab // (128 * world)) * 128
        weight = torch.randn(vocab, width, generator=generator, device=device).mul_(4 / width**0.5).bfloat16()
        if world > 1:
            pad = rows * world - vocab
            weight = torch.cat([weight, weight.new_zeros(pad, width)])[rank * rows : (rank + 1) * rows].clone()
        hidden = torch.randn(tokens, width, generator=generator, device=device).bfloat16()
        ids = torch.randint(vocab, (tokens, 1 + topk), generator=generator, device=device)
        grads = torch.randn(2, tokens, generator=generator, device=device)
        shard = VocabShard.even(rows, vocab, dist.group.WORLD) if world > 1 else VocabShard(0, vocab, vocab)
        return cls(
            hidden.requires_grad_(),
            weight.requires_grad_(),
            ids[:, 0].contiguous(),
            ids[:, 1:].contiguous(),
            grads[0].contiguous(),
            (0.01 * grads[1]).contiguous(),
            0.01 * torch.randn(tokens, topk, generator=generator, device=device),
            shard,
        )


def interleaved_ms[K](runs: dict[K, Callable[[], object]], repeats: int) -> dict[K, float]:
    """Median time of each run by CUDA events.

    Clocks follow the GPU's power, so runs take turns in a shuffled order, each after an untimed run of itself.
    """
    times: dict[K, list[float]] = {name: [] for name in runs}
    order = list(runs)
    shuffle = random.Random(0).shuffle
    for _ in range(repeats):
        shuffle(order)
        for name in order:
            runs[name]()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            runs[name]()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def extra_gib(run: Callable[[], object]) -> float:
    """Peak memory of one run beyond what was there before, gradients included."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - before) / GIB


def floors(problem: Problem) -> dict[str, Callable[[], object]]:
    """Matrix products alone: one pass (logits), three (and both gradients), four (and the logits once more)."""
    h, w = problem.hidden.detach(), problem.weight.detach()[: problem.shard.valid]
    logits = torch.mm(h, w.t())
    unrounded = torch.empty_like(logits, dtype=torch.float32)
    dh, dw = torch.empty_like(h), torch.empty_like(w)

    def passes(logit_passes: int) -> None:
        for _ in range(logit_passes):
            torch.mm(h, w.t(), out=logits)
        torch.mm(logits, w, out=dh)
        torch.mm(logits.t(), h, out=dw)

    return {
        "1 pass, bf16 out": lambda: torch.mm(h, w.t(), out=logits),
        "3 passes, bf16 out": lambda: passes(1),
        "4 passes, bf16 out": lambda: passes(2),
        "1 pass, fp32 out": lambda: torch.mm(h, w.t(), out_dtype=torch.float32, out=unrounded),
    }


def ours(problem: Problem, implementation: Literal["fused", "chunked"], topk_gradient: bool = False) -> Forward:
    def forward(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        stats = token_stats(
            hidden, weight, problem.token_ids, problem.topk_ids, shard=problem.shard, implementation=implementation
        )
        assert stats.topk_logp is not None
        both = (stats.logp, stats.entropy)
        return (*both, stats.topk_logp) if topk_gradient else both

    return forward


def contenders(problem: Problem, only: str | None) -> Iterator[tuple[str, Forward | str]]:
    """Name and forward of each contender, or the reason why it cannot run."""
    ids = problem.token_ids
    if only is None or "ours" in only:
        yield "token_stats, fused (logp, entropy, per-token top-K)", ours(problem, "fused")
        yield "token_stats, fused, with a gradient through the top K", ours(problem, "fused", topk_gradient=True)
    if only is None or "chunked" in only:
        yield "token_stats, chunked PyTorch (the same)", ours(problem, "chunked")
    if problem.shard.world_size > 1 or only is not None:
        return

    def materialised(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (-torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), ids, reduction="none"),)

    yield "materialised logits, PyTorch (logp)", materialised
    try:
        from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

        def liger(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            nll, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, ids, 1.0, -100, 1, True)
            return -nll, entropy

        yield "Liger scaled cross-entropy SM90 (logp, entropy)", liger
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        def liger_mean(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            return (liger_fused_linear_cross_entropy(hidden, weight, ids),)

        yield "Liger fused linear cross-entropy (mean loss)", liger_mean
    except ImportError as error:
        yield "Liger", f"not installed ({error})"
    try:
        from cut_cross_entropy import linear_cross_entropy

        def cce(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            return (-linear_cross_entropy(hidden, weight, ids, reduction="none", filter_eps=None),)

        yield "cut-cross-entropy, filtering off (logp)", cce
    except ImportError as error:
        yield "cut-cross-entropy", f"not installed ({error})"


def exact_logp(problem: Problem) -> Tensor:
    """``log pi`` in float64 from the same bf16 inputs, by row blocks."""
    w = problem.weight.detach().double()
    blocks = []
    for h, ids in zip(problem.hidden.detach().split(1024), problem.token_ids.split(1024), strict=True):
        z = h.double() @ w.t()
        blocks.append(z.gather(1, ids[:, None]).squeeze(1) - z.logsumexp(1))
    return torch.cat(blocks)


def fp32_gemm_logp(problem: Problem) -> Tensor:
    """``log pi`` from a plain fp32-output product, finished in float64: the error that the product itself makes."""
    w = problem.weight.detach()
    blocks = []
    for h, ids in zip(problem.hidden.detach().split(1024), problem.token_ids.split(1024), strict=True):
        z = torch.mm(h, w.t(), out_dtype=torch.float32).double()
        blocks.append(z.gather(1, ids[:, None]).squeeze(1) - z.logsumexp(1))
    return torch.cat(blocks)


def forward_and_backward(name: str, forward: Forward, problem: Problem) -> Callable[[], tuple[Tensor, ...]]:
    def run() -> tuple[Tensor, ...]:
        outputs = forward(problem.hidden, problem.weight)
        seeds = None
        if outputs[0].ndim:
            grads = (problem.grad_logp, problem.grad_entropy, problem.grad_topk)[: len(outputs)]
            seeds = [grad.to(output.dtype) for grad, output in zip(grads, outputs, strict=True)]
        return torch.autograd.grad(outputs, (problem.hidden, problem.weight), seeds)

    return run


def no_grad(forward: Forward, problem: Problem) -> Callable[[], tuple[Tensor, ...]]:
    return torch.no_grad()(lambda: forward(problem.hidden, problem.weight))


def table(problem: Problem, only: str | None, repeats: int) -> list[str]:
    """All contenders and floors, timed in turns; memory and error of each alone."""
    world = problem.shard.world_size
    exact = exact_logp(problem) if world == 1 else None
    lines: list[str] = []
    memory: dict[str, float] = {}
    error: dict[str, str] = {}
    runs: dict[tuple[str, str], Callable[[], object]] = {}
    for name, forward in contenders(problem, only):
        if isinstance(forward, str):
            lines.append(f"{name}: {forward}")
            continue
        both = forward_and_backward(name, forward, problem)
        both()
        memory[name] = extra_gib(both)
        output = no_grad(forward, problem)()[0]
        error[name] = f"{(output.double() - exact).abs().max():.1e}" if exact is not None and output.ndim else "-"
        runs[name, "forward"], runs[name, "both"] = no_grad(forward, problem), both
    runs.update({(name, "floor"): run for name, run in floors(problem).items()})
    if world > 1:
        partial = torch.zeros_like(problem.hidden, dtype=torch.float32)
        runs["hidden-gradient all-reduce (fp32)", "floor"] = lambda: dist.all_reduce(partial)
    ms = interleaved_ms(runs, repeats)
    alone = "; ".join(f"{name} {value:.2f}" for (name, kind), value in ms.items() if kind == "floor")
    lines.append(f"alone, ms: {alone}")
    one, four = ms["1 pass, bf16 out", "floor"], ms["4 passes, bf16 out", "floor"]
    if exact is not None:
        lines.append(
            f"max error of logp, plain fp32-output product: {(fp32_gemm_logp(problem) - exact).abs().max():.1e}"
        )
    lines += [
        "",
        "| contender | forward ms | / 1 pass | forward+backward ms | / 4 passes | peak extra GiB | max error of logp |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in memory:
        f, b = ms[name, "forward"], ms[name, "both"]
        lines.append(
            f"| {name} | {f:.2f} | {f / one:.2f} | {b:.2f} | {b / four:.2f} | {memory[name]:.2f} | {error[name]} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=whole(), default=16384)
    parser.add_argument("--hidden", type=whole(), default=2048)
    parser.add_argument("--vocab", type=whole(), default=151936)
    parser.add_argument("--topk", type=whole(), default=20)
    parser.add_argument("--repeats", type=whole(), default=9)
    parser.add_argument("--only", choices=["ours", "chunked"], help="this op alone")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it measures CUDA kernels and found no CUDA device")
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl", device_id=device)
    problem = Problem.make(args.tokens, args.hidden, args.vocab, args.topk, rank, world, device)
    title = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: T={args.tokens} H={args.hidden} V={args.vocab} "
        f"K={args.topk} TP={world}, bf16, median of {args.repeats} in turns"
    )
    lines = [title, *table(problem, args.only, args.repeats)]
    if rank == 0:
        print("\n".join(lines), flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(exit_status(main))
