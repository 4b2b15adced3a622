"""Tables of what the cases found, in Markdown."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import numpy as np

from actor_step.cases import CASES, REFERENCE, REPEATS, Case
from megatron_dppo.models.flops import H100_BF16_DENSE

Found = dict[str, dict[str, Any]]
MAIN, REPLAY, NO_REPLAY = "dppo-topk-tv, replay", "dppo-binary-tv, replay", "dppo-binary-tv"
STOCK = "dppo-binary-tv, replay, Megatron-Core's optimizer step"
STOCK_KERNELS = "dppo-topk-tv, replay, stock experts, dispatcher and Adam"
PLAIN = "dppo-topk-tv, replay, one microbatch after the other"
OLD_LOGP = "dppo-topk-tv-decoupled, replay"
EXPERTS, STOCK_EXPERTS = "experts", "stock experts and dispatcher"


def report(found: Found, failures: dict[str, str]) -> str:
    """Everything, the timing table first."""
    parts = [
        _depth(found),
        _timing(found),
        _ratios(found),
        _replay(found),
        _old_logp(found),
        _experts(found),
        _work(found),
        _agreement(found),
        _offload(found),
    ]
    if failures:
        parts.append("Failed:\n\n" + "\n".join(f"- `{name}`:\n```\n{text}\n```" for name, text in failures.items()))
    return "\n\n".join(part for part in parts if part) + "\n"


def _median(found: dict[str, Any], group: str, arm: str) -> float | None:
    times = found.get(group, {}).get(arm)
    return statistics.median(times) if times else None


def whole_step(cases: list[Case], steps: list[float]) -> float | None:
    """The whole model's step: layers of each kind times what such a layer takes, and the rest, by `cases`; None where
    they do not tell kinds apart whose shares in the whole differ."""
    if len(cases) < 2:
        return None
    whole = replace(cases[0], layers=cases[0].whole).kinds
    depths = np.array([[1.0, *(case.kinds.get(kind, 0) for kind in whole)] for case in cases])
    wanted = np.array([1.0, *whole.values()])
    weights = wanted @ np.linalg.pinv(depths)
    return float(weights @ np.array(steps)) if np.allclose(weights @ depths, wanted) else None


def _depth(found: Found) -> str:
    """Depths of a model, and the whole model's step from them."""
    rows = []
    names: dict[str, list[Case]] = {}
    for case in sorted(_cases(found, "depth"), key=lambda one: one.layers):
        names.setdefault(case.name.rpartition("-")[0], []).append(case)
    for cases in names.values():
        for arm, kernels in ((MAIN, "ours"), (PLAIN, "ours, not overlapped"), (STOCK_KERNELS, "stock")):
            medians = [_median(found[case.name], "with_replay", arm) for case in cases]
            measured = {case.layers: step for case, step in zip(cases, medians, strict=True) if step is not None}
            reached = [case for case in cases if case.layers in measured]
            whole = whole_step(reached, list(measured.values()))
            if whole is None:
                continue
            deep = reached[-1]
            high = found[deep.name]
            layer = (whole - measured[deep.layers]) / (deep.whole - deep.layers)
            spread = np.quantile(high["with_replay"][arm], [0.25, 0.75])
            other = PLAIN if PLAIN in high["with_replay"] else STOCK_KERNELS
            ratio = _ratio(measured[deep.layers], _median(high, "with_replay", other))
            rows.append(
                [
                    *(deep.name, deep.layout_text, kernels),
                    ", ".join(f"{step:.4f}" for step in measured.values()),
                    *(f"{spread[0]:.4f} to {spread[1]:.4f}", len(high["with_replay"][arm]), ratio),
                    *(f"{layer * 1e3:.1f}", f"{whole:.2f}", f"{high['tokens'] / whole / deep.gpus:,.0f}"),
                    f"{high['whole_flops_per_gpu'] / whole / H100_BF16_DENSE:.1%}",
                    f"{high.get(f'peak_gib, {arm}', 0):.1f}",
                ]
            )
    title = (
        "The whole step from several depths: a layer, its weights' optimizer step included, takes what a deeper "
        "model takes longer, by layer and kind of layer. Arms in turn in one process; medians."
    )
    head = ["case", "layout", "kernels", "depths' steps s", "quartiles of the deepest", "steps", "of the last"]
    head += ["layer ms", "whole step s", "tokens/s per GPU", "MFU at full depth", "peak GiB"]
    return _table(title, head, rows)


def _timing(found: Found) -> str:
    rows = []
    for case in _cases(found, "time"):
        got = found[case.name]
        step = _median(got, "with_replay", MAIN)
        if step is None:
            continue
        mfu = got["flops_per_gpu"] / step / H100_BF16_DENSE
        rows.append(
            [
                *(case.name, case.layout_text, got["layers"], case.recompute, case.microbatches, got["tokens"]),
                *(f"{step:.3f}", f"{got['tokens'] / step / case.gpus:,.0f}", f"{mfu:.1%}"),
                f"{got['peak_gib']:.1f}" if "peak_gib" in got else "",
                f"{max(got['parameters_per_rank']) / 1e9:.2f}",
            ]
        )
    title = (
        "Whole steps (`MegatronActor.update`, DPPO top-20 TV, routes replayed): median seconds of the slowest rank. "
        "MFU: (6 x active parameters x tokens + 6 x layers x heads x head_dim x sum n^2) / 989.4 TFLOP/s."
    )
    head = ["case", "layout", "layers", "recompute", "microbatches", "tokens", "step s", "tokens/s per GPU", "MFU"]
    return _table(title, [*head, "peak GiB", "1e9 parameters per rank"], rows)


def _ratios(found: Found) -> str:
    rows = []
    for case in _cases(found, "time"):
        got = found[case.name]
        row: list[Any] = [case.name]
        row.append(_ratio(_median(got, "with_replay", REPLAY), _median(got, "with_replay", NO_REPLAY)))
        row.append(_ratio(_median(got, "with_replay", REPLAY), _median(got, "without_wgrad_fusion", REPLAY)))
        row.append(_ratio(_median(got, "stock_optimizer", REPLAY), _median(got, "stock_optimizer", STOCK)))
        for group, names in (
            ("objective", (NO_REPLAY, "dppo-topk-tv", "dppo-topk-kl")),
            ("objective_fused", (NO_REPLAY,)),
        ):
            base = _median(got, group, "cross-entropy")
            row.append(f"{base:.3f}" if base else "")
            row += [_ratio(_median(got, group, name), base) for name in names]
        row.append(f"{got['cross_entropy_peak_gib']:.1f}" if "cross_entropy_peak_gib" in got else "")
        rows.append(row)
    head = [
        "case",
        "replay on / off",
        "weight gradients fused / not",
        "optimizer: ours / stock",
        "cross-entropy (CE) s",
    ]
    head += ["binary TV / CE", "top-20 TV / CE", "top-20 KL / CE", "fused CE s", "binary TV / fused CE"]
    return _table("Ratios of medians, arms in turn in one process.", [*head, "peak GiB with CE"], rows)


def _replay(found: Found) -> str:
    rows = []
    for case in _cases(found, "time"):
        got = found[case.name].get("replay")
        if got is None:
            continue
        on, off = np.array(got[REPLAY]), np.array(got[NO_REPLAY])
        ratios = on / off  # neighbours in time: what drifts is the same for both
        draws = np.random.default_rng(0).integers(0, len(ratios), size=(2000, len(ratios)))
        low, high = np.quantile(np.median(ratios[draws], axis=1), [0.025, 0.975])
        cells = [f"{np.median(on):.4f}", f"{np.median(off):.4f}", f"{np.median(on) / np.median(off):.3f}"]
        rows.append([case.name, len(ratios), *cells, f"{np.median(ratios):.3f} ({low:.3f} to {high:.3f})"])
    head = ["case", "pairs", "with replay, s", "without, s", "ratio of medians"]
    title = "Steps with routes replayed and without in turn; median of the ratio of neighbours, 95 % by bootstrap."
    return _table(title, [*head, "median of ratios"], rows)


def _old_logp(found: Found) -> str:
    rows = []
    for case in _cases(found, "time"):
        skipped, done = _median(found[case.name], "old_logp", MAIN), _median(found[case.name], "old_logp", OLD_LOGP)
        if skipped and done:
            rows.append([case.name, f"{skipped:.4f}", f"{done:.4f}", _ratio(done, skipped)])
    title = "Steps without and with a pass that recomputes log-probabilities before the update, in turn; medians."
    return _table(title, ["case", "without, s", "with, s", "with / without"], rows)


def _experts(found: Found) -> str:
    rows = []
    for case in _cases(found, "experts"):
        got = found[case.name]
        if "stock_profile" not in got:
            continue
        medians = [statistics.median(got["layer_s"][arm]) for arm in (EXPERTS, STOCK_EXPERTS)]
        busy = [got[profile]["busy"] / REPEATS for profile in ("profile", "stock_profile")]
        for name, seconds, kernels, profile in zip(
            ("ours", "stock"), medians, busy, ("profile", "stock_profile"), strict=True
        ):
            work = got[profile]["work"]
            parts = [work.get(f"experts: {kind}", 0.0) for kind in ("grouped GEMM", "activation", "permutation")]
            other = sum(work.values()) - sum(parts)
            cells = [f"{seconds * 1e3:.2f}", _ratio(seconds, medians[1]), f"{kernels * 1e3:.2f}"]
            cells += [_ratio(kernels, busy[1]), *(f"{part / REPEATS * 1e3:.2f}" for part in [*parts, other])]
            rows.append([case.name, got["rows"], name, *cells])
    title = (
        "One layer of experts, forward and backward, by our kernels and by stock ones in turn: medians, and of a "
        "profiled one the kernels' time."
    )
    head = ["case", "rows", "kernels", "ms", "of stock", "a kernel runs, ms", "of stock"]
    return _table(title, [*head, "products", "activation", "permutation", "other"], rows)


def _work(found: Found) -> str:
    kinds_of_case = ("depth", "time", "experts")
    cases = [c for measure in kinds_of_case for c in _cases(found, measure) if "profile" in found[c.name]]
    profiles = {case.name: found[case.name]["profile"] for case in cases}
    for key, what in (
        ("profile_unwaited", "phases not waited for"),
        ("stock_optimizer_profile", "stock optimizer"),
        ("stock_profile", "stock kernels"),
    ):
        profiles |= {f"{c.name}, {what}": found[c.name][key] for c in cases if key in found[c.name]}
    if not profiles:
        return ""
    kinds = sorted(
        {kind for p in profiles.values() for kind in p["work"]},
        key=lambda kind: -max(p["work"].get(kind, 0.0) / p["seconds"] for p in profiles.values()),
    )
    rows = [[kind, *(_share(p["work"].get(kind, 0.0), p["seconds"]) for p in profiles.values())] for kind in kinds]
    rows.append(["no kernel running", *(_share(p["seconds"] - p["busy"], p["seconds"]) for p in profiles.values())])
    rows.append(["profiled step, s", *(f"{p['seconds']:.3f}" for p in profiles.values())])
    phases = list(dict.fromkeys(name for p in profiles.values() for name in p["phases"]))
    rows += [
        [f"phase: {n}", *(_share(p["phases"].get(n, 0.0), p["seconds"]) for p in profiles.values())] for n in phases
    ]
    title = (
        "Where the time of the step goes (torch.profiler, mean over ranks, milliseconds and share; kernels on several "
        "streams overlap, collectives include waiting for other ranks)."
    )
    return _table(title, ["", *profiles], rows)


def _agreement(found: Found) -> str:
    rows = []
    reference = found.get(REFERENCE, {}).get("steps")
    for case in _cases(found, "agreement"):
        got = found[case.name]
        row: list[Any] = [case.name, case.layout_text]
        for number, step in enumerate(got.get("steps", [])):
            for key in ("loss", "grad_norm"):
                text = f"{step[key]:.6f}"
                if reference and case.name != REFERENCE:
                    text += f" ({step[key] / reference[number][key] - 1:+.1e})"
                row.append(text)
        gap = got.get("parity", {}).get("max_abs_logp_gap")
        rows.append([*row, f"{gap:.4f}" if gap is not None else ""])
    head = ["case", "layout", *(f"{what} {n}" for n in (1, 2, 3) for what in ("loss", "gradient norm"))]
    title = (
        "The same batch of 16 sequences and the same weights under every layout: three steps (in brackets: relative "
        f"difference from `{REFERENCE}`)."
    )
    return _table(title, [*head, "max abs(log pi - log mu)"], rows)


def _offload(found: Found) -> str:
    keys = ["allocated_gib", "freed_gib", "left_gib", "offload_s", "onload_s", "step_after_s"]
    rows = [
        [name, *(f"{got['offload'][key]:.2f}" for key in keys), got["offload"]["same_bits"]]
        for name, got in found.items()
        if "offload" in got
    ]
    head = ["case", "allocated GiB", "freed GiB", "left GiB", "offload s", "onload s", "next step s", "same bits"]
    return _table("Weights, optimizer state and gradients to page-locked host memory and back.", head, rows)


def _cases(found: Found, measure: str) -> list[Case]:
    return [case for case in CASES if case.measure == measure and case.name in found]


def _ratio(numerator: float | None, denominator: float | None) -> str:
    return f"{numerator / denominator:.3f}" if numerator and denominator else ""


def _share(part: float, whole: float) -> str:
    return f"{part * 1e3:.1f} ({part / whole:.1%})" if part else "0"


def _table(title: str, head: list[str], rows: list[list[Any]]) -> str:
    if not rows:
        return ""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return title + "\n\n" + "\n".join(lines)
