"""Nothing secret in what a run writes. Every value here is invented."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import regex

from megatron_dppo.cli import main
from megatron_dppo.config.load import load_config, recorded, save_config
from megatron_dppo.errors import UserError, first_line
from megatron_dppo.launch import exit_status
from megatron_dppo.launch.logs import logging_to
from megatron_dppo.launch.secrets import redact
from megatron_dppo.tasks.rewards import patterns
from megatron_dppo.trainer.samples import Sample
from megatron_dppo.trainer.sinks import WandbSink
from megatron_dppo.trainer.tracking import Tracker

VALUE, OTHER = "inv3nted-w0rd/of the tests", "second;invented'value"


def a(kind: str, length: int) -> str:
    """Letters and digits that mean nothing."""
    letters = "Zq7Lm2Xw9Rt4Kc1Vb8Np3Hs6Jd5Fg0YaEuIoTQWe"
    return kind + (letters * (1 + length // len(letters)))[:length]


@pytest.mark.parametrize(
    "secret",
    [
        a("hf_", 34),
        a("github_pat_", 22) + "_" + a("", 59),
        a("ghp_", 36),
        a("gho_", 36),
        a("ghs_", 36),
        a("glpat-", 20),
        a("sk-", 48),
        a("sk-ant-api03-", 60),
        a("sk-proj-", 80),
        "AKIA" + "Q7LM2XW9RT4KC1VB",
        "ASIA" + "Q7LM2XW9RT4KC1VB",
        a("", 12) + "/" + a("", 15) + "+" + a("", 11),  # 40, as AWS's
        "/" + a("", 39),
        a("", 86) + "==",  # Azure's storage
        a("xoxb-", 30),
        a("AIza", 35),
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJub2JvZHkifQ.Zq7Lm2Xw9Rt4Kc1Vb8Np",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNz\nZq7Lm2\n-----END OPENSSH PRIVATE KEY-----",
    ],
)
def test_known_forms_are_hidden(secret: str) -> None:
    for text in (secret, f"before {secret} after", f"key='{secret}',", f'{{"k": "{secret}"}}', f"x={secret}\n"):
        hidden = redact(text, {})
        assert secret not in hidden
        assert hidden == text.replace(secret, "***")


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("Authorization: Bearer Zq7Lm2Xw9Rt4", "Authorization: ***"),
        ("https://me:p@ss@host/path", "https://***@host/path"),
        ("redis://:Zq7Lm2Xw@host:1", "redis://***@host:1"),
        ("https://blob/x?sv=1&sig=Zq7Lm2%3D&se=2", "https://blob/x?sv=1&***&se=2"),
        ("WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567", "WANDB_API_KEY=***"),
        ("aws_secret_access_key = 'Zq7Lm2Xw9Rt4Kc1Vb8Np'", "aws_secret_access_key = '***'"),
        ("AccountKey=Zq7Lm2Xw9Rt4;EndpointSuffix=x", "AccountKey=***;EndpointSuffix=x"),
        ('{"password": "hunter2hunter2"}', '{"password": "***"}'),
    ],
)
def test_what_stands_beside_a_telling_word_is_hidden(text: str, hidden: str) -> None:
    assert redact(text, {}) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "step=7/40 reward=0.412 tokens/s=1,234 left=2:10",
        "rollout.max_response_tokens=32768 and eos_token='<|endoftext|>', pad_token_id=151643",
        "commit 0123456789abcdef0123456789abcdef01234567",
        "sha256 " + "0123456789abcdef" * 4,
        "/data/runs/moe_base_r3/20261128-184243/checkpoints/step_00000010/hf",
        "https://huggingface.co/Qwen/Qwen3-30B-A3B-Base and tcp://10.0.0.1:29500",
        "Basic arithmetic, by the bearer certificate",
        "the answer's key: it is a secret that nobody knows",
        "model.layers.0.mlp.experts.0.gate_proj.weight",
    ],
)
def test_ordinary_lines_stay(text: str) -> None:
    environment = {
        "TOKENIZERS_PARALLELISM": "experts",
        "MAX_TOKENS": "151643",
        "PWD": "/data/runs",
        "GOOGLE_APPLICATION_CREDENTIALS": "/data/runs/moe_base_r3",
        "RAY_AUTH_MODE": "step=7",
        "API_KEY_ID": "32768",
    }
    assert redact(text, environment) == text


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_KEY", "AZURE_STORAGE_CONNECTION_STRING",
     "DB_PASSWORD", "MYSQL_PWD", "SENTRY_DSN", "KEY", "GH_TOKEN", "NPM_AUTH"],
)  # fmt: skip
def test_values_of_variables_that_are_named_like_secrets(name: str) -> None:
    text = f"it is {OTHER}, {OTHER!r}, {{'a': {json.dumps(OTHER)}}} or second%3Binvented%27value"
    assert redact(text, {name: OTHER}) == """it is ***, "***", {'a': "***"} or ***"""


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INVENTED_PLAIN", VALUE)  # a name that tells nothing
    monkeypatch.setenv("INVENTED_TOKEN", OTHER)
    file = tmp_path / "c.yaml"
    file.write_text(
        "run: {dir: out, name: '${oc.env:INVENTED_TITLE,a title}'}\n"
        "model: {path: 'm/${run.name}'}\n"
        "task:\n  system_prompt: 'Say ${oc.env:INVENTED_PLAIN}, \\${x} and ${task.answer_pattern}'\n"
        "  answer_pattern: '(?P<answer>${oc.env:INVENTED_PLAIN})'\n"
        "optimizer: {lr: '${oc.decode:${oc.env:INVENTED_RATE,1e-3}}'}\n"
    )
    return file


def test_a_saved_configuration_names_the_variable_and_is_resolved_again(config_file: Path, tmp_path: Path) -> None:
    config = load_config(config_file, [f"tracking.project={OTHER}"])
    assert config.task.system_prompt == f"Say {VALUE}, ${{x}} and (?P<answer>{VALUE})"
    assert (config.model.path, config.optimizer.lr) == (Path("m/a title"), 1e-3)
    save_config(config, tmp_path / "saved.yaml")
    text = (tmp_path / "saved.yaml").read_text()
    assert "inv3nted" not in text
    assert "second" not in text
    again = load_config(tmp_path / "saved.yaml")
    assert again.model_dump() == config.model_dump()
    os.environ["INVENTED_PLAIN"], os.environ["INVENTED_RATE"] = "another", "0.5"
    try:
        changed = load_config(tmp_path / "saved.yaml")
    finally:
        del os.environ["INVENTED_RATE"]
    assert changed.task.answer_pattern == "(?P<answer>another)"
    assert changed.optimizer.lr == 0.5


def test_a_variable_that_is_missing_on_resume_is_one_line(config_file: Path, tmp_path: Path) -> None:
    save_config(load_config(config_file), tmp_path / "saved.yaml")
    del os.environ["INVENTED_PLAIN"]
    with pytest.raises(UserError) as error:
        load_config(tmp_path / "saved.yaml")
    assert str(error.value) in {
        f"config key task.{key}: the environment variable INVENTED_PLAIN is not set; set it"
        for key in ("system_prompt", "answer_pattern")
    }


def test_no_sink_has_it(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "argv", ["megatron-dppo", "train", f"tracking.project={OTHER}"])
    config, folder = load_config(config_file), tmp_path / "run"
    folder.mkdir()
    save_config(config, folder / "config.yaml")
    service = WandbSink("project", config.run.name, folder, recorded(config), resume=False)
    print(f"of the terminal: {VALUE}")
    sample = Sample(
        prompt=f"{config.task.system_prompt} 1+1", response=f"<think>{OTHER}", reference=VALUE, reward=0.0, parts={},
        correct=False, tokens=1, finish_reason="stop", advantage=0.0, pieces=["<think>", *OTHER], sequence=0, episode=0,
        prompt_tokens=1,
    )  # fmt: skip
    with logging_to(folder, 0), closing(Tracker(folder, sinks=[service])) as tracker:
        logging.getLogger("megatron_dppo").info("with %r", config.task)
        try:
            raise ValueError(OTHER)
        except ValueError:
            logging.getLogger("elsewhere").exception("failed")
        tracker.log(1, {"reward/mean": 0.5})
        tracker.samples(1, [sample])
    assert json.loads((folder / "samples.jsonl").read_text())["pieces"] == []
    written = [file for file in folder.rglob("*") if file.is_file()]
    kinds = {file.suffix for file in written}
    assert {".yaml", ".jsonl", ".wandb"} <= kinds
    assert any("tfevents" in file.name for file in written)
    for file in written:
        for secret in (VALUE, OTHER, repr(OTHER)[1:-1]):
            assert secret.encode() not in file.read_bytes(), file
    assert "Say ***, ${x}" in (folder / "samples.jsonl").read_text()


def test_error_lines_and_the_doctor_have_it_not(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["optimizer.lr=${oc.env:INVENTED_PLAIN}", "rollout.temperature=${oc.env:INVENTED_TOKEN}"]
    assert main(["train", str(config_file), *overrides]) == 2
    error = capsys.readouterr().err
    assert "config key optimizer.lr='***': " in error
    assert main(["doctor", str(config_file), *overrides]) == 1
    report = capsys.readouterr().out
    assert "config key optimizer.lr='***': " in report

    def fails() -> int:
        raise ValueError(f"with {OTHER}")

    assert exit_status(fails) == 1
    trace = capsys.readouterr().err
    assert trace.splitlines()[-1] == "megatron-dppo: failed: ValueError: with ***"
    for text in (error, report, trace):
        assert VALUE not in text
        assert OTHER not in text


def test_a_long_secret_is_not_shown_in_part(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cut before it is looked at is not known again."""
    secret = a("", 800)
    monkeypatch.setenv("INVENTED_PLAIN", secret)
    monkeypatch.setenv("INVENTED_TOKEN", secret)
    for override in (
        "optimizer.lr=${oc.env:INVENTED_PLAIN}",
        f"optimizer.{'x' * 170}{secret}={{a",
        f"run.seed=!!int {secret}",
    ):
        with pytest.raises(UserError) as error:
            load_config(config_file, [override])
        assert "Zq7Lm2" not in redact(str(error.value)), override
    slow = regex.compile(f"(a|aa)+(b|{secret})")
    monkeypatch.setattr(patterns, "MATCH_TIMEOUT_S", 0.01)
    monkeypatch.setattr(patterns, "_CALL_TIMEOUT_S", 0.0)
    with pytest.raises(UserError, match=r"answer_pattern='\(a\|aa\)\+\(b\|\*\*\*\)' takes too long"):
        patterns.match_all(slow, ["a" * 60], field="answer_pattern")


def test_what_an_error_makes_of_a_secret_is_secret() -> None:
    """Its first line, or its lines joined."""
    secret, other = a("", 40) + "\nfirst", a("", 40) + "\nsecond"
    for said in (str(UserError(secret)), first_line(ValueError(secret)), secret, other, secret[:30]):
        assert redact(f"not {said}.", {"INVENTED_TOKEN": secret, "OTHER_TOKEN": other}) == "not ***."


def test_the_error_file_of_a_rank_has_it_not(tmp_path: Path) -> None:
    """It is what torchrun prints."""
    body = "from megatron_dppo.launch import exit_status\ndef f(): raise ValueError('" + VALUE + "')\nexit_status(f)"
    environment = os.environ | {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "e.json"), "INVENTED_TOKEN": VALUE}
    subprocess.run([sys.executable, "-c", body], env=environment, check=True)
    text = (tmp_path / "e.json").read_text()
    assert "ValueError: ***" in text
    assert VALUE not in text
