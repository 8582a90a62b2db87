"""rloo-kit eval and judge: models on the same prompts, their intervals, whom a judge prefers."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import rloo_kit as rk
from rloo_kit.cli import main
from rloo_kit.config.engine_settings import requested_engine
from rloo_kit.config.run_file import DataSection, make_run_config
from rloo_kit.diagnosis.record import read_run
from rloo_kit.errors import (
    ConfigError,
    DataError,
    GenerationError,
    ModelError,
    RewardContractError,
    RewardLoadError,
)
from rloo_kit.evaluation.evaluator import Evaluation
from rloo_kit.evaluation.held_out import HeldOut, choose_engine, read_held_out
from rloo_kit.evaluation.statistics import difference
from rloo_kit.evaluation.table import EvalTable, Row, compare, judge_alike, results_folder
from rloo_kit.evaluation.trained import LoadedBase, find_trained, load_base
from rloo_kit.evaluation.win_rate import WinRate, verdicts
from rloo_kit.job import PreparedJob, held_out_judges
from rloo_kit.models.notes import notes_of
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.runs.folder import write_run_file
from rloo_kit.sampling.engine import active_adapter
from rloo_kit.scoring.contract import call_reward, reward_columns

PROMPTS = 8


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps, with several completions of each held-out prompt."""
    folder = tmp_path_factory.mktemp("evaluating") / "run"
    settings = f"""
        output_dir={folder} trainer.max_steps=2 trainer.per_device_train_batch_size=32
        trainer.num_generations=4 data.num_prompts=32 data.held_out={PROMPTS}
        data.held_out_samples=4 data.held_out_rewards=[length] data.held_out_every=1
    """
    rk.train("quickstart", settings.split(), say=str)
    return folder


def with_settings(run, folder, *settings):
    """A copy of the run that has these settings."""
    shutil.copytree(run, folder)
    write_run_file(folder, make_run_config(rk.read_run_file(run / "run.yaml").as_dict(), settings))
    return folder


def read(file):
    return json.loads(file.read_text())


def change(file, **values):
    file.write_text(json.dumps(read(file) | values))


def on_file(run, folder, file, held_out, *settings):
    """A copy of the run that holds out the last prompts of a file."""
    data = (f"data.prompts={file}", f"data.held_out={held_out}", "data.num_prompts=null")
    return with_settings(run, folder, *data, *settings)


def record_held_out(folder, file, num):
    """Write the last prompts of a file into the record of a run; return them."""
    kept = read_held_out([find_trained(folder)], prompts=file).prompts["prompt"][-num:]
    change(folder / "evaluation.json", before={"samples": [{"prompt": one} for one in kept]})
    return kept


def held_out_sums(num):
    return rk.load_prompts("arithmetic", split="held_out", num_prompts=num)


@pytest.fixture
def base():
    return load_base(find_trained("tiny-thinker"))


@pytest.fixture(scope="module")
def table(run):
    """The table of the run and its base."""
    return rk.evaluate_models([run], say=str)


# --- during a run ---------------------------------------------------------------------------------


def test_a_run_reports_pass_and_intervals(run):
    found = read(run / "evaluation.json")
    assert [row["step"] for row in found["during"]] == [1]  # eval_steps; the last step is "after"
    for part in ("before", "after"):
        one = found[part]
        assert one["num_prompts"] == PROMPTS
        assert len(one["samples"]) == 4 * PROMPTS
        assert list(one["rewards"]) == ["accuracy", "length"]  # the second is never paid
        assert one["correct_by"] == "accuracy"
        passed = one["pass_at_k"]
        assert passed["1"] == pytest.approx(one["rewards"]["accuracy"])
        assert passed["1"] <= passed["2"] <= passed["4"] <= 1
        low, high = one["intervals"]["accuracy"]
        assert low <= one["rewards"]["accuracy"] <= high
        scores = [sample["rewards"]["accuracy"] for sample in one["samples"]]
        by_prompt = [any(scores[at : at + 4]) for at in range(0, len(scores), 4)]
        assert passed["4"] == pytest.approx(sum(by_prompt) / PROMPTS)
    assert "rewards/length" not in (run / "metrics.jsonl").read_text()


def test_chance_is_counted_in_prompts(run):
    """Completions of one prompt are correlated, so four of them do not count as four prompts."""
    found = {one.name: one for one in read_run(run).scored_twice}
    assert found["accuracy"].num == PROMPTS


def test_evaluation_reads_back_and_so_do_older_ones(run):
    found = read(run / "evaluation.json")["before"]
    assert Evaluation.from_dict(found).as_dict() == found
    older = {k: found[k] for k in ("rewards", "num_prompts", "mean_length", "temperature")}
    samples = [{k: s[k] for k in ("prompt", "completion", "rewards")} for s in found["samples"]]
    assert Evaluation.from_dict({**older, "samples": samples}).thinking_length is None


def test_evaluate_takes_rewards_as_the_trainer_does(base):
    def polite(completions, **_):
        return [0.5] * len(completions)

    how = {"rewards": ["length", polite], "max_completion_length": 4}
    found = rk.evaluate(base.model, base.tokenizer, held_out_sums(2), **how)
    assert found.rewards["polite"] == 0.5
    assert set(found.rewards) == {"length", "polite"}


@pytest.mark.parametrize("end", [258, None])
def test_evaluate_takes_a_model_that_the_kit_did_not_load(base, end):
    def samples():
        how = {"temperature": 0, "max_completion_length": 16}
        prompts = [{"prompt": "1 + 1 = "}, {"prompt": "111 + 222 = "}]
        return rk.evaluate(base.model, base.tokenizer, prompts, [], **how).samples

    before = samples()
    base.model.generation_config.eos_token_id = end
    base.tokenizer.pad_token = None
    assert samples() == before


@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ({"num_samples": 0}, ConfigError, "num_samples is 0 and batch_size is 64"),
        ({"batch_size": 0}, ConfigError, "batch_size is 0"),
        ({"temperature": 0, "num_samples": 2}, ConfigError, "all the same"),
        ({"rewards": [torch.nn.Linear(1, 1)]}, RewardLoadError, "only a trainer can call"),
    ],
)
def test_what_evaluate_cannot_do_is_one_sentence(base, how, error, match):
    with pytest.raises(error, match=match):
        rk.evaluate(base.model, base.tokenizer, held_out_sums(2), **{"rewards": [], **how})


def test_a_missing_column_is_found_before_sampling(base, monkeypatch):
    monkeypatch.setattr("rloo_kit.evaluation.evaluator.sample_and_score", refused)
    with pytest.raises(RewardContractError, match="asks for 'answer'"):
        rk.evaluate(base.model, base.tokenizer, [{"prompt": "1 + 1 = "}], ["accuracy"])


JUDGES = {
    "{prompts: arithmetic, paid: [length, accuracy], held_out_rewards: [length]}": (
        "accuracy auto, length"
    ),
    "{prompts: arithmetic, paid: [length, accuracy], held_out_rewards: "
    "[{name: accuracy, match: number}]}": "accuracy auto, accuracy_held_out number, length",
    # the reward of a task judges its prompts
    "{prompts: gsm8k:copy, paid: [length]}": "accuracy number, length",
    "{prompts: gsm8k, paid: [accuracy]}": "accuracy number",
    "{prompts: gsm8k, paid: [accuracy], system: x}": "accuracy auto",
    "{prompts: gsm8k, paid: [math]}": "math",
    "{prompts: math500, paid: [{name: accuracy, match: number}]}": "math, accuracy number",
    "{prompts: mine.jsonl, paid: [length]}": "accuracy auto, length",
    "{prompts: mine.jsonl, paid: [length, math]}": "math, length",
    "{prompts: 'reasoning_gym:chain_sum', paid: [reasoning_gym]}": "reasoning_gym",
}


@pytest.mark.parametrize("text", JUDGES)
def test_held_out_prompts_are_judged_by_the_rewards_and_others(text):
    data = yaml.safe_load(text)
    rewards = rk.load_rewards(data.pop("paid"))
    found = held_out_judges(rewards, held_out_sums(2), rk.load_rewards, DataSection(**data))
    names = [f"{one.name} {getattr(one.func.reward, 'match', '')}".strip() for one in found]
    assert ", ".join(names) == JUDGES[text]


# --- eval -----------------------------------------------------------------------------------------


def test_models_in_one_table(run, table):
    assert [(row.model, row.mode) for row in table.rows] == [
        (name, mode)
        for name in (f"base of {run}", str(run))
        for mode in ("greedy", "4 sampled at 1")
    ]
    assert {one.reward for one in table.compared} == {"accuracy", "length"}
    for one in table.compared:
        assert one.found.num == PROMPTS
        row = {(r.model, r.mode): r for r in table.rows}
        after = row[one.model, one.mode].evaluation.rewards[one.reward]
        before = row[one.against, one.mode].evaluation.rewards[one.reward]
        assert one.found.mean == pytest.approx(after - before)
    text = str(table)
    assert "pass@4" in text
    assert re.search(r"accuracy, greedy: [+-]0\.\d+ \[", text)


def test_table_is_in_the_folder(run, table):
    written = read(run / "eval.json")["evaluations"]
    assert [row["model"] for row in written[-1]["rows"]] == [row.model for row in table.rows]
    samples = (run / "eval_samples.jsonl").read_text().splitlines()
    assert len(samples) == 2 * PROMPTS * 5


def test_a_reward_may_have_the_name_of_a_column():
    samples = [{"prompt": "", "completion": "", "rewards": {"thinking": 0.5}, "thought_tokens": 7}]
    row = Row("x", Evaluation({"thinking": 0.5}, 1, 9.0, 0.0, samples), 1.0)
    _, titles, cells = str(EvalTable("prompts", [row], [])).splitlines()
    assert titles.split() == ["model", "drawn", "thinking", "thinking", "tokens", "cut", "off"]
    assert cells.split() == ["x", "greedy", "0.500", "[0.500,", "0.500]", "7.0", "9.0", "0%"]


@pytest.mark.long
def test_each_adapter_gives_its_own_answers(run, tmp_path, save_adapter):
    """The base, the run's adapter and another one, in any order: each gives its own answers."""
    spoiled = save_adapter(tmp_path / "spoiled", std=0.2)
    names = [str(spoiled), str(run), "tiny-thinker"]
    how = FEW | {"output": tmp_path / "out", "say": str}
    found = [rk.evaluate_models(given, **how) for given in (names, names[::-1])]
    texts = [
        {row.model: [s["completion"] for s in row.evaluation.samples] for row in one.rows}
        for one in found
    ]
    assert texts[0] == texts[1]
    assert texts[0][names[0]] != texts[0][names[2]]
    assert found[0].rows[0].evaluation.rewards["accuracy"] < 0.2  # it was spoiled
    assert len(read(tmp_path / "out" / "eval.json")["evaluations"]) == 2


WRONG = {
    "eval ./nowhere/run": "./nowhere/run",
    "eval tiny-thinker --samples 0 --no-greedy": "num_samples is 0: set it to 1 or more (0",
    "eval tiny-thinker --samples -1": "num_samples is -1: set it to 1 or more (0 is",
    "eval tiny-thinker --prompts nowhere.jsonl": "nowhere.jsonl",
    "judge tiny-thinker": "--against",
    "eval tiny-thinker --num-prompts 0": "num-prompts is 0",
    "judge tiny-thinker --against x --batch-size -2": "batch-size is -2",
    "eval tiny-thinker --set model.load_in_4bit=false": "--set model would change a model",
    "eval tiny-thinker --set lora.rank=8": "--set lora would change a model",
    "eval tiny-thinker --set trainer.num_generations=3": "num_generations has no effect on an",
    "eval tiny-thinker --set trainer.reward_timeout_seconds=9": "seconds has no effect on an",
    "eval tiny-thinker --set trainer=5": "trainer is 5, must be",
    "eval tiny-thinker --set model=5": "--set model would change a model",
    "eval tiny-thinker --set data.held_out_samples=8": "data.held_out_samples has no effect on an",
    "eval tiny-thinker --set output_dir=x": "--set output_dir has no effect on an evaluation",
    "eval tiny-thinker --set vllm.enforce_eager=true": "--set vllm has no effect on an evaluation",
}


@pytest.mark.parametrize("words", WRONG)
def test_bad_input_is_one_sentence(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert WRONG[words] in error
    assert len(error.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_may_have_longer_completions():
    how = ["trainer.max_completion_length=2000", "model.max_seq_length=4000"]
    found = read_held_out([find_trained("tiny-thinker")], how, num_prompts=2, say=str)
    assert found.job.args.max_completion_length == 2000


@pytest.mark.parametrize(
    ("overrides", "prompts"), [([], "countdown"), (["data.prompts=countdown"], None)]
)
def test_prompts_of_a_task_are_scored_by_its_reward(overrides, prompts):
    found = read_held_out([find_trained("tiny-thinker")], overrides, prompts, 2, say=str)
    assert found.job.config.rewards == ["countdown"]


def test_prompts_that_another_run_trained_on_are_refused(run, tmp_path):
    file = tmp_path / "prompts.jsonl"
    write_sums(file, 12)
    models = []
    for num in (4, 2):
        folder = on_file(run, tmp_path / f"run{num}", file, num)
        record_held_out(folder, file, num)
        models.append(find_trained(folder))
    read_held_out(models[:1])
    with pytest.raises(DataError, match="2 of 4 prompts were not held out"):
        read_held_out(models)


def test_results_go_to_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert results_folder("~/out", None) == tmp_path / "home" / "out"


def test_a_reward_model_is_no_policy(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"task_type": "SEQ_CLS"}')
    with pytest.raises(ConfigError, match="is a reward model, which writes no text"):
        find_trained(tmp_path)


def test_all_models_are_found_before_one_is_sampled(run, monkeypatch):
    monkeypatch.setattr("rloo_kit.evaluation.table.load_base", refused)
    with pytest.raises(ModelError, match="the config of model 'no/such' cannot be read"):
        rk.evaluate_models([run, "no/such"], say=str)
    with pytest.raises(ModelError, match="'no/such'"):
        rk.evaluate_models("no/such", say=str)
    with pytest.raises(ModelError, match="'no/such'"):
        rk.judge_models(run, against="no/such", say=str)


@pytest.mark.parametrize("key", ["tools", "environment"])
def test_code_of_tools_is_named_before_it_runs(run, tmp_path, key):
    (tmp_path / "mine.py").touch()
    name = f"{tmp_path.resolve()}/mine.py"
    value = f"{name}:lost" if key == "environment" else f"[{name}:lost]"
    folder = with_settings(run, tmp_path / "run", f"{key}={value}")
    said = []
    with pytest.raises(RewardLoadError, match="no object named 'lost'"):
        rk.evaluate_models([folder], say=said.append)
    assert said == [f"running code of {name} (lost)"]


def test_a_model_is_not_compared_with_itself(run, monkeypatch):
    monkeypatch.setattr("rloo_kit.evaluation.table.load_base", refused)
    monkeypatch.chdir(run.parent)
    with pytest.raises(ConfigError, match="would be compared with itself"):
        rk.judge_models(run, against=run.name, say=str)


@pytest.mark.long
def test_the_command_imports_the_libraries_in_their_order(tmp_path):
    words = "eval tiny-thinker --num-prompts 2 --samples 0 --set data.held_out=2"
    command = [sys.executable, "-m", "rloo_kit", *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_run_without_adapter_says_so(tmp_path, run):
    shutil.copy(run / "run.yaml", tmp_path)
    with pytest.raises(ConfigError, match="has no adapter yet"):
        find_trained(tmp_path)


def test_an_adapter_of_another_model_is_refused(run, tmp_path, base):
    other = shutil.copytree(run / "adapter", tmp_path / "adapter")
    change(other / "adapter_config.json", r=3)
    with pytest.raises(ModelError, match="cannot be put on its base"):
        base.load(find_trained(other))


def test_an_adapter_whose_weights_find_no_place_is_refused(run, tmp_path):
    other = shutil.copytree(run / "adapter", tmp_path / "adapter")
    weights = load_file(other / "adapter_model.safetensors")
    moved = {k.replace(".layers.", ".language_model.layers."): v for k, v in weights.items()}
    save_file(moved, other / "adapter_model.safetensors")
    for earlier in ([], [run]):  # PEFT loads the first adapter in another way
        base = load_base(find_trained(run))
        for one in earlier:
            base.load(find_trained(one))
        for _ in range(2):
            with pytest.raises(ModelError, match=r"cannot be put on its base .*missing adapter"):
                base.load(find_trained(other))


def test_unfinished_run_is_its_newest_checkpoint(run, tmp_path):
    past = shutil.copytree(run, tmp_path / "run")
    assert find_trained(past).adapter == past / "adapter"
    (past / "end.json").unlink()  # as while it goes, or where it was killed
    assert find_trained(past).adapter == past / "checkpoint-2"


def test_settings_that_a_newer_version_refuses_together_can_be_evaluated(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    content = yaml.safe_load((folder / "run.yaml").read_text())
    content["trainer"] |= {"kl_estimator": "k3", "beta": 0.0}
    (folder / "run.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match="has no effect"):
        rk.read_run_file(folder / "run.yaml")
    found = read_held_out([find_trained(folder)], say=str)
    assert found.job.args.kl_estimator == "k3"
    with pytest.raises(ConfigError, match="has no effect"):  # settings of the user are checked
        read_held_out([find_trained(folder)], ["trainer.temperature=0.9"], say=str)


def test_hidden_values_are_not_read_as_settings(run, tmp_path):
    folder = with_settings(run, tmp_path / "run", "trainer.hub_token=hf_" + "aB3" * 9)
    assert "[hidden: hub_token]" in (folder / "run.yaml").read_text()
    assert "hub_token" not in find_trained(folder).config.trainer


@pytest.mark.parametrize(
    ("loaded", "name"),
    [
        ("unsloth/qwen3-4b-bnb-4bit", "unsloth/qwen3-4b-bnb-4bit"),
        ("/data/qwen3-4b", "Qwen/Qwen3-4B"),
        (None, "Qwen/Qwen3-4B"),
    ],
)
def test_the_base_is_the_one_that_unsloth_loaded_in_training(run, tmp_path, loaded, name):
    folder = with_settings(run, tmp_path / "run", "model.name=Qwen/Qwen3-4B")
    change(folder / "adapter" / "adapter_config.json", base_model_name_or_path=loaded)
    found = find_trained(folder)
    assert found.base == "Qwen/Qwen3-4B"  # for cards, and to merge in 16 bit
    assert found.model.name == found.without_adapter().model.name == name
    # and Unsloth must not replace it by a copy of its own
    assert found.config.unsloth == ({"use_exact_model_name": True} if name == loaded else {})
    if name == loaded:  # else the adapter alone has no base
        bare = find_trained(shutil.copytree(folder / "adapter", tmp_path / "bare"))
        assert bare.config.unsloth == found.config.unsloth


@pytest.fixture
def arguments_of(monkeypatch):
    """Return what gives the arguments with which ``load_base`` would load a model."""
    load = Mock(side_effect=ModelError("stop"))
    monkeypatch.setattr("rloo_kit.evaluation.trained.load_model", load)

    def arguments(*trained, **changes):
        with pytest.raises(ModelError, match="stop"):
            load_base(*trained, **changes)
        return load.call_args.kwargs

    return arguments


@pytest.mark.parametrize(
    ("changes", "exact"), [({}, True), ({"load_in_4bit": True}, True), ({"name": "a/b"}, False)]
)
def test_an_export_of_another_base_may_get_a_copy(run, tmp_path, arguments_of, changes, exact):
    folder = with_settings(run, tmp_path / "run", "model.name=Qwen/Qwen3-4B")
    change(folder / "adapter" / "adapter_config.json", base_model_name_or_path="Qwen/Qwen3-4B")
    given = arguments_of(find_trained(folder), **changes)
    assert given.get("use_exact_model_name", False) is exact


@pytest.mark.parametrize("backend", ["unsloth", "transformers"])
def test_arguments_of_unsloth_are_those_of_the_run(
    run, tmp_path, monkeypatch, arguments_of, backend
):
    given = (
        "unsloth.rope_scaling={type: linear}",
        "unsloth.enforce_eager=true",
        "unsloth.load_in_fp8=true",
        "unsloth.tokenizer_name=other",
    )
    trained = find_trained(with_settings(run, tmp_path / "run", *given))
    monkeypatch.setattr("rloo_kit.evaluation.trained.setup", lambda _: Mock(backend=backend))
    for changes in ({}, {"load_in_4bit": False}):
        given = arguments_of(trained, **changes)
        assert "enforce_eager" not in given  # of an engine
        assert ("rope_scaling" in given) == (backend == "unsloth")
        for name in ("load_in_fp8", "tokenizer_name"):  # only as the run loaded it
            assert (name in given) == (backend == "unsloth" and not changes)


@pytest.mark.parametrize(
    ("on_gpu", "changes", "precision"),
    [(True, {}, "fp16"), (False, {}, None), (True, {"load_in_4bit": False}, None)],
)
def test_a_run_in_float16_is_sampled_in_float16(
    run, tmp_path, monkeypatch, arguments_of, on_gpu, changes, precision
):
    trained = find_trained(with_settings(run, tmp_path / "run", "trainer.fp16=true"))
    assert trained.base_settings != find_trained(run).base_settings
    environment = Mock(backend="unsloth", hardware=Mock(on_gpu=on_gpu))
    monkeypatch.setattr("rloo_kit.evaluation.trained.setup", lambda _: environment)
    assert arguments_of(trained, **changes).get("precision") == precision


def test_models_that_are_loaded_alike_share_a_base(run, tmp_path):
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    setting = f"model.chat_template={tmp_path}/mine.jinja"
    first, second = (with_settings(run, tmp_path / name, setting) for name in ("1", "2"))
    for folder in (first, second):
        shutil.copy(tmp_path / "mine.jinja", folder / "adapter/chat_template.jinja")
    (tmp_path / "mine.jinja").unlink()
    given = [first, second, first / "checkpoint-2", second / "adapter"]
    assert len({find_trained(one).base_settings for one in given}) == 1
    (second / "adapter/chat_template.jinja").write_text("{{ messages[1].content }}")
    assert len({find_trained(one).base_settings for one in given}) == 2
    other = with_settings(first, tmp_path / "3", "unsloth.load_in_fp8=true")
    assert find_trained(other).base_settings != find_trained(first).base_settings


def test_the_template_is_that_of_the_adapter_that_the_run_began_with(run, tmp_path):
    first = shutil.copytree(run / "adapter", tmp_path / "first")
    (first / "chat_template.jinja").write_text("{{ messages[0].content }} (as it was tuned)")
    folder = with_settings(run, tmp_path / "run", f"model.name={first}")
    own = folder / "adapter" / "chat_template.jinja"
    assert find_trained(folder).model.chat_template == str(own)
    own.unlink()  # a checkpoint has none
    for model in (find_trained(first), find_trained(folder).without_adapter()):
        assert load_base(model).tokenizer.chat_template.endswith("(as it was tuned)")
    given = with_settings(folder, tmp_path / "given", "model.chat_template=mine.jinja")
    assert find_trained(given).model.chat_template == "mine.jinja"


def write_sums(file, num, words=""):
    rows = [
        {"prompt": f"What is {n} + 1?{words * (n % 2)}", "answer": f"{n + 1}"} for n in range(num)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))


def test_long_prompts_are_left_out_as_in_the_run(tmp_path):
    file = tmp_path / "prompts.jsonl"
    write_sums(file, 8, " please" * 40)
    given = [find_trained("tiny-thinker")]
    assert len(read_held_out(given, ["data.max_prompt_tokens=60"], file).prompts) == 4


def test_a_quantile_leaves_out_the_held_out_prompts_of_the_run(run, tmp_path):
    file = tmp_path / "prompts.jsonl"
    write_sums(file, 8, " please" * 9)
    folder = on_file(run, tmp_path / "run", file, 4, "data.max_prompt_quantile=0.5")
    _, kept_out = PreparedJob(rk.read_run_file(folder / "run.yaml"), say=str).splits
    samples = [{"prompt": prompt} for prompt in kept_out["prompt"]]
    assert len(samples) == 2
    change(folder / "evaluation.json", before={"samples": samples})
    assert read_held_out([find_trained(folder)]).prompts["prompt"][:] == kept_out["prompt"][:]


def test_prompts_that_the_run_trained_on_are_not_scored_as_held_out(run, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    write_sums(file, 12)
    folder = on_file(run, tmp_path / "run", file, 4)
    kept_out = record_held_out(folder, file, 4)

    def prompts(*overrides):
        return read_held_out([find_trained(folder)], overrides).prompts["prompt"][:]

    assert prompts() == kept_out
    assert prompts("data.held_out=2") == kept_out[2:]
    assert main(["eval", str(folder), "--set", "data.held_out=6"]) == 2
    assert "2 of 6 prompts were not held out" in capsys.readouterr().err
    write_sums(file, 11)
    with pytest.raises(DataError, match="1 of 4 prompts were not held out"):
        prompts()


def test_prompts_with_images_are_refused_before_loading(run, tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "red.png")
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "What colour?", "image": "red.png"}\n' * 8)
    folder = on_file(run, tmp_path / "run", file, 4)
    with pytest.raises(DataError, match="images, and completions of such prompts"):
        read_held_out([find_trained(folder)])


def test_rewards_fail_by_the_rule_of_the_run_without_the_time_limit_of_a_batch(run, tmp_path):
    folder = with_settings(run, tmp_path / "run", "trainer.reward_timeout_seconds=9")
    found = read_held_out([find_trained(folder)], "trainer.on_reward_error=skip")
    rewards = found.rewards(found.job.tokenizer)
    assert [(one.func.on_error, one.func.timeout) for one in rewards] == [("skip", None)] * 2


def test_the_context_length_may_be_that_of_a_text_config_inside(monkeypatch):
    monkeypatch.setattr("rloo_kit.evaluation.held_out.quantile_of_lengths", lambda *_: 50)
    args = SimpleNamespace(chat_template_kwargs={}, max_completion_length=50)
    held_out = HeldOut(SimpleNamespace(args=args, tool_loop=None), [], "prompts", None, None)
    shape = AutoConfig.for_model("gemma3", text_config={"max_position_embeddings": 77})
    base = LoadedBase(SimpleNamespace(config=shape), None)
    with pytest.raises(DataError, match="context length of the model is 77"):
        held_out.settings(base, []).__enter__()


def test_prompts_may_be_longer_than_those_of_the_run(run):
    trained = find_trained(run)
    one = load_base(trained)
    if notes_of(one.model).backend != "unsloth":
        pytest.skip("only Unsloth cuts prompts")
    longest = one.model.config.max_position_embeddings
    assert trained.model.max_seq_length < longest
    limits = [vars(module).get("max_seq_length") for module in one.model.modules()]
    assert {limit for limit in limits if limit} == {longest}


def test_all_rows_share_the_reward_that_says_right_or_wrong():
    def evaluation(*scores):
        samples = [{"prompt": "", "completion": "", "rewards": {"a": s, "b": 1.0}} for s in scores]
        return Evaluation({"a": 0.5, "b": 1.0}, len(scores), 1.0, 0.0, samples)

    rows = [Row("x", evaluation(0.0, 0.0), 1.0), Row("y", evaluation(0.0, 0.5), 1.0)]
    assert [row.evaluation.correct_by for row in rows] == ["a", "b"]
    assert [row.evaluation.correct_by for row in judge_alike(rows)] == ["b", "b"]


# --- who samples ----------------------------------------------------------------------------------


def refused(*_, **__):
    raise GenerationError("vLLM cannot start (no room): lower something")


FEW = {"num_prompts": 4, "num_samples": 0}


@pytest.mark.long
def test_engine_that_was_asked_for_and_does_not_start_ends_the_evaluation(run, monkeypatch):
    monkeypatch.setattr("rloo_kit.sampling.choice._in_process", refused)
    monkeypatch.setattr("rloo_kit.sampling.choice.why_not_vllm", lambda: None)
    found = rk.evaluate_models([run], output=run.parent / "here", say=str, **FEW)
    assert {row.sampler for row in found.rows} == {"transformers"}
    for name in ("generation: vllm", "use_vllm: true"):
        how = f"trainer={{{name}, max_completion_length: 48}}"
        with pytest.raises(GenerationError, match="no room"):
            rk.evaluate_models([run], overrides=[how], say=str, **FEW)


def test_models_vllm_cannot_sample_are_refused_before_loading(run, monkeypatch):
    monkeypatch.setattr("rloo_kit.sampling.choice.why_not_vllm", lambda: None)
    monkeypatch.setattr("rloo_kit.evaluation.table.load_base", refused)
    by_vllm = ["trainer.generation=vllm"]
    with pytest.raises(GenerationError, match="tiny-thinker has no adapter"):
        rk.evaluate_models([run, "tiny-thinker"], overrides=by_vllm, say=str, **FEW)
    strange = shutil.copytree(run / "adapter", run.parent / "strange")
    change(strange / "adapter_config.json", use_dora=True)
    with pytest.raises(GenerationError, match="use_dora"):
        rk.evaluate_models([run, strange], overrides=by_vllm, say=str, **FEW)


def test_missing_vllm_ends_the_command(run, capsys, monkeypatch):
    monkeypatch.setattr("rloo_kit.sampling.choice.why_not_vllm", lambda: "vLLM is not here")
    assert main(["eval", str(run), "--vllm"]) == 2
    assert "vLLM is not here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("trained", "wanted"),
    [("generation: transformers", "transformers"), ("use_vllm: true", "auto"), ("{}", "auto")],
)
def test_another_engine_may_evaluate_than_trained(trained, wanted, tmp_path):
    for given in ({}, {"generation": "transformers"}, {"generation": "vllm"}):
        args = rk.LeaveOneOutConfig(str(tmp_path), **yaml.safe_load(trained) | given)
        choose_engine(args, given)
        assert requested_engine(args) == given.get("generation", wanted)


def test_rows_of_two_samplers_are_not_compared(table):
    rows = [
        replace(row, sampler="vLLM" if number else "transformers")
        for number, row in enumerate(table.rows)
    ]
    assert len(list(compare(table.rows))) > len(list(compare(rows)))


def test_one_adapter_is_active_at_a_time_or_none(run, tmp_path, base):
    copies = (shutil.copytree(run / "adapter", tmp_path / name) for name in ("one", "two"))
    first, second = map(find_trained, copies)
    base.load(first)
    base.load(second)
    names = [(first, "default"), (first.without_adapter(), None), (second, "adapter-1")]
    for trained, name in (*names, names[0]):
        with base.using(trained) as model:
            assert active_adapter(model) == name


def test_models_own_repetition_penalty_is_not_used(base):
    def texts(**sampling):
        how = {"temperature": 0, "sampling": sampling, "max_completion_length": 48}
        found = rk.evaluate(base.model, base.tokenizer, held_out_sums(2), [], **how)
        return [sample["completion"] for sample in found.samples]

    plain = texts()
    assert texts(repetition_penalty=30.0) != plain
    base.model.generation_config.repetition_penalty = 30.0
    assert texts() == plain


def test_generation_kwargs_of_the_run_apply_to_its_evaluation(run):
    def lengths(others):
        how = [f"trainer.generation_kwargs={{{others}}}"]
        few = {"num_prompts": 2, "num_samples": 2, "output": run.parent / "here", "say": str}
        rows = rk.evaluate_models([run], overrides=how, **few).rows
        assert len(rows) == 4  # greedy and sampled, with and without the adapter
        return [sample["tokens"] for row in rows for sample in row.evaluation.samples]

    assert min(lengths("min_new_tokens: 40, top_k: 5, use_cache: true, do_sample: true")) >= 40
    with pytest.raises(ConfigError, match="were refused"):
        lengths("stop_strings: [a]")
    with pytest.raises(ConfigError, match="'min_tokens', which cannot be passed to generate"):
        lengths("min_tokens: 40")  # the name of vLLM


# --- judge ----------------------------------------------------------------------------------------


def test_a_rule_judges(run):
    (run.parent / "taste.py").write_text(
        "def long(completions, **_):\n    return [len(c[-1]['content']) for c in completions]\n"
    )
    said = []
    found = rk.judge_models(run, by=f"{run.parent}/taste.py:long", say=said.append)
    assert said[0] == f"running code of {run.parent.resolve()}/taste.py (long)"
    rows = [json.loads(line) for line in (run / "judge_samples.jsonl").read_text().splitlines()]
    won = [len(row["completion"]) > len(row["against"]) for row in rows]
    lost = [len(row["completion"]) < len(row["against"]) for row in rows]
    assert (found.wins, found.losses) == (sum(won), sum(lost))
    assert found.ties == PROMPTS - found.wins - found.losses
    assert found.rate == pytest.approx((found.wins + found.ties / 2) / PROMPTS)


def judged(run, folder, code, added=""):
    """How a class judges the run and a copy of its base with a text added to its chat template."""
    (folder / "taste.py").write_text(code)
    other = shutil.copytree(TINY_THINKER, folder / "other")
    with (other / "chat_template.jinja").open("a") as template:
        template.write(added)
    how = {"num_prompts": 2, "output": folder, "say": str}
    return rk.judge_models(run, against=other, by={"name": f"{folder}/taste.py:Taste"}, **how)


COUNTED = """
made = []

class Taste:
    def __init__(self):
        made.append(self)

    def __call__(self, completions, **_):
        return [float(len(made)) for c in completions]
"""


def test_one_judge_scores_the_models_of_every_base(run, tmp_path):
    assert judged(run, tmp_path, COUNTED).ties == 2  # each was scored by the first that was made


PAIRS = """
class Taste:
    mode = "pairwise"
    column = "reference"

    def __init__(self, template=""):
        self.template = template

    def bind(self, tokenizer):
        return Taste(tokenizer.chat_template)

    def answer_text(self, prompt, completion):
        return "another" if "{# another #}" in self.template else "the same"

    def __call__(self, completions, reference, **_):
        return [float(text == "another") for text in reference]
"""


def test_the_answers_of_a_model_are_read_by_its_own_template(run, tmp_path):
    found = judged(run, tmp_path, PAIRS, "{# another #}")
    assert found.wins == 2
    assert found.judge.endswith(':Taste"}, which compares the answers')


def answered(*texts, **rewards):
    """The evaluation of these texts, each the answer to another question."""
    samples = [
        {
            "prompt": [{"role": "user", "content": f"What is {n} + {n}?"}],
            "completion": text,
            "rewards": {name: values[n - 111] for name, values in rewards.items()},
        }
        for n, text in enumerate(texts, 111)
    ]
    return Evaluation({}, len(samples), 1.0, 0.0, samples)


def test_answer_beats_a_thought_that_was_cut_off(base):
    (judge,) = rk.load_rewards(
        [{"name": "judge", "model": "m", "mode": "pairwise", "base_url": "http://127.0.0.1:9/v1"}],
        tokenizer=base.tokenizer,
    )
    cut, whole = "1+1", "1+1=2 </think> 2"
    sides = answered(cut, whole, cut), answered(whole, cut, cut)
    assert verdicts(judge, *sides) == [0.0, 1.0, 0.5]


def test_of_a_penalty_the_lower_score_wins():
    (penalty,) = rk.load_rewards(["length:-1"])
    scores = ([1.0, 2.0, None], [2.0, 2.0, 1.0])
    sides = (answered("", "", "", length=values) for values in scores)
    assert verdicts(penalty, *sides) == [1.0, 0.5, None]


def test_a_judge_of_pairs_reads_the_answers_of_both():
    read = []

    class Taste:
        mode = "pairwise"
        column = "reference"

        def answer_text(self, prompt, completion):
            return completion.rpartition("</think>")[2]

        def __call__(self, completions, reference, **_):
            read.extend(
                (one[-1]["content"], other)
                for one, other in zip(completions, reference, strict=True)
            )
            return [1.0, None]

    sides = (answered(*(f"</think> {whose} {n}" for n in range(2))) for whose in ("mine", "theirs"))
    assert verdicts(*rk.load_rewards([Taste()]), *sides) == [1.0, None]
    assert read == [(f"</think> mine {n}", f" theirs {n}") for n in range(2)]


def test_an_async_reward_scores_where_a_loop_runs():
    async def slow(completions, **_):
        await asyncio.sleep(0)
        return [0.5] * len(completions)

    async def in_a_notebook():
        (reward,) = rk.load_rewards([slow])
        return call_reward(reward.func, reward_columns([{"prompt": "a"}], ["b"], [[1]]))

    assert asyncio.run(in_a_notebook()) == [0.5]


def test_a_win_rate_stays_between_none_and_all():
    won = difference([0.5] * 10, [1.0] * 10)
    shown = str(WinRate("a", "b", "judge", "greedy", "prompts", 10, 0, 0, 0, won))
    assert "100.0% [" in shown
    assert ", 100.0%]" in shown
