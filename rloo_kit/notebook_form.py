"""Form for a notebook: the fields of a run file, its plan, and buttons to train.

A process of its own reads the fields, so that the kernel loads no library and takes no memory of a
GPU. It ends before a run starts, which is a process too.
"""

import asyncio
import base64
import contextlib
import html
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rloo_kit.config.run_file import (
    EXAMPLES,
    find_run_file,
    make_run_config,
    read_overrides,
    read_run_file,
    read_value,
)
from rloo_kit.data.hub_tasks import HUB_TASKS
from rloo_kit.data.prompts import BUILTIN
from rloo_kit.diagnosis.record import read_run
from rloo_kit.errors import KitError, ModelError, SetupError
from rloo_kit.job import beside, read_config, read_prompts
from rloo_kit.live.notebook import DRAWING_SECONDS, page_of
from rloo_kit.live.view import number_text, progress_of
from rloo_kit.machine.environment import quiet
from rloo_kit.machine.hardware import find_card
from rloo_kit.output_folder import free_folder, latest_folder, write_atomically
from rloo_kit.planning.planner import make_plan
from rloo_kit.reward_lab.lab import check_rewards, columns_of
from rloo_kit.rewards import RewardModel
from rloo_kit.runs.child import POSIX, call_in_child
from rloo_kit.runs.train import train
from rloo_kit.scoring.composition import Composed
from rloo_kit.scoring.contract import AsyncCheckedReward, CheckedReward, call_reward
from rloo_kit.scoring.loading import LoadedReward, load_rewards
from rloo_kit.text.redaction import redact
from rloo_kit.text.wording import text_of

if TYPE_CHECKING:
    from datasets import Dataset

# Seconds without a key before the fields are read, and that reading them may take
PAUSE, LIMIT = 0.5, 120.0
TOO_SLOW = (
    f"reading the fields takes more than {LIMIT:.0f} s: if prompts are being downloaded, run "
    "rk.load_prompts on them in a cell first, then change a field to try again"
)
SAMPLES = 3
LOG_LINES = 200
FIELDS = ("model", "prompts", "rewards", "card", "settings")
BUTTONS = ("check", "train", "stop", "resume")
# Shown above the buttons, and below them
ABOVE, BELOW = ("plan", "samples", "run file"), ("status", "figure", "log", "report")


# --- reading the fields --------------------------------------------------------------------------


@dataclass(frozen=True)
class Preview:
    """What the fields come to; all but ``errors`` is "" where there is one."""

    errors: dict[str, str]  # field -> what is wrong with it
    plan: str = ""
    samples: str = ""
    run_file: str = ""
    output_dir: str = ""


def preview(content: dict[str, Any], fields: dict[str, str], base: Path) -> Preview:
    """Return what the fields come to; nothing is written, and no weights are loaded.

    ``content`` is a valid run file in the folder ``base``, which the fields change.
    """
    errors: dict[str, str] = {}

    def attempt(name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return call(*args, **options)
        except KitError as exc:
            text = redact(str(exc))
            field = "model" if isinstance(exc, ModelError) else text.partition(":")[0]
            errors.setdefault(field if field in FIELDS else name, text)

    settings, card = [*filter(str.strip, fields["settings"].splitlines())], fields["card"]
    rewards = {"rewards": read_value(f"[{fields['rewards']}]")}
    content["model"] = {**(content.get("model") or {}), "name": fields["model"]}
    content["data"] = {**(content.get("data") or {}), "prompts": fields["prompts"]}
    if attempt("rewards", make_run_config, rewards):
        content |= rewards
    # Where the settings are wrong, the other fields are read without them.
    config = attempt("settings", make_run_config, content, settings)
    if "rewards" in errors:
        content.pop("rewards", None)
    config = config or make_run_config(content)
    config, _ = attempt("settings", read_config, config, ()) or (config, base)
    if card != "this":
        attempt("card", find_card, card)
    with quiet():
        prompts, _ = attempt("prompts", read_prompts, config, base) or (None, None)
        found = attempt("rewards", load_rewards, config.rewards, base_dir=base)
        plan = attempt("settings", make_plan, config, "this" if errors else card, base=base)
        samples = "" if errors else attempt("rewards", _samples, prompts, found)
    if errors:
        return Preview(errors)
    for key, value in read_overrides(settings).items():
        content[key] = {**(content.get(key) or {}), **value} if isinstance(value, dict) else value
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    return Preview({}, str(plan), samples, text, config.output_dir)


def _samples(prompts: "Dataset", rewards: list[LoadedReward]) -> str:
    """Return the first prompts, and what the answer of each, after a thought, earns."""
    rows = [dict(row) for row in prompts.select(range(min(SAMPLES, len(prompts))))]
    for row in rows:
        text = f"<think>\n...\n</think>\n\n{row.get('answer') or ''}"
        is_chat = isinstance(row["prompt"], list)
        row["completion"] = [{"role": "assistant", "content": text}] if is_chat else text
    earned = {
        one.name: call_reward(one.func, columns_of(rows))
        for one in rewards
        if not _asks_a_model(one.func)
    }
    lines = []
    for number, row in enumerate(rows):
        scores = [f"{name} {number_text(found[number], 3)}" for name, found in earned.items()]
        completion = " ".join(text_of(row["completion"]).split())
        lines += [text_of(row["prompt"]), f"    {completion}   {', '.join(scores)}"]
    left = ", ".join(one.name for one in rewards if one.name not in earned)
    return "\n".join(lines) + (f"\nonly the check asks: {left}" if left else "")


def _asks_a_model(func: CheckedReward) -> bool:
    """Return whether a reward or a part of it asks a model, or counts the tokens of one."""
    if isinstance(func.reward, Composed):
        return any(map(_asks_a_model, func.reward.parts))
    is_model = isinstance(func, AsyncCheckedReward) or isinstance(func.reward, RewardModel)
    return is_model or "completion_ids" in func.required


def _follow_the_kernel() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the notebook's stop button is for a run
    kernel: Any = parent_process()
    threading.Thread(target=lambda: (kernel.join(), os._exit(0)), daemon=True).start()


# --- the form ------------------------------------------------------------------------------------


def form(path: str | Path = "form.yaml") -> Any:
    """Return a form for a notebook: it shows the plan of a run, writes its run file, and trains.

    Args:
        path: The run file. The form begins with it where it exists, else with ``quickstart``, and
            writes it before a run, without comments.

    Raises:
        SetupError: ipywidgets is not installed.
        ConfigError: The run file is wrong.
    """
    if find_spec("ipywidgets") is None:
        raise SetupError("rk.form() needs ipywidgets: pip install ipywidgets")
    return Form(path).page


class Form:
    """The widgets of a form and what they do; ``page`` holds them all."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.state = "idle"  # or "starting", "running"
        self.found: Preview | None = None  # None while the fields are read
        self._reading = threading.Lock()
        self._reader: ProcessPoolExecutor | None = None
        self._timer = threading.Timer(PAUSE, self._read)
        self._process: subprocess.Popen | None = None
        self._folder: Path | None = None  # of the run that is shown
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._due = 0.0
        self._loop: Any = None  # of the kernel's main thread; a click may come in another one
        with contextlib.suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()
        self._make_widgets()
        self._begin_with(self.path if self.path.exists() else "quickstart")

    def _make_widgets(self) -> None:
        import ipywidgets as widgets

        shipped = sorted(file.stem for file in EXAMPLES.glob("*.yaml"))
        options = {
            "model": [*dict.fromkeys(read_run_file(name).model.name for name in shipped)],
            "prompts": [*BUILTIN, *(name for name, task in HUB_TASKS.items() if task.train)],
            "card": ["this", "8GB", "12GB", "16GB", "24GB"],
        }
        wide = {"layout": {"width": "36em"}, "style": {"description_width": "6em"}}
        self.start = widgets.Dropdown(options=["", *shipped], description="begin with", **wide)
        self.fields: dict[str, Any] = {
            name: widgets.Combobox(options=options[name], description=name, **wide)
            if name in options
            else widgets.Textarea(description=name, **wide)
            for name in FIELDS
        }
        self.buttons = {name: widgets.Button(description=name) for name in BUTTONS}
        self.parts = {name: widgets.HTML() for name in (*FIELDS, *ABOVE, *BELOW)}
        self.start.observe(lambda change: self._begin_with(change["new"]), "value")
        for field in self.fields.values():
            field.observe(self._typed, "value")
        for name, button in self.buttons.items():
            button.on_click(lambda _, name=name: self.press(name))
        for name, part in self.parts.items():
            part.add_class(f"rloo-kit-{name.replace(' ', '-')}")
        rows = [widgets.HBox([self.fields[name], self.parts[name]]) for name in FIELDS]
        above, below = ([self.parts[name] for name in names] for names in (ABOVE, BELOW))
        buttons = widgets.HBox([*self.buttons.values()])
        self.page = widgets.VBox([self.start, *rows, *above, buttons, *below])

    def _begin_with(self, source: str | Path) -> None:
        """Fill the fields from a run file; "" leaves them."""
        if not source:
            return
        config, file = read_run_file(source), find_run_file(source).absolute()
        self._content = yaml.safe_load(file.read_text(encoding="utf-8-sig")) or {}
        base = Path() if file == self.path else file.parent
        rewards = yaml.safe_dump(config.rewards, default_flow_style=True, width=1 << 30)
        self.fields["model"].value = beside(config.model.name, base)
        self.fields["prompts"].value = beside(config.data.prompts, base)
        self.fields["rewards"].value = rewards.strip()[1:-1]
        self.fields["card"].value = "this"
        self.fields["settings"].value = ""
        self._typed()

    def _typed(self, _: object = None) -> None:
        self.found = None
        self._show("reading the fields")
        self._timer.cancel()
        self._timer = threading.Timer(PAUSE, self._read)
        self._timer.daemon = True
        self._timer.start()

    def _read(self) -> None:
        with self._reading:
            fields = self._values()
            if self.found is not None or self.state != "idle":
                return  # another thread has read them
            try:
                made = {"mp_context": get_context("spawn"), "initializer": _follow_the_kernel}
                self._reader = self._reader or ProcessPoolExecutor(1, **made)
                asked = self._reader.submit(preview, self._content, fields, self.path.parent)
                found = asked.result(LIMIT)
            except Exception as exc:  # a library's, a reward's; too slow; the process was killed
                is_slow = isinstance(exc, TimeoutError)
                found = Preview({"prompts": TOO_SLOW} if is_slow else {"settings": _text_of(exc)})
                self._end_reader(wait=False)
        if fields != self._values() or self.state != "idle":
            return  # typed meanwhile
        self.found = found
        for name in FIELDS:
            text = html.escape(found.errors.get(name, ""))
            self.parts[name].value = f'<b role="alert" style="color: #b00020">{text}</b>'
        for name, text in zip(ABOVE, (found.plan, found.samples, found.run_file), strict=True):
            self._put(name, text)
        self._show("correct the fields first" if found.errors else "ready")

    def _values(self) -> dict[str, str]:
        return {name: field.value.strip() for name, field in self.fields.items()}

    def _end_reader(self, *, wait: bool = True) -> None:
        """End the process, which frees its memory; another starts when the fields change."""
        if self._reader is not None:
            self._reader.shutdown(wait, cancel_futures=True)
        self._reader = None

    def _put(self, name: str, text: str) -> None:
        style = "white-space: pre-wrap; line-height: 1.3; max-height: 24em; overflow: auto"
        page = f'<b>{name}</b><pre style="{style}">{html.escape(text)}</pre>'
        self.parts[name].value = page if text else ""

    def _show(self, status: str) -> None:
        idle, found = self.state == "idle", self.found
        ready = idle and found is not None and not found.errors
        begun = ready and found is not None and latest_folder(found.output_dir) is not None
        on = {"check": ready, "train": ready, "stop": self.state == "running", "resume": begun}
        for name, button in self.buttons.items():
            button.disabled = not on[name]
        for field in (self.start, *self.fields.values()):
            field.disabled = not idle
        self._put("status", status)

    def _say(self, line: str) -> None:
        self._log.append(line)
        self._put("log", "\n".join(self._log))
        if time.monotonic() >= self._due:
            self._draw()

    def _draw(self) -> None:
        """Draw the figure of the run; an error in it ends nothing."""
        with contextlib.suppress(Exception):
            if self._folder is not None and (self._folder / "metrics.jsonl").exists():
                page = page_of(progress_of(read_run(self._folder)))
                self.parts["figure"].value = page["text/html"]
                self._due = time.monotonic() + DRAWING_SECONDS

    def press(self, name: str) -> None:
        """Do what a button says; a check and a run have a thread, and a process of their own."""
        if name == "stop":
            self._stop()
            return
        assert self.found is not None
        try:
            write_atomically(self.path, self.found.run_file.encode())
        except OSError as exc:
            self._show(f"the run file {self.path} cannot be written ({exc.strerror})")
            return
        folder = {"check": lambda _: None, "train": free_folder, "resume": latest_folder}[name]
        self._folder, self.state = folder(self.found.output_dir), "starting"
        self._log.clear()
        for part in BELOW:
            self._put(part, "")
        self._show(f"{name}: starting")
        if self._loop is not None:
            # Between cells a kernel ignores the notebook's stop button. The handler is set when the
            # kernel has handled this click, after which it restores its own.
            handler = (signal.SIGINT, lambda *_: self._stop())
            self._loop.call_soon_threadsafe(self._loop.call_later, 1.0, signal.signal, *handler)
        threading.Thread(target=self._work, args=(name,), daemon=True).start()

    def _stop(self) -> None:
        """Ask the run to finish its step and save; asked again, or on Windows, it ends at once."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT if POSIX else signal.SIGTERM)

    def _started(self, process: subprocess.Popen) -> None:
        self._process, self.state = process, "running"
        self._show("running")

    def _work(self, name: str) -> None:
        self._end_reader()
        function = check_rewards if name == "check" else train
        given: dict[str, Any] = {"resume": True} if name == "resume" else {}
        try:
            made = call_in_child(
                function, (str(self.path),), self._say, started=self._started, **given
            )
            ended = made.verdict if name == "check" else f"{made.steps} steps, in {made.folder}"
        except KeyboardInterrupt:
            ended = "stopped"
        except Exception as exc:
            ended = _text_of(exc)
        self._process = None
        self._draw()
        if self._folder is not None and (report := self._folder / "report.html").exists():
            content = base64.b64encode(report.read_bytes()).decode("ascii")
            self.parts["report"].value = (
                '<iframe title="report" sandbox="allow-scripts" width="100%" height="700" '
                f'src="data:text/html;base64,{content}"></iframe>'
            )
        self.state = "idle"
        self._show(f"{name}: {ended}")


def _text_of(exc: Exception) -> str:
    return redact(str(exc) if isinstance(exc, KitError) else f"{type(exc).__name__}: {exc}")
