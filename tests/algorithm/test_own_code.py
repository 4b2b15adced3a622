"""Divergences and losses of a user's own, from a package that the test writes: used as the table's are, and refused
with the reason where they do what must not be."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest
import torch

from megatron_dppo.algorithm import (
    PresetError,
    divergence_for,
    own_advantages,
    policy_loss,
    presets,
    try_advantages,
    try_own_code,
)
from megatron_dppo.errors import UserError

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import torch
from megatron_dppo.algorithm import Divergence, Needs

def chi_square(x):
    return (x.anchor_logp.double().exp() - x.logp.double().exp()) ** 2 / x.anchor_logp.double().exp()

CHI = Divergence(chi_square, thresholds={"own": 0.01})
ALL = Divergence(lambda x: x.topk()[0][:, 0].exp(), needs=Needs.VOCABULARY, thresholds={"own": 0.1})
SHY = Divergence(lambda x: x.topk()[0][:, 0], thresholds={"own": 0.1})

def column(x): return chi_square(x)[:, None]
def whole(x): return (x.logp < -1).long()
def nan(x): return x.logp * torch.nan
def raises(x): return x.nothing

def squared(x): return 0.5 * (x.logp - x.mu_logp) ** 2 - x.advantages * x.logp
def keeping(x): return squared(x), x.advantages > 0
def summed(x): return squared(x) - x.logp.sum()
def summed_kept(x): return squared(x) - torch.where(x.mask, x.logp, 0.0).sum()
def soft_mask(x): return squared(x), torch.sigmoid(x.logp)
def scalar(x): return squared(x).sum()
def detached(x): return squared(x).detach()
def logarithm(x): return squared(x) + torch.log(x.advantages.abs())
def steep(x): return squared(x) + (x.logp - x.logp.detach()).abs().sqrt()

def centred(rewards, groups): return (rewards - rewards.mean()).double()
def per_group(rewards, groups): return torch.zeros(int(groups.max()) + 1)
def counted(rewards, groups): return groups
def divided(rewards, groups): return rewards / rewards
def listed(rewards, groups): return rewards.tolist()
def changed(rewards, groups): return rewards.zero_()
def broken(rewards, groups): return rewards[groups + 6]
def drawn(rewards, groups): return rewards + torch.rand(len(rewards))
def running(rewards, groups, seen=[]):
    seen.append(rewards.mean())
    return rewards - sum(seen) / len(seen)
"""


@pytest.fixture
def package(tmp_path, monkeypatch) -> str:
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_a_divergence_decides_the_mask_with_its_own_threshold(package):
    preset = presets.get("dppo-binary-tv", divergence=f"{package}:CHI")
    assert (preset.threshold_negative, preset.threshold_positive, preset.topk) == (0.01, 0.01, None)
    mu, pi = torch.tensor([0.5, 0.5, 0.1, 0.1]).double(), torch.tensor([0.6, 0.56, 0.14, 0.12]).double()
    logp = pi.log().requires_grad_()
    divergence = divergence_for(preset, logp=logp, mu_logp=mu.log())
    torch.testing.assert_close(divergence, torch.tensor([0.02, 0.0072, 0.016, 0.004]).double())
    loss = policy_loss(
        preset, logp, mu.log(), torch.ones(4).double(), loss_mask=torch.ones(4).bool(), divergence=divergence
    )
    assert loss.mask.tolist() == [False, True, False, True]
    (gradient,) = torch.autograd.grad(loss.per_token.sum(), logp)
    torch.testing.assert_close(gradient, torch.tensor([0.0, -1.12, 0.0, -1.2]).double())


def test_a_loss_replaces_the_surrogate_and_may_add_a_mask(package):
    mu, pi = torch.tensor([0.5, 0.9, 0.2, 0.5]).double().log(), torch.tensor([0.4, 0.3, 0.3, 0.1]).double().log()
    advantages, trained = torch.tensor([1.0, -1.0, -1.0, 1.0]).double(), torch.tensor([True, True, True, False])

    def run(function: str) -> tuple[list[float], list[float], list[bool]]:
        preset = presets.get("mask-0.5", loss=f"{package}:{function}")  # blocks the second row
        logp = pi.clone().requires_grad_()
        loss = policy_loss(preset, logp, mu, advantages, loss_mask=trained)
        (gradient,) = torch.autograd.grad(loss.per_token.sum(), logp)
        return loss.per_token.tolist(), gradient.tolist(), loss.mask.tolist()

    r = [math.log(0.4 / 0.5), math.log(0.3 / 0.2)]
    loss, gradient, mask = run("squared")
    assert mask == [True, False, True, False]
    assert loss == pytest.approx([0.5 * r[0] ** 2 - math.log(0.4), 0.0, 0.5 * r[1] ** 2 + math.log(0.3), 0.0])
    assert gradient == pytest.approx([r[0] - 1, 0.0, r[1] + 1, 0.0])
    loss, gradient, mask = run("keeping")
    assert mask == [True, False, False, False]
    assert gradient == pytest.approx([r[0] - 1, 0.0, 0.0, 0.0])


def test_the_mask_reaches_the_metrics(package):
    preset = presets.get("pg-is", loss=f"{package}:keeping")
    logp = torch.zeros(4, requires_grad=True)
    loss = policy_loss(preset, logp, logp.detach(), torch.tensor([1.0, -1.0, 1.0, 1.0]), loss_mask=torch.ones(4).bool())
    assert loss.metrics.finalize(1)["masked_fraction"] == 0.25


@pytest.mark.parametrize("rows", ["squared", "keeping", "summed_kept"])
def test_a_good_loss_passes_its_trial(package, rows):
    for preset in ("pg-is", "dppo-binary-tv", "minirl", "gspo"):
        try_own_code(presets.get(preset, loss=f"{package}:{rows}"))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("scalar", r"must return one floating number per row, \[12\], and returned torch.float64 \[\]"),
        ("whole", r"must return one floating number per row, \[12\], and returned torch.int64 \[12\]"),
        ("nan", "returned nan for ordinary probabilities"),
        ("raises", "raised AttributeError: 'LossInputs' object has no attribute 'nothing'"),
        ("summed", "a gradient to logp reaches 4 rows that are masked or not trained"),
        ("soft_mask", "its mask must be boolean, .*since no gradient may reach it, and is torch.float64"),
        ("detached", "returned a loss without gradient"),
        ("logarithm", "returned -inf for ordinary probabilities"),
        ("steep", "its gradient to logp is not finite"),
    ],
)
def test_a_loss_is_refused_with_the_reason(package, function, reason):
    with pytest.raises(PresetError, match=reason) as error:
        try_own_code(presets.get("dppo-binary-tv", loss=f"{package}:{function}"))
    assert f"algorithm.loss={package}:{function}: " in str(error.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("column", r"must return one floating number per row, \[12\], and returned torch.float64 \[12, 1\]"),
        ("whole", r"and returned torch.int64 \[12\]"),
        ("nan", "returned nan for ordinary probabilities"),
        ("raises", "raised AttributeError"),
        ("SHY", "top-K log-probabilities come to divergences that say needs=Needs.TOPK alone"),
    ],
)
def test_a_divergence_is_refused_with_the_reason(package, name, reason):
    thresholds = {"threshold_negative": 0.1, "threshold_positive": 0.1}
    with pytest.raises(PresetError, match=reason) as error:
        try_own_code(presets.get("dppo-binary-tv", divergence=f"{package}:{name}", **thresholds))
    assert f"algorithm.divergence={package}:{name}: " in str(error.value)


@pytest.mark.parametrize("field", ["loss", "divergence"])
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no.such.module:f", "cannot be imported: ModuleNotFoundError"),
        ("no/such/file.py:f", "cannot be imported: FileNotFoundError"),
        ("math:pi", "cannot be used: math has no callable pi"),
        ("math:nothing", "cannot be used: math has no callable nothing"),
    ],
)
def test_a_path_that_leads_nowhere(field, path, reason):
    with pytest.raises(UserError, match=f"algorithm.{field}={path} {reason}"):
        presets.get("dppo-binary-tv", **{field: path})


def test_a_divergence_that_becomes_nan_in_training_is_seen(package):
    """Compared with a threshold NaN is false: the row would be kept, and nobody would know."""
    preset = presets.get("dppo-binary-tv", divergence=f"{package}:nan", threshold_negative=0.1, threshold_positive=0.1)
    logp = torch.full((3,), -1.0, requires_grad=True)
    loss = policy_loss(
        preset,
        logp,
        logp.detach(),
        torch.ones(3),
        loss_mask=torch.tensor([True, False, True]),
        divergence=divergence_for(preset, logp=logp, mu_logp=logp),
    )
    assert loss.per_token.isnan().tolist() == [True, False, True]


def test_what_a_vocabulary_needs(package):
    preset = presets.get("dppo-binary-tv", divergence=f"{package}:ALL", topk=300)
    assert preset.needs_topk
    assert preset.needs_vocabulary
    try_own_code(preset)


def test_the_documented_example(tmp_path, monkeypatch):
    """As docs/algorithms.md prints it: the exact numbers of two tokens."""
    (code,) = re.findall(r'```python\n("""Say my_rl\.py.*?)```', (ROOT / "docs/algorithms.md").read_text(), re.S)
    (tmp_path / "my_rl.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    preset = presets.get("dppo-topk-tv", divergence="my_rl.py:HELLINGER", loss="my_rl.py:softened", topk=2)
    try_own_code(preset)
    assert preset.threshold_positive == 0.05
    mu, pi = (torch.tensor([[0.5, 0.3, 0.5]]).log(), torch.tensor([[0.2, 0.6, 0.2]]).log())
    divergence = divergence_for(
        preset,
        logp=pi[:, 0],
        mu_logp=mu[:, 0],
        topk_logp=pi,
        mu_topk_logp=mu,
        topk_member=torch.tensor([[True, True, False]]),
    )
    expected = 1 - (math.sqrt(0.5 * 0.2) + math.sqrt(0.3 * 0.6) + math.sqrt(0.2 * 0.2))
    assert divergence.item() == pytest.approx(expected, rel=1e-6)
    logp = torch.tensor([0.5]).double().log().requires_grad_()
    loss = policy_loss(
        preset, logp, torch.tensor([0.25]).double().log(), torch.ones(1).double(), loss_mask=torch.ones(1).bool(),
        divergence=torch.zeros(1).double(),
    )  # fmt: skip
    sigmoid = 1 / (1 + math.exp(-1 / 5))
    assert loss.per_token.item() == pytest.approx(-10 * sigmoid)
    (gradient,) = torch.autograd.grad(loss.per_token.sum(), logp)
    assert gradient.item() == pytest.approx(-2 * sigmoid * (1 - sigmoid) * 2.0)


def test_advantages_of_ones_own(package: str) -> None:
    """In the dtype of the rewards, which it cannot change."""
    rewards = torch.tensor([3.0, 1.0])
    got = own_advantages(f"{package}:centred", rewards, torch.tensor([0, 1]))
    assert (got.dtype, got.tolist()) == (torch.float32, [1.0, -1.0])
    own_advantages(f"{package}:changed", rewards, torch.tensor([0, 1]))
    assert rewards.tolist() == [3.0, 1.0]
    assert try_advantages(f"{package}:centred"), "answers of equal rewards train"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("per_group", r"must return one floating number per answer, \[6\], and returned torch.float32 \[3\]"),
        ("counted", r"and returned torch.int64 \[6\]"),
        ("listed", "and returned list"),
        ("divided", "returned nan"),
        ("broken", "raised IndexError: "),
        ("drawn", "gave the same rewards other advantages when called again"),
        ("running", "gave the same rewards other advantages when called again"),
        ("absent", "has no callable absent"),
    ],
)
def test_advantages_that_are_none_are_refused(package: str, name: str, reason: str) -> None:
    with pytest.raises(UserError, match=rf"^algorithm\.advantage={package}:{name}.*{reason}"):
        try_advantages(f"{package}:{name}")


def test_the_documents_example_of_advantages(tmp_path: Path) -> None:
    """Two groups with means 0.5 and 2 of a step: the spread is that of all centred rewards together."""
    (code,) = re.findall(r"```python\n(def of_batch.*?)```", (ROOT / "docs/algorithms.md").read_text(), re.S)
    (tmp_path / "mine.py").write_text(f"import torch\n\n{code}")
    rewards, groups = torch.tensor([0.0, 1.0, 1.0, 3.0]), torch.tensor([4, 4, 7, 7])
    assert not try_advantages(f"{tmp_path}/mine.py:of_batch"), "a group of equal rewards teaches nothing"
    got = own_advantages(f"{tmp_path}/mine.py:of_batch", rewards, groups)
    centred = [-0.5, 0.5, -1.0, 1.0]
    spread = math.sqrt(sum(x**2 for x in centred) / 3)
    torch.testing.assert_close(got, torch.tensor([x / spread for x in centred]), rtol=1e-5, atol=0)
