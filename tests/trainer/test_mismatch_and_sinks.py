"""Figure 2's picture, panels of evaluation sets, samples, and services that are not installed."""

from __future__ import annotations

import importlib.util
import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.tiny_moe_dppo.model import byte_tokenizer
from megatron_dppo.actor.signal import Spans
from megatron_dppo.cli import main
from megatron_dppo.config.trainer import TrackingConfig
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.stored import columns_of
from megatron_dppo.tasks.task import Prompt, Rewards
from megatron_dppo.trainer.dynamic_sampling import Groups
from megatron_dppo.trainer.history import History, Series
from megatron_dppo.trainer.mismatch import Mismatch
from megatron_dppo.trainer.plots import PANELS, panels_for, plot_runs
from megatron_dppo.trainer.samples import choose_samples, spelled
from megatron_dppo.trainer.sinks import require_services
from megatron_dppo.trainer.tracking import Tracker
from tests.batch.rollouts import random_batch
from tests.system_faults import files_of_at_most


def mismatch(spread: float, tokens: int = 4000) -> Mismatch:
    rng = np.random.default_rng(0)
    log_mu = np.log(rng.beta(0.3, 0.3, tokens).clip(1e-6, 1 - 1e-6)).astype(np.float32)
    replayed = log_mu + 0.01 * rng.standard_normal(tokens)
    live = log_mu + spread * rng.standard_normal(tokens)
    pairs = [np.stack([log_mu, np.minimum(pi, 0)], axis=1).astype(np.float32) for pi in (replayed, live)]
    return Mismatch.of(*pairs)


def test_figure_2_from_a_runs_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, spread in (("small", 0.01), ("large", 2.0)):
        (tmp_path / name).mkdir()
        mismatch(spread).write(tmp_path / name)
    back = Mismatch.read(tmp_path / "large")
    np.testing.assert_array_equal(back.log_pi_live, mismatch(2.0).log_pi_live)
    picture = tmp_path / "figure2.png"
    assert main(["plot", str(tmp_path / "small"), str(tmp_path / "large"), "--mismatch", "-o", str(picture)]) == 0
    pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int)
    coloured = pixels.max(axis=2) - pixels.min(axis=2) > 40
    quarters = [part for half in np.array_split(coloured, 2) for part in np.array_split(half, 2, axis=1)]
    assert min(part.mean() for part in quarters) > 0.005
    assert main(["plot", str(tmp_path), "--mismatch"]) == 2
    assert "mismatch.npz: no such file; a run writes it with trainer.parity_check=true" in capsys.readouterr().err
    whole = (tmp_path / "small/mismatch.npz").read_bytes()
    for damaged in (b"", whole[:-100], whole[:200] + bytes(50) + whole[250:]):  # by a kill, a full disk
        (tmp_path / "mismatch.npz").write_bytes(damaged)
        assert main(["plot", str(tmp_path), "--mismatch"]) == 2
        assert "mismatch.npz: not what a run writes: " in capsys.readouterr().err
    with pytest.raises(UserError, match=r"mismatch\.npz: cannot write: File too large"), files_of_at_most(100):
        mismatch(0.01).write(tmp_path)


def test_evaluation_sets_have_panels_of_their_own(tmp_path: Path) -> None:
    steps = np.arange(0, 20, 5)
    series = {panel.metric: Series(np.arange(1, 21), np.linspace(0, 1, 20)) for panel in PANELS}
    for name in ("aime25", "aime24"):
        for end in ("", "_low", "_high"):
            series[f"eval/{name}/accuracy{end}"] = Series(steps, np.linspace(0.1, 0.4, 4))
    runs = {"a": History(series), "b": History(dict(list(series.items())[:6]))}
    titles = [panel.title for panel in panels_for(runs)]
    assert titles[:4] == ["Reward", "Accuracy", "aime24 avg@n", "aime25 avg@n"]
    assert len(titles) == len(PANELS) + 2
    plot_runs(runs, tmp_path / "plot.png")
    image = Image.open(tmp_path / "plot.png")
    assert image.height > 1200  # three rows


def test_samples_and_blocked_tokens(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    prompts = [
        Prompt(index=i, prompt_ids=np.zeros(1, np.int32), text=f"Q{i}", question=f"Q{i}", answer="4") for i in range(2)
    ]
    responses = [np.array([*tokenizer.encode(f"a{i}\n"), tokenizer.eos_token_id]) for i in range(4)]
    batch = random_batch(3, [7, 1, 5, 1], [len(response) for response in responses], 4)
    handle, _ = columns_of(batch, store="s", key="k", layer_groups=None)
    scores = np.array([0.0, 1.0, 0.5, 0.25], dtype=np.float32)
    rewards = Rewards(
        reward=scores, correct=scores >= 1, well_formed=scores >= 0, parts={"exact-match": scores, "format": scores}
    )
    groups = Groups(prompts, handle, responses, rewards)
    chosen = choose_samples(3, tokenizer, groups, scores - 0.5)
    assert [(s.prompt, s.response, s.reward) for s in chosen] == [
        ("Q0", "a0\n<|end|>", 0.0),
        ("Q1", "a2\n<|end|>", 0.5),
        ("Q0", "a1\n<|end|>", 1.0),
    ]
    assert [s.advantage for s in chosen] == [-0.5, 0.0, 0.5]
    assert chosen[2].pieces == ["a", "1", "\n", "<|end|>"]
    # Two turns of sequence 1, with the first piece and the third.
    spans = Spans(np.array([0, 1, 1]), np.array([6, 0, 2]), np.array([1.0, 0.25, -2.0], dtype=np.float32))
    of_turns = choose_samples(3, tokenizer, groups, scores, spans=spans)
    assert [s.turn_advantages for s in of_turns] == [((0, 1.0),), (), ((0, 0.25), (2, -2.0))]
    # Row t predicts token t + 1: of sequence 1, whose prompt is one token, row 0 predicts the first piece.
    watched = np.array([[0, 6, 1], [1, 0, 0], [1, 2, 1], [1, 3, 0], [2, 4, 0]])
    marked = [sample.marked(watched) for sample in chosen]
    assert [(s.sequence, s.blocked, s.untrained) for s in marked] == [
        (0, (0,), (1, 2, 3)),
        (2, (), (1, 2, 3)),
        (1, (2,), (1,)),
    ]
    with closing(Tracker(tmp_path)) as tracker:
        tracker.samples(2, chosen)
        tracker.masked_tokens(2, spelled({"positive": [(tokenizer.encode("7")[0], 3)], "negative": []}, tokenizer))
        tracker.samples(4, chosen[:1])
    with closing(Tracker(tmp_path, resume_step=3)):  # what is made again is dropped
        pass
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 2, 2]
    assert rows[1]["parts"] == {"exact-match": 0.5, "format": 0.5}
    masked = json.loads((tmp_path / "masked_tokens.jsonl").read_text())
    assert masked == {"step": 2, "positive": [["7", 3]], "negative": []}


def test_services_are_optional() -> None:
    require_services(TrackingConfig())
    require_services(TrackingConfig(wandb=True))
    if importlib.util.find_spec("trackio") is None:
        with pytest.raises(
            UserError, match=r"tracking.trackio=true, but trackio cannot be imported.*uv pip install tr"
        ):
            require_services(TrackingConfig(trackio=True))
    else:
        require_services(TrackingConfig(trackio=True))
