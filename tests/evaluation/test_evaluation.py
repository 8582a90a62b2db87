"""rloo-kit eval and judge: models on the same prompts, their intervals, whom a judge prefers."""

import asyncio
import json
import re
import shutil
from dataclasses import replace

import pytest
import yaml

import rloo_kit as rk
from rloo_kit.cli import main
from rloo_kit.config.engine_settings import requested_engine
from rloo_kit.config.run_file import DataSection
from rloo_kit.diagnosis.record import read_run
from rloo_kit.errors import (
    ConfigError,
    DataError,
    GenerationError,
    ModelError,
)
from rloo_kit.evaluation.evaluator import Evaluation
from rloo_kit.evaluation.held_out import choose_engine, read_held_out
from rloo_kit.evaluation.statistics import difference
from rloo_kit.evaluation.table import Row, compare, judge_alike
from rloo_kit.evaluation.trained import find_trained, load_base
from rloo_kit.evaluation.win_rate import WinRate, verdicts
from rloo_kit.job import held_out_judges
from rloo_kit.models.notes import notes_of
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.sampling.engine import active_adapter
from rloo_kit.scoring.contract import call_reward, reward_columns

PROMPTS = 16


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps, with several completions of each held-out prompt."""
    folder = tmp_path_factory.mktemp("evaluating") / "run"
    settings = {
        "output_dir": folder, "trainer.max_steps": 2, "data.num_prompts": 32,
        "data.held_out": PROMPTS, "trainer.per_device_train_batch_size": 32,
        "trainer.num_generations": 4, "data.held_out_samples": 4,
        "data.held_out_rewards": "[length]", "data.held_out_every": 1,
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    assert main(["quickstart", *words]) == 0
    return folder


@pytest.fixture(scope="module")
def table(run):
    """Of the run and a base of the same kind; a changed adapter makes a second model."""
    return rk.evaluate_models([run], say=str)


# --- during a run ---------------------------------------------------------------------------------


def test_a_run_reports_pass_and_intervals(run):
    found = json.loads((run / "evaluation.json").read_text())
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
        by_prompt = [
            [s["rewards"]["accuracy"] for s in one["samples"][at : at + 4]]
            for at in range(0, 4 * PROMPTS, 4)
        ]
        assert passed["4"] == pytest.approx(sum(map(any, by_prompt)) / PROMPTS)
        assert {s["prompt"][-1]["content"] for s in one["samples"][:4]} == {
            one["samples"][0]["prompt"][-1]["content"]
        }
    metrics = (run / "metrics.jsonl").read_text()
    assert "rewards/length" not in metrics


def test_chance_is_counted_in_prompts(run):
    """Completions of one prompt are alike: four of them are no four prompts."""
    found = {one.name: one for one in read_run(run).scored_twice}
    assert found["accuracy"].num == PROMPTS


def test_evaluation_reads_back_and_so_do_older_ones(run):
    found = json.loads((run / "evaluation.json").read_text())["before"]
    assert Evaluation.from_dict(found).as_dict() == found
    older = {k: found[k] for k in ("rewards", "num_prompts", "mean_length", "temperature")}
    samples = [{k: s[k] for k in ("prompt", "completion", "rewards")} for s in found["samples"]]
    assert Evaluation.from_dict({**older, "samples": samples}).thinking_length is None


def test_evaluate_takes_rewards_as_the_trainer_does():
    model, tokenizer = rk.load_model("tiny-thinker", max_seq_length=128)
    prompts = rk.load_prompts("arithmetic", num_prompts=2)

    def polite(completions, **_):
        return [0.5] * len(completions)

    found = rk.evaluate(model, tokenizer, prompts, ["length", polite], max_completion_length=4)
    assert found.rewards["polite"] == 0.5
    assert set(found.rewards) == {"length", "polite"}


def test_several_greedy_completions_are_refused(run):
    one = load_base(find_trained("tiny-thinker"))
    prompts = rk.load_prompts("arithmetic", split="held_out", num_prompts=2)
    with pytest.raises(ConfigError, match="all the same"):
        rk.evaluate(one.model, one.tokenizer, prompts, [], temperature=0, num_samples=2)


def test_judge_with_other_settings_than_the_reward_is_added():
    prompts = rk.load_prompts("arithmetic", split="held_out", num_prompts=2)
    paid = rk.load_rewards(["length", "accuracy"])

    def names(*specs):
        data = DataSection(prompts="arithmetic", held_out_rewards=list(specs))
        return [one.name for one in held_out_judges(paid, prompts, rk.load_rewards, data)]

    assert names() == ["accuracy", "length"]
    assert names("length", "accuracy") == ["accuracy", "length"]
    judge = {"name": "accuracy", "match": "number"}
    assert names(judge) == ["accuracy", "accuracy_held_out", "length"]
    assert names("repetition") == ["accuracy", "repetition", "length"]


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


def test_table_is_in_the_folder_and_the_report(run, table):
    written = json.loads((run / "eval.json").read_text())["evaluations"]
    assert [row["model"] for row in written[-1]["rows"]] == [row.model for row in table.rows]
    samples = (run / "eval_samples.jsonl").read_text().splitlines()
    assert len(samples) == 2 * PROMPTS * 5


@pytest.mark.long
def test_each_adapter_gives_its_own_answers(run, tmp_path, save_adapter):
    """The base, the run's adapter and another one, in any order: each gives its own answers."""
    spoiled = save_adapter(tmp_path / "spoiled", std=0.2)
    names = [str(spoiled), str(run), "tiny-thinker"]
    settings = {"num_samples": 0, "num_prompts": 8, "output": tmp_path / "out", "say": str}
    first = rk.evaluate_models(names, **settings)
    second = rk.evaluate_models(names[::-1], **settings)
    texts = [
        {row.model: [s["completion"] for s in row.evaluation.samples] for row in found.rows}
        for found in (first, second)
    ]
    assert texts[0] == texts[1]
    assert texts[0][names[0]] != texts[0][names[2]]
    assert first.rows[0].evaluation.rewards["accuracy"] < 0.2  # it was spoiled
    assert len(json.loads((tmp_path / "out" / "eval.json").read_text())["evaluations"]) == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["eval", "./nowhere/run"], "./nowhere/run"),
        (["eval", "tiny-thinker", "--samples", "0", "--no-greedy"], "num_samples is 0"),
        (["eval", "tiny-thinker", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["eval", "tiny-thinker", "--set", "data.held_out=0"], "data.held_out: 0"),
        (["judge", "tiny-thinker"], "--against"),
        (["eval", "tiny-thinker", "--num-prompts", "0"], "num-prompts is 0"),
        (["judge", "tiny-thinker", "--against", "x", "--batch-size", "-2"], "batch-size is -2"),
        (["eval", "tiny-thinker", "--set", "model.load_in_4bit=false"], "model.load_in_4bit"),
    ],
)
def test_bad_input_is_one_sentence(arguments, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert text in error
    assert len(error.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_adapter_says_so(tmp_path, run):
    (tmp_path / "run.yaml").write_text((run / "run.yaml").read_text())
    with pytest.raises(ConfigError, match="has no adapter yet"):
        find_trained(tmp_path)


def test_an_adapter_of_another_model_is_refused(run, tmp_path):
    one = load_base(find_trained("tiny-thinker"))
    other = tmp_path / "adapter"
    other.mkdir()
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"r": 3}))
    (other / "adapter_model.safetensors").write_bytes(
        (run / "adapter" / "adapter_model.safetensors").read_bytes()
    )
    with (
        pytest.raises(ModelError, match="cannot be put on its base"),
        one.using(find_trained(other)),
    ):
        pytest.fail("it answered")


@pytest.mark.long
def test_unfinished_run_is_its_newest_checkpoint(run, tmp_path):
    past = tmp_path / "run"
    shutil.copytree(run, past)
    assert find_trained(past).adapter == past / "adapter"
    main(["train", str(past), "--resume", "--set", "trainer.max_steps=3"])
    assert find_trained(past).adapter == past / "adapter"
    (past / "end.json").unlink()  # as while it goes, or where it was killed
    found = find_trained(past).adapter
    assert found.name == "checkpoint-3"


def test_hidden_values_are_not_read_as_settings(run, tmp_path):
    content = yaml.safe_load((run / "run.yaml").read_text())
    content["rewards"] = ["accuracy"]
    content["trainer"]["hub_token"] = "[hidden: hub_token]"
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    assert "hub_token" not in find_trained(tmp_path).config.trainer


@pytest.mark.parametrize(
    ("loaded", "name"),
    [
        ("unsloth/qwen3-4b-bnb-4bit", "unsloth/qwen3-4b-bnb-4bit"),
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"),
        ("/data/qwen3-4b", "Qwen/Qwen3-4B"),
        (None, "Qwen/Qwen3-4B"),
    ],
)
def test_the_base_is_the_one_that_unsloth_loaded_in_training(run, tmp_path, loaded, name):
    content = yaml.safe_load((run / "run.yaml").read_text())
    content["model"]["name"] = "Qwen/Qwen3-4B"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    shutil.copytree(run / "adapter", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"base_model_name_or_path": loaded}))
    found = find_trained(tmp_path)
    assert found.base == "Qwen/Qwen3-4B"  # for cards, and to merge in 16 bit
    assert found.model.name == found.without_adapter().model.name == name


def test_long_prompts_are_left_out_as_in_the_run(tmp_path):
    rows = [{"prompt": "What is 1 + 1?" + " please" * 40 * (n % 2)} for n in range(8)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["rewards=[length]", "data.max_prompt_tokens=60"]
    found = rk.evaluate_models(
        ["tiny-thinker"], prompts=file, overrides=settings, num_samples=0, say=str
    )
    assert found.rows[0].evaluation.num_prompts == 4


def test_prompts_that_the_run_trained_on_are_not_scored_as_held_out(run, tmp_path, capsys):
    def write(count):
        rows = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(count)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    file, folder = tmp_path / "prompts.jsonl", tmp_path / "run"
    write(12)
    shutil.copytree(run, folder)
    content = yaml.safe_load((folder / "run.yaml").read_text())
    content["data"] |= {"prompts": str(file), "held_out": 4, "num_prompts": None}
    (folder / "run.yaml").write_text(yaml.safe_dump(content))
    scores = json.loads((folder / "evaluation.json").read_text())
    kept_out = read_held_out([find_trained(folder)], prompts=file).prompts["prompt"][-4:]
    scores["before"]["samples"] = [{"prompt": prompt} for prompt in kept_out]
    (folder / "evaluation.json").write_text(json.dumps(scores))

    def prompts(*overrides):
        return read_held_out([find_trained(folder)], overrides).prompts["prompt"][:]

    assert prompts() == kept_out
    assert prompts("data.held_out=2") == kept_out[2:]
    assert main(["eval", str(folder), "--set", "data.held_out=6"]) == 2
    assert "2 of 6 held-out prompts were not held out" in capsys.readouterr().err
    write(11)
    with pytest.raises(DataError, match="1 of 4 held-out prompts"):
        prompts()


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
    whole = "trainer={generation: vllm, max_completion_length: 48}"
    by_trls_name = "trainer={use_vllm: true, max_completion_length: 48}"
    for how in ("trainer.generation=vllm", whole, by_trls_name):
        with pytest.raises(GenerationError, match="no room"):
            rk.evaluate_models([run], overrides=[how], say=str, **FEW)


def test_models_vllm_cannot_sample_are_refused_before_loading(run, monkeypatch):
    monkeypatch.setattr("rloo_kit.sampling.choice.why_not_vllm", lambda: None)
    monkeypatch.setattr("rloo_kit.evaluation.table.by_base", refused)
    by_vllm = ["trainer.generation=vllm"]
    with pytest.raises(GenerationError, match="tiny-thinker has no adapter"):
        rk.evaluate_models([run, "tiny-thinker"], overrides=by_vllm, say=str, **FEW)
    strange = run.parent / "strange"
    shutil.copytree(run / "adapter", strange, dirs_exist_ok=True)
    config = json.loads((strange / "adapter_config.json").read_text())
    (strange / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(GenerationError, match="use_dora"):
        rk.evaluate_models([run, strange], overrides=by_vllm, say=str, **FEW)


def test_missing_vllm_ends_the_command(run, capsys, monkeypatch):
    monkeypatch.setattr("rloo_kit.sampling.choice.why_not_vllm", lambda: "vLLM is not here")
    assert main(["eval", str(run), "--vllm"]) == 2
    assert "vLLM is not here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("trained", "wanted"),
    [
        ({"generation": "transformers"}, "transformers"),
        ({"use_vllm": True}, "auto"),
        ({"use_vllm": True, "vllm_mode": "server"}, "auto"),
        ({}, "auto"),
    ],
    ids=str,
)
def test_another_engine_may_evaluate_than_trained(trained, wanted, tmp_path):
    args = rk.LeaveOneOutConfig(str(tmp_path), **trained)
    choose_engine(args, {})
    assert requested_engine(args) == wanted
    for given in ("transformers", "vllm"):
        args = rk.LeaveOneOutConfig(str(tmp_path), **trained | {"generation": given})
        choose_engine(args, {"generation": given})
        assert requested_engine(args) == given


def test_rows_of_two_samplers_are_not_compared(table):
    rows = [
        replace(row, sampler="vLLM" if number else "transformers")
        for number, row in enumerate(table.rows)
    ]
    assert len(list(compare(table.rows))) > len(list(compare(rows)))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, save_adapter):
    """Two adapters that differ little from their base, and from each other."""
    folder = tmp_path_factory.mktemp("adapters")
    return [save_adapter(folder / f"adapter-{seed}", std=0.02, seed=seed) for seed in (1, 2)]


def test_one_adapter_is_active_at_a_time_or_none(adapters):
    first, second = map(find_trained, adapters)
    one = load_base(first)
    one.load(first)
    one.load(second)
    names = {first: "default", first.without_adapter(): None, second: "adapter-1"}
    for trained in (*names, first):
        with one.using(trained) as model:
            assert active_adapter(model) == names[trained]


def test_models_own_repetition_penalty_is_not_used(run):
    one = load_base(find_trained("tiny-thinker"))
    prompts = rk.load_prompts("arithmetic", split="held_out", num_prompts=4)

    def texts(**sampling):
        found = rk.evaluate(one.model, one.tokenizer, prompts, [], temperature=0, sampling=sampling)
        return [sample["completion"] for sample in found.samples]

    plain = texts()
    penalised = texts(repetition_penalty=30.0)
    assert plain != penalised
    one.model.generation_config.repetition_penalty = 30.0
    assert texts() == plain


# --- judge ----------------------------------------------------------------------------------------


def test_a_rule_judges(run):
    (run.parent / "taste.py").write_text(
        "def long(completions, **_):\n    return [len(c[-1]['content']) for c in completions]\n"
    )
    found = rk.judge_models(run, by=f"{run.parent}/taste.py:long", say=str)
    rows = [json.loads(line) for line in (run / "judge_samples.jsonl").read_text().splitlines()]
    won = [len(row["completion"]) > len(row["against"]) for row in rows]
    lost = [len(row["completion"]) < len(row["against"]) for row in rows]
    assert (found.wins, found.losses) == (sum(won), sum(lost))
    assert found.ties == PROMPTS - found.wins - found.losses
    assert found.rate == pytest.approx((found.wins + found.ties / 2) / PROMPTS)


def test_one_judge_scores_the_models_of_every_base(run, tmp_path):
    (tmp_path / "taste.py").write_text(
        "made = []\n\n"
        "class Long:\n"
        "    def __init__(self):\n"
        "        made.append(self)\n\n"
        "    def __call__(self, completions, **_):\n"
        "        return [float(len(made)) for c in completions]\n"
    )
    other = tmp_path / "other"
    shutil.copytree(TINY_THINKER, other)
    found = rk.judge_models(
        run,
        against=other,
        by={"name": f"{tmp_path}/taste.py:Long"},
        num_prompts=2,
        output=tmp_path,
        say=str,
    )
    assert found.ties == 2  # each was scored by the first that was made


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


def test_answer_beats_a_thought_that_was_cut_off():
    (judge,) = rk.load_rewards(
        [{"name": "judge", "model": "m", "mode": "pairwise", "base_url": "http://127.0.0.1:9/v1"}],
        tokenizer=load_base(find_trained("tiny-thinker")).tokenizer,
    )
    cut = "1+1"
    whole = "1+1=2 </think> 2"
    one = answered(cut, whole, cut)
    other = answered(whole, cut, cut)
    assert verdicts(judge, one, other) == [0.0, 1.0, 0.5]


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


def test_the_reward_of_a_task_judges_its_prompts():
    prompts = rk.load_prompts("arithmetic", split="held_out", num_prompts=2)

    def names(task, *paid):
        rewards = rk.load_rewards(paid)
        data = DataSection(prompts=task)
        found = held_out_judges(rewards, prompts, rk.load_rewards, data)
        return [(one.name, getattr(one.func.reward, "match", None)) for one in found]

    assert names("gsm8k:copy", "length") == [("accuracy", "number"), ("length", None)]
    assert names("gsm8k", "math") == [("math", None)]
    assert names("math500", {"name": "accuracy", "match": "number"})[0] == ("math", None)
    assert names("mine.jsonl", "length") == [("accuracy", "auto"), ("length", None)]


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
