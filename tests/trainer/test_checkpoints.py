"""Which changes of a configuration a resumed run accepts."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import BaseModel
from safetensors.torch import load_file, save_file

from megatron_dppo.config.load import load_config, save_config
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import UserError
from megatron_dppo.trainer.resume import (
    FREE,
    RESULT,
    _in,
    allowed,
    check_changed,
    differences,
    facts,
    placed,
    weights_fingerprint,
)
from megatron_dppo.trainer.train import _dated

WEIGHTS = "0123456789abcdef"
TOPK_KL = {"reference_kl": {"coefficient": 0.1, "estimator": "topk"}}


def settings(weights: str = WEIGHTS, questions: str = "t", **sections: dict[str, Any]) -> dict[str, Any]:
    config = Config.model_validate({"run": {"dir": "r"}, "model": {"path": "m"}} | sections)
    return json.loads(json.dumps(facts(config, task=questions, weights=weights)))  # as a state keeps it


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The first."""
    return next(iter(differences(before, now).values()), "")


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        ({}, {}, ""),
        ({}, {"trainer": {"steps": 7}, "rollout": {"engines": 2}}, ""),
        ({}, {"optimizer": {"overlap_grad_reduce": True}}, ""),
        ({}, {"parallel": {"tensor": 2}, "actor": {"recompute": "full"}, "tracking": {"samples": 1}}, ""),
        ({}, {"run": {"dir": "elsewhere", "name": "x"}, "task": {"reward_workers": 5, "date": "2026-01-02"}}, ""),
        ({}, {"model": {"path": "moved"}}, ""),
        ({}, {"optimizer": {"lr": 0.5}}, "optimizer.lr was 1e-06 and is 0.5 now"),
        (
            {"algorithm": {"overrides": {"threshold_negative": 0.3}}},
            {},
            "algorithm.overrides.threshold_negative was 0.3 and is absent now",
        ),
        (
            {},
            {"algorithm": {"overrides": {"threshold_negative": 0.3}}},
            "algorithm.overrides.threshold_negative was absent and is 0.3 now",
        ),
        (
            {"algorithm": {"divergence": "tests.preflight.own_rows:EVERY_TOKEN", "overrides": {"topk": 300}}},
            {"algorithm": {"preset": "dppo-binary-tv"}},
            "algorithm.divergence was 'tests.preflight.own_rows:EVERY_TOKEN' and is None now",
        ),
        ({}, {"algorithm": {"loss": "torch:abs"}}, "algorithm.loss was None and is 'torch:abs' now"),
        (
            {"algorithm": {"reference_kl": {"coefficient": 0.1}}},
            {"algorithm": {"reference_kl": {"coefficient": 0.1, "place": "reward"}}},
            "algorithm.reference_kl.place was 'loss' and is 'reward' now",
        ),
        (
            {"algorithm": TOPK_KL},
            {"algorithm": TOPK_KL, "rollout": {"top_k_logprobs": 5}},
            "rollout.top_k_logprobs was 20 and is 5 now",
        ),
        ({"algorithm": TOPK_KL}, {"algorithm": TOPK_KL, "rollout": {"top_k_logprobs": 20}}, ""),
        ({}, {"optimizer": {"initial_loss_scale": 4.0}}, ""),
        ({"lora": {"rank": 8, "alpha": 16}}, {}, "lora.alpha was 16.0 and is absent now"),
        ({}, {"rollout": {"max_response_tokens": 9}}, "rollout.max_response_tokens was 16384 and is 9 now"),
        ({}, {"rollout": {"router_replay": False, "top_k_logprobs": 3}}, ""),
        ({}, {"actor": {"router_replay": "none"}}, "actor.router_replay was 'r3' and is 'none' now"),
        (
            {"actor": {"megatron": {"bucket_size": 1000}}},
            {"actor": {"megatron": {"bucket_size": 2000}}},
            "actor.megatron.bucket_size was 1000 and is 2000 now",
        ),
        (
            {},
            {"rollout": {"vllm": {"compilation_config": {"mode": 0}}}},
            "rollout.vllm.compilation_config.mode was absent and is 0 now",
        ),
        ({}, {"run": {"dir": "r", "seed": 4}}, "run.seed was 0 and is 4 now"),
        ({}, {"task": {"seed": 4}}, "task.seed was 0 and is 4 now"),
        (
            {},
            {"task": {"answer_pattern": "(?P<answer>.*)"}},
            r"task.answer_pattern was '\\s*(?P<answer>\\S(?:.*\\S)?)\\s*' and is '(?P<answer>.*)' now",
        ),
        (
            {"task": {"rewards": [{"kind": "exact-match"}, {"kind": "format", "pattern": "a", "weight": 0.5}]}},
            {"task": {"rewards": [{"kind": "exact-match"}, {"kind": "format", "pattern": "a", "weight": 0.25}]}},
            "task.rewards.1.weight was 0.5 and is 0.25 now",
        ),
        (
            {"task": {"rewards": [{"kind": "math-verify", "timeout_s": 3}]}},
            {"task": {"rewards": [{"kind": "math-verify", "timeout_s": 30}]}},
            "",
        ),
        (
            {},
            {"weights": "f" * 16, "model": {"path": "n"}},
            f"model.path was 'm (weights {WEIGHTS})' and is 'n (weights {'f' * 16})' now",
        ),
        ({}, {"questions": "u"}, "task, its questions and answers was 't' and is 'u' now"),
    ],
)
def test_what_decides_the_next_step_must_stay(before: dict[str, Any], now: dict[str, Any], changed: str) -> None:
    assert difference(settings(**before), settings(**now)) == changed


@pytest.mark.parametrize(
    ("named", "now", "refused"),
    [
        (["optimizer.lr"], {"optimizer": {"lr": 0.5}}, []),
        (["optimizer.lr"], {"optimizer": {"lr": 0.5, "beta1": 0.5}}, ["optimizer.beta1"]),
        (["rollout.max_response_tokens"], {"rollout": {"max_response_tokens": 9}}, []),  # and with it the normaliser
        (["trainer.prompts_per_step"], {"trainer": {"prompts_per_step": 64}}, []),
        (["task.rewards"], {"task": {"rewards": [{"kind": "exact-match", "weight": 0.5}]}}, []),
        (["task.rewards"], {"questions": "u"}, ["task, its questions and answers"]),
        (["task.data"], {"questions": "u"}, []),
        (["algorithm.overrides"], {"algorithm": {"overrides": {"threshold_negative": 0.3}}}, []),
        (
            ["algorithm.reference_kl", "rollout.top_k_logprobs"],
            {"algorithm": TOPK_KL, "rollout": {"top_k_logprobs": 5}},
            [],
        ),
        (["optimizer.lr"], {}, []),  # as a run that is started again after it went on
    ],
)
def test_what_is_named_may_change(named: list[str], now: dict[str, Any], refused: list[str]) -> None:
    changed = differences(settings(), settings(**now))
    assert [name for name in changed if not allowed(name, named)] == refused
    assert bool(changed) == bool(now)
    tree = {"run": {"dir": "r"}, "model": {"path": "m"}, "trainer": {"resume_changed": named}}
    check_changed(Config.model_validate(tree))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("optimizer.lrr", "no setting that a resumed run must have as it was; did you mean optimizer.lr?"),
        ("trainer.steps", "no setting that a resumed run must have as it was"),
        ("optimizer.initial_loss_scale", "no setting that a resumed run must have as it was"),
        ("lora.rank", "is what a state is of; start a new run with model.path=RUN/hf"),
        ("model.path", "is what a state is of"),
    ],
)
def test_what_cannot_change_cannot_be_named(name: str, message: str) -> None:
    tree = {"run": {"dir": "r"}, "model": {"path": "m"}, "trainer": {"resume_changed": [name]}}
    with pytest.raises(UserError, match=rf"trainer\.resume_changed: {re.escape(name)} .*{re.escape(message)}"):
        check_changed(Config.model_validate(tree))


def test_a_state_from_before_a_setting_goes_on_with_its_default() -> None:
    """But not one without the section that the setting is in: no adapters are not the default ones."""
    old = {name: value for name, value in settings().items() if name != "optimizer.grad_reduce_dtype"}
    assert difference(old, settings()) == ""
    changed = difference(old, settings(optimizer={"grad_reduce_dtype": "bfloat16"}))
    assert changed == "optimizer.grad_reduce_dtype was absent and is 'bfloat16' now"
    assert difference(settings(), settings(lora={})).startswith("lora.")


def test_a_state_of_a_setting_that_is_gone_goes_on_where_it_is_named() -> None:
    name = "trainer.engine_weight_noise"
    assert difference(settings() | {name: 0.0}, settings()) == ""
    changed = differences(settings() | {name: 0.01}, settings())
    assert changed == {name: f"{name} was 0.01 and is absent now"}
    assert allowed(name, [name])
    tree = {"run": {"dir": "r"}, "model": {"path": "m"}, "trainer": {"resume_changed": [name]}}
    check_changed(Config.model_validate(tree))


def test_a_state_that_has_an_adapters_path_as_it_was_given_goes_on() -> None:
    now = settings(lora={"adapter": "a"})
    assert difference(now | {"lora.adapter": "a"}, now) == ""
    assert difference(now | {"lora.adapter": "b"}, now).startswith("lora.adapter was 'b' and is ")


def test_the_normaliser_is_compared_as_it_is_resolved() -> None:
    def explicit(value: float) -> dict[str, Any]:
        return {"overrides": {"aggregation": "seq-mean-token-sum-norm"}, "normaliser": value}

    kept = settings(algorithm=explicit(16384.0))
    assert kept["algorithm.normaliser, resolved"] == 16384.0
    assert settings()["algorithm.normaliser, resolved"] == 16384.0
    assert difference(kept, settings(algorithm=explicit(8.0))) == "algorithm.normaliser was 16384.0 and is 8.0 now"


def leaves(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields of a configuration, sections included that may be absent or many."""
    for name, field in kind.model_fields.items():
        sections = list(sections_of(field.annotation))
        if not sections or field.annotation not in sections:
            yield prefix + name
        for section in sections:
            yield from leaves(section, f"{prefix}{name}.")


def sections_of(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from sections_of(part)


def test_every_field_is_placed_once_and_nothing_else_is() -> None:
    fields = set(leaves(Config))
    assert {placed(name) for name in fields} == {"result", "free"}  # KeyError names what is not
    of = [(name, {field for field in fields if _in((name,), field)}) for name in (*RESULT, *FREE)]
    assert [name for name, its in of if not its] == []
    times = Counter(field for _, its in of for field in its)
    assert {field: count for field, count in times.items() if count != 1} == {}
    with pytest.raises(KeyError, match=r"task\.rewards\.3\.new: place it in RESULT or FREE"):
        placed("task.rewards.3.new")


def test_a_value_of_the_environment_is_compared_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("run: {dir: r}\nmodel: {path: m}\ntask: {system_prompt: 'Say ${oc.env:INVENTED_KEY}'}\n")
    found = []
    for value in ("inv3nted-w0rd", "inv3nted-w0rd", "another-w0rd"):
        monkeypatch.setenv("INVENTED_KEY", value)
        found.append(facts(load_config(file), task="t", weights=WEIGHTS))
    assert "w0rd" not in json.dumps(found)
    assert difference(found[0], found[1]) == ""
    assert difference(found[1], found[2]).startswith("task.system_prompt was 'Say ${oc.env:INVENTED_KEY} (")


def test_weights_are_known_by_what_they_are_not_by_where(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {f"layers.{i}.w": torch.randn(5, 8).to(torch.bfloat16) for i in range(3)} | {
        "scalar": torch.tensor(1.5),
        "vector": torch.randn(7),
    }
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    save_file(tensors, one / "model.safetensors")
    first = weights_fingerprint(one, random=False)
    assert len(first) == 16
    parts = {"a.safetensors": ["scalar", "layers.1.w"], "b.safetensors": ["layers.0.w", "layers.2.w", "vector"]}
    for name, keys in parts.items():
        save_file({key: tensors[key] for key in keys}, other / name)
    index = {"weight_map": {key: name for name, keys in parts.items() for key in keys}}
    (other / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_fingerprint(other, random=False) == first
    shutil.copy(one / "model.safetensors", tmp_path / "kept")
    for name in tensors.keys() - {"scalar"}:
        changed = load_file(tmp_path / "kept")
        changed[name] = changed[name] * 1.01 if changed[name].dim() < 2 else changed[name].roll(1, dims=-1)
        save_file(changed, one / "model.safetensors")
        assert weights_fingerprint(one, random=False) != first, name
    before = weights_fingerprint(one, random=True)
    (one / "config.json").write_text('{"a": 1}')
    assert weights_fingerprint(one, random=True) != before


def test_a_run_that_goes_on_keeps_the_date_it_began_with(tmp_path: Path) -> None:
    def config(**task: Any) -> Config:
        sections = {"run": {"dir": tmp_path}, "model": {"path": "m"}, "trainer": {"resume": True}, "task": task}
        return Config.model_validate(sections)

    began = _dated(config())
    assert began.task.date is not None
    save_config(_dated(config(date="2024-02-29")), tmp_path / "config.yaml")
    assert str(_dated(config()).task.date) == "2024-02-29"
    assert str(_dated(config(date="2024-03-01")).task.date) == "2024-03-01"
    assert str(load_config(tmp_path / "config.yaml").task.date) == "2024-02-29"
    anew = config().model_copy(update={"trainer": config().trainer.model_copy(update={"resume": False})})
    assert str(_dated(anew).task.date) != "2024-02-29"
