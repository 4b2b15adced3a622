"""The objective at its edges: ties, blocked and impossible tokens, the gradient's path, and inputs it refuses."""

import math

import pytest
import torch
from torch import Tensor

from megatron_dppo.algorithm import PolicyLoss, divergence_for, policy_loss, presets


def log(p: float) -> float:
    return math.log(p) if p > 0 else -math.inf


def simple(
    name: str, mu: list[float], pi: list[float], advantage: list[float], **overrides: object
) -> tuple[PolicyLoss, Tensor]:
    preset = presets.get(name, **overrides)
    logp = torch.tensor([log(p) for p in pi], dtype=torch.float64, requires_grad=True)
    mu_logp = torch.tensor([log(p) for p in mu], dtype=torch.float64)
    loss = policy_loss(
        preset,
        logp,
        mu_logp,
        torch.tensor(advantage, dtype=torch.float64),
        loss_mask=torch.ones(len(mu), dtype=torch.bool),
        divergence=divergence_for(preset, logp=logp, mu_logp=mu_logp),
    )
    (gradient,) = torch.autograd.grad(loss.per_token.sum(), logp)
    return loss, gradient


def test_ties_at_the_threshold() -> None:
    """Numbers that float64 represents exactly: a tie is kept everywhere, and blocked by the minimal mask."""
    tie = {"mu": [1.0], "pi": [0.5], "advantage": [-1.0]}
    assert simple("dppo-binary-tv", threshold_negative=0.5, **tie)[0].mask.item() is True
    assert simple("dppo-binary-tv", threshold_negative=0.499, **tie)[0].mask.item() is False
    assert simple("ppo-clip", threshold_negative=0.5, **tie)[0].mask.item() is True
    assert simple("mask-0.5", **tie)[0].mask.item() is False
    up = {"mu": [0.5], "pi": [1.0], "advantage": [1.0]}
    assert simple("ppo-clip", threshold_positive=1.0, **up)[0].mask.item() is True
    assert simple("ppo-clip", threshold_positive=0.999, **up)[0].mask.item() is False
    assert simple("relax-low", relax_below=0.5, threshold_positive=0.1, **up)[0].mask.item() is False


@pytest.mark.parametrize("constants", ["appendix-d", "appendix-f"])
def test_section_4_2_numbers_end_to_end(constants: str) -> None:
    """PPO clips 1e-4 -> 1e-2 and keeps 0.99 -> 0.80; DPPO-TV at delta = 0.15 does the reverse."""
    numbers = {"mu": [1e-4, 0.99], "pi": [1e-2, 0.80], "advantage": [1.0, -1.0]}
    ppo, ppo_gradient = simple("ppo-clip", **numbers)
    dppo_loss, gradient = simple(
        "dppo-binary-tv", constants=constants, threshold_negative=0.15, threshold_positive=0.15, **numbers
    )
    assert ppo.mask.tolist() == [False, True]
    assert dppo_loss.mask.tolist() == [True, False]
    cap = math.inf if constants == "appendix-d" else 5.0
    assert gradient.tolist() == pytest.approx([-min(100.0, cap), 0.0])
    assert ppo_gradient.tolist() == pytest.approx([0.0, 0.80 / 0.99])


def test_equal_policies_give_the_plain_policy_gradient() -> None:
    for name in ("pg-is", "cispo", "grpo-clip-higher", "dppo-binary-tv", "dppo-binary-kl", "mask-0.5", "relax-both"):
        loss, gradient = simple(name, [0.3, 1.0, 1e-8], [0.3, 1.0, 1e-8], [1.0, -2.0, 0.5])
        assert loss.mask.all()
        assert gradient.tolist() == [-1.0, 2.0, -0.5]
        assert loss.per_token.tolist() == [-1.0, 2.0, -0.5]


def test_blocked_rows_contribute_exactly_zero_even_where_the_ratio_is_infinite() -> None:
    loss, gradient = simple("dppo-binary-tv", [0.0, 1.0, 0.5], [0.9, 0.0, 0.5], [1.0, -1.0, 1.0])
    assert loss.ratio[0].item() == math.inf
    assert loss.mask.tolist() == [False, False, True]
    assert loss.per_token.tolist() == [0.0, 0.0, -1.0]
    assert gradient.tolist() == [0.0, 0.0, -1.0]


def test_zero_advantage_and_impossible_tokens_contribute_exactly_zero() -> None:
    loss, gradient = simple("pg-is", [0.0, 0.5, 0.0], [0.5, 0.0, 0.0], [0.0, 1.0, 0.0])
    assert loss.per_token.tolist() == [0.0, 0.0, 0.0]
    assert gradient.tolist() == [0.0, 0.0, 0.0]


def test_an_active_row_that_is_not_finite_stays_visible() -> None:
    loss, _ = simple("pg-is", [0.0, 0.5], [0.5, 0.5], [1.0, math.nan])
    assert not loss.per_token.isfinite().any()


@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_to_train_still_has_a_graph(rows: int) -> None:
    logp = torch.full((rows,), math.nan, requires_grad=True)
    loss = policy_loss(
        presets.get("pg-is"), logp, logp.detach(), logp.detach(), loss_mask=torch.zeros(rows, dtype=torch.bool)
    )
    loss.per_token.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [0.0] * rows
    assert loss.metrics.finalize(1) == {"tokens": 0.0}


def test_gradient_flows_through_logp_only() -> None:
    leaves = {n: torch.tensor([-0.5, -1.0], requires_grad=True) for n in ("logp", "mu", "re", "advantages", "entropy")}
    preset = presets.get("dppo-binary-kl-decoupled")
    divergence = divergence_for(preset, logp=leaves["logp"], mu_logp=leaves["mu"], recomputed_logp=leaves["re"])
    loss = policy_loss(
        preset,
        leaves["logp"],
        leaves["mu"],
        leaves["advantages"],
        loss_mask=torch.ones(2),
        divergence=divergence,
        recomputed_logp=leaves["re"],
        entropy=leaves["entropy"],
    )
    loss.per_token.sum().backward()
    assert [n for n, leaf in leaves.items() if leaf.grad is not None] == ["logp"]
    assert not loss.ratio.requires_grad
    assert not loss.metrics.sums.requires_grad


def test_entropy_bonus_reaches_every_trained_row_blocked_or_not() -> None:
    preset = presets.get("dppo-binary-tv", entropy_coefficient=0.01)
    logp = torch.tensor([-0.01, -3.0, -1.0], requires_grad=True)
    mu = torch.tensor([-3.0, -3.0, -1.0])
    entropy = torch.tensor([2.0, 1.0, math.nan], requires_grad=True)
    loss = policy_loss(
        preset,
        logp,
        mu,
        torch.ones(3),
        loss_mask=torch.tensor([True, True, False]),
        divergence=divergence_for(preset, logp=logp, mu_logp=mu),
        entropy=entropy,
    )
    assert loss.mask.tolist() == [False, True, False]
    loss.per_token.sum().backward()
    torch.testing.assert_close(loss.per_token.detach(), torch.tensor([-0.02, -1.01, 0.0]))
    torch.testing.assert_close(entropy.grad, torch.tensor([-0.01, -0.01, 0.0]))
    torch.testing.assert_close(logp.grad, torch.tensor([0.0, -1.0, 0.0]))


def test_decoupled_direction_comes_from_the_recomputed_policy() -> None:
    """pi is above mu but below pi': for A < 0 the update moves away from pi', so only the decoupled row blocks it."""
    args = {
        "logp": torch.tensor([math.log(0.5)]),
        "mu_logp": torch.tensor([math.log(0.3)]),
        "recomputed_logp": torch.tensor([math.log(0.9)]),
    }
    for name, kept in (("dppo-binary-tv", True), ("dppo-binary-tv-decoupled", False)):
        preset = presets.get(name)
        if not preset.needs_recomputed_logp:
            args = {k: v for k, v in args.items() if k != "recomputed_logp"} | {"recomputed_logp": None}
        else:
            args["recomputed_logp"] = torch.tensor([math.log(0.9)])
        loss = policy_loss(
            preset,
            args["logp"],
            args["mu_logp"],
            torch.tensor([-1.0]),
            loss_mask=torch.tensor([True]),
            divergence=divergence_for(preset, **args),
            recomputed_logp=args["recomputed_logp"],
        )
        assert loss.mask.item() is kept
        # The importance ratio of Eq. 23 is to mu in both.
        assert loss.ratio.item() == pytest.approx(0.5 / 0.3)


def test_gspo_uses_the_geometric_mean_ratio_of_the_sequence() -> None:
    preset = presets.get("gspo", threshold_negative=0.2, threshold_positive=0.2)
    logp = torch.tensor([-1.0, -2.0, -0.5, -1.0, math.nan], dtype=torch.float64, requires_grad=True)
    mu = torch.tensor([-1.1, -2.1, -1.0, -1.5, math.nan], dtype=torch.float64)
    loss = policy_loss(
        preset,
        logp,
        mu,
        torch.ones(5, dtype=torch.float64),
        loss_mask=torch.tensor([True, True, True, True, False]),
        sequence_ids=torch.tensor([0, 0, 1, 1, -1]),
    )
    ratio = [math.exp(0.1)] * 2 + [math.exp(0.5)] * 2
    assert loss.ratio.tolist() == pytest.approx([*ratio, 1.0])
    assert loss.mask.tolist() == [True, True, False, False, False]
    (gradient,) = torch.autograd.grad(loss.per_token.sum(), logp)
    assert gradient.tolist() == pytest.approx([-math.exp(0.1)] * 2 + [0.0] * 3)


@pytest.mark.parametrize(
    ("name", "missing", "given", "message"),
    [
        ("minirl", "recomputed_logp", {}, "recomputed_logp is missing: run the trainer's forward"),
        ("dppo-binary-tv", "divergence", {}, "divergence is missing"),
        ("gspo", "sequence_ids", {}, "sequence_ids is missing"),
        ("pg-is", "", {"recomputed_logp": torch.zeros(2)}, "recomputed_logp would have no effect"),
        ("pg-is", "", {"divergence": torch.zeros(2)}, "does not mask by divergence"),
        ("pg-is", "", {"entropy": torch.zeros(3)}, r"entropy has shape \(3,\), logp \(2,\)"),
        ("pg-is", "", {"mu_logp": torch.zeros(2, 1)}, r"mu_logp has shape \(2, 1\)"),
    ],
)
def test_inputs_that_do_not_fit_the_preset_are_refused(
    name: str, missing: str, given: dict[str, Tensor], message: str
) -> None:
    arguments = {"mu_logp": torch.zeros(2), "advantages": torch.ones(2)} | given
    with pytest.raises(ValueError, match=message):
        policy_loss(
            presets.get(name), torch.zeros(2), arguments.pop("mu_logp"), arguments.pop("advantages"),
            loss_mask=torch.ones(2, dtype=torch.bool), **arguments,
        )  # fmt: skip


def test_entropy_bonus_without_entropy_is_refused() -> None:
    with pytest.raises(ValueError, match="entropy is missing"):
        policy_loss(
            presets.get("pg-is", entropy_coefficient=0.1),
            torch.zeros(2),
            torch.zeros(2),
            torch.zeros(2),
            loss_mask=torch.ones(2),
        )


def test_divergence_for_names_what_is_missing() -> None:
    logp = torch.zeros(2)
    assert divergence_for(presets.get("minirl"), logp=logp, mu_logp=logp) is None
    with pytest.raises(ValueError, match="needs recomputed_logp"):
        divergence_for(presets.get("dppo-binary-tv-decoupled"), logp=logp, mu_logp=logp)
    with pytest.raises(ValueError, match="needs mu_topk_logp"):
        divergence_for(presets.get("dppo-topk-tv"), logp=logp, mu_logp=logp)
    with pytest.raises(ValueError, match="needs recomputed_topk_logp"):
        divergence_for(
            presets.get("dppo-topk-kl-decoupled"), logp=logp, mu_logp=logp, recomputed_logp=logp, mu_topk_logp=logp
        )
    columns, member = torch.zeros(2, 20), torch.ones(2, 20, dtype=torch.bool)
    with pytest.raises(ValueError, match="need 21 columns"):
        divergence_for(
            presets.get("dppo-topk-tv"), logp=logp, mu_logp=logp,
            topk_logp=columns, mu_topk_logp=columns, topk_member=member,
        )  # fmt: skip
