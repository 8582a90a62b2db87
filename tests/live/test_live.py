"""The live views: through a pipe, a pseudo-terminal and a notebook's kernel."""

import base64
import contextlib
import itertools
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
import warnings
from types import SimpleNamespace

import nbformat
import pytest
from nbclient import NotebookClient

from rloo_kit.diagnosis.record import RunRecord
from rloo_kit.diagnosis.registry import Finding
from rloo_kit.errors import ConfigError
from rloo_kit.live import progress as live
from rloo_kit.live import select
from rloo_kit.live.figure import figure_png
from rloo_kit.live.progress import Progress
from rloo_kit.live.terminal import TerminalPanel
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


def record(question, completion, score):
    return {
        "step": 1, "group": 0, "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": completion}], "truncated": False,
        "rewards": {"accuracy": score}, "score": score, "kl": 0.0, "baseline": 1.0,
        "advantage": 0.0, "tokens": 27, "thought_tokens": 20,
        "answer_at": completion.find("</think>") + len("</think>"),
    }  # fmt: skip


RECORDS = [
    record("What is 420 + 659?", "0+9=9 2+5=7 4+6=10\n</think>\n\n1079", 1.0),
    record("What is 335 + 491?", "5+1=6 3+9=12 3+4+1=8\n</think>\n\n826", 0.0),
]
FINDING = Finding(
    "kl_explosion", "error", None, "kl/token 1.3", "why", "begin again", "trainer.beta=0.1"
)


def start(view, max_steps=40):
    state = SimpleNamespace(global_step=0, max_steps=max_steps, num_input_tokens_seen=0)
    view.on_train_begin(None, state, None, model=None)
    return state


def make_step(view, state, records=RECORDS, **changes):
    """The events of one step, as the trainer sends them."""
    state.global_step += 1
    tokens = 4261.0 * state.global_step
    view.on_completions(None, state, None, records=records, model=None)
    view.on_log(None, state, None, logs={**ROW, "num_tokens": tokens, **changes}, model=None)
    view.on_log(None, state, None, logs=FURTHER_PASS, model=None)


# --- a terminal, read back ------------------------------------------------------------------------


class Terminal:
    """A pseudo-terminal of a given size, and what was written to it."""

    def __init__(self, columns, lines):
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (lines, columns))
        self.stream = os.fdopen(os.dup(self.slave), "w", encoding="utf-8", buffering=1)
        self.columns, self.lines = columns, lines
        self._bytes = b""
        self._last = time.monotonic()
        self._reader = threading.Thread(target=self._read_on)  # a full buffer blocks who writes
        self._reader.start()

    def _read_on(self):
        with contextlib.suppress(OSError):  # the other end is closed
            while chunk := os.read(self.master, 65536):
                self._bytes += chunk
                self._last = time.monotonic()

    def read(self):
        """All that was written, as text, once nothing has come for a while."""
        asked = time.monotonic()
        while time.monotonic() - max(asked, self._last) < 0.05:
            time.sleep(0.01)
        return self._bytes.decode()

    def close(self):
        self.stream.close()
        os.close(self.slave)
        self._reader.join(10)
        os.close(self.master)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "RLOO_KIT_LIVE"):
        monkeypatch.delenv(name, raising=False)
    made = []

    def make(columns=80, lines=24):
        # rich asks the terminal of this process for its size, unless it is told
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("LINES", str(lines))
        made.append(Terminal(columns, lines))
        return made[-1]

    yield make
    for one in made:
        one.close()


CODE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\r|\n|[^\x1b]", re.DOTALL)


def screen(text, columns):
    """What a terminal shows after ``text``, scrolled lines included; unknown codes fail."""
    lines, row, column = [""], 0, 0
    for match in CODE.finditer(text):
        numbers, code = match[1], match[2]
        if match[0] == "\r":
            column = 0
        elif match[0] == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif code == "A":
            row = max(0, row - int(numbers or 1))
        elif code == "K":
            lines[row] = "" if numbers == "2" else lines[row][:column]
        elif code is None:
            assert column < columns, f"a line is wider than the terminal: {lines[row]!r}"
            lines[row] = lines[row][:column].ljust(column) + match[0] + lines[row][column + 1 :]
            column += 1
        else:
            assert code == "m" or (code in "hl" and numbers == "?25"), match[0]
    return lines


def panel_of(lines):
    """The one panel on a screen."""
    tops = [place for place, line in enumerate(lines) if line.startswith("╭")]
    ends = [place for place, line in enumerate(lines) if line.startswith("╰")]
    assert len(tops) == len(ends) == 1, "\n".join(lines)
    return lines[tops[0] : ends[0] + 1]


# --- which view -----------------------------------------------------------------------------------


def test_terminal_gets_the_panel_and_pipe_gets_lines(terminal, tmp_path):
    assert type(select.live_progress(terminal().stream)) is TerminalPanel
    with (tmp_path / "out").open("w") as stream:
        assert type(select.live_progress(stream)) is PlainLines


def test_environment_variable_chooses_the_view(terminal, tmp_path, monkeypatch):
    wanted = {"plain": PlainLines, "off": LiveView, "panel": TerminalPanel, "auto": TerminalPanel}
    stream = terminal().stream
    for value, view in wanted.items():
        monkeypatch.setenv("RLOO_KIT_LIVE", value)
        assert type(select.live_progress(stream)) is view
    monkeypatch.setenv("RLOO_KIT_LIVE", "pannel")
    with pytest.raises(ConfigError, match="'pannel', must be one of auto, panel, notebook, plain"):
        select.live_progress(stream)


# --- lines ----------------------------------------------------------------------------------------


def test_pipe_gets_one_line_per_step_and_finding():
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading) as lines:
        view = select.live_progress(stream)
        state = start(view, max_steps=3)
        for _ in range(3):
            make_step(view, state)
            view.on_findings(None, state, None, findings=[FINDING])
        view.on_log(None, state, None, logs=SUMMARY)
        view.on_train_end(None, state, None)
        view.close()
        stream.close()
        text = lines.read()
    assert re.fullmatch(
        r"step 1/3  reward 0\.594  accuracy 0\.594  thinking 0\.700  kl 0\.0345  length 27\.6  "
        r"no signal 25%  \d+ tokens/s  0.0 s left\n"
        r"error: kl_explosion; set trainer\.beta=0\.1\n"
        r"(step [23]/3  .* left\n){2}",
        text,
    )


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "high", [1.0]])
def test_odd_metrics_are_shown_as_none(value, terminal):
    screen_of = terminal()
    for view in (PlainLines(screen_of.stream), TerminalPanel(screen_of.stream)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            state = start(view)
            for _ in range(5):
                make_step(view, state, **dict.fromkeys(ROW, value))
            make_step(view, state)
            view.close()
        assert len(view.progress.metrics.steps) == 6
    figure_png(view.progress)


def test_broken_stream_ends_the_view_not_the_run():
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w")
    view = PlainLines(stream)
    state = start(view)
    os.close(reading)
    with pytest.warns(RuntimeWarning, match="the live view ended, the run continues: BrokenPipe"):
        make_step(view, state)
    make_step(view, state)  # and says nothing more
    view.close()
    with pytest.raises(BrokenPipeError):
        stream.close()


# --- what is known --------------------------------------------------------------------------------


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


# --- the panel ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(60, 24), (200, 60), (80, 10)])
def test_panel_fits_and_keeps_the_last_state(terminal, size):
    place = terminal(*size)
    view = TerminalPanel(place.stream)
    state = start(view)
    for number in range(6):
        make_step(view, state, reward=0.5 + number / 10)
        view.on_findings(None, state, None, findings=[FINDING] * (number == 3))
    view.on_train_end(None, state, None)
    view.close()
    text = place.read()
    lines = screen(text, place.columns)
    panel = panel_of(lines)
    assert lines[len(panel) :] == [""]  # nothing above it, and the prompt's line below
    assert len({len(line) for line in panel}) == 1
    whole = "\n".join(panel)
    assert "step 6/40" in whole
    assert "nothing found" in whole
    assert "1.000 ▁" in whole
    assert "What is 420" in whole
    assert text.rindex("\x1b[?25h") > text.rfind("\x1b[?25l")


def test_panel_separates_thought_and_escapes_control_characters(terminal):
    place = terminal(columns=100)
    view = TerminalPanel(place.stream)
    odd = "[bold]a\x1b[2J\x07[/nope]\n</think>\n\n[red]7[/red] 数"
    make_step(view, start(view), records=[record("1 + 1?", odd, 1.0), *RECORDS[1:]])
    view.close()
    panel = panel_of(screen(place.read(), 200))
    shown = [line.strip("│ ") for line in panel]
    assert any(line.startswith("best 1.000  1 + 1?") for line in shown)
    assert r"thought    [bold]a\x1b[2J\x07[/nope]" in shown
    assert "answer     [red]7[/red] 数" in shown
    assert "worst 0.000 What is 335 + 491?" in shown
    assert "answer     826" in shown


def test_findings_appear_with_their_setting_and_disappear(terminal):
    place = terminal()
    view = TerminalPanel(place.stream)
    state = start(view)
    make_step(view, state)
    view.on_findings(None, state, None, findings=[FINDING] * 5)
    with_findings = panel_of(screen(place.read(), 80))
    view.on_findings(None, state, None, findings=[])
    without = panel_of(screen(place.read(), 80))
    view.close()
    assert "error: kl_explosion; set trainer.beta=0.1" in with_findings[2]
    assert "and 2 more" in with_findings[4]
    assert "nothing found" in without[2]


def test_printed_lines_appear_above_the_panel(terminal, monkeypatch):
    place = terminal()
    monkeypatch.setattr(sys, "stdout", place.stream)
    monkeypatch.setattr(sys, "stderr", place.stream)
    view = select.live_progress()
    state = start(view)
    for number in range(3):
        print("printed", number)  # noqa: T201
        print("warned", number, file=sys.stderr)  # noqa: T201
        make_step(view, state)
    view.close()
    assert (sys.stdout, sys.stderr) == (place.stream,) * 2
    lines = screen(place.read(), 80)
    printed = [f"{what} {number}" for number in range(3) for what in ("printed", "warned")]
    assert [line.rstrip() for line in lines[:6]] == printed
    assert "step 3/40" in panel_of(lines)[0]
    assert lines[6].startswith("╭")


CHILD = """
import sys, time
sys.path[:0] = {path!r}
from test_live import make_step, start
from rloo_kit.live.select import live_progress

print("imported")  # libraries log before
view = live_progress()
state = start(view)
try:
    make_step(view, state)
    print("READY")
    {then}
finally:
    view.close()
    view.close()
"""


def in_a_terminal(place, then, interrupt):
    """Run CHILD in the terminal; its exit status."""
    code = CHILD.format(path=[os.path.dirname(__file__)], then=then)
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=place.slave, stderr=place.slave,
        env={**os.environ, "RLOO_KIT_LIVE": "auto"},
    )  # fmt: skip
    killer = threading.Timer(120, child.kill)
    killer.start()
    try:
        while "READY" not in place.read() and child.poll() is None:
            pass
        if interrupt:
            child.send_signal(interrupt)
        status = child.wait()
        time.sleep(0.3)  # the reader's thread may still wait for a core
        return status
    finally:
        killer.cancel()


@pytest.mark.long
def test_ctrl_c_leaves_panel_and_cursor(terminal):
    place = terminal()
    assert in_a_terminal(place, "time.sleep(60)", signal.SIGINT) != 0
    text = place.read().partition("imported")[2].lstrip()
    lines = screen(text, 80)
    assert "step 1/40" in panel_of(lines)[0]
    assert lines[-2].rstrip() == "KeyboardInterrupt"  # printed below the panel
    assert text.rindex("\x1b[?25h") > text.rfind("\x1b[?25l")


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


def test_a_recorded_run_begins_with_its_first_step():
    row = ROW | {"step": 1, "time": 100.0, "step_time": 4.0}
    rows = [row, row | {"step": 2, "time": 104.0}]
    record = RunRecord(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "find_in_run", lambda _: [])
        progress = live.progress_of(record)
        assert list(progress._paces) == [4.0, 4.0]
        record = RunRecord(rows, config=SimpleNamespace(trainer={"max_steps": -1}))
        assert live.progress_of(record).total == 2
