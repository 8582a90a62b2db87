"""Everything that reads what a user gives: each a target that takes an input and returns nothing.

A target raises a KitError where it refuses the input, returns where the result was looked at and
is right, and anything else it raises is a failure.
"""

import csv
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from fuzz_inputs import (
    DROPPED,
    NASTY,
    bomb,
    changed,
    changes,
    mutated,
    odd_numbers,
    odd_texts,
    odd_values,
    plain_values,
    replaced,
)
from hypothesis import strategies as st

from rloo_kit.config.run_file import EXAMPLES, SECTIONS, make_run_config, read_run_file
from rloo_kit.config.trainer_settings import known_trainer_fields
from rloo_kit.errors import KitError


@dataclass(frozen=True)
class Target:
    name: str
    inputs: Callable[[], st.SearchStrategy]
    one: Callable[[Any], None]
    share: int = 1
    """Of the inputs, in parts."""
    most: int = 1 << 30
    """Inputs, where each takes long."""
    heavy: bool = False
    """Imports torch or datasets."""
    isolated: bool = False
    """In a process of its own: a library in C or Rust may end it."""
    good: Callable[[], Any] | None = None
    """An input that is right, of a target that imports much."""
    seeds: Callable[[], list[bytes]] | None = None
    """Of a target that takes bytes alone: what a coverage-guided fuzzer begins with."""


@cache
def work():
    """A folder for files, gone with the process."""
    holder = tempfile.TemporaryDirectory(prefix="rloo-kit-fuzz-")
    cleanup.append(holder)
    return Path(holder.name)


cleanup: list[tempfile.TemporaryDirectory] = []


def must(condition, what):
    if not condition:
        raise AssertionError(what)


# --- run files -----------------------------------------------------------------------------------


def config_is_right(config):
    """What was read can be written to run.yaml and read back."""
    text = yaml.safe_dump(config.as_dict(), sort_keys=False)
    again = make_run_config(yaml.safe_load(text))
    must(repr(again) == repr(config), "run.yaml does not say the same")


def run_file(data):
    path = work() / "run.yaml"
    path.write_bytes(data)
    config_is_right(read_run_file(path))


@cache
def run_file_seeds():
    shipped = [file.read_bytes() for file in sorted(EXAMPLES.glob("*.yaml"))]
    return [
        *shipped,
        bomb(),
        b"trainer: &t {beta: 0.1}\nlora: *t\n" + bomb(4, 4),
        b"model:\n  <<: &m {name: x}\ndata:\n  <<: *m\n",
        b"rewards:\n  - {name: accuracy, weight: {0: 1.0, 0.5: 0.2}, only_if: thinking_format}\n",
        b"data: {prompts: x.jsonl, columns: {prompt: q}, level: [1, 2], settings: {a: 1}}\n",
    ]


def run_file_inputs():
    return st.one_of(mutated(run_file_seeds()), mutated([*run_file_seeds(), *NASTY], most=12))


def run_content_inputs():
    """Sections with right and odd names and values, and overrides."""
    fields = {name: sorted(section.__dataclass_fields__) for name, section in SECTIONS.items()}
    fields["trainer"] = sorted(known_trainer_fields())

    def table(names):
        known = st.sampled_from(names)
        return st.one_of(
            st.dictionaries(known, plain_values(), max_size=2),
            st.dictionaries(known, st.one_of(plain_values(), odd_values()), max_size=2),
            st.dictionaries(st.one_of(known, odd_texts()), odd_values(), max_size=3),
        )

    single = [
        table(names).map(lambda value, name=name: {name: value}) for name, names in fields.items()
    ]
    rewards = st.lists(st.one_of(odd_values(), rewards_table()), max_size=3)
    other = st.dictionaries(
        st.sampled_from(["rewards", "output_dir", "seed", "model", "lora", "data", "trainer"]),
        st.one_of(odd_values(), rewards),
        max_size=2,
    )
    paths = [f"{name}.{key}" for name, keys in fields.items() for key in keys]
    override = st.builds(
        "{}{}{}".format,
        st.one_of(st.sampled_from([*paths, "seed", "output_dir", "rewards"]), odd_texts()),
        st.sampled_from(["=", "=", "=", "", "=="]),
        st.one_of(odd_texts(), odd_numbers().map(str_of), st.sampled_from(NASTY).map(text_of)),
    )
    content = st.one_of(*single, other, odd_values())
    return st.tuples(content, st.lists(override, max_size=2))


def trainer_inputs():
    """Settings of the trainer, of which most have a right type."""
    names = st.sampled_from(sorted(known_trainer_fields() - {"output_dir", "seed"}))
    value = st.one_of(plain_values(), plain_values(), odd_values())
    return st.dictionaries(names, value, min_size=1, max_size=3)


def trainer_settings(data):
    """What the run file takes, TRL and transformers take as well, or it is refused in time."""
    from rloo_kit.training.preparation import make_trainer_args

    make_trainer_args(make_run_config({"trainer": data}), work() / "run")


def str_of(number):
    return hex(number) if isinstance(number, int) and abs(number) > 1 << 1000 else str(number)


def text_of(piece):
    return piece.decode("utf-8", "surrogateescape")


def run_content(data):
    content, overrides = data
    config_is_right(make_run_config(content, overrides))


# --- the command line ----------------------------------------------------------------------------


def argv_inputs():
    word = st.one_of(odd_texts(), st.sampled_from(NASTY).map(text_of)).map(
        lambda text: text.replace("\x00", "")  # no system passes it on
    )
    flag = st.sampled_from(
        ["--set", "--output", "--output-dir", "--resume", "-h", "--x", "--prompts"]
    )
    command = st.sampled_from(
        [
            ["train"], ["quickstart"], ["report"], ["doctor"], ["rewards", "show"],
            ["rewards", "check"], ["reward-model", "train"], ["rewards", "list"], [],
        ]
    )  # fmt: skip
    place = st.sampled_from(["quickstart", "smollm2", "missing.yaml", str(EXAMPLES), "."])
    return st.tuples(command, st.lists(st.one_of(word, flag, place), max_size=5))


def command_line(data):
    """Run the command; a last override, which no one can undo, keeps it from training."""
    from rloo_kit.cli import main

    command, words = data
    argv = [*command, *words]
    if {"train", "quickstart", "check"} & set(argv):
        argv += ["--set", "rewards=[no_such_reward]"]
    if command == ["doctor"] and not words:
        argv = ["doctor", "missing"]  # without a run it looks at the machine
    if command == ["reward-model", "train"]:
        argv = [*command, "missing.jsonl", *words]
    folder = work() / "here"
    folder.mkdir(exist_ok=True)
    inside(folder, lambda: command_says(main, argv))


def inside(folder, call):
    import os

    before = os.getcwd()
    os.chdir(folder)
    try:
        return call()
    finally:
        os.chdir(before)


def command_says(main, argv):
    said = sys.stderr
    try:
        code = main(argv)
    except SystemExit as exc:  # argparse: usage, or help
        must(exc.code in (0, 2), f"exit code {exc.code!r}")
        return
    must(code in (0, 1, 2, 3), f"exit code {code!r}")
    complaints = [line for line in said.getvalue().splitlines() if line.startswith("rloo-kit: ")]
    if code == 2:
        must(len(complaints) == 1, f"not one complaint: {said.getvalue()!r}")
        raise KitError(complaints[0].removeprefix("rloo-kit: "))


# --- prompts -------------------------------------------------------------------------------------

ROWS = [
    {"prompt": "What is 1 + 1?", "answer": "2", "level": 1},
    {"prompt": "Name a colour, please.", "answer": "blue", "level": 2},
    {"prompt": "Say é 😀", "answer": "", "level": 1},
]
CHAT = [
    {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "n": 1,
    },
    {"prompt": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "n": 2},
]


def as_jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_csv(rows):
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_parquet(rows, **options):
    import pyarrow
    import pyarrow.parquet

    buffer = io.BytesIO()
    table = rows if isinstance(rows, pyarrow.Table) else pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, buffer, **options)
    return buffer.getvalue()


@cache
def jsonl_seeds():
    return [
        as_jsonl(ROWS),
        as_jsonl(CHAT),
        b'{"prompt": "a", "prompt": "b"}\n',
        b'{"prompt": "' + b"long " * 20_000 + b'"}\n',
        b"",
        b"\n\n",
        b'{"question": "a"}\n',
        b'{"prompt": "a", "n": 1}\n{"prompt": "b", "n": "two"}\n',
        b'{"prompt": "a"}\n{"prompt": [{"role": "user", "content": "b"}]}\n',
        as_jsonl(ROWS).decode().encode("utf-16"),
    ]


@cache
def csv_seeds():
    return [
        as_csv(ROWS),
        b"prompt,prompt\na,b\n",
        b"prompt,answer\n",
        b"",
        b"prompt\n" + b"x" * 200_000 + b"\n",
        b'prompt,answer\n"a\nb",1\n',
    ]


@cache
def parquet_seeds():
    import pyarrow

    twice = pyarrow.table([["a"], ["b"]], names=["prompt", "prompt"])
    kinds = pyarrow.table(
        {
            "prompt": pyarrow.array(["a", "b", "a"]).dictionary_encode(),
            "when": pyarrow.array([1, 2, 3], pyarrow.timestamp("us")),
            "raw": pyarrow.array([b"a", None, b"\xff"]),
            "nested": [[{"a": 1}], [], None],
            "much": pyarrow.array([1, 2, 3], pyarrow.decimal128(30, 2)),
        }
    )
    large = pyarrow.table({"prompt": pyarrow.array(["a", "b"], pyarrow.large_string())})
    odd = pyarrow.table({"prompt": [1, 2]})
    none = pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
    tables = [ROWS, *([row] for row in CHAT), twice, kinds, large, odd, none]
    return [as_parquet(table, compression="none") for table in tables]


def row_inputs():
    """Rows of a .jsonl file with odd values in known columns."""
    message = st.dictionaries(
        st.sampled_from(["role", "content", "tool_calls", "x"]),
        st.one_of(
            st.sampled_from(["user", "system", "assistant", "hi"]), odd_values(for_json=True)
        ),
        max_size=3,
    )
    prompt = st.one_of(st.just("a"), odd_values(for_json=True), st.lists(message, max_size=3))
    names = st.one_of(st.sampled_from(["answer", "level", "task", "question"]), odd_texts())
    others = st.dictionaries(names, odd_values(for_json=True), max_size=2)
    row = st.builds(lambda p, rest: {**rest, "prompt": p}, prompt, others)
    return st.lists(row, min_size=1, max_size=4).map(as_jsonl)


def options_inputs():
    return st.fixed_dictionaries(
        {},
        optional={
            "columns": st.one_of(
                st.just({"prompt": "question"}),
                st.just({"level": "n"}),
                st.dictionaries(odd_texts(), odd_texts(), max_size=2),
            ),
            "system": st.one_of(st.just("Be brief."), odd_texts()),
            "chat": st.booleans(),
            "num_prompts": st.integers(1, 5),
            "curriculum": st.booleans(),
            "level": st.one_of(st.integers(-1, 9), st.lists(st.integers(-1, 9), max_size=3)),
        },
    )


def prompts_inputs():
    plain = st.just({})
    options = st.one_of(plain, options_inputs())
    files = [
        st.tuples(st.just(".jsonl"), mutated(jsonl_seeds()), plain),
        st.tuples(st.just(".jsonl"), row_inputs(), options),
        st.tuples(st.just(".jsonl"), mutated(jsonl_seeds()), options),
        st.tuples(st.just(".csv"), mutated(csv_seeds()), options),
        st.tuples(st.sampled_from([".txt", ".json", "", ".JSONL"]), st.just(b"{}"), plain),
    ]
    return st.one_of(files)


def parquet_inputs():
    flips = st.lists(
        st.builds(lambda c: c[0], changes(1)).filter(lambda c: c.kind in ("flip", "cut", "delete")),
        min_size=0,
        max_size=2,
    )
    data = st.one_of(
        st.builds(changed, st.sampled_from(parquet_seeds()), flips),
        mutated(parquet_seeds(), most=2),
    )
    return st.tuples(st.just(".parquet"), data, st.one_of(st.just({}), options_inputs()))


@cache
def tokenizer():
    from transformers import AutoTokenizer

    from rloo_kit.models.loading import TINY_THINKER

    return AutoTokenizer.from_pretrained(TINY_THINKER)


def prompts(data):
    from rloo_kit.data.prompts import load_prompts, prompt_ids

    suffix, content, options = data
    path = work() / f"prompts{suffix}"
    path.write_bytes(content)
    dataset = load_prompts(path, **options)
    must(len(dataset) > 0, "no rows")
    for row in dataset.select(range(min(3, len(dataset)))):
        must(row["prompt"], "an empty prompt")
        must(prompt_ids(tokenizer(), row["prompt"]), "a prompt without tokens")


def source_inputs():
    """Names of prompts: no files, or tasks with odd arguments."""
    name = st.one_of(
        odd_texts(),
        st.sampled_from(["arithmetic", "countdown", "letter_count", "sort", "reasoning_gym:x"]),
        odd_texts().map(lambda text: f"{text}.jsonl"),
        odd_texts().map(lambda text: f"reasoning_gym:{text}"),
    )
    settings = st.dictionaries(odd_texts(), odd_values(), max_size=2)
    return st.tuples(
        name, options_inputs(), st.one_of(st.none(), st.just({}), settings), odd_texts()
    )


def sources(data):
    from rloo_kit.data.prompts import load_prompts

    name, options, settings, split = data
    options = {"num_prompts": 3, **options}
    load_prompts(name, **options, settings=settings, split=split if split.strip() else "train")


# --- pairs ---------------------------------------------------------------------------------------

PAIRS = [
    {"prompt": "Hi", "chosen": "Hello!", "rejected": "What?"},
    {"prompt": "Bye", "chosen": "See you.", "rejected": "Go."},
]
TALKS = [
    {
        "chosen": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}],
        "rejected": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "No."}],
    }
]


def pairs_inputs():
    message = st.dictionaries(
        st.sampled_from(["role", "content"]),
        st.one_of(st.sampled_from(["user", "assistant"]), odd_values(for_json=True)),
        max_size=2,
    )
    side = st.one_of(st.just("a"), odd_values(for_json=True), st.lists(message, max_size=3))
    row = st.dictionaries(
        st.sampled_from(["prompt", "chosen", "rejected", "x"]), side, min_size=2, max_size=4
    )
    seeds = [as_jsonl(PAIRS), as_jsonl(TALKS)]
    return st.one_of(
        st.tuples(st.just(".jsonl"), st.lists(row, min_size=1, max_size=3).map(as_jsonl)),
        st.tuples(st.just(".jsonl"), mutated(seeds)),
        st.tuples(st.just(".csv"), mutated([as_csv(PAIRS)])),
    )


def pairs(data):
    from rloo_kit.reward_lab.training import read_pairs, split_pairs

    suffix, content = data
    path = work() / f"pairs{suffix}"
    path.write_bytes(content)
    found = read_pairs(path)
    split_pairs(found, 0.5, 0)
    for pair in found:
        for prompt, completion in (pair.chosen, pair.rejected):
            for message in [*prompt, *completion]:
                if isinstance(message, dict):
                    must(isinstance(message["role"], str), "a role that is no text")


def rows_inputs():
    return mutated([*jsonl_seeds(), *csv_seeds()])


def rows(data):
    """Read the lines of a file without making a dataset of them."""
    from rloo_kit.data.files import read_source

    path = work() / ("rows.jsonl" if data[:1] in (b"{", b"") else "rows.csv")
    path.write_bytes(data)
    for row in read_source(str(path), "train"):
        must(row["prompt"], "an empty prompt")


# --- rewards -------------------------------------------------------------------------------------

GOOD_REWARD = b"""import math

def polite(completions, answer=None, **_):
    return [float("please" in str(text)) for text in completions]

class Long:
    def __init__(self, target=3):
        self.target = target
    def __call__(self, completions, **_):
        return [math.tanh(len(str(text)) / self.target) for text in completions]
"""
BAD_REWARDS = [
    b"import sys\nsys.exit()\n",
    b"import sys\nsys.exit(0)\n",
    b"raise SystemExit('bye')\n",
    b"import no_such_package\n",
    b"from os import no_such_name\n",
    b"def f(): return f()\nf()\n",
    b"1 / 0\n",
    b"raise ValueError\n",
    b"def polite(:\n",
    b"raise Exception('a\\nb' * 5000)\n",
    b"polite = 3\n",
    b"class polite:\n    def __call__(self, completions, **_): return [1.0]\n",
    b"def polite(completions, **_):\n    import sys\n    sys.exit(1)\n",
    b"def polite(completions, **_):\n    return polite(completions)\n",
    b"def polite(completions, **_):\n    raise KeyError(b'\\xff' * 9000)\n",
    b"def polite(completions, **_):\n    return [10 ** 400] * len(completions)\n",
    b"def polite(completions, **_):\n    return 'abc'\n",
    b"def polite(completions, **_):\n    return [[1.0]] * len(completions)\n",
    b"def polite(completions, **_):\n    return (1.0 for _ in completions)\n",
    b"def polite(completions, **_):\n    raise StopIteration\n",
    b"def polite(completions, **_):\n    raise MemoryError\n",
    b"class E(Exception):\n    def __str__(self): return 1 / 0\nraise E\n",
    b"def polite(completions, **_):\n    while False: pass\n",
    b"\x00",
    b"\xff\xfe\x00",
    b"# coding: no-such-encoding\n",
    b"(" * 3000,
]


@cache
def parameters():
    """Name of every built-in reward -> names of its parameters."""
    from rloo_kit.scoring.contract import keywords_of
    from rloo_kit.scoring.loading import reward_behind

    names = ["accuracy", "countdown", "format", "length", "length_band", "math", "repetition"]
    names += ["soft_overlong", "thinking", "thinking_budget", "thinking_closed_once", "code"]
    names += ["thinking_format", "thinking_questions", "language", "judge", "reward_model"]
    return {name: keywords_of(reward_behind(name))[0] for name in names}


def rewards_table():
    names = st.sampled_from(
        ["accuracy", "length", "thinking_format", "thinking", "format", "judge"]
    )
    schedule = st.dictionaries(odd_numbers(), odd_numbers(), max_size=3)
    gate = st.fixed_dictionaries(
        {"name": st.one_of(names, odd_texts())},
        optional={"at_least": odd_values(), "otherwise": odd_values(), "weight": odd_numbers()},
    )
    return st.fixed_dictionaries(
        {"name": st.one_of(names, odd_texts())},
        optional={
            "weight": st.one_of(odd_numbers(), schedule, odd_values()),
            "only_if": st.one_of(names, gate, odd_values()),
            "only_for": st.one_of(
                odd_values(), st.dictionaries(odd_texts(), odd_values(), max_size=2)
            ),
            "scaled_by": odd_values(),
            "clipped_to": st.one_of(odd_values(), st.lists(odd_numbers(), max_size=3)),
        },
    )


def spec_inputs():
    known = parameters()

    def table(name):
        keys = st.one_of(st.sampled_from(known[name] or ["x"]), odd_texts())
        return st.dictionaries(keys, odd_values(), max_size=2).map(lambda t: {**t, "name": name})

    tables = st.sampled_from(sorted(known)).flatmap(table)
    packages = ["os:getcwd", "json:dumps", "no.such:thing", "sys:exit", "rloo_kit.rewards:Accuracy"]
    packages += ["math:inf", "builtins:int", ":", "a:", ":b", "rloo_kit.rewards:length", "..x:y"]
    texts = st.one_of(
        odd_texts(),
        st.sampled_from([*packages, *sorted(known)]),
        st.builds(
            "{}:{}".format, st.sampled_from([*sorted(known), *packages]), odd_numbers().map(str_of)
        ),
    )
    source = st.one_of(st.sampled_from(BAD_REWARDS), mutated([GOOD_REWARD], most=2))
    attribute = st.one_of(st.sampled_from(["polite", "Long", "math", ""]), odd_texts())
    files = st.tuples(source, attribute, st.sampled_from(["", ":0.5", ":x", ":1e400"]))
    return st.one_of(
        texts.map(lambda spec: (None, spec)),
        tables.map(lambda spec: (None, spec)),
        rewards_table().map(lambda spec: (None, spec)),
        odd_values().map(lambda spec: (None, spec)),
        files.map(lambda three: (three[0], f"mine.py:{three[1]}{three[2]}")),
    )


CALLED = 0


def reward_specs(data):
    """Load a reward as a run file names it, and call the cheap ones on three completions."""
    from rloo_kit.scoring.loading import load_rewards

    source, spec = data
    folder = work() / "rewards"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if source is not None:
        (folder / "mine.py").write_bytes(source)
    try:
        loaded = load_rewards([spec], base_dir=folder)
        must(len({reward.name for reward in loaded}) == 1, "names")
        for reward in loaded:
            call_reward(reward)
    finally:
        for name in [n for n in sys.modules if n.startswith("_rloo_kit_reward_")]:
            del sys.modules[name]


def call_reward(reward):
    if any(name in repr(reward.func) for name in ("Math(", "Code(", "Judge(", "RewardModel(")):
        return  # they start processes, or ask a server
    count = 3
    columns = {
        "prompts": ["a"] * count,
        "completions": ["please", "", "</think> 4"],
        "completion_ids": [[1, 2], [], [3]],
        "answer": ["please", "x", "4"],
        "trainer_state": None,
    }
    scores = reward.func(**columns)
    if hasattr(scores, "close"):
        scores.close()  # a coroutine
        return
    must(len(scores) == count, "scores")
    reward.weight_at(0.5)


ANSWERS = [
    b"<think>1+1=2</think> 2",
    b"</think> The answer is \\boxed{1,234.50}",
    b"(25 - 4) * 3 / 2 = 31.5",
    b'```json\n{"a": [1, 2]}\n```',
    b"<answer>-1/2</answer> 50 % 1e5",
    b"\\boxed{\\frac{1}{2}}",
]


def answers_inputs():
    return mutated(ANSWERS)


@cache
def answer_rewards():
    from rloo_kit.scoring.loading import load_rewards

    tables = [{"name": "format", "tags": ["answer"]}, {"name": "format", "schema": True}]
    names = ["accuracy", "countdown", "length", "repetition", "thinking_format", *tables]
    return [reward.func for reward in load_rewards(names)]


def answers(data):
    """Score a completion with the rewards that read it themselves: a number or None."""
    text = data.decode("utf-8", "replace")
    columns = {
        "prompts": ["a"], "completions": [text], "completion_ids": [[1, 2]], "answer": [text[::-1]],
        "numbers": [[25, 4, 3, 2]], "target": [24], "trainer_state": None,
    }  # fmt: skip
    for reward in answer_rewards():
        (score,) = reward(**columns)
        must(score is None or isinstance(score, float), "no score")


# --- folders of runs -----------------------------------------------------------------------------


@cache
def run_folder_files():
    """Name -> content of the files of a small run."""
    steps = range(1, 13)
    metrics = [
        {
            "step": step, "time": 1.0e9 + step, "loss": 0.01, "reward": 0.1 * step,
            "reward_std": 0.3, "grad_norm": 0.2, "learning_rate": 1e-5, "kl": 0.001 * step,
            "kl/token": 0.001 * step,
            "kl/sequence": 0.02 * step, "entropy": 0.5, "completions/mean_length": 20.0 + step,
            "completions/truncated": 0.1, "signal/groups_without": 0.4, "val/ratio": 1.0,
            "rewards/accuracy/mean": 0.1 * step, "memory/peak_gib": 1.0 + 0.1 * step,
            "policy/clipfrac_avg": 0.0, "num_tokens": 100.0 * step, "step_time": 2.0,
            "sampling/adapter_reached": 1.0, "speed/generation_tokens_per_second": 900.0,
            "speed/learning_tokens_per_second": 1000.0,
        }
        for step in steps
    ]  # fmt: skip
    completions = [
        {
            "step": step, "group": group, "prompt": [{"role": "user", "content": "What is 1 + 1?"}],
            "completion": [{"role": "assistant", "content": f"1+1={n}</think> {n}"}],
            "truncated": False, "rewards": {"accuracy": float(n == 2), "length": None},
            "score": float(n == 2), "kl": 0.1, "baseline": 0.5, "advantage": 0.5 - n / 4,
            "tokens": 9, "thought_tokens": 5, "answer_at": 13,
        }
        for step in steps for group in range(2) for n in range(3)
    ]  # fmt: skip
    part = {
        "rewards": {"accuracy": 0.25}, "num_prompts": 4, "mean_length": 20.0, "temperature": 1.0,
        "samples": [
            {"prompt": "What is 1 + 1?", "completion": "</think> 2", "rewards": {"accuracy": 1.0}},
            {"prompt": "What is 2 + 1?", "completion": "</think> 2", "rewards": {"accuracy": 0.0}},
        ],
    }  # fmt: skip
    return {
        "metrics.jsonl": as_jsonl([*metrics, {"step": 12, "train_runtime": 30.0}]),
        "completions.jsonl": as_jsonl(completions),
        "evaluation.json": json.dumps({"before": part, "after": part, "during": [part]}).encode(),
        "end.json": json.dumps(
            {
                "how": "stopped", "reason": "x", "steps": 12, "seconds": 30.0, "time": 1.0e9,
                "kept_step": 9,
                "finding": {
                    "kind": "kl_explosion", "level": "error", "reward": None, "evidence": "e",
                    "why": "w", "remedy": "r", "setting": "trainer.beta=0.1",
                },
            }
        ).encode(),
        "run.yaml": (EXAMPLES / "quickstart.yaml").read_bytes(),
        "environment.json": json.dumps(
            {
                "hardware": {"name": "A GPU", "total_memory": 1 << 34, "num_devices": 1},
                "backend": "transformers", "why_not_unsloth": "x", "versions": {"torch": "2"},
            }
        ).encode(),
    }  # fmt: skip


def run_folder_inputs():
    names = st.sampled_from(sorted(run_folder_files()))
    where = st.lists(st.integers(0, 40), min_size=1, max_size=5)
    value = st.one_of(odd_values(for_json=True), st.just(DROPPED))
    row = st.tuples(st.just("row"), names, st.integers(0, 80), where, value)
    every = st.tuples(st.just("every row"), names, st.just(0), where, value)
    data = st.tuples(st.just("bytes"), names, changes(3), st.none(), st.none())
    gone = st.tuples(st.just("gone"), names, st.none(), st.none(), st.none())
    return st.lists(st.one_of(row, row, every, data, gone), min_size=1, max_size=4)


def spoilt(files, several):
    files = dict(files)
    for kind, name, how, where, value in several:
        if kind == "gone" or name not in files:
            files.pop(name, None)
        elif kind == "bytes":
            files[name] = changed(files[name], how)
        elif name != "run.yaml":
            files[name] = spoilt_rows(files[name], kind, how, where, value)
    return files


def spoilt_rows(content, kind, at, where, value):
    lines = content.split(b"\n")
    chosen = range(len(lines)) if kind == "every row" else [at % len(lines)]
    for place in chosen:
        try:
            row = json.loads(lines[place])
        except ValueError:
            continue
        lines[place] = json.dumps(replaced(row, where, value)).encode()
    return b"\n".join(lines)


def write_folder(name, files):
    folder = work() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file, content in files.items():
        (folder / file).write_bytes(content)
    return folder


def run_folder(data):
    from rloo_kit.diagnosis.record import read_run
    from rloo_kit.diagnosis.run_rules import diagnose, find_in_run, verdict
    from rloo_kit.report.page import write_report

    folder = write_folder("run", spoilt(run_folder_files(), data))
    said = []
    diagnose(folder, said.append)
    must(said and said[0].strip(), "nothing was said")
    record = read_run(folder)
    must(verdict(record, find_in_run(record)).endswith("."), "no sentence")
    page = write_report(folder, work() / "page.html").read_text("utf-8")
    start = page.index('type="application/json"')
    text = page[page.index(">", start) + 1 : page.index("</script>", start)]
    json.loads(text, parse_constant=lambda name: must(condition=False, what=f"{name} in the page"))


# --- checkpoints ---------------------------------------------------------------------------------


@cache
def checkpoint_files():
    from rloo_kit.checkpoints.store import write_checkpoint

    def fill(folder):
        (folder / "state.json").write_text('{"step": 3}')
        (folder / "weights.bin").write_bytes(bytes(range(64)))

    run = work() / "checkpointed"
    run.mkdir(exist_ok=True)
    write_checkpoint(run, 3, fill, facts={"seed": 42}, score=0.5)
    folder = run / "checkpoint-3"
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def checkpoint_inputs():
    names = st.sampled_from(sorted(checkpoint_files()))
    where = st.lists(st.integers(0, 9), min_size=1, max_size=4)
    value = st.one_of(odd_values(for_json=True), st.just(DROPPED))
    row = st.tuples(st.just("every row"), st.just("manifest.json"), st.just(0), where, value)
    whole = st.tuples(st.just("whole"), st.just("manifest.json"), st.none(), where, value)
    data = st.tuples(st.just("bytes"), names, changes(2), st.none(), st.none())
    gone = st.tuples(st.just("gone"), names, st.none(), st.none(), st.none())
    return st.lists(st.one_of(row, whole, data, gone), min_size=1, max_size=2)


def checkpoints(data):
    """Whatever was done to a checkpoint, it is refused, or found to be what was written."""
    from rloo_kit.checkpoints.store import find_checkpoint, read_checkpoint

    files = dict(checkpoint_files())
    for change in data:
        kind, name, _, where, value = change
        if kind == "whole" and name in files:
            try:
                manifest = replaced(json.loads(files[name]), where, value)
            except ValueError:
                continue
            files[name] = json.dumps(manifest).encode()
        else:
            files = spoilt(files, [change])
    run = work() / "resumed"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    folder = write_folder("resumed/checkpoint-3", files)
    found = find_checkpoint(run)
    must(found is None or found.step == 3, "another step")
    read = read_checkpoint(folder)
    must(found is not None, "found by one and not by the other")
    same = {k: v for k, v in files.items() if k != "manifest.json"}
    wrote = {k: v for k, v in checkpoint_files().items() if k != "manifest.json"}
    must(same == wrote, "a file that was not written so")
    must(read.step == 3, "another step")
    must(read.facts == {"seed": 42}, "other facts")


# --- models --------------------------------------------------------------------------------------

MODEL_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
    "config.json", "model.safetensors",
)  # fmt: skip


@cache
def model_files():
    from rloo_kit.models.loading import TINY_THINKER

    return {name: (TINY_THINKER / name).read_bytes() for name in MODEL_FILES}


TEMPLATES = [
    b"{% for m in messages %}", b"{{ messages[99].content }}", b"{{ 1 / 0 }}", b"{{ x.y.z }}",
    b"{{ messages.__class__.__mro__ }}",
    b"{{ 'a' * 10**9 }}", b"{{ raise_exception('no') }}",
    b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    b"{{ messages[0].content + 1 }}", b"{{ none.x }}", b"{% include 'x' %}", b"", b"\xff",
]  # fmt: skip


def model_inputs():
    """(file, how it is changed): bytes, a JSON value, a template of one's own, or gone."""
    texts = [name for name in MODEL_FILES if name.endswith(".json")]
    where = st.lists(st.integers(0, 40), min_size=1, max_size=5)
    value = st.one_of(odd_values(for_json=True), st.just(DROPPED))
    values = st.tuples(st.just("whole"), st.sampled_from(texts), st.none(), where, value)
    data = st.tuples(
        st.just("bytes"), st.sampled_from(MODEL_FILES), changes(2), st.none(), st.none()
    )
    head = st.builds(
        lambda place, piece: [(place / 40_000, piece)],
        st.integers(0, 40_000),
        st.binary(max_size=9),
    )
    tensors = st.tuples(st.just("head"), st.just("model.safetensors"), head, st.none(), st.none())
    template = st.tuples(
        st.just("template"), st.just("chat_template.jinja"), st.sampled_from(TEMPLATES), st.none(),
        st.none(),
    )  # fmt: skip
    gone = st.tuples(st.just("gone"), st.sampled_from(MODEL_FILES), st.none(), st.none(), st.none())
    one = st.one_of(values, values, values, data, tensors, template, gone)
    return st.lists(one, min_size=1, max_size=2)


def spoilt_model(files, several):
    files = dict(files)
    for change in several:
        kind, name, how, where, value = change
        if name not in files:
            continue
        if kind == "whole":
            try:
                content = replaced(json.loads(files[name]), where, value)
            except ValueError:
                continue
            files[name] = json.dumps(content).encode()
        elif kind == "template":
            files[name] = how
        elif kind == "head":
            for place, piece in how:
                at = int(place * 4000)
                files[name] = files[name][:at] + piece + files[name][at + len(piece) :]
        else:
            files = spoilt(files, [change])
    return files


def models(data):
    from rloo_kit.data.prompts import prompt_ids
    from rloo_kit.models.loading import load_model

    folder = write_folder("model", spoilt_model(model_files(), data))
    model, tokenizer = load_model(folder, load_in_4bit=False)
    ids = prompt_ids(tokenizer, [{"role": "user", "content": "What is 1 + 1?"}])
    must(isinstance(ids, list) and all(isinstance(token, int) for token in ids), "no ids")
    must(model.generation_config.eos_token_id, "no end")


def model_name_inputs():
    return st.one_of(odd_texts(), odd_texts().map("{}.gguf".format), odd_texts().map("./{}".format))


def model_names(data):
    from rloo_kit.models.loading import load_model

    inside(work(), lambda: load_model(data, load_in_4bit=False))


@cache
def adapter_files():
    from rloo_kit.models.loading import attach_lora, load_model, save_adapter

    model, tokenizer = load_model("tiny-thinker", load_in_4bit=False)
    folder = save_adapter(attach_lora(model, r=2), tokenizer, work() / "adapter-made")
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def adapter_inputs():
    names = ["adapter_config.json", "adapter_model.safetensors"]
    where = st.lists(st.integers(0, 40), min_size=1, max_size=3)
    value = st.one_of(odd_values(for_json=True), st.just(DROPPED))
    values = st.tuples(st.just("whole"), st.just(names[0]), st.none(), where, value)
    data = st.tuples(st.just("bytes"), st.sampled_from(names), changes(2), st.none(), st.none())
    gone = st.tuples(st.just("gone"), st.sampled_from(names), st.none(), st.none(), st.none())
    return st.lists(st.one_of(values, values, data, gone), min_size=1, max_size=2)


def adapters(data):
    from rloo_kit.models.loading import load_model

    folder = write_folder("adapter", spoilt_model(adapter_files(), data))
    model, _ = load_model(folder, load_in_4bit=False)
    must(sum(p.numel() for p in model.parameters()) > 0, "no weights")


# --- all -----------------------------------------------------------------------------------------

TARGETS = (
    Target("run files", run_file_inputs, run_file, 40, seeds=run_file_seeds),
    Target("settings", run_content_inputs, run_content, 60),
    Target("command lines", argv_inputs, command_line, 10, good=lambda: (["rewards", "list"], [])),
    Target("rows", rows_inputs, rows, 12, seeds=lambda: [*jsonl_seeds()[:2], *csv_seeds()[::5]]),
    Target("answers", answers_inputs, answers, 12, seeds=lambda: ANSWERS),
    Target("rewards", spec_inputs, reward_specs, 20, good=lambda: (None, "accuracy")),
    Target("pairs", pairs_inputs, pairs, 15, good=lambda: (".jsonl", as_jsonl(PAIRS))),
    Target("run folders", run_folder_inputs, run_folder, 12, good=list),
    Target("checkpoints", checkpoint_inputs, checkpoints, 10, good=list),
    Target("trainer", trainer_inputs, trainer_settings, 8, heavy=True, good=dict),
    Target(
        "prompts",
        prompts_inputs,
        prompts,
        25,
        heavy=True,
        good=lambda: (".jsonl", as_jsonl(ROWS), {}),
    ),
    Target("prompt sources", source_inputs, sources, 8, heavy=True),
    Target(
        "parquet",
        parquet_inputs,
        prompts,
        6,
        heavy=True,
        isolated=True,
        good=lambda: (".parquet", as_parquet(ROWS), {}),
    ),
    Target("model names", model_name_inputs, model_names, 4, heavy=True),
    Target("models", model_inputs, models, 4, most=250, heavy=True, isolated=True, good=tuple),
    Target(
        "adapters", adapter_inputs, adapters, 2, most=100, heavy=True, isolated=True, good=tuple
    ),
)
