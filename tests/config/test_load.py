"""Configuration: what is wrong is named, with what to do."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from megatron_dppo.config import load
from megatron_dppo.config.load import load_config, read_tree, save_config
from megatron_dppo.config_base import Bounds, ConfigModel, Seed
from megatron_dppo.errors import UserError
from tests.system_faults import files_of_at_most

MINIMAL = "run: {dir: out}\nmodel: {path: model}\n"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(MINIMAL)
    return file


def test_defaults_overrides_and_their_order(config_file):
    config = load_config(config_file, ["optimizer.lr=1e-3", "run.seed=7", "run.seed=8", "task.parameters.max_terms=3"])
    assert config.optimizer.lr == 1e-3
    assert config.run.seed == 8
    assert config.task.parameters == {"max_terms": 3}
    assert config.algorithm.resolve().name == "dppo-binary-tv"


def test_what_may_be_infinite_and_what_is_no_number_by_right(config_file):
    settings = ["algorithm.overrides={ratio_cap: .inf, include_other: false}", "trainer.resume=1"]
    config = load_config(config_file, ["algorithm.preset=dppo-topk-tv", *settings])
    assert config.algorithm.resolve().ratio_cap == float("inf")
    assert config.algorithm.resolve().include_other is False
    assert config.trainer.resume is True


def test_a_mapping_takes_the_place_of_another_and_an_entry_does_not(config_file):
    whole = "task.parameters={min_terms: 3, max_terms: 4}"
    assert load_config(config_file, [whole]).task.parameters == {"min_terms": 3, "max_terms": 4}
    animals = load_config(config_file, [whole, "task.dataset=leg_counting", "task.parameters={max_animals: 2}"])
    assert animals.task.parameters == {"max_animals": 2}
    assert load_config(config_file, [whole, "task.parameters.max_terms=5"]).task.parameters["min_terms"] == 3


def test_a_mapping_for_a_section_changes_what_it_names(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        MINIMAL + "lora: null\nevaluation: {every: 7, prompts: 12}\n"
        "task: {kind: environment, environment: {name: a, factory: 'a:b', max_turns: 9, parameters: {size: 4}}}\n"
    )
    inner = "task={seed: 3, environment: {parameters: {depth: 2}}}"
    config = load_config(file, ["evaluation={every: 3}", "lora={rank: 4}", "lora={}", inner, "model={}"])
    assert (config.evaluation.every, config.evaluation.prompts, config.lora.rank) == (3, 12, 4)
    assert (config.task.seed, config.task.kind, config.task.environment.max_turns) == (3, "environment", 9)
    assert config.task.environment.parameters == {"depth": 2}
    assert load_config(file, ["lora={}"]).lora is not None
    linked = load_config(file, ["evaluation={every: '${run.seed}'}", "run={seed: 5}"])
    assert (linked.evaluation.every, linked.evaluation.prompts, linked.run.dir) == (5, 12, Path("out").absolute())


class Several(ConfigModel):
    seed: Seed | None = None
    paths: tuple[Path, ...] = ()
    more: list[Path | None] | None = None
    counts: list[int] | None = None
    bounds: Bounds = (0.0, 1.0)
    mixed: tuple[bool, float] = (True, 1.0)


def test_the_home_folder_and_numbers_in_lists_and_unions(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    several = Several(paths=("~/a", "b"), more=["~/c", None], mixed=(False, 2))
    assert (several.paths, several.more) == ((tmp_path / "a", Path("b")), [tmp_path / "c", None])
    assert several.mixed == (False, 2.0)
    for given, message in (
        ({"seed": True}, "seed is a number, not true"),
        ({"counts": [1, False]}, "counts.1 is a number, not false"),
        ({"bounds": [True, 2]}, "bounds.0 is a number, not true"),
        ({"mixed": [True, True]}, "mixed.1 is a number, not true"),
        ({"bounds": True}, "Input should be a valid tuple"),
    ):
        with pytest.raises(ValidationError, match=message):
            Several(**given)


def test_a_value_with_a_hash_is_whole(config_file):
    """To YAML the rest is a comment: a system prompt lost its end, and two runs had one folder."""
    texts = {
        "task.system_prompt": "Write the answer after ####, as in #### 5.",
        "run.name": "#1",
        "run.dir": '/runs/it\'s "exp" \U0001f600 #2: {x}',
    }
    config = load_config(config_file, [f"{name}={text}" for name, text in texts.items()])
    assert (config.task.system_prompt, config.run.name, str(config.run.dir)) == tuple(texts.values())
    same = load_config(config_file, ["optimizer.lr=1e-3 # low", "run.name='a' # b", "tracking.samples_every=3 #"])
    assert (same.optimizer.lr, same.run.name, same.tracking.samples_every) == (1e-3, "a", 3)
    assert load_config(config_file, ["run.name=a#b", "task.system_prompt="]).run.name == "a#b"
    for null in ("null # none", "~ # none", " NULL\t# none", "null #"):
        unset = load_config(config_file, ["task.system_prompt=before", f"task.system_prompt={null}"])
        assert unset.task.system_prompt is None, null


def test_the_home_folder(config_file, tmp_path, monkeypatch):
    """No shell puts it in place of the `~` of `run.dir=~/runs`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    lora = "lora={adapter: ~/adapter}"
    config = load_config(config_file, ["run.dir=~/runs/~a", "model.path=~/", "rollout.compile_cache=~/cache", lora])
    assert config.run.dir == tmp_path / "runs/~a"
    assert config.model.path == tmp_path
    assert config.rollout.compile_cache == tmp_path / "cache"
    assert config.lora.adapter == tmp_path / "adapter"
    nobody = load_config(config_file, ["run.dir=~nobody-of-that-name/x"])
    assert nobody.run.dir == Path("~nobody-of-that-name/x").absolute()


def test_folders_are_whole_and_names_of_the_hub_stay(config_file, tmp_path, monkeypatch):
    """What a run writes of its configuration is read again in other folders."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "q.jsonl").touch()
    sets = "evaluation.sets=[{name: a, data: {path: q.jsonl}}, {name: b, data: {path: org/questions}}]"
    paths = ["rollout.compile_cache=cache", "lora={adapter: adapter}", "task={kind: data, data: {path: ./q.jsonl}}"]
    save_config(load_config(config_file, [*paths, sets]), tmp_path / "saved.yaml")
    monkeypatch.chdir("/")
    config = load_config(tmp_path / "saved.yaml")
    assert (config.run.dir, config.model.path) == (tmp_path / "out", tmp_path / "model")
    assert (config.rollout.compile_cache, config.lora.adapter) == (tmp_path / "cache", tmp_path / "adapter")
    assert config.task.data.path == str(tmp_path / "q.jsonl")
    assert [one.data.path for one in config.evaluation.sets] == [str(tmp_path / "q.jsonl"), "org/questions"]
    assert load_config(config_file, ["model.path=Qwen/Qwen3-30B-A3B"]).model.path == Path("Qwen/Qwen3-30B-A3B")


def test_own_code_that_is_a_program(config_file, tmp_path, monkeypatch):
    """One that reads its arguments would end the run without a word of where."""
    (tmp_path / "program.py").write_text("raise SystemExit(2)\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"divergence=~/program.py:f cannot be imported: SystemExit: 2"):
        load_config(config_file, ["algorithm.divergence=~/program.py:f"])


def test_a_saved_config_loads_again(config_file, tmp_path):
    names = ["run.name='1e-6'", "run.dir='5e3'", "task.parameters={a: '1_0', '12': 'null'}"]
    for settings in (["parallel.tensor=2", "algorithm.overrides.threshold_negative=0.3"], names):
        config = load_config(config_file, settings)
        save_config(config, tmp_path / "saved.yaml")
        assert load_config(tmp_path / "saved.yaml") == config
    assert config.run.name == "1e-6"


def test_a_full_disk_leaves_the_saved_config_as_it_was(config_file, tmp_path):
    """A run that goes on writes it again; what it holds may be in no other file."""
    config, saved = load_config(config_file), tmp_path / "config.yaml"
    save_config(config, saved)
    with pytest.raises(UserError, match=r"config\.yaml: cannot write: File too large"), files_of_at_most(100):
        save_config(config, saved)
    assert load_config(saved) == config


def test_settings_that_are_gone_are_left_out_where_they_did_nothing(config_file, tmp_path):
    """A run's own config.yaml has every setting of its time."""
    tree = read_tree(config_file)
    for value, refusal in (
        (0.0, None),
        (0.01, r"trainer.engine_weight_noise is gone; noise .* rollout.engine=examples/"),
    ):
        old = tmp_path / f"old-{value}.yaml"
        old.write_text(json.dumps(tree | {"trainer": tree.get("trainer", {}) | {"engine_weight_noise": value}}))
        if refusal is None:
            assert load_config(old) == load_config(config_file)
        else:
            with pytest.raises(UserError, match=refusal):
                load_config(old)


def test_a_fault_of_ours_is_not_told_as_the_users(config_file, monkeypatch):
    """A TypeError of OmegaConf's merge is of a list in place of a section; any other is no UserError."""

    def broken(*_: object) -> None:
        raise TypeError("ours")

    monkeypatch.setattr(load, "_put", broken)
    with pytest.raises(TypeError):
        load_config(config_file, ["evaluation={every: 3}"])


def test_a_mapping_below_a_list_is_refused(config_file):
    with pytest.raises(UserError, match=r"override task\.parameters\.a\.b\.c: a list and a section do not merge"):
        load_config(config_file, ["task.parameters.a=[1, 2]", "task.parameters.a.b.c={x: 1}"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lrr=1", "unknown config key optimizer.lrr; did you mean optimizer.lr?"),
        ("optimiser.lr=1", "unknown config key optimiser; did you mean optimizer?"),
        ("evaluation.zzz=1", "unknown config key evaluation.zzz; known keys of evaluation: every, prompts, samples"),
        ("optimizer.lr=-1", "config key optimizer.lr=-1: Input should be greater than or equal to 0"),
        (
            "rollout.max_staleness=2",
            "config section rollout: rollout.max_staleness=2 needs",
        ),
        ("optimizer.lr=fast", "config key optimizer.lr='fast'"),
        ("actor.dtype=float8", "config key actor.dtype='float8'"),
        ("algorithm.preset=dppo-binary-tw", "unknown preset 'dppo-binary-tw'; did you mean dppo-binary-tv"),
        (
            "algorithm.divergence=binary-tw",
            "divergence='binary-tw' is not one of binary-tv, binary-kl, topk-tv, topk-kl",
        ),
        ("algorithm.divergence=no.such:f", "algorithm.divergence=no.such:f cannot be imported: ModuleNotFoundError"),
        ("algorithm={preset: minirl, divergence: binary-tv}", "divergence=binary-tv has no effect, because the trust"),
        ("algorithm={loss: 'math:sin', overrides: {loss: 'math:cos'}}", "are one setting; set the first"),
        ("algorithm.overrides.treshold_negative=0.1", "did you mean threshold_negative"),
        ("optimizer.schedule=cosine", "optimizer.decay_steps=0 must exceed optimizer.warmup_steps=0"),
        ("task.prompt='Find ${x}$'", "config key task.prompt: Interpolation key 'x' not found (${...} stands for"),
        ("algorithm={advantage: 'my:own', divide_by_std: true}", "have no effect beside algorithm.advantage"),
        ("algorithm={normaliser: 9, overrides: {aggregation: token-mean}}", "algorithm.normaliser=9 has no effect"),
        ("optimizer={schedule: linear, decay_steps: 9, lr: 0.1, min_lr: 0.2}", "min_lr=0.2 exceeds optimizer.lr=0.1"),
        (
            "task={kind: agent, agent: {command: x, environment: [A=B]}}",
            "task.agent.environment.0='A=B': String should match",
        ),
        ("optimizer.lr=.inf", "config key optimizer.lr=inf: Input should be a finite number"),
        ("optimizer.epsilon=inf", "config key optimizer.epsilon='inf': Input should be a finite number"),
        ("run.collective_timeout_minutes=.inf", "config key run.collective_timeout_minutes=inf: Input should be a fin"),
        ("rollout.dynamic_sampling=true", "config section rollout: dynamic_sampling is a number, not true"),
        ("trainer.profile_step=true", "config section trainer: profile_step is a number, not true"),
        ("task.rewards=[{kind: math-verify, boxed: 1}]", "rewards.0.boxed; did you mean task.rewards.0.boxed_only?"),
        ("task.rewards=[{kind: format}]", "config key task.rewards.0.pattern is required"),
        ("task.rewards=[{weight: 1}]", "rewards.0={'weight': 1}: has no kind; set kind to one of verifier, math"),
        ("evaluation.sets=[{name: a, data: {pth: x}}]", "did you mean evaluation.sets.0.data.path?"),
        ("task.rewards={kind: math-verify}", "rewards={'kind': 'math-verify'}: must be a list, [...]"),
        ("task.rewards=[my.py:score]", "config key task.rewards.0='my.py:score': must be a section, {key: value}"),
        (
            "task.rewards=[{kind: python, path: my.py}]",
            "path='my.py': must be package.module:name or path/to/file.py:n",
        ),
        ("task.environment={factory: my.py}", "factory='my.py': must be package.module:name or path/to/file.py:name"),
        ("task.agent={function: my.py}", "function='my.py': must be package.module:name or path/to/file.py:name"),
        ("task.rewards=[{kind: python, path: 'a:b:c'}]", "path='a:b:c': must be package.module:name or path/to/fi"),
        ("task.environment={factory: 'a:b:c'}", "factory='a:b:c': must be package.module:name or path/to/file.py:name"),
        ("task.agent={function: 'a:b:c'}", "function='a:b:c': must be package.module:name or path/to/file.py:name"),
        ("algorithm.advantage=my.py:a:b", "advantage='my.py:a:b': must be package.module:name or path/to/file.py:name"),
        ("run.name=7", "config key run.name=7: must be text; put it in quotes (in a shell twice: 'a.b=\"...\"')"),
        ("run.dir=", "config key run.dir=None: must be a file or folder"),
        ("task.parameters=3", "config key task.parameters=3: must be a mapping, {name: value}"),
        ("trainer=null", "config key trainer=None: is a section; give it settings, or leave it out"),
        ("run.seed=99999999999999999999", "run.seed=99999999999999999999: Input should be less than 4294967296"),
        ("task.seed=4294967296", "config key task.seed=4294967296: Input should be less than 4294967296"),
        ("run=[]", "override run=[]: a list and a section do not merge"),
        ("run.seed", "override 'run.seed' must look like section.key=value"),
        ("run.dir=???", "override run.dir=???: ??? is what a config file has to be filled in; give a value"),
        ("model.path=''", "config section model: path is empty; name a file or folder"),
        ("run.seed=!!int x", "override run.seed=!!int x cannot be applied to "),
        ("run.name=\udcff", "cannot be applied to "),
        ("run.name=${oc.select:run}", "config key run.name: its ${...} stands for what holds it"),
        (r'run.dir="a\0b"', "config key run.dir: holds a control character; remove it"),
        ("trainer.resume=1.0", "config section trainer: resume is true or false, not 1.0"),
        ("task.date=0", "config section task: date is a date, not 0"),
        (
            "trainer.prompts_per_step=" + "9" * 400,
            "trainer: prompts_per_step=99999999999999999999... is beyond what 64",
        ),
        ("run.seed=0x" + "f" * 6000, "config key run.seed: is a number beyond what 64 bits hold"),
        ("task.parameters={a: [0x" + "f" * 6000 + "]}", "config key task.parameters.a.0: is a number beyond"),
        ("trainer.steps=" + "x" * 5000, "xxx...: Input should be a valid integer"),
    ],
)
def test_errors_name_the_key(config_file, override, message):
    with pytest.raises(UserError) as error:
        load_config(config_file, [override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_text_that_looks_like_a_key_survives_saving(config_file, tmp_path):
    config = load_config(config_file, [r"run.name='Find \${x}, \frac{a}{b} or \\\${y}'"])
    assert config.run.name == r"Find ${x}, \frac{a}{b} or \${y}"
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {dir: out}\n", "config key model is required"),
        ("run:\n  dir: [a\nmodel: {}\n", "is not valid YAML: line 3, column 6"),
        ("- a\n- b\n", "must hold sections"),
        ("run:\n  dir: ${nowhere}\nmodel: {path: m}\n", "config key run.dir: .*nowhere"),
        ("run: {dir: out}\nmodel:\n  path: ???\n", r"config key model\.path is \?\?\?, to be filled in"),
    ],
)
def test_broken_files(tmp_path, text, message):
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        load_config(file)


def test_of_a_file_that_is_no_configuration_the_first_faults_are_named(tmp_path):
    (file := tmp_path / "config.json").write_text(json.dumps(dict.fromkeys("abcdefghijklmnop", 1)))
    with pytest.raises(UserError, match=r"^config key run is required; .* and 12 more$"):
        load_config(file)


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"x\.yaml cannot be read: it is not UTF-8 text"):
        load_config(tmp_path / "x.yaml")


def test_a_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.yaml does not exist"):
        load_config(tmp_path / "nothing.yaml")


@pytest.mark.parametrize(
    ("overrides", "topk", "routes"),
    [
        ([], 0, True),
        (["algorithm.preset=dppo-topk-kl"], 20, True),
        (["algorithm.preset=dppo-topk-tv", "algorithm.overrides.topk=7"], 7, True),
        (["algorithm.reference_kl={coefficient: 0.1, estimator: topk}"], 20, True),
        (["actor.router_replay=none"], 0, False),
        (["actor.router_replay=none", "rollout.router_replay=true", "rollout.top_k_logprobs=3"], 3, True),
        (["rollout.max_num_seqs=8", "rollout.router_replay=false"], 0, False),
    ],
)
def test_a_rollout_records_what_is_used_of_it(config_file, overrides, topk, routes):
    config = load_config(config_file, overrides)
    assert (config.rollout.top_k_logprobs, config.rollout.router_replay) == (topk, routes)
    save_config(config, config_file)
    assert load_config(config_file) == config
    save_config(load_config(config_file), config_file)
    assert load_config(config_file) == config


def test_what_a_rollout_records_follows_overrides_of_a_saved_config_too(config_file):
    save_config(load_config(config_file, ["algorithm.preset=dppo-topk-kl"]), config_file)
    for overrides, topk, routes in (
        (["algorithm.preset=dppo-binary-tv", "actor.router_replay=none"], 0, False),
        (["algorithm.overrides.topk=7"], 7, True),
    ):
        rollout = load_config(config_file, overrides).rollout
        assert (rollout.top_k_logprobs, rollout.router_replay) == (topk, routes)
    save_config(load_config(config_file, ["rollout.top_k_logprobs=20"]), config_file)  # given is given
    assert load_config(config_file, ["algorithm.preset=dppo-binary-tv"]).rollout.top_k_logprobs == 20
