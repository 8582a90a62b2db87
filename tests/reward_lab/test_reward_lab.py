"""Rewards tried before training: every planted fault is named first, good rewards are left alone.

The completions are made here, 16 prompts of 8, and follow a chat template that opens the thought.
"""

import asyncio
import json
import os
import random
import re
import time
from types import SimpleNamespace

import pytest

import rloo_kit as rk
from rloo_kit.cli import main
from rloo_kit.errors import ConfigError, DataError, ModelError, RewardLoadError
from rloo_kit.reward_lab import lab
from rloo_kit.reward_lab.lab import check_rewards
from rloo_kit.reward_lab.rules import KINDS

CLOSE = 151668
END = 2
WORDS = ["first", "carry", "the", "one", "so", "that", "both", "digits", "fit", "why", "again"]


def make_rows(num_prompts=16, size=8, seed=5):
    """Sums with a thought; half of the answers are right, whatever their length."""
    rng = random.Random(seed)
    rows = []
    for prompt in range(num_prompts):
        a = rng.randint(100, 999)
        b = rng.randint(100, 999)
        for _ in range(size):
            thought = [rng.choice(WORDS) for _ in range(rng.randint(4, 44))]
            wrong = rng.choice([0, 0, 0, 1, 10])
            lead = rng.choice(["", "", "", "It is "])
            rows.append(
                {
                    "prompt": [{"role": "user", "content": f"What is {a} + {b}?"}],
                    "completion": f"{' '.join(thought)}</think>{lead}{a + b - wrong}",
                    "completion_ids": [*(10 + len(w) for w in thought), CLOSE, 7, 8, 9, END],
                    "answer": str(a + b),
                    "level": 1 + prompt % 3,
                    "group": prompt,
                    "truncated": False,
                }
            )
    return rows


ROWS = make_rows()


def changed(**columns):
    """The rows with columns put in; a function gets the row, None takes the column out."""
    rows = []
    for row in ROWS:
        row = dict(row)
        for name, value in columns.items():
            row[name] = value(row) if callable(value) else value
            if value is None:
                del row[name]
        rows.append(row)
    return rows


def check(rewards, rows=ROWS, source=None, **more):
    return check_rewards(source, rewards=rewards, completions=rows, say=lambda line: None, **more)


def kinds(found):
    return [finding.kind for finding in found.findings]


# --- planted faults ------------------------------------------------------------------------------


def texts_of(completions):
    return [c if isinstance(c, str) else c[-1]["content"] for c in completions]


def half(completions, **_):
    return [0.5] * len(completions)


def boxed(completions, **_):
    """Wants what this model never writes."""
    return [float(r"\boxed{" in text) for text in texts_of(completions)]


def log_of_zero(completions, **_):
    return [float("nan") if len(t) % 5 == 0 else 1.0 for t in texts_of(completions)]


def splits(completions, **_):
    """Raises where the word is not there."""
    return [float(len(text.split("again")[1]) % 2) for text in texts_of(completions)]


def right(completions, answer, **_):
    pairs = zip(texts_of(completions), answer, strict=True)
    return [float(t.rpartition("</think>")[2] == a) for t, a in pairs]


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


def moody(completions, answer, **_):
    return [score + random.uniform(0, 0.2) for score in right(completions, answer)]


def one_short(completions, **_):
    return [1.0] * (len(completions) - 1)


def nothing(completions, **_):
    return [None] * len(completions)


def last_digit(completions, **_):
    return [float(text[-1] in "13579") for text in texts_of(completions)]


def hangs(completions, **_):
    time.sleep(5)


async def hangs_async(completions, **_):
    await asyncio.sleep(5)


QUICK = {"source": "quickstart", "overrides": ["trainer.reward_timeout_seconds=0.1"]}
CUT = changed(
    completion=lambda row: row["completion"].partition("</think>")[0],
    completion_ids=lambda row: (row["completion_ids"][:4] * 12)[:48],
    truncated=True,
)
NO_ANSWER = changed(answer=None)
BLANK_ANSWER = changed(answer=" ")
FEW = ROWS[:24]
SETTLED = changed(
    completion=lambda row: f"hm</think>{row['answer'] if row['group'] % 2 else 'no idea'}"
)
TOOLS = {"source": "tools"}


def trajectories(*results, when=lambda number: True, is_open=False):
    """Return rows in which some completions call a tool, once for each result."""
    call = [{"type": "function", "function": {"name": "calculator", "arguments": {}}}]
    rows = []
    for number, row in enumerate(ROWS):
        turns = [{"role": "assistant", "content": row["completion"]}]
        if when(number):
            for result in reversed(results):
                turns.insert(0, {"role": "tool", "name": "calculator", "content": result})
                turns.insert(0, {"role": "assistant", "content": "", "tool_calls": call})
            turns += [{"role": "assistant", "content": "", "tool_calls": call}] * is_open
        rows.append({**row, "completion": turns})
    return rows


def calls_cost(completions, answer, **_):
    """Never pays for a call."""
    pairs = zip(right(completions, answer), completions, strict=True)
    return [score if len(turns) == 1 else -1.0 for score, turns in pairs]


def worth_it(completions, answer, **_):
    """Pays for a call."""
    pairs = zip(right(completions, answer), completions, strict=True)
    return [score + 2.0 * (len(turns) > 1) for score, turns in pairs]


def is_even(number):
    return number % 2 == 0


FAULTS = {
    "raises": [([splits], ROWS)],
    "timeout": [([hangs], ROWS, QUICK), ([hangs_async], ROWS, QUICK)],
    "missing_column": [(["accuracy"], NO_ANSWER), ([right], NO_ANSWER)],
    "wrong_output": [([one_short], ROWS), ([log_of_zero], ROWS)],
    "never_applies": [(["accuracy"], BLANK_ANSWER)],
    "truncated": [(["accuracy"], CUT), (["accuracy", "thinking:0.1", tags], CUT)],
    "blind_to_thought": [([tags], ROWS), ([tags_and_answer], ROWS)],
    "non_deterministic": [([dice], ROWS), ([moody], ROWS)],
    "order_dependent": [([early_bird], ROWS)],
    "constant": [([half], ROWS), ([half, "accuracy"], ROWS)],
    "all_zero": [([boxed], ROWS), (["accuracy", boxed], ROWS)],
    "saturated": [([closed], ROWS)],
    "no_signal": [([by_level], ROWS), (["accuracy"], SETTLED)],
    "fragile": [([last_digit], ROWS)],
    "length_in_disguise": [([thorough], ROWS)],
    "tools_never_called": [(["accuracy"], trajectories(), TOOLS)],
    "tool_calls_fail": [
        ([worth_it], trajectories("{'error': 'no'}", "4", when=is_even), TOOLS),
        (["accuracy"], trajectories("{'error': 'no'}"), TOOLS),
    ],
    "calls_without_answer": [([worth_it], trajectories(when=is_even, is_open=True), TOOLS)],
    "tool_results_cut": [([worth_it], trajectories("x" * 20_000, when=is_even), TOOLS)],
    "needless_calls": [([calls_cost], trajectories("4", when=is_even), TOOLS)],
}
CASES = [
    pytest.param(kind, *case, *([{}] if len(case) < 3 else []), id=f"{kind}-{number}")
    for kind, cases in FAULTS.items()
    for number, case in enumerate(cases)
]


def test_every_kind_of_fault_is_planted():
    assert set(FAULTS) == set(KINDS)


@pytest.mark.parametrize(("kind", "rewards", "rows", "more"), CASES)
def test_the_planted_fault_is_the_first_and_only_one(kind, rewards, rows, more):
    found = check(rewards, rows, **more)
    assert kinds(found) == [kind], found
    assert found.findings[0].evidence
    assert kind in str(found)


def test_several_faults_are_listed_the_worst_first():
    found = check([closed, half, splits], FEW)
    assert kinds(found) == ["raises", "constant", "saturated"]
    assert found.verdict == "The run would stop at its first step: see raises below."
    assert found.has_errors


# --- good rewards --------------------------------------------------------------------------------

BAND = {"name": "length_band", "low": 10, "high": 20, "falloff": 10}
NUMBER = {"name": "format", "pattern": "[0-9]+", "part": "answer"}
OVERLONG = {"name": "soft_overlong", "max_completion_length": 48, "soft_punish_cache": 16}


@pytest.mark.long
@pytest.mark.parametrize(
    "rewards",
    [
        ["accuracy"],
        ["thinking"],
        [BAND],
        ["accuracy", "thinking:0.2", {**BAND, "weight": 0.3}, {**NUMBER, "weight": 0.5}],
        ["accuracy", {**OVERLONG, "max_completion_length": 900}],
        [{"name": "accuracy", "only_for": {"level": [1, 2]}}],
    ],
    ids=lambda specs: " ".join(getattr(spec, "__name__", str(spec)) for spec in specs),
)
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


def test_what_is_written_can_be_checked_again(tmp_path):
    first = check(["accuracy", "thinking:0.1"], output_dir=tmp_path / "out")
    folder = tmp_path / "out"
    found_again = json.loads((folder / "rewards_check.json").read_text())
    assert found_again["verdict"] == first.verdict
    assert found_again["table"][0]["mean"] == first.table[0].mean
    assert len(found_again["samples"]) == 128
    again = check(["accuracy", "thinking:0.1"], folder / "completions.jsonl", output_dir=folder)
    assert again.samples == first.samples
    assert again.signal == first.signal
    assert (tmp_path / "out-2").is_dir()


def test_plain_texts_are_grouped_by_their_prompt():
    rows = [
        {"prompt": f"{n} <think>", "completion": f"a</think>{n + k}", "answer": n}
        for k in (0, 1) for n in range(4)
    ]  # fmt: skip
    found = check(["accuracy"], rows)
    assert found.signal.num_groups == found.signal.num_with_signal == 4


def test_an_async_reward_is_awaited():
    async def later(completions, answer, **_):
        return right(completions, answer)

    found = check([later])
    assert found.findings == []
    assert found.table[0].mean == check([right]).table[0].mean


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({}, ConfigError, "give a run file, or completions"),
        ({"completions": ROWS}, ConfigError, "give a run file, or completions"),
        ({"source": "quickstart", "num_prompts": 0}, ConfigError, "must be at least 1"),
        ({"completions": [], "rewards": [right]}, DataError, "add rows with the columns prompt"),
        ({"completions": "none.jsonl", "rewards": [right]}, DataError, "give the path of a .jsonl"),
        ({"completions": [{"prompt": "a"}], "rewards": [right]}, DataError, "row 1: completion is"),
        ({"completions": ROWS, "rewards": ["acuracy"]}, RewardLoadError, "did you mean 'accuracy'"),
        ({"source": "quickstart", "rewards": ["x.py:f"]}, RewardLoadError, "does not exist"),
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


# --- what is shown -------------------------------------------------------------------------------


def test_the_table_has_a_line_for_each_reward():
    lines = str(check(["accuracy", "thinking:0.1"])).splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["reward", "accuracy", "thinking", "score"]
    assert lines[2].split()[1] == "0.1"
    assert all(len(line) < 120 for line in lines[:4])


def test_completions_cannot_steer_the_terminal():
    rows = changed(completion=lambda row: f"\x1b[2J\ud800\n{row['completion']}\u202e")
    printed = str(check([right, splits], rows))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e\ud800]", printed)
    assert "\\x1b[2J\\ud800\\n" in printed


# --- the real model ------------------------------------------------------------------------------


def test_the_embedded_model_can_be_sampled_and_its_reward_is_good(tmp_path, capsys):
    rk.setup()
    found = check_rewards(
        "quickstart",
        rewards=["accuracy", "thinking:0.1", tags],
        num_prompts=8,
        output_dir=tmp_path / "out",
        overrides=["data.held_out=0"],
    )
    found_again = [(finding.kind, finding.reward) for finding in found.findings]
    # Its thoughts are all of the same band, so that the second reward says nothing yet.
    assert found_again == [("blind_to_thought", "tags"), ("constant", "thinking")]
    accuracy = found.table[0]
    assert accuracy.none_share == 0
    assert 0.3 < accuracy.mean < 0.8
    printed = capsys.readouterr().out
    assert "sampling 8 prompts x 8 completions of tiny-thinker, temperature 1" in printed
    assert "released" in printed
    specs = ["accuracy", "thinking:0.1", tags]
    again = check(specs, tmp_path / "out" / "completions.jsonl", source="quickstart")
    assert again.findings == found.findings
    assert again.samples == found.samples


def test_rewards_get_the_columns_of_the_prompts_even_if_the_check_uses_their_names(tmp_path):
    seen = []

    def own(completions, group, truncated, **_):
        seen.extend(zip(group, truncated, strict=True))
        return [float(len(str(text))) for text in completions]

    prompts = write(
        tmp_path / "prompts.jsonl",
        [{"prompt": f"{n} + 1 = ", "group": "easy", "truncated": "no"} for n in range(4)],
    )
    rk.setup()
    found = check_rewards(
        "quickstart",
        rewards=[own],
        num_prompts=2,
        overrides=[f"data.prompts={prompts}", "data.held_out=0"],
    )
    assert set(seen) == {("easy", "no")}
    assert found.signal.num_groups == 2


def test_an_output_that_cannot_be_written_is_said_first(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        check_rewards(
            rewards=["accuracy"], completions=ROWS, output_dir=tmp_path / "file" / "checks"
        )


def test_env_file_is_read_before_rewards_are_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MY_ANSWER", raising=False)
    (tmp_path / ".env").write_text("MY_ANSWER=42\n")
    (tmp_path / "mine.py").write_text(
        "import os\nANSWER = os.environ['MY_ANSWER']\n\n\n"
        "def mine(completions, **_):\n    return [float(ANSWER)] * len(completions)\n"
    )
    try:
        found = check_rewards(rewards=["mine.py:mine"], completions=ROWS)
    finally:
        os.environ.pop("MY_ANSWER", None)
    assert found.table[0].mean == 42


@pytest.mark.long
def test_on_a_gpu_the_model_samples_in_a_child_and_the_rewards_run_here(monkeypatch, capfd):
    rk.setup()
    seen = []

    def mine(completions, **columns):
        seen.append(len(completions))
        return [float(len(one)) for one in completions]

    on_gpu = SimpleNamespace(hardware=SimpleNamespace(device="cuda"))
    monkeypatch.setattr(lab.PreparedJob, "environment", on_gpu)
    monkeypatch.setattr(lab.PreparedJob, "policy", None)  # of this process, not of the child
    lines = []
    found = check_rewards("quickstart", rewards=[mine], num_prompts=2, say=lines.append)
    assert 16 in seen
    assert found.table[0].name == "mine"
    assert any(line.startswith("sampling 2 prompts x 8 completions") for line in lines)
    with pytest.raises(ModelError, match="does not exist"):
        check_rewards("quickstart", overrides=["model.name=./nowhere"], say=str)


GAME = """
class Adder:
    def reset(self, answer, **row):
        self.right = answer
        self.calls = 0

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
    played = [sample["rewards"]["Adder"] for sample in found.samples]
    assert 0 < sum(played) < len(played)
    again = check_rewards(
        tmp_path / "run.yaml", completions=tmp_path / "check" / "completions.jsonl",
        say=lambda line: None,
    )  # fmt: skip
    assert [sample["rewards"]["Adder"] for sample in again.samples] == played
