"""A run as a page: what is in it, that it needs nothing from elsewhere, and how a browser sees it."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.cli import main
from megatron_dppo.errors import UserError
from megatron_dppo.trainer.mismatch import Mismatch
from megatron_dppo.trainer.report import GREEN, RED, write_report
from megatron_dppo.trainer.samples import Sample
from megatron_dppo.trainer.tracking import Tracker

HOSTILE = "<script>alert(1)</script>"


def made_up(folder: Path, seed: int) -> Path:
    """What a run leaves in its folder."""
    folder.mkdir()
    (folder / "config.yaml").write_text(f"run: {{dir: {folder}, seed: {seed}}}\nrollout: {{temperature: 1.0}}\n")
    answers = [
        Sample(prompt="1 + 1", response=f"2{HOSTILE}", pieces=["2", HOSTILE], reference="2", reward=1.0, advantage=0.75,
               parts={}, correct=True, tokens=2, finish_reason="stop", sequence=0, episode=0, prompt_tokens=5),
        Sample(prompt="1 + 2", response="45", pieces=["4", "5"], reference="3", reward=0.0, advantage=-0.25, parts={},
               correct=False, tokens=2, finish_reason="length", sequence=1, episode=1, prompt_tokens=5, blocked=(1,),
               untrained=(0,)),
    ]  # fmt: skip
    with closing(Tracker(folder)) as tracker:
        for step in range(1, 6):
            values = {"reward/mean": step / 8 + seed, "time/rollout_s": 2.0, "time/train_s": 3.0, "time/sync_s": 0.5}
            tracker.log(step, values | {"policy/entropy": float("nan") if step == 3 else 1.0})
        tracker.log(5, {"eval/accuracy": 0.625})
        tracker.samples(2, answers[:1])
        tracker.samples(4, answers)
        for step in (2, 4):
            tracker.masked_tokens(step, {"positive": [("so", 3)], "negative": [("<b>", 2), ("so", 1)]})
    log_mu = np.log(np.linspace(0.01, 1, 50)).astype(np.float32)
    Mismatch(log_mu, log_mu + np.float32(1e-3), log_mu).write(folder)
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    runs = [made_up(root / "first", 0), made_up(root / "second", 7)]
    assert main(["report", *map(str, runs), "-o", str(root / "out/page.html"), "--title", "two <runs>"]) == 0
    return root / "out/page.html"


def pictures(page: Path) -> list[str]:
    """The page's pictures, as SVG, in which matplotlib notes every text as a comment."""
    found = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', page.read_text(encoding="utf-8"))
    return [base64.b64decode(one).decode() for one in found]


def test_the_page_holds_what_the_runs_logged(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<h1>two &lt;runs&gt;</h1>" in text
    for section in ("Curves", "Mismatch", "Time of a step", "Answers", "Tokens that the trust", "Configurations"):
        assert f"<h2>{section}" in text
    assert text.index("<h2>Curves") < text.index("<img") < text.index("<h2>Mismatch")
    curves, mismatch, phases = pictures(page)
    for shown in ("Reward", "Accuracy", "Entropy", "held-out", "first", "second"):
        assert f"<!-- {shown} -->" in curves
    assert "not logged" not in curves
    assert "<!-- Response length -->" not in curves
    for label in ("first", "second"):
        assert f"<!-- {label}: binary TV divergence -->" in mismatch
        assert f"<!-- {label} -->" in phases


def test_the_phases_of_a_step_lie_on_each_other(page: Path) -> None:
    """2 s of rollout, 3 s of training and 0.5 s of sync."""
    _, _, phases = pictures(page)
    heights = {}
    for colour in ("#1f77b4", "#2ca02c", "#d62728"):
        points = re.search(rf'd="([^"]*)" clip-path="[^"]*" style="fill: {colour}"', phases)
        assert points
        y = [float(one) for one in re.findall(r"[ML] \S+ (\S+)", points[1])]
        heights[colour] = (max(y), min(y))
    (bottom, rollout), (train_from, train_to), (sync_from, sync_to) = heights.values()
    second = (bottom - rollout) / 2
    assert (train_from, sync_from) == (rollout, train_to)
    assert (train_from - train_to, sync_from - sync_to) == pytest.approx((3 * second, second / 2), rel=1e-4)


def test_answers_have_their_tokens_on_the_colour_of_their_advantage(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<h3>first, step 4</h3>") == 1
    assert text.count('<span class="token') == 2 * 4
    assert text.count('untrained">4</span><span class="token blocked" style="background:rgba(214,39,40,0.17)">5') == 2
    assert text.count('<span class="token" style="background:rgba(44,160,44,0.50)">') == 2 * 2
    assert text.count('<span class="token" style="background:rgba(214,39,40,0.17)">') == 0
    assert HOSTILE not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert re.search(r"A &lt; 0<td><code>&#x27;&lt;b&gt;&#x27;</code> 4, <code>&#x27;so&#x27;</code> 2", text)


def test_of_several_runs_the_settings_that_differ_are_shown(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "2 of 3 settings differ" in text
    assert "<tr><td>run.seed<td>0<td>7</tr>" in text
    assert "rollout.temperature" not in text


def test_nothing_comes_from_elsewhere(page: Path) -> None:
    assert not re.search(
        r"""(src|href)\s*=\s*["']?(https?:)?//|url\(|@import|<link|<iframe|<script""", page.read_text()
    )


def test_runs_without_some_of_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    with closing(Tracker(folder)) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
    write_report({"bare": folder}, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert len(pictures(tmp_path / "page.html")) == 1
    for reason in (
        "trainer.parity_check",
        "no run has logged it",
        "tracking.samples_every",
        "no run has its config.yaml",
    ):
        assert reason in text
    with pytest.raises(UserError, match="no such file; give a metrics file or the folder of a run"):
        write_report({"none": tmp_path / "none"}, tmp_path / "page.html")


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_draws_it(page: Path, tmp_path: Path) -> None:
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    probe = page.with_name("probe.html")
    seen = "document.title = [...document.images].map(one => one.naturalWidth > 500).join()"
    probe.write_text(f"{page.read_text()}<script>onload = () => {{ {seen} }}</script>")
    command += ["--virtual-time-budget=10000", "--dump-dom", probe.as_uri()]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    assert "<title>true,true,true</title>" in drawn


def test_one_episode_has_a_page_of_its_own_with_each_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    common = {"parts": {"agent": 1.0}, "correct": True, "finish_reason": "stop", "reference": "3", "reward": 1.0,
              "advantage": 0.5, "episode": 6}  # fmt: skip
    branches = [
        Sample(prompt="user: 1 + 2", response="abcd", pieces=["a", HOSTILE, "c", "d"], tokens=4, sequence=9,
               prompt_tokens=5, untrained=(1, 2), blocked=(3,), **common),
        Sample(prompt="user: other", response="e", pieces=["e"], tokens=1, sequence=10, prompt_tokens=5, **common),
    ]  # fmt: skip
    with closing(Tracker(folder)) as tracker:
        tracker.samples(2, branches)
    assert main(["show", str(folder), "--episode", "6", "-o", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert HOSTILE not in text
    assert re.findall("<h4>(.*?)</h4>", text) == [
        "before the policy&#x27;s first word", "policy, 1", "not trained on", "policy, 2",
        "before the policy&#x27;s first word", "policy, 1",
    ]  # fmt: skip
    assert text.count('class="token untrained"') == 2
    assert text.count('class="token blocked"') == 1
    assert "Sequence 2 of 2" in text
    assert not re.search(r"""(src|href)\s*=|<script|url\(|@import|<link|<iframe""", text)
    for wrong, said in (
        (["--episode", "7"], "of step 2 the episodes 6 were kept, not 7"),
        (["--step", "3"], "step 3 is not among those that were kept (2)"),
    ):
        assert main(["show", str(folder), *wrong]) == 2
        assert said in capsys.readouterr().err
    (folder / "samples.jsonl").write_text("")
    assert main(["show", str(folder)]) == 2
    assert "no answer was kept yet" in capsys.readouterr().err
    assert main(["show", str(tmp_path)]) == 2
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 1.0}\n')
    for row in ('{"step": 2}', '{"step": 2, "episode": "x"}', '{"step": 2, "prompt": 1, "response": 2}'):
        (folder / "samples.jsonl").write_text(f"{row}\n")
        for command in ("show", "report"):
            assert main([command, str(folder), "-o", str(tmp_path / "page.html")]) == 2
            assert f"{folder / 'samples.jsonl'}: holds a row that no run writes" in capsys.readouterr().err


def test_turns_have_the_colour_of_their_own_advantage(tmp_path: Path) -> None:
    """With credit by turn a token is not trained with the advantage of its answer."""
    sample = Sample(prompt="?", response="abcd", pieces=list("abcd"), tokens=4, sequence=0, prompt_tokens=1, episode=0,
                    untrained=(1,), turn_advantages=((0, -0.5), (2, 1.0)), parts={}, correct=True, reference="",
                    finish_reason="stop", reward=1.0, advantage=0.25)  # fmt: skip
    with closing(Tracker(tmp_path)) as tracker:
        tracker.samples(1, [sample])
    assert main(["show", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert re.findall("<h4>(.*?)</h4>", text)[1:] == [
        "policy, 1: advantage -0.5", "not trained on", "policy, 2: advantage +1"
    ]  # fmt: skip
    shown = re.findall(r'background:(rgba[^"]*)">(\w)<', text)
    assert shown == [(f"rgba({RED},.3)", "a"), (f"rgba({GREEN},.3)", "c"), (f"rgba({GREEN},.3)", "d")]
