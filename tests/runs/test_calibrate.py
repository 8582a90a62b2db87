"""calibrate: the level that is chosen, the run file that is written, what is refused."""

import json
import math
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import rloo_kit as rk
from rloo_kit.cli import main
from rloo_kit.config.run_file import make_run_config
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.runs import calibrate
from rloo_kit.runs.calibrate import Level, _by_level, _chosen, _free_file, _write_prompts
from rloo_kit.runs.precision import mismatch
from rloo_kit.runs.warm_up import read_examples

RUN = {
    "model": {"max_seq_length": 256},
    "data": {"prompts": "sums.jsonl", "held_out": 12},
    "trainer": {"max_steps": 1, "num_generations": 8, "max_completion_length": 48},
    "output_dir": "runs/sums",
}


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
    data = RUN["data"] | {"columns": {"prompt": "question"}}
    Path("run.yaml").write_text(yaml.safe_dump(RUN | {"data": data}))


@pytest.mark.long
def test_the_level_that_is_sometimes_solved_is_written_and_trains(capsys):
    write_run()
    before = Path("run.yaml").read_bytes()
    assert main(["calibrate", "run.yaml", "--num-prompts", "12", "--set", "seed=7"]) == 0
    printed = capsys.readouterr().out
    text = Path("run-calibrated.yaml").read_text()
    assert Path("run.yaml").read_bytes() == before
    solved = {line.split()[1]: line.split()[3] for line in text.splitlines()[2:5]}
    share = {level: int(value.rstrip("%")) for level, value in solved.items()}
    assert share["1"] > 80 > share["2"] > 20 > share["3"]
    assert text.splitlines()[3].removeprefix("# ") in printed

    made = rk.read_run_file("run-calibrated.yaml")
    assert (made.seed, made.output_dir, made.data.columns) == (7, "runs/sums", None)
    rows = [json.loads(line) for line in Path(made.data.prompts).read_text().splitlines()]
    assert {row["level"] for row in rows} == {2}
    assert made.data.held_out == 4  # of the twelve that were held out before
    source = [json.loads(line)["question"] for line in Path("sums.jsonl").read_text().splitlines()]
    asked = [row["prompt"][-1]["content"] for row in rows]
    assert [text in source[-12:] for text in asked] == [False] * (len(rows) - 4) + [True] * 4
    # of the twenty prompts of the level 16 are to train on, and 12 of them were sampled
    assert 4 + 2 <= len(rows) - 4 <= 4 + 12
    sampled = Path("run-calibrated-completions.jsonl").read_text().splitlines()
    assert len(sampled) == 3 * 12 * 8
    best = read_examples("run-calibrated-completions.jsonl")
    assert {row["score"] for row in best} == {1.0}
    answers = {row["prompt"][-1]["content"]: row["answer"] for row in rows}
    asked = [row for row in best if row["prompt"][-1]["content"] in answers]
    assert asked
    for row in asked:
        assert row["completion"].endswith(answers[row["prompt"][-1]["content"]])
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
    shipped = rk.read_run_file("quickstart")
    assert made.data.level == 1
    assert made.trainer == shipped.trainer
    assert made.data.prompts == "arithmetic"


def test_written_prompts_need_no_setting_of_their_source(tmp_path):
    row = {"prompt": "1 + 1"}
    written = _write_prompts(tmp_path / "level.jsonl", [row], [row])
    assert {name: value for name, value in written.items() if value is not None} == {
        "prompts": "level.jsonl", "split": "train", "held_out": 1
    }  # fmt: skip
    assert {"config", "max_prompt_quantile", "num_prompts", "level"} <= set(written)


@pytest.mark.long
def test_prompts_that_are_never_solved_write_nothing(capsys):
    write_run(levels=[3], num=8)
    assert main(["calibrate", "run.yaml", "--num-prompts", "4", "--set", "data.held_out=2"]) == 2
    said = capsys.readouterr().err
    assert "use easier prompts" in said
    assert sorted(path.name for path in Path().iterdir()) == ["run.yaml", "sums.jsonl"]


def level(name, solved, signal):
    return Level(name, 10, solved, signal, [{}] * round(10 * signal))


def test_most_signal_in_range_is_chosen():
    levels = [level(1, 0.85, 0.9), level(2, 0.7, 0.3), level(3, 0.3, 0.6), level(4, 0.1, 0.7)]
    assert _chosen(levels).level == 3


@pytest.mark.parametrize(
    ("levels", "remedy"),
    [
        ([level(1, 0.9, 0.2), level(2, 1.0, 0)], "use harder prompts"),
        ([level(1, 0.1, 0.2), level(2, 0, 0)], "use easier prompts"),
        ([level(1, 0.9, 0.2), level(2, 0, 0)], "use other prompts"),
        ([level(None, 0.5, 0)], "the same score: raise --num-generations"),
    ],
)
def test_no_level_in_range_says_what_to_take(levels, remedy):
    with pytest.raises(DataError, match=remedy):
        _chosen(levels)


def test_prompts_without_a_score_do_not_count():
    rows = [{"level": "a", "n": n} for n in range(4)] + [{"level": "b"}]
    scores = [[1.0, 1.0], [0.0, None], [0.0, 1.0], [None, None], [None, None]]
    [one] = _by_level(rows, scores, "accuracy")
    assert (one.num_prompts, one.solved) == (3, pytest.approx(0.5))
    assert (one.signal, [row["n"] for row in one.with_signal]) == (pytest.approx(1 / 3), [2])


@pytest.mark.parametrize(
    ("scores", "what"),
    [
        ([[-1.0, 1.0]], r"its scores are not in \[0, 1\]"),
        ([[0.0, 2.0]], r"its scores are not in \[0, 1\]"),
        ([[None, None]], "it scored no completion"),
    ],
)
def test_a_reward_that_is_no_share_is_refused(scores, what):
    with pytest.raises(ConfigError, match=rf"reward length .* but {what}: rescale it with"):
        _by_level([{}], scores, "length")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-prompts", "0"], "num_prompts is 0"),
        (["--num-generations", "1"], "num_generations is 1"),
        (["--output", "new.txt"], "'new.txt'"),
        (["--output", "none/new.yaml"], "'none/new.yaml'"),
        (["--output", "old.yaml"], "'old.yaml'"),
        (["--output", "prompts.yaml"], "'prompts.yaml'"),
    ],
)
def test_wrong_options_are_refused_before_anything_loads(options, message, capsys):
    for name in ("old.yaml", "prompts.jsonl"):
        Path(name).write_text("kept")
    assert main(["calibrate", "quickstart", *options]) == 2
    assert message in capsys.readouterr().err
    assert Path("old.yaml").read_text() == Path("prompts.jsonl").read_text() == "kept"


@pytest.mark.parametrize(
    ("source", "name"),
    [("qwen3-0.6b-8gb", "qwen3-0.6b-8gb"), ("quickstart", "quickstart"), ("runs/v1.2", "v1.2")],
)
def test_the_new_file_has_the_whole_name(source, name):
    assert _free_file(source, None) == Path(f"{name}-calibrated.yaml")


@pytest.mark.long
def test_the_judge_is_the_reward_of_the_largest_weight(capsys):
    write_run(levels=[2], num=8)
    weights = ["--set", "rewards=[length, accuracy]", "--set", "trainer.reward_weights=[0.1, 1.0]"]
    few = ["--num-prompts", "4", "--num-generations", "4", "--set", "data.held_out=2"]
    main(["calibrate", "run.yaml", *few, *weights])  # 2 where four prompts are all alike
    printed = capsys.readouterr()
    assert "largest weight" not in printed.err
    assert "level     prompts  solved" in printed.out


@pytest.mark.long
def test_the_precision_with_the_smaller_difference_is_written():
    write_run(levels=[2])
    # Unsloth computes in bf16 on a CPU, and this process has it
    command = [sys.executable, "-m", "rloo_kit", "calibrate", "run.yaml", "--precision"]
    done = subprocess.run(
        [*command, "--num-prompts", "12", "--set", "model.backend=transformers"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    said = re.search(r"bf16 (\S+), fp16 (\S+); trainer.(\S+): true", done.stdout)
    assert 0 <= float(said[2]) < float(said[1]) < 0.2
    assert said[3] == "fp16"
    made = rk.read_run_file("run-calibrated.yaml")
    assert made.trainer["fp16"] is True
    assert "bf16" not in made.trainer


@pytest.mark.long
def test_a_precision_that_cannot_be_had_is_said(capsys):
    write_run(levels=[2])
    assert main(["calibrate", "run.yaml", "--num-prompts", "12", "--precision"]) == 2
    assert "set model.backend: transformers" in capsys.readouterr().err


@pytest.mark.long
def test_on_a_gpu_each_precision_is_measured_in_a_process_of_its_own(monkeypatch):
    write_run(levels=[2])
    config = make_run_config(rk.read_run_file("run.yaml").as_dict(), ["model.backend=transformers"])
    card = SimpleNamespace(hardware=SimpleNamespace(device="cuda"))
    monkeypatch.setattr(calibrate, "setup", lambda backend: card)
    measured = []

    def in_child(function, args, say):
        function, args = pickle.loads(pickle.dumps((function, args)))
        assert function is mismatch
        measured.append(args[-1])
        return {"bf16": math.nan, "fp16": 0.01}[args[-1]]

    monkeypatch.setattr(calibrate, "call_in_child", in_child)
    rows = [*rk.load_prompts("arithmetic", num_prompts=2)]
    made, line = calibrate._in_best_precision(config, Path(), rows, print)
    assert measured == ["bf16", "fp16"]
    assert made.trainer["fp16"] is True
    assert "bf16" not in made.trainer
    assert line.endswith("bf16 nan, fp16 0.01000; trainer.fp16: true")
