"""The live views: through a pipe and in a notebook's kernel."""

import base64
import contextlib
import itertools
import os
import re
import warnings
from types import SimpleNamespace

import nbformat
import pytest
from matplotlib.figure import Figure
from nbclient import NotebookClient

from rloo_kit.diagnosis.record import RunRecord
from rloo_kit.diagnosis.registry import Finding
from rloo_kit.errors import ConfigError
from rloo_kit.live import progress as live
from rloo_kit.live import select
from rloo_kit.live.figure import figure_png, page_of
from rloo_kit.live.progress import Progress
from rloo_kit.live.view import LiveView, PlainLines

# Of the quickstart's first step.
ROW = {
    "loss": 9.313225746154785e-09, "grad_norm": 0.16217748820781708, "learning_rate": 0.001,
    "num_tokens": 4261.0, "completions/mean_length": 27.578125, "completions/clipped_ratio": 0.0,
    "speed/generation_tokens_per_second": 1630.3704799725574, "signal/groups_without": 0.25,
    "reward": 0.59375, "reward_std": 0.49501481652259827, "frac_reward_zero_std": 0.25,
    "score/raw_group_std": 0.2540663480758667, "completions/truncated": 0.0,
    "rewards/accuracy/mean": 0.59375, "rewards/accuracy/std": 0.49501481652259827,
    "rewards/thinking/mean": 0.7, "rewards/thinking/std": 0.0,
    "kl": 0.0345, "kl/token": 0.0345, "kl/sequence": 0.991, "objective/kl": 0.991,
    "step_time": 2.244945555998129, "speed/learning_tokens_per_second": 3668.116684405367,
    "memory/peak_gib": 1.7049636840820312, "epoch": 0.0078125,
}  # fmt: skip
SUMMARY = {"train_runtime": 94.9557, "train_steps_per_second": 0.421, "epoch": 0.3125}
FURTHER_PASS = {"loss": 0.1, "grad_norm": 0.2, "epoch": 0.1}


FINDING = Finding(
    "kl_explosion", "error", None, "kl/token 1.3", "why", "begin again", "trainer.beta=0.1"
)


def start(view, max_steps=40):
    state = SimpleNamespace(global_step=0, max_steps=max_steps, num_input_tokens_seen=0)
    view.on_train_begin(None, state, None, model=None)
    return state


def make_step(view, state, **changes):
    """The events of one step, as the trainer sends them."""
    state.global_step += 1
    tokens = 4261.0 * state.global_step
    view.on_log(None, state, None, logs={**ROW, "num_tokens": tokens, **changes}, model=None)
    view.on_log(None, state, None, logs=FURTHER_PASS, model=None)


# --- which view -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "view"),
    [
        ("plain", PlainLines),
        ("off", LiveView),
        ("auto", PlainLines),
        ("notebook", PlainLines),  # there is no cell here
    ],
)
def test_environment_variable_chooses_the_view(monkeypatch, choice, view):
    monkeypatch.setenv("RLOO_KIT_LIVE", choice)
    assert type(select.live_progress()) is view


def test_a_view_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setenv("RLOO_KIT_LIVE", "panel")
    with pytest.raises(ConfigError, match="'panel', must be one of auto, notebook, plain, off"):
        select.live_progress()


# --- lines ----------------------------------------------------------------------------------------


def test_pipe_gets_one_line_per_step_and_finding():
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading) as lines:
        view = PlainLines()
        with contextlib.redirect_stdout(stream):
            state = start(view, max_steps=3)
            for findings in ([], [FINDING], [FINDING]):  # right before their step is logged
                view.on_findings(None, state, None, findings=findings)
                make_step(view, state)
            view.on_log(None, state, None, logs=SUMMARY)
            view.on_train_end(None, state, None)
            view.close()
        stream.close()
        text = lines.read()
    assert re.fullmatch(
        r"step 1/3  reward 0\.594  accuracy 0\.594  thinking 0\.700  kl 0\.0345  length 27\.6  "
        r"no signal 25%  \d+ tokens/s  0.0 s left\n"
        r"step 2/3  .* left\n"
        r"error: kl_explosion; set trainer\.beta=0\.1\n"
        r"step 3/3  .* left\n",
        text,
    )


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "high", [1.0]])
def test_odd_metrics_are_shown_as_none(value, capsys):
    view = PlainLines()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = start(view)
        for _ in range(5):
            make_step(view, state, **dict.fromkeys(ROW, value))
        make_step(view, state)
        view.close()
    assert len(view.progress.metrics.steps) == 6
    lines = capsys.readouterr().out.splitlines()
    assert "reward none  accuracy none  thinking none  kl none  length none" in lines[0]
    assert "reward 0.594  accuracy 0.594" in lines[-1]
    figure_png(view.progress)


def test_broken_stream_ends_the_view_not_the_run():
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w")
    view = PlainLines()
    state = start(view)
    os.close(reading)
    with contextlib.redirect_stdout(stream):
        with pytest.warns(RuntimeWarning, match="but the run continues: BrokenPipe"):
            make_step(view, state)
        make_step(view, state)  # and says nothing more
        view.close()
    with pytest.raises(BrokenPipeError):
        stream.close()


@pytest.mark.parametrize(("name", "shown"), [("unscored", []), ("_mine", ["_mine"])])
def test_every_reward_that_scored_is_in_the_legend(monkeypatch, name, shown):
    progress = Progress()
    rewards = {f"rewards/{name}/mean": None if name == "unscored" else 0.5}
    progress.add(1, 2, {"reward": 0.5, **rewards}, 1.0)
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure_png(progress)
    legend = figures[0].axes[-1].get_legend()
    assert [text.get_text() for text in (legend.get_texts() if legend else ())] == shown


def test_without_findings_the_figure_says_nothing_of_the_doctor():
    progress = Progress()  # which does not know if the doctor is off
    progress.add(1, 2, ROW, 1.0)
    assert page_of(progress)["text/plain"] == progress.line


# --- what is known --------------------------------------------------------------------------------


def test_the_line_reads_only_the_newest_step():
    progress = Progress()
    progress.add(1, 2, ROW, 1.0)
    alone = progress.line.partition("tokens/s")[0]
    progress.metrics.rows.insert(0, None)
    assert progress.line.partition("tokens/s")[0] == alone


def test_time_left_ignores_one_slow_step():
    progress = Progress(0, 10, now=0.0)
    for step, now in ((1, 2.0), (2, 4.0), (3, 104.0), (4, 106.0), (5, 108.0)):
        progress.add(step, 10, ROW, now)
    assert progress.seconds_left == 5 * 2.0
    resumed = Progress(100, 110, now=0.0)
    resumed.add(102, 110, ROW, 6.0)  # a further pass lies between
    assert resumed.seconds_left == 8 * 3.0


def test_the_first_step_after_a_resume_has_its_true_speed(monkeypatch):
    clock = itertools.count(0, 2)
    monkeypatch.setattr("rloo_kit.live.view.time.monotonic", lambda: next(clock))
    view = LiveView()
    state = SimpleNamespace(global_step=100, max_steps=110, num_input_tokens_seen=426_100)
    view.on_train_begin(None, state, None)
    make_step(view, state)
    assert view.progress.tokens_per_second == 4261 / 2


# --- the notebook ---------------------------------------------------------------------------------


def run_cells(cells, tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
    return [cell.outputs for cell in notebook.cells]


SETUP = f"""
import sys, time
sys.path[:0] = {[os.path.dirname(__file__)]!r}
from test_live import FINDING, make_step, start
from rloo_kit.live.select import live_progress

def train(steps, seconds):
    view = live_progress()
    state = start(view, max_steps=steps)
    try:
        for number in range(steps):
            time.sleep(seconds)
            make_step(view, state, reward=number / 10)
        view.on_findings(None, state, None, findings=[FINDING])
    finally:
        view.close()
        view.close()
    return view
"""


@pytest.mark.notebook
def test_notebook_shows_one_figure_updated_in_place(tmp_path):
    cells = [
        SETUP,
        "view = train(12, 0.05)",
        "print(type(view).__name__, 'matplotlib.pyplot' in sys.modules)",
        "try:\n    train(3, 'no number')\nexcept TypeError as exc:\n    print('ended by', exc)",
        "sys.modules['matplotlib'] = None\nview = train(3, 0.05)",
    ]
    _, trained, counted, failed, without = run_cells(cells, tmp_path)
    (output,) = trained
    assert output.output_type == "display_data"
    assert set(output.data) == {"text/plain", "text/html"}  # no widget
    picture = re.search(r'src="data:image/png;base64,([^"]+)"', output.data["text/html"])[1]
    assert base64.b64decode(picture)[:4] == b"\x89PNG"
    assert output.data["text/plain"].startswith("step 12/12  reward 1.100")
    assert "error: kl_explosion; set trainer.beta=0.1" in output.data["text/plain"]
    assert "kl_explosion" in output.data["text/html"]
    assert counted[0].text == "NotebookFigure False\n"
    assert failed[0].data["text/plain"] == "step 0/3"
    assert "ended by" in failed[1].text
    assert without[0].data["text/plain"].startswith("step 3/3")
    assert "<img" not in without[0].data["text/html"]


@pytest.fixture
def no_findings(monkeypatch):
    """As if the doctor had nothing to say; a record alone is not enough for it."""
    monkeypatch.setattr(live, "find_in_run", lambda record: [])


def test_a_recorded_run_begins_with_its_first_step(no_findings):
    row = ROW | {"step": 1, "time": 100.0, "step_time": 4.0}
    rows = [row, row | {"step": 2, "time": 104.0}]
    progress = live.progress_of(RunRecord(rows))
    assert list(progress._paces) == [4.0, 4.0]
    assert progress.total == 2  # it is not known how many steps were planned


@pytest.mark.parametrize(
    ("trainer", "total"),
    [
        ({"max_steps": -1, "num_train_epochs": 0.32}, 4),  # a part of a step is a step
        ({"max_steps": -1, "num_train_epochs": 0.2}, 3),
        ({"max_steps": 2}, 3),
        ({"max_steps": 8}, 8),
    ],
)
def test_no_step_is_above_the_planned_steps(no_findings, trainer, total):
    row = ROW | {"step": 3, "time": 100.0, "epoch": 0.3}
    record = RunRecord([row], config=SimpleNamespace(trainer=trainer))
    assert live.progress_of(record).total == total
