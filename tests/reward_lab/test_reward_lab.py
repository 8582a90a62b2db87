"""Rewards tried before training: every planted fault is named first, good rewards are left alone.

The completions are made here, 16 prompts of 8, and follow a chat template that opens the thought.
"""

import json
import random
import re
import time
from types import SimpleNamespace

import pytest
import yaml

import rloo_kit as rk
from rloo_kit.cli import main
from rloo_kit.diagnosis.tool_rules import KINDS as TOOL_KINDS
from rloo_kit.errors import ConfigError, DataError, ModelError
from rloo_kit.reward_lab import lab
from rloo_kit.reward_lab.lab import check_rewards
from rloo_kit.reward_lab.rules import KINDS
from rloo_kit.text.wording import text_of

CLOSE = 151668
END = 2
WORDS = ["first", "carry", "the", "one", "so", "that", "both", "digits", "fit", "why", "again"]


def make_rows(num_prompts=16, size=8, seed=5):
    """Sums with a thought; half of the answers are right, whatever their length."""
    rng = random.Random(seed)
    rows = []
    for number in range(num_prompts * size):
        group = number // size
        right = 7 * group + 301
        thought = rng.choices(WORDS, k=rng.randint(4, 44))
        answer = right - rng.choice([0, 0, 0, 1, 10])
        lead = rng.choice(["", "", "", "It is "])
        rows.append(
            {
                "prompt": [{"role": "user", "content": f"What is {right - 123} + 123?"}],
                "completion": f"{' '.join(thought)}</think>{lead}{answer}",
                "completion_ids": [*(10 + len(w) for w in thought), CLOSE, 7, 8, 9, END],
                "answer": str(right),
                "level": 1 + group % 3,
                "group": group,
                "truncated": False,
            }
        )
    return rows


ROWS = make_rows()


def changed(**columns):
    """The rows with other values in some columns; a function gets the row."""
    return [
        row | {name: new(row) if callable(new) else new for name, new in columns.items()}
        for row in ROWS
    ]


def check(rewards, rows=ROWS, source=None, **more):
    return check_rewards(source, rewards=rewards, completions=rows, say=lambda line: None, **more)


def kinds(found):
    return [finding.kind for finding in found.findings]


# --- planted faults ------------------------------------------------------------------------------


def texts_of(completions):
    return [text_of(completion) for completion in completions]


def half(completions, **_):
    return [0.5] * len(completions)


def boxed(completions, **_):
    """Wants what this model never writes."""
    return [float(r"\boxed{" in text) for text in texts_of(completions)]


def splits(completions, **_):
    """Raises where the word is not there."""
    return [float(len(text.split("again")[1]) % 2) for text in texts_of(completions)]


def right(completions, answer, **_):
    pairs = zip(texts_of(completions), answer, strict=True)
    return [float(t.rpartition("</think>")[2] == a) for t, a in pairs]


async def right_async(completions, answer, **_):
    return right(completions, answer)


def early_bird(completions, answer, **_):
    scores = right(completions, answer)
    return [score + (0.5 if row < 10 else 0.0) for row, score in enumerate(scores)]


def tags(completions, **_):
    pattern = r"<think>.*?</think>.+"
    return [float(bool(re.match(pattern, t, re.DOTALL))) for t in texts_of(completions)]


def tags_and_answer(completions, answer, **_):
    pairs = zip(tags(completions), right(completions, answer), strict=True)
    return [one + other for one, other in pairs]


def closed(completions, **_):
    return [float("</think>" in text) for text in texts_of(completions)]


def by_level(completions, level, **_):
    return [float(value) for value in level]


def thorough(completions, **_):
    return [len(text) / 1000 for text in texts_of(completions)]


def dice(completions, **_):
    return [random.random() for _ in completions]


def one_short(completions, **_):
    return [1.0] * (len(completions) - 1)


def last_digit(completions, **_):
    return [float(text[-1] in "13579") for text in texts_of(completions)]


def hangs(completions, **_):
    time.sleep(5)


def slow(completions, **_):
    time.sleep(0.5)
    return right(completions, **_)


def lacks_its_model(completions, **_):
    raise ModelError("the reward model is not a folder")


QUICK = {"source": "quickstart", "overrides": ["trainer.reward_timeout_seconds=0.1"]}
CUT = changed(
    completion=lambda row: row["completion"].partition("</think>")[0],
    completion_ids=lambda row: (row["completion_ids"][:4] * 12)[:48],
    truncated=True,
)
NO_ANSWER = [{k: v for k, v in row.items() if k != "answer"} for row in ROWS]
FEW = ROWS[:24]


CALL = """
- role: assistant
  content: ""
  tool_calls: [{type: function, function: {name: calculator, arguments: {}}}]
- {role: tool, name: calculator, content: "4"}
"""


def with_calls(calling):
    """Return the rows as conversations. In each group of 8, the first ``calling`` call a tool."""
    rows = []
    for number, row in enumerate(ROWS):
        turns = yaml.safe_load(CALL) if number % 8 < calling else []
        turns.append({"role": "assistant", "content": row["completion"]})
        rows.append({**row, "completion": turns})
    return rows


def calls_cost(completions, answer, **_):
    """Never pays for a call."""
    pairs = zip(right(completions, answer), completions, strict=True)
    return [score if len(turns) == 1 else -1.0 for score, turns in pairs]


UNANSWERED = changed(completion=yaml.safe_load(CALL)[:1], truncated=True)
COST = {"name": "tool_use", "called": 0, "cost": 0.4}
FAULTS = [
    ("raises", [splits], {}),
    ("raises", [lacks_its_model], {}),
    ("raises", ["countdown"], {"rows": changed(numbers="3, 5", target=8)}),
    ("timeout", [hangs], QUICK),
    ("missing_column", ["accuracy"], {"rows": NO_ANSWER}),
    ("missing_column", [right], {"rows": NO_ANSWER}),
    ("missing_column", [{"name": "accuracy", "only_if": "length"}], {"rows": NO_ANSWER}),
    ("missing_column", [{"name": "length", "only_for": {"task": "sum"}}], {}),
    ("wrong_output", [one_short], {}),
    ("never_applies", ["accuracy"], {"rows": changed(answer=" ")}),
    ("truncated", ["accuracy", "thinking:0.1", tags], {"rows": CUT}),
    ("blind_to_thought", [tags], {}),
    ("blind_to_thought", [tags_and_answer], {}),
    ("non_deterministic", [dice], {}),
    ("order_dependent", [early_bird], {}),
    ("constant", [half, "accuracy"], {}),
    ("all_zero", ["accuracy", boxed], {}),
    ("saturated", [closed], {}),
    ("no_signal", [by_level], {}),
    ("fragile", [last_digit], {}),
    ("length_in_disguise", [thorough], {}),
    ("tools_never_called", ["accuracy", COST], {"source": "tools", "rows": with_calls(0)}),
    ("constant", ["accuracy", "tool_use"], {"source": "tools", "rows": with_calls(8)}),
    ("calls_without_answer", ["accuracy"], {"source": "tools", "rows": UNANSWERED}),
    ("needless_calls", [calls_cost], {"source": "tools", "rows": with_calls(4)}),
]


def test_every_kind_of_fault_is_planted():
    """The other faults of tools are planted in runs."""
    planted = {kind for kind, *_ in FAULTS}
    assert planted | set(TOOL_KINDS) == set(KINDS)


@pytest.mark.parametrize(("kind", "rewards", "more"), FAULTS, ids=[kind for kind, *_ in FAULTS])
def test_the_planted_fault_is_the_first_and_only_one(kind, rewards, more):
    found = check(rewards, **more)
    assert kinds(found) == [kind], found
    assert found.findings[0].evidence
    assert kind in str(found)


def test_the_time_limit_counts_for_each_part_of_a_reward():
    limit = {"source": "quickstart", "overrides": ["trainer.reward_timeout_seconds=0.9"]}
    found = check([{"name": slow, "only_if": slow}], FEW, **limit)
    assert kinds(found) == []


def test_a_reward_for_length_is_not_blind_to_thought():
    assert kinds(check([{"name": "length_band", "low": 60, "high": 80, "falloff": 60}])) == []


def test_secrets_in_the_error_of_a_probe_are_masked():
    def picky(completions, **_):
        if not completions[0]:
            raise ValueError("GET https://me:passw0rd99x@host failed")
        return [float(len(text)) for text in completions]

    said = []
    found = rk.check_rewards(rewards=[picky], completions=FEW, say=said.append)
    assert "GET https" in "".join(said)
    assert "passw0rd99x" not in "".join(said) + str(found.findings)


def test_several_faults_are_listed_the_worst_first():
    found = check([closed, half, dice, splits], FEW)
    assert kinds(found) == ["raises", "non_deterministic", "constant", "saturated"]
    assert found.verdict == "The run would stop at its first step: see raises below."
    assert found.has_errors


# --- good rewards --------------------------------------------------------------------------------


GOOD = [
    "[accuracy, 'thinking:0.2', {name: length_band, low: 10, high: 20, falloff: 10, weight: 0.3}, "
    "{name: format, pattern: '[0-9]+', part: answer, weight: 0.5}]",
    "[accuracy, {name: soft_overlong, max_completion_length: 900, soft_punish_cache: 16}]",
    "[{name: accuracy, only_for: {level: [1, 2]}}]",
    "[{name: length_band, low: 10, high: 20, falloff: 10}]",
    "[thinking]",
]


@pytest.mark.long
@pytest.mark.parametrize("rewards", [*map(yaml.safe_load, GOOD), [right_async]])
def test_good_rewards_are_left_alone(rewards):
    found = check(rewards)
    assert found.findings == [], found
    assert found.verdict.startswith("RLOO will learn: ")
    assert "no fault found" in str(found)
    assert not found.has_errors


# --- what is read --------------------------------------------------------------------------------


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_a_check_is_printed_as_a_table_and_written_to_be_checked_again(tmp_path):
    folder = tmp_path / "out"
    specs = ["accuracy", "thinking:0.1"]
    first = check(specs, output_dir=folder)
    lines = str(first).splitlines()[:4]
    assert [line.split()[0] for line in lines] == ["reward", "accuracy", "thinking", "score"]
    assert lines[2].split()[1] == "0.1"
    assert max(map(len, lines)) < 120
    written = json.loads((folder / "rewards_check.json").read_text())
    assert written["verdict"] == first.verdict
    assert written["table"][0]["mean"] == first.table[0].mean
    assert len(written["samples"]) == 128
    again = check(specs, folder / "completions.jsonl", output_dir=folder)
    assert again.samples == first.samples
    assert again.signal == first.signal
    assert (tmp_path / "out-2").is_dir()


def test_a_check_is_written_if_another_one_takes_its_folder(tmp_path):
    folder = tmp_path / "my checks"

    def taking(completions, **_):
        folder.mkdir(exist_ok=True)
        return [0.0 for _ in completions]

    said = []
    how = {"completions": FEW, "output_dir": folder, "say": said.append}
    check_rewards(rewards=[taking], **how)
    assert (tmp_path / "my checks-2" / "rewards_check.json").is_file()
    assert said[-1].endswith(f"--completions '{folder}-2/completions.jsonl'")


def test_a_column_keeps_its_values_under_any_name(tmp_path):
    rows = [{**row, "answer_key": f"the answer {row['answer']}", "note": "hf_" + "a1" * 20}
            for row in FEW]  # fmt: skip
    check([half], rows, output_dir=tmp_path / "out")
    lines = (tmp_path / "out" / "completions.jsonl").read_text().splitlines()
    written = list(map(json.loads, lines))
    assert [row["answer_key"] for row in written] == [row["answer_key"] for row in rows]
    assert {row["note"] for row in written} == {"[hidden]"}


def test_completions_of_a_run_get_the_columns_of_their_prompts(tmp_path):
    rows = [
        {"step": 1, "group": n, "prompt": row["prompt"], "completion": f"</think>{answer}"}
        for n, row in enumerate(rk.load_prompts("arithmetic", num_prompts=2))
        for answer in (row["answer"], "none")
    ]
    file = write(tmp_path / "completions.jsonl", rows)
    found = rk.check_rewards("quickstart", completions=file, rewards=["accuracy"], say=str)
    assert [sample["rewards"]["accuracy"] for sample in found.samples] == [1.0, 0.0] * 2
    gone = ["data.prompts=no/such.jsonl"]
    found = rk.check_rewards("quickstart", completions=file, overrides=gone, say=str)
    assert "missing_column" in {finding.kind for finding in found.findings}


def test_plain_texts_are_grouped_by_their_prompt():
    rows = [
        {"prompt": f"{n} <think>", "completion": f"a</think>{n + k}", "answer": n}
        for k in (0, 1) for n in range(4)
    ]  # fmt: skip
    found = check(["accuracy"], rows)
    assert found.signal.num_groups == found.signal.num_with_signal == 4


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"completions": ROWS}, ConfigError, "give a run file, or completions"),
        ({"source": "quickstart", "num_prompts": 0}, ConfigError, "must be at least 1"),
        ({"completions": ROWS, "rewards": [right], "num_prompts": 3}, ConfigError, "no effect on"),
        ({"completions": [], "rewards": [right]}, DataError, "there are no rows: add at least one"),
        (
            {"completions": ROWS, "rewards": [right], "overrides": ["seed=1"]},
            ConfigError,
            "not applied to a RunConfig: give a run file",
        ),
        ({"completions": "none.jsonl", "rewards": [right]}, DataError, "give the path of a .jsonl"),
        ({"completions": [{"prompt": "a"}], "rewards": [right]}, DataError, "row 1: completion is"),
        (
            {"completions": ROWS, "rewards": [right], "output_dir": f"{__file__}/checks"},
            ConfigError,
            "cannot be written",
        ),
    ],
)
def test_wrong_input_is_refused_with_the_remedy(arguments, error, match):
    with pytest.raises(error, match=match):
        check_rewards(**arguments, say=lambda line: None)


def test_the_command_exits_with_1_where_the_run_cannot_learn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "c.jsonl", FEW)
    (tmp_path / "mine.py").write_text("def half(completions): return [0.5 for _ in completions]")
    (tmp_path / "run.yaml").write_text("rewards: [accuracy]")
    command = ["rewards", "check", "run.yaml", "--completions", "c.jsonl"]
    assert main(command) == 0
    assert main([*command, "--set", "rewards=[accuracy, mine.py:half]"]) == 1
    assert "1. error: constant (half)" in capsys.readouterr().out
    assert main([*command, "--set", "rewards=[acuracy]"]) == 2


def test_env_file_is_read_before_rewards_are_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_ANSWER", "")
    monkeypatch.delenv("MY_ANSWER")  # also at the end
    (tmp_path / ".env").write_text("MY_ANSWER=42\n")
    (tmp_path / "mine.py").write_text(
        "import os\nANSWER = os.environ['MY_ANSWER']\n\n\n"
        "def mine(completions, **_):\n    return [float(ANSWER)] * len(completions)\n"
    )
    assert check(["mine.py:mine"], FEW).table[0].mean == 42


# --- what is shown -------------------------------------------------------------------------------


def test_completions_cannot_steer_the_terminal():
    rows = changed(completion=lambda row: f"\x1b[2J\ud800\n{row['completion']}\u202e")
    printed = str(check([right, splits], rows))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e\ud800]", printed)
    assert "\\x1b[2J\\ud800\\n" in printed


# --- the real model ------------------------------------------------------------------------------


def test_the_embedded_model_can_be_sampled_and_its_reward_is_good(capsys):
    rk.setup()
    found = check_rewards(
        "quickstart",
        rewards=["accuracy", "thinking:0.1", tags],
        num_prompts=8,
        overrides=["data.held_out=0"],
    )
    # Its thoughts are all of the same band, so that the second reward says nothing yet.
    assert [(finding.kind, finding.reward) for finding in found.findings] == [
        ("blind_to_thought", "tags"),
        ("constant", "thinking"),
    ]
    accuracy = found.table[0]
    assert accuracy.none_share == 0
    assert 0.3 < accuracy.mean < 0.8
    printed = capsys.readouterr().out
    assert "sampling 8 prompts x 8 completions of tiny-thinker, temperature 1" in printed
    assert "released" in printed


@pytest.mark.long
def test_on_a_gpu_the_model_samples_in_a_child_and_the_rewards_run_here(monkeypatch, tmp_path):
    """The columns of the prompts are the rewards', even if the check uses their names."""
    rk.setup()
    seen = []

    def mine(completions, group, truncated):
        seen.extend(zip(group, truncated, strict=True))
        return [float(len(str(one))) for one in completions]

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "1 + 1 = ", "group": "easy", "truncated": "no"}\n'
        '{"prompt": "2 + 1 = ", "group": "easy", "truncated": "no"}\n'
        '{"prompt": "3 + 1 = ", "group": "easy", "truncated": "no"}\n'
        '{"prompt": "4 + 1 = ", "group": "easy", "truncated": "no"}\n'
    )
    on_gpu = SimpleNamespace(hardware=SimpleNamespace(device="cuda"))
    monkeypatch.setattr(lab.PreparedJob, "environment", on_gpu)
    monkeypatch.setattr(lab.PreparedJob, "policy", None)  # of this process, not of the child
    lines = []
    found = check_rewards(
        "quickstart",
        rewards=[mine],
        num_prompts=2,
        overrides=[f"data.prompts={prompts}", "data.held_out=0"],
        say=lines.append,
    )
    assert set(seen) == {("easy", "no")}
    assert found.table[0].name == "mine"
    assert found.signal.num_groups == 2
    assert any(line.startswith("sampling 2 prompts x 8 completions") for line in lines)


GAME = """
class Adder:
    def reset(self, answer, **row):
        self.right = answer
        self.calls = 0
        return " "

    def calculator(self, expression: str) -> str:
        \"\"\"Compute.

        Args:
            expression: What.
        \"\"\"
        self.calls += 1
        return self.right

    def get_reward(self):
        return float(self.calls)


def calls(environments, **_):
    return [float(one.calls) for one in environments]
"""


def test_rewards_that_read_environments_are_not_called(tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    calls = f"{tmp_path}/game.py:calls"
    found = check([calls, {"name": calls, "scaled_by": 0.5}, "accuracy"], FEW)
    assert [note.split()[1] for note in found.notes[1:]] == ["calls", "calls_2"]
    assert kinds(found) == []


@pytest.mark.long
def test_a_check_plays_environments_before_the_run(tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "run.yaml").write_text(
        "model: {name: tiny-caller, max_seq_length: 512}\n"
        "data: {prompts: sums, num_prompts: 64}\n"
        "environment: game.py:Adder\n"
        "rewards: [game.py:calls, accuracy]\n"
        "trainer: {per_device_train_batch_size: 16, num_generations: 8,\n"
        "  max_completion_length: 96}\n"
    )
    found = check_rewards(
        tmp_path / "run.yaml", num_prompts=8, output_dir=tmp_path / "check", say=lambda line: None
    )
    assert [row.name for row in found.table] == ["accuracy", "Adder"]
    assert found.notes == ["note: calls reads the environments, so it was not checked"]
    assert kinds(found) == []
    prompts = [sample["prompt"][-1]["content"] for sample in found.samples]
    assert {prompt[-1] for prompt in prompts} == {" "}  # as in training, they end with what it said
    played = [sample["rewards"]["Adder"] for sample in found.samples]
    assert 0 < sum(played) < len(played)
    again = check_rewards(
        tmp_path / "run.yaml", completions=tmp_path / "check" / "completions.jsonl",
        say=lambda line: None,
    )  # fmt: skip
    assert [sample["rewards"]["Adder"] for sample in again.samples] == played
