"""Every reader of a user's files refuses bad input in one sentence of the kit, or reads it rightly.

A target raises a KitError where it refuses its input, and any other error is a failure.
"""

import contextlib
import io
import json
import shutil
import sys
import warnings
from functools import cache

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import rloo_kit as rk
from rloo_kit.config.run_file import EXAMPLES, SECTIONS, make_run_config, read_run_file
from rloo_kit.config.settings import DEFAULTS
from rloo_kit.config.trainer_settings import known_trainer_fields
from rloo_kit.errors import KitError

sys.path.insert(0, __file__.rpartition("/")[0])
from fuzz_inputs import (
    changed,
    fault_of_text,
    mutated,
    odd_numbers,
    odd_texts,
    odd_values,
    replaced,
    spoilt_files,
)


def every(number, inputs, target, accepted):
    """Give a target a number of inputs, the same ones in each run; a floor of them is accepted."""
    num_accepted = 0

    @settings(
        max_examples=number,
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs)
    def run(data):
        nonlocal num_accepted
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            fault = None
            try:
                target(data)
                num_accepted += 1
            except KitError as exc:
                fault = fault_of_text(str(exc)) and f"{exc!r} {fault_of_text(str(exc))}"
            assert not fault

    run()
    assert num_accepted >= accepted, "nearly everything is refused, so nothing is tried"


def as_jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def written(folder, files):
    """The folder with these files and no others."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def spoilt(files, several):
    """Files after what ``spoilt_files`` says was done to them."""
    files = dict(files)
    for kind, name, how, where, value in several:
        if kind == "gone" or name not in files:
            files.pop(name, None)
        elif kind == "bytes":
            files[name] = changed(files[name], how)
        else:
            files[name] = spoilt_rows(files[name], kind, how, where, value)
    return files


def spoilt_rows(content, kind, at, where, value):
    lines = content.split(b"\n")
    for place in range(len(lines)) if kind == "every row" else [at % len(lines)]:
        with contextlib.suppress(ValueError):  # no row of JSON
            lines[place] = json.dumps(replaced(json.loads(lines[place]), where, value)).encode()
    return b"\n".join(lines)


# --- run files -----------------------------------------------------------------------------------


def check_config(config):
    """What was read can be written to run.yaml and read back."""
    again = make_run_config(yaml.safe_load(yaml.safe_dump(config.as_dict(), sort_keys=False)))
    assert repr(again) == repr(config)


def test_bytes_of_a_run_file(tmp_path):
    path = tmp_path / "run.yaml"
    shipped = [file.read_bytes() for file in sorted(EXAMPLES.glob("*.yaml"))]

    def target(data):
        path.write_bytes(data)
        check_config(read_run_file(path))

    every(
        80,
        mutated([*shipped, b"trainer: &t {beta: 0.1}\nlora: *t\n"], most=6),
        target,
        accepted=8,
    )


def test_settings_and_overrides():
    names = {name: sorted(section.__dataclass_fields__) for name, section in SECTIONS.items()}
    names["trainer"] = sorted(known_trainer_fields())
    odd = st.one_of(odd_values(), st.sampled_from([1, 0.5, True, "no", "steps", [], {}, None]))
    defaults = {name: vars(getattr(make_run_config({}), name)) for name in SECTIONS}
    defaults["trainer"] = DEFAULTS

    @st.composite
    def tables(draw):
        name = draw(st.sampled_from(sorted(names)))
        keys = draw(st.lists(st.sampled_from(names[name]), max_size=3, unique=True))
        sound = draw(st.booleans())
        table = {key: defaults[name].get(key) if sound else draw(odd) for key in keys}
        return {
            name: table if sound else table | draw(st.dictionaries(odd_texts(), odd, max_size=1))
        }

    paths = [f"{name}.{key}" for name, keys in names.items() for key in keys]
    override = st.builds(
        "{}{}{}".format,
        st.one_of(st.sampled_from(paths), odd_texts()),
        st.sampled_from(["=", "=", "", "=="]),
        odd_texts(),
    )
    content = st.one_of(tables(), tables(), odd_values())

    def target(data):
        check_config(make_run_config(*data))

    every(100, st.tuples(content, st.lists(override, max_size=1)), target, accepted=13)


# --- prompts -------------------------------------------------------------------------------------


def test_files_of_prompts(tmp_path):
    from rloo_kit.data.prompts import load_prompts

    seeds = [
        as_jsonl([{"prompt": "What is 1 + 1?", "answer": "2"}, {"prompt": "Say é 😀"}]),
        as_jsonl([{"prompt": [{"role": "user", "content": "Hi"}], "n": 1}]),
        b"prompt,answer\nWhat?,2\n",
        b"prompt,prompt\na,b\n",
    ]
    message = st.dictionaries(
        st.sampled_from(["role", "content", "tool_calls"]), odd_values(for_json=True), max_size=3
    )
    prompt = st.one_of(odd_values(for_json=True), st.lists(message, max_size=3))
    rows = st.lists(prompt.map(lambda one: {"prompt": one}), min_size=1, max_size=3).map(as_jsonl)

    def target(data):
        path = tmp_path / ("rows.jsonl" if data[:1] in (b"{", b"") else "rows.csv")
        path.write_bytes(data)
        assert all(load_prompts(path)["prompt"])

    every(80, st.one_of(mutated(seeds), rows), target, accepted=3)


# --- rewards -------------------------------------------------------------------------------------

REWARD = b"""import math

def polite(completions, answer=None, **_):
    return [float("please" in str(text)) for text in completions]
"""
BAD_REWARDS = [
    b"import sys\nsys.exit()\n", b"import no_such_package\n", b"def f(): return f()\nf()\n",
    b"1 / 0\n", b"def polite(:\n", b"raise Exception('a\\nb' * 5000)\n", b"polite = 3\n",
    b"def polite(completions, **_):\n    import sys\n    sys.exit(1)\n",
    b"def polite(completions, **_):\n    return polite(completions)\n",
    b"def polite(completions, **_):\n    return [10 ** 400] * len(completions)\n",
    b"def polite(completions, **_):\n    return [[1.0]] * len(completions)\n",
    b"class E(Exception):\n    def __str__(self): return 1 / 0\nraise E\n", b"\x00", b"(" * 3000,
]  # fmt: skip


def test_specs_and_files_of_rewards(tmp_path):
    from rloo_kit.scoring.specs import load_rewards

    names = st.sampled_from(["accuracy", "length", "thinking_format", "format", "judge"])
    table = st.fixed_dictionaries(
        {"name": st.one_of(names, odd_texts())},
        optional={
            "weight": st.one_of(odd_values(), st.dictionaries(odd_numbers(), odd_numbers())),
            "only_if": st.one_of(names, odd_values()),
            "only_for": odd_values(),
            "scaled_by": odd_values(),
            "clipped_to": st.lists(odd_numbers(), max_size=3),
        },
    )
    source = st.one_of(st.sampled_from(BAD_REWARDS), mutated([REWARD], most=2))
    spec = st.one_of(odd_texts(), odd_values(), table, table)
    file = st.sampled_from(["mine.py:polite", "mine.py:polite:0.5", "mine.py:math"])
    columns = {
        "prompts": ["a"] * 3, "completions": ["please", "", "</think> 4"], "trainer_state": None,
        "completion_ids": [[1, 2], [], [3]], "answer": ["please", "x", "4"],
    }  # fmt: skip

    def target(data):
        written(tmp_path / "rewards", {"mine.py": data[0]})
        for reward in load_rewards([data[1]], base_dir=tmp_path / "rewards"):
            if "Judge(" not in repr(reward.func):  # it asks a server
                assert len(reward.func(**columns)) == 3
                reward.weight_at(0.5)

    every(90, st.tuples(source, st.one_of(spec, file)), target, accepted=4)


# --- folders of runs -----------------------------------------------------------------------------


@cache
def run_folder_files():
    """Name -> content of the files of a small run."""
    steps = range(1, 13)
    metrics = [
        {
            "step": step, "time": 1.0e9 + step, "loss": 0.01, "reward": 0.1 * step, "entropy": 0.5,
            "reward_std": 0.3, "grad_norm": 0.2, "learning_rate": 1e-5, "kl": 0.001 * step,
            "kl/token": 0.001 * step, "completions/mean_length": 20.0 + step, "step_time": 2.0,
            "completions/truncated": 0.1, "rewards/accuracy/mean": 0.1 * step,
            "memory/peak_gib": 1.0 + 0.1 * step, "sampling/adapter_reached": 1.0,
        }
        for step in steps
    ]  # fmt: skip
    completions = [
        {
            "step": step, "group": 0, "prompt": [{"role": "user", "content": "What is 1 + 1?"}],
            "completion": [{"role": "assistant", "content": f"1+1={n}</think> {n}"}],
            "truncated": False, "rewards": {"accuracy": float(n == 2), "length": None},
            "score": float(n == 2), "kl": 0.1, "baseline": 0.5, "advantage": 0.5 - n / 4,
            "tokens": 9, "thought_tokens": 5, "answer_at": 13,
        }
        for step in steps for n in range(3)
    ]  # fmt: skip
    sample = {"prompt": "What is 1 + 1?", "completion": "</think> 2", "rewards": {"accuracy": 1.0}}
    part = {
        "rewards": {"accuracy": 0.25}, "num_prompts": 4, "mean_length": 20.0, "temperature": 1.0,
        "samples": [sample, sample],
    }  # fmt: skip
    finding = {
        "kind": "kl_explosion", "level": "error", "reward": None, "evidence": "e", "why": "w",
        "remedy": "r", "setting": "trainer.beta=0.1",
    }  # fmt: skip
    end = {"how": "stopped", "reason": "x", "steps": 12, "seconds": 30.0, "finding": finding}
    return {
        "metrics.jsonl": as_jsonl([*metrics, {"step": 12, "train_runtime": 30.0}]),
        "completions.jsonl": as_jsonl(completions),
        "evaluation.json": json.dumps({"before": part, "after": part, "during": [part]}).encode(),
        "end.json": json.dumps(end).encode(),
        "run.yaml": (EXAMPLES / "quickstart.yaml").read_bytes(),
        "environment.json": b'{"hardware": {"name": "A GPU"}, "backend": "transformers"}',
    }


def test_files_of_a_run(tmp_path):
    from rloo_kit.diagnosis.run_rules import diagnose
    from rloo_kit.report.page import write_report

    def target(data):
        folder = written(tmp_path / "run", spoilt(run_folder_files(), data))
        said = []
        diagnose(folder, said.append)
        assert said[0].strip()
        page = write_report(folder, tmp_path / "page.html").read_text("utf-8")
        start = page.index(">", page.index('type="application/json"')) + 1
        json.loads(page[start : page.index("</script>", start)], parse_constant=pytest.fail)

    every(30, spoilt_files(run_folder_files()), target, accepted=15)


def test_files_of_a_checkpoint(tmp_path):
    from rloo_kit.checkpoints.store import find_checkpoint, read_checkpoint, write_checkpoint

    def fill(folder):
        (folder / "state.json").write_text('{"step": 3}')
        (folder / "weights.bin").write_bytes(bytes(range(64)))

    (tmp_path / "good").mkdir()
    write_checkpoint(tmp_path / "good", 3, fill, facts={"seed": 42}, score=0.5)
    good = {file.name: file.read_bytes() for file in (tmp_path / "good/checkpoint-3").iterdir()}
    weights = {name for name in good if name != "manifest.json"}

    def target(data):
        files = spoilt(good, data)
        folder = written(tmp_path / "resumed/checkpoint-3", files)
        found = find_checkpoint(tmp_path / "resumed")
        read = read_checkpoint(folder)
        # what is accepted is what was written
        assert found is not None
        assert (found.step, read.step, read.facts) == (3, 3, {"seed": 42})
        assert all(files.get(name) == good[name] for name in weights)

    every(60, spoilt_files(good), target, accepted=5)


@pytest.mark.long
def test_files_of_an_adapter(tmp_path):
    model, tokenizer = rk.load_model("tiny-thinker", load_in_4bit=False)
    made = rk.save_adapter(rk.attach_lora(model, r=2), tokenizer, tmp_path / "made")
    names = ("adapter_config.json", "adapter_model.safetensors")
    weights = load_file(made / names[1])
    good = {file.name: file.read_bytes() for file in made.iterdir() if file.is_file()}

    def target(data):
        folder = written(tmp_path / "adapter", spoilt(good, data))
        with rk.session():
            loaded, _ = rk.load_model(folder, load_in_4bit=False)
            saved = rk.save_adapter(loaded, tokenizer, tmp_path / "again")
            now = load_file(saved / names[1])
            assert now.keys() == weights.keys()
            assert all(torch.isfinite(value).all() for value in now.values())

    target([])  # nothing spoilt
    every(8, spoilt_files(names), target, accepted=0)


@pytest.mark.parametrize(
    "text", ["", "a line\nand another: fix both", "x" * 900 + ": shorten it", "beta is wrong"]
)
def test_text_that_is_no_sentence_with_a_remedy_is_seen(text):
    assert fault_of_text(text)
