"""What a run reports to TensorBoard, Trackio and Weights & Biases, read back from their files."""

import json
import os
from types import SimpleNamespace

import pytest
from fresh_python import run_python

pytestmark = [pytest.mark.tracker, pytest.mark.xdist_group("tracker")]

TRAINING = """
import json, socket, sys

asked = []
resolve = socket.getaddrinfo

def noted(host, *rest, **more):
    asked.append(str(host))
    return resolve(host, *rest, **more)

socket.getaddrinfo = noted

import rloo_kit as rk

def odd_characters(completions, **_):
    return [sum(ord(c) % 2 for c in completion[-1]["content"]) / 100 for completion in completions]

def sometimes(completions, **_):
    return [None if number % 4 == 1 else 0.5 for number in range(len(completions))]

model, tokenizer = rk.load_model("tiny-thinker", max_seq_length=256)
trainer = rk.LeaveOneOutTrainer(
    model=rk.attach_lora(model),
    reward_funcs=[odd_characters, sometimes],
    train_dataset=rk.load_prompts("arithmetic", num_prompts=16),
    processing_class=tokenizer,
    args=rk.LeaveOneOutConfig(
        "out",
        max_steps=2,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        save_strategy="no",
        report_to=["tensorboard", "trackio", "wandb"],
        project="kit",
        run_name="two-steps",
        log_completions=True,
        num_completions_to_print=0,
    ),
)
trainer.train()
rows = [row for row in trainer.state.log_history if "reward" in row]
json.dump({"rows": rows, "asked": asked}, open("seen.json", "w"))
"""
METRICS = ("reward", "signal/groups_without", "kl/sequence", "score/group_std",
           "speed/generation_tokens_per_second", "speed/learning_tokens_per_second",
           "memory/peak_gib", "rewards/odd_characters/mean")  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps that report to all three at once, in a process without a network."""
    folder = tmp_path_factory.mktemp("run")
    names = {
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(folder / "trackio"),
        "RLOO_KIT_LIVE": "off",
    }
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "TRACKIO"))}
    printed = run_python(TRAINING, cwd=folder, env={**kept, **names})
    seen = json.loads((folder / "seen.json").read_text())
    assert [row["step"] for row in seen["rows"]] == [1, 2]
    return SimpleNamespace(folder=folder, rows=seen["rows"], asked=seen["asked"], printed=printed)


def tables_hold_the_batches(tables):
    """A table a step, the last one once more at the end of a run, with rewards and advantages."""
    assert [{row["step"] for row in table} for table in tables[:2]] == [{1}, {2}]
    assert tables[2:] in ([], [tables[1]])
    for table in tables:
        assert len(table) == 8
        assert table[0]["prompt"][-1]["content"].startswith("What is")
        assert all(row["completion"][-1]["role"] == "assistant" for row in table)
        assert [row["sometimes"] for row in table] == [0.5, "none", 0.5, 0.5] * 2
        assert any(row["advantage"] for row in table)
        for group in (table[:4], table[4:]):
            scores = [row["odd_characters"] + 0.5 * (row["sometimes"] == 0.5) for row in group]
            order = sorted(range(4), key=lambda place: scores[place])
            advantages = [group[place]["advantage"] for place in order]
            assert advantages == pytest.approx(sorted(advantages))


def test_no_name_of_another_machine_is_asked_for(run):
    assert set(run.asked) <= {"localhost", "127.0.0.1", "::1", "0.0.0.0"}


def test_no_table_is_printed_over_the_live_view(run):
    assert "Completion" not in run.printed
    assert "│" not in run.printed


def test_trackio_holds_every_metric_and_the_completions(run):
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage;"
        "(name,) = SQLiteStorage.get_runs('kit');"
        "print(json.dumps([name, SQLiteStorage.get_logs('kit', name)]))"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(run.folder / "trackio")}
    printed = run_python(code, env=environment)
    name, rows = json.loads(printed.splitlines()[-1])
    assert name == "two-steps"
    steps = [row for row in rows if "train/reward" in row]
    for name in METRICS:
        found = [(row["train/global_step"], row[f"train/{name}"]) for row in steps]
        assert found == [(row["step"], pytest.approx(row[name])) for row in run.rows]
    tables_hold_the_batches(
        [as_said(row["completions"]["_value"]) for row in rows if "completions" in row]
    )


def as_said(table):
    """Rows in which what could not be scored is none; the trackers write NaN, or its name."""
    return [
        {name: "none" if value == "NaN" or value != value else value for name, value in row.items()}
        for row in table
    ]


def test_wandb_holds_the_completions(run):
    (file,) = run.folder.rglob("run-*.wandb")
    assert "offline-run" in file.parent.name
    tables = [json.loads(path.read_text()) for path in file.parent.rglob("*.table.json")]
    tables = [
        as_said(dict(zip(table["columns"], row, strict=True)) for row in table["data"])
        for table in tables
    ]
    tables_hold_the_batches(sorted(tables, key=lambda table: table[0]["step"]))
