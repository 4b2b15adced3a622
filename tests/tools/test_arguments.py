"""Every tool and example refuses a wrong argument by its name, with exit status 2, before it begins anything."""

from __future__ import annotations

import json
import runpy
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import torch

from megatron_dppo.launch.arguments import model_folder, new_folder, out_folder, real, several, whole

ROOT = Path(__file__).parents[2]
PREDICTION = {
    "layout": "x",
    "layers": 1,
    "gpus": 1,
    "recompute": "none",
    "microbatches": 1,
    "peak_gib": 1,
    "step_s": 1,
    "parts_gib": {},
}
FILES = {
    "cut.json": '{"cases": {"a1": ',
    "list.json": "[]",
    "other.json": '{"steps": 3}',
    "wrong.json": '{"cases": {"a1": {"with_replay": {"dppo-topk-tv, replay": ["fast"]}}}}',
    "empty.json": '{"cases": {}}',
    "prediction.json": json.dumps({"a1": PREDICTION}),
    "half.json": json.dumps({"a1": {"layout": "x"}}),
    "efficiency.json": '{"speed": 2}',
    "peak.json": '{"cases": {"a1": {"peak_gib": 3}}}',
    "foreign.json": '{"cases": {"a1": {"seconds": 3}, "zz": {"peak_gib": 3}}}',
    "nothing.json": "{}",
}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("tools/compare_plan.py absent.json", "bench: absent.json cannot be read: No such file or directory"),
        ("tools/compare_plan.py .", "bench: . cannot be read: Is a directory"),
        ("tools/compare_plan.py cut.json", "bench: cut.json is not valid JSON"),
        ("tools/compare_plan.py list.json", "bench: list.json must hold a JSON object, found a list; give a file that"),
        ("tools/compare_plan.py other.json", "bench: other.json: cases: Field required; give a file that tools/bench_"),
        ("tools/compare_plan.py --fixed half.json", "--fixed: half.json: a1.layers: Field required"),
        (
            "tools/compare_plan.py --efficiency efficiency.json",
            "--efficiency: efficiency.json: dense: Field required; give a file that tools/fit_planner.py --save wrote",
        ),
        ("tools/compare_plan.py foreign.json", "bench: foreign.json: no peak and no step of a1 b2 c2 d2 e4 f4 g4 in"),
        ("tools/compare_plan.py peak.json --only b2", "bench: peak.json: no peak and no step of b2 in it; give a file"),
        ("tools/compare_plan.py --fixed nothing.json", "--fixed: nothing.json: no case in it; give a file that this"),
        ("tools/compare_plan.py --gpu tpu", "argument --gpu: invalid choice: 'tpu'"),
        ("tools/compare_plan.py --only zz", "argument --only: invalid choice: 'zz'"),
        ("tools/compare_plan.py --only a1 --save no/such/p.json", "--save: no/such/p.json cannot be written: No such"),
        ("tools/fit_planner.py wrong.json", "bench: wrong.json: cases.a1.with_replay.dppo-topk-tv, replay.0: Input"),
        ("tools/fit_planner.py empty.json", "bench: empty.json: no peak and no step of "),
        ("tools/fit_planner.py peak.json foreign.json", "bench: foreign.json: no peak and no step of "),
        ("tools/fit_planner.py peak.json --only a1", "bench: peak.json: no step of a1 was measured"),
        ("tools/bench_engines.py absent", "argument model: absent is no folder of a Hugging Face model"),
        ("tools/bench_engines.py model --repeats 0", "argument --repeats: 0 must be 1 or more"),
        ("tools/bench_engines.py model --engines no", "config key engine='no': String should match pattern"),
        ("tools/bench_engines.py model temprature=1", "unknown config key temprature; did you mean temperature?"),
        ("tools/bench_sync.py --gib x", "argument --gib: 'x' is no number"),
        ("tools/bench_sync.py --gib 1", "start it with torchrun on a machine with GPUs"),
        (
            "tools/bench_cluster.py --out model/config.json",
            "argument --out: model/config.json cannot be written: File ex",
        ),
        ("tools/bench_cluster.py --out o --dry-run --only no", "argument --only: no: with 4 GPUs the parts are "),
        ("tools/bench_actor_step.py --out o --only no", "argument --only: invalid choice: 'no'"),
        ("tools/bench_lora.py --out o --steps 0", "argument --steps: 0 must be 1 or more"),
        ("tools/inspect_routes.py --model absent", "argument --model: absent is no folder of a Hugging Face model"),
        ("tools/inspect_routes.py --model model --record list.json/r", "--record list.json/r cannot be written: Not a"),
        ("examples/tiny_moe_dppo/make_model.py model", "argument OUT: model exists already"),
        (
            "examples/tiny_moe_dppo/make_model.py o --seed -1",
            "argument --seed: -1 must be 0 or more and less",
        ),
        ("examples/paper/make_shapes.py o --layers 49", "argument --layers: 49 must be 1 or more and less than 49"),
        ("examples/agent/make_model.py model/config.json/o", "argument OUT: model/config.json/o cannot be written in"),
        ("examples/smollm2/study.py o rates --seeds 0.5", "argument --seeds: '0.5' is no whole number"),
        (
            "examples/smollm2/study.py o replay",
            "study replay: --parted is missing; make the mixture whose experts differ",
        ),
        ("examples/smollm2/study.py o rates replay --parted absent", "study replay: --parted: absent holds no model"),
        ("examples/smollm2/study.py o staleness --algorithms ppo", "config section algorithm: unknown preset 'ppo'"),
        (
            "examples/smollm2/study.py o noise rollout.schedule=one_step_off trainer.steps=0",
            "config key trainer.steps=0: ",
        ),
        (
            "examples/smollm2/study.py list.json learn --seeds 0",
            "OUT: list.json/lanes cannot be written: Not a directory",
        ),
        (
            "examples/smollm2/study.py o no",
            "study: no is no experiment: learn, replay, rates, staleness, noise; or rep",
        ),
        ("examples/smollm2/study.py o report", "o: holds no run of the study"),
        ("examples/smollm2/supervised.py absent o", "argument MODEL: absent is no folder of a Hugging Face model"),
    ],
)
def test_a_wrong_argument_is_named(
    command: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    script, *words = command.split()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *words])
    monkeypatch.setattr(sys, "path", [str((ROOT / script).parent), str(ROOT), *sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert message in said
    assert "Traceback" not in said
    assert not list((tmp_path / "o").glob("*")), "it was begun"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    ("tool", "said"),
    [
        *((f"{tool} --out .", "found none; --tiny runs on a CPU") for tool in ("bench_actor_step", "bench_lora")),
        ("bench_rollout --out .", "found none; --tiny runs on a CPU"),
        ("bench_family Moonlight-16B-A3B", "megatron-dppo: error: bench_family: it measures GPUs and found none"),
    ],
)
def test_what_measures_gpus_says_that_there_is_none(
    tool: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *words = tool.split()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *words])
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), str(ROOT), *sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / f"tools/{name}.py"), run_name="__main__")
    assert (ended.value.code, list(tmp_path.iterdir())) == (2, [])
    assert said in capsys.readouterr().err


def test_kinds_of_arguments(tmp_path: Path) -> None:
    assert (whole()("3"), whole(0)("0"), real()("0.5"), real(below=1)("0"), several(whole())("1 2")) == (
        *(3, 0, 0.5, 0.0),
        [1, 2],
    )
    assert new_folder(str(tmp_path / "a/b")) == out_folder(str(tmp_path / "a/b")) == new_folder(str(tmp_path / "a/b"))
    for kind, text in (
        (whole(), "0"),
        (whole(), "1.0"),
        (whole(below=2), "2"),
        (real(), "nan"),
        (real(), "inf"),
        (real(), "-1e-9"),
        (several(whole()), " "),
        (several(whole()), "1 x"),
        (new_folder, str(tmp_path)),
        (model_folder, str(tmp_path)),
        *((kind, text) for kind in (new_folder, out_folder, model_folder) for text in ("", "x" * 300)),
    ):
        with pytest.raises(ArgumentTypeError):
            kind(text)
    for kind in (new_folder, out_folder):  # of root too, whom no permission refuses
        with pytest.raises(ArgumentTypeError, match=r"/proc/none cannot be written.*: No such file .*; choose another"):
            kind("/proc/none")
