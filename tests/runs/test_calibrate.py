"""calibrate: the level that is chosen, the run file that is written, what is refused."""

import json
import math
import pickle
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import rloo_kit as rk
from rloo_kit.cli import main
from rloo_kit.config.run_file import DataSection, make_run_config
from rloo_kit.data.hub_tasks import SYSTEM
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.job import system_message
from rloo_kit.models.adapters import EMBEDDED
from rloo_kit.runs import calibrate
from rloo_kit.runs.calibrate import Level, _by_level, _chosen, _drawn, _free_files
from rloo_kit.runs.precision import job_in, mismatch
from rloo_kit.runs.warm_up import read_examples

RUN = """
model: {max_seq_length: 256}
data: {prompts: sums.jsonl, num_prompts: 60, held_out: 12, columns: {prompt: question},
  max_prompt_quantile: 0.999}
trainer: {max_steps: 1, num_generations: 8, max_completion_length: 48}
output_dir: runs/sums
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def without_carry(rng):
    pairs = [(x, rng.randint(1, 9 - x)) for x in (rng.randint(1, 8) for _ in range(3))]
    return [int("".join(str(pair[one]) for pair in pairs)) for one in (0, 1)]


def write_run(levels=(1, 2, 3), num=20):
    """Sums without carry, of two and of three numbers: the model nearly always, often, never."""
    rng = random.Random(3)
    make = {
        1: lambda: without_carry(rng),
        2: lambda: [rng.randint(100, 999) for _ in range(2)],
        3: lambda: [rng.randint(100, 999) for _ in range(3)],
    }
    rows = []
    for _ in range(num):
        for level in levels:
            terms = make[level]()
            text = " + ".join(map(str, terms))
            row = {"question": f"What is {text}?", "answer": str(sum(terms)), "level": level}
            rows.append(json.dumps(row))
    Path("sums.jsonl").write_text("\n".join(rows))
    Path("run.yaml").write_text(RUN)


@pytest.mark.long
def test_the_level_that_is_sometimes_solved_is_written_and_trains(capsys):
    write_run()
    assert main(["calibrate", "run.yaml", "--num-prompts", "12", "--set", "seed=7"]) == 0
    printed = capsys.readouterr().out
    text = Path("run-calibrated.yaml").read_text()
    assert Path("run.yaml").read_text() == RUN
    solved = dict(re.findall(r"# (\d) +\d+ +(\d+)%", text))
    share = {level: int(value) for level, value in solved.items()}
    assert share["1"] > 80 > share["2"] > 20 > share["3"]
    assert text.splitlines()[3].removeprefix("# ") in printed

    made = rk.read_run_file("run-calibrated.yaml")
    assert (made.seed, made.output_dir) == (7, "runs/sums")
    rows = [json.loads(line) for line in Path(made.data.prompts).read_text().splitlines()]
    assert {row["level"] for row in rows} == {2}
    # of the twelve that were held out before; all else of data is used up
    assert made.data == DataSection(prompts=made.data.prompts, held_out=4)
    source = [json.loads(line)["question"] for line in Path("sums.jsonl").read_text().splitlines()]
    answers = {row["prompt"][-1]["content"]: row["answer"] for row in rows}
    of_held_out = [text in source[-12:] for text in answers]
    assert of_held_out == [False] * (len(rows) - 4) + [True] * 4
    # of the twenty prompts of the level 16 are to train on, and 12 of them were sampled
    assert 4 + 2 <= len(rows) - 4 <= 4 + 12
    sampled = Path("run-calibrated-completions.jsonl").read_text().splitlines()
    assert len(sampled) == 3 * 12 * 8
    best = read_examples("run-calibrated-completions.jsonl")
    assert {row["score"] for row in best} == {1.0}
    asked = [(row["prompt"][-1]["content"], row["completion"]) for row in best]
    right = {text.endswith(answers[prompt]) for prompt, text in asked if prompt in answers}
    assert right == {True}
    assert rk.train("run-calibrated.yaml", say=lambda line: None).steps == 1

    assert main(["calibrate", "run.yaml"]) == 2
    assert "run-calibrated.yaml" in capsys.readouterr().err


@pytest.mark.long
def test_a_task_gets_its_level():
    file = rk.calibrate(
        "quickstart", overrides=["data.level=[1,2]"], num_prompts=8, say=lambda line: None
    )
    assert file == Path("quickstart-calibrated.yaml")
    made = rk.read_run_file(file)
    assert (made.data.prompts, made.data.level) == ("arithmetic", 1)
    assert made.trainer == rk.read_run_file("quickstart").trainer


@pytest.mark.long
def test_prompts_that_the_reward_of_the_largest_weight_never_rewards_write_nothing(capsys):
    write_run(levels=[3], num=8)
    settings = ["data.held_out=2", "rewards=[length, accuracy]", "trainer.reward_weights=[0.1, 1]"]
    words = [word for setting in settings for word in ("--set", setting)]
    assert main(["calibrate", "run.yaml", "--num-prompts", "4", *words]) == 2
    assert "use easier prompts" in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["run.yaml", "sums.jsonl"]


def level(name, solved, signal):
    return Level(name, 10, solved, signal, [{}] * round(10 * signal))


@pytest.mark.parametrize("levels", [[3, 20, 3, 20, 3], [["a"], ["b"], ["a"], ["b"], ["a"]]])
def test_prompts_of_each_level_are_drawn(levels):
    from datasets import Dataset

    prompts = Dataset.from_dict({"level": levels})
    drawn = _drawn(prompts, 2, 1)
    found = sorted(map(str, prompts.select(drawn)["level"]))
    assert found == sorted(map(str, levels))[:2] + sorted(map(str, levels))[-2:]
    assert len({*drawn}) == 4


def test_most_signal_in_range_is_chosen():
    levels = [level(1, 0.85, 0.9), level(2, 0.7, 0.3), level(3, 0.3, 0.6), level(4, 0.1, 0.7)]
    assert _chosen(levels).level == 3


@pytest.mark.parametrize(
    ("levels", "remedy"),
    [
        ([(0.9, 0.2), (1.0, 0)], "use harder prompts"),
        ([(0.1, 0.2), (0, 0)], "use easier prompts"),
        ([(0.9, 0.2), (0, 0)], "use other prompts"),
        ([(0.5, 0)], "the same score: raise --num-generations"),
    ],
)
def test_no_level_in_range_says_what_to_take(levels, remedy):
    with pytest.raises(DataError, match=remedy):
        _chosen([level(number, *shares) for number, shares in enumerate(levels)])


def test_prompts_without_a_score_do_not_count():
    rows = [{"level": "a", "n": n} for n in range(4)] + [{"level": "b"}]
    scores = [[1.0, 1.0], [0.0, None], [0.0, 1.0], [None, None], [None, None]]
    [one] = _by_level(rows, scores, "accuracy")
    assert (one.num_prompts, one.solved) == (3, pytest.approx(0.5))
    assert (one.signal, [row["n"] for row in one.with_signal]) == (pytest.approx(1 / 3), [2])


@pytest.mark.parametrize(
    ("score", "what"),
    [
        (-1.0, r"its scores are not in \[0, 1\]"),
        (2.0, r"its scores are not in \[0, 1\]"),
        (None, "it scored no completion"),
    ],
)
def test_a_reward_that_is_no_share_is_refused(score, what):
    with pytest.raises(ConfigError, match=rf"reward length .* but {what}: rescale it with"):
        _by_level([{}], [[score]], "length")


WRONG = {
    "--num-prompts 0": "num_prompts is 0",
    "--num-generations 1": "num_generations is 1",
    "--num-generations 0": "num_generations is 0",
    "--output new.txt": "'new.txt'",
    "--output none/new.yaml": "'none/new.yaml'",
    "--output old.yaml": "'old.yaml'",
    "--output prompts.yaml": "'prompts.yaml'",
}


@pytest.mark.parametrize("options", WRONG)
def test_wrong_options_are_refused_before_anything_loads(options, capsys):
    old = [Path("old.yaml"), Path("prompts.jsonl")]
    for file in old:
        file.write_text("kept")
    assert main(["calibrate", "quickstart", *options.split()]) == 2
    assert WRONG[options] in capsys.readouterr().err
    assert {file.read_text() for file in old} == {"kept"}


@pytest.mark.parametrize("source", ["qwen3-0.6b-8gb", "runs/v1.2"])
def test_the_new_file_has_the_whole_name(source):
    assert _free_files(source, None)[0] == Path(f"{Path(source).name}-calibrated.yaml")


# Unsloth computes in bf16 on a CPU, and this process has it
WITHOUT_UNSLOTH = """
import rloo_kit as rk
backend = ["model.backend=transformers"]
rk.calibrate("run.yaml", overrides=backend, num_prompts=8, precision=True)
completions = "run-calibrated-completions.jsonl"
rk.warm_up("run.yaml", completions, steps=1, output="made", overrides=backend)
"""


@pytest.mark.long
def test_without_unsloth_the_better_precision_is_written_and_a_warm_up_trains():
    write_run(levels=[2])
    command = [sys.executable, "-c", WITHOUT_UNSLOTH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = re.search(r"bf16 (\S+), fp16 (\S+); trainer.(\S+): true", done.stdout)
    found = {"bf16": float(said[1]), "fp16": float(said[2])}
    assert all(0 < value < 0.01 for value in found.values())
    assert said[3] == min(found, key=found.get)
    made = rk.read_run_file("run-calibrated.yaml")
    assert {name for name in found if made.trainer.get(name)} == {said[3]}
    written = {path.name for path in Path("made").iterdir()}
    assert {"adapter_model.safetensors", "tokenizer.json"} <= written


def test_a_precision_that_cannot_be_had_is_said_before_sampling(capsys, monkeypatch):
    write_run(levels=[2])
    monkeypatch.setattr(calibrate, "_tried", None)
    assert main(["calibrate", "run.yaml", "--num-prompts", "4", "--precision"]) == 2
    assert "set model.backend: transformers" in capsys.readouterr().err


@pytest.mark.long
def test_on_a_gpu_each_precision_is_measured_in_a_process_of_its_own(monkeypatch):
    config = make_run_config(yaml.safe_load(RUN), ["model.backend=transformers"])
    card = SimpleNamespace(hardware=SimpleNamespace(device="cuda"))
    monkeypatch.setattr(calibrate, "setup", lambda backend: card)
    measured = []

    def in_child(function, args, say):
        function, args = pickle.loads(pickle.dumps((function, args)))
        assert function is mismatch
        measured.append(args[-1])
        return {"bf16": math.nan, "fp16": 0.01}[args[-1]]

    monkeypatch.setattr(calibrate, "call_in_child", in_child)
    made, line = calibrate._in_best_precision(config, Path(), [{"prompt": "1 + 1"}], print)
    assert measured == ["bf16", "fp16"]
    assert made.trainer["fp16"] is True
    assert "bf16" not in made.trainer
    assert line.endswith("bf16 nan, fp16 1.0e-02; trainer.fp16: true")


@pytest.mark.parametrize(("given", "wanted"), [({"max_completion_length": 32}, 32), ({}, 64)])
def test_the_precision_is_measured_with_completions_that_fit_into_the_run(given, wanted):
    config = make_run_config({"trainer": given | {"step": "trl", "save_only_model": True}})
    args = job_in("bf16", config, Path()).args
    assert (args.max_completion_length, args.step) == (wanted, "auto")
    assert not args.save_only_model


@pytest.mark.long
def test_the_precision_is_measured_without_the_models_own_sampling_settings():
    shutil.copytree(EMBEDDED["tiny-thinker"], "model")
    file = Path("model/generation_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"no_repeat_ngram_size": 2}))
    config = make_run_config(
        {
            "model": {"name": "model", "max_seq_length": 128},
            "trainer": {
                "max_completion_length": 48, "partial_rollouts": True,
                "per_device_train_batch_size": 32, "rows_in_flight": 64,
            },
        }
    )  # fmt: skip
    rows = [*rk.load_prompts("arithmetic", num_prompts=8)]
    assert 0 < mismatch(config, Path(), rows, "bf16") < 0.02
    assert mismatch(config, Path(), rows[:1], "bf16") > 0


def test_a_calibrated_math_run_keeps_the_system_message(monkeypatch):
    Path("m.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    row = {"prompt": [{"role": "user", "content": "1 + 1?"}], "answer": "2"}
    one = Level(None, 1, 0.5, 1.0, [row])
    monkeypatch.setattr(calibrate, "_tried", lambda *_: ([one], [], [], []))
    config = make_run_config({"data": {"prompts": "gsm8k:m.jsonl", "held_out": 0}})
    assert system_message(rk.read_run_file(rk.calibrate(config, say=str)).data) == SYSTEM
