"""A form for notebooks: fields for a run file, and buttons for the commands that use it.

Each command runs in another process, so that the kernel loads no heavy library and uses no GPU
memory.
"""

import base64
import contextlib
import html
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from rloo_kit.config.run_file import (
    EXAMPLE_NAMES,
    RunConfig,
    find_run_file,
    make_run_config,
    read_overrides,
    read_run_file,
)
from rloo_kit.data.hub_tasks import HUB_TASKS
from rloo_kit.data.prompts import BUILTIN
from rloo_kit.diagnosis.record import read_run
from rloo_kit.errors import KitError, SetupError
from rloo_kit.job import beside
from rloo_kit.live.figure import DRAWING_SECONDS, page_of
from rloo_kit.live.progress import progress_of
from rloo_kit.output_folder import free_folder, latest_folder, write_atomically
from rloo_kit.text.redaction import redact

LOG_LINES = 200
# Name of a button -> arguments with which it starts rloo-kit
COMMANDS = {
    "plan": ["plan"],
    "check": ["rewards", "check"],
    "train": ["train"],
    "resume": ["train", "--resume"],
}
# Exit codes of a command that a signal stopped. The negative ones mean that it was still starting
STOPPED = (130, 143, -signal.SIGINT, -signal.SIGTERM)
# Parts of the page below the fields
PARTS = ("status", "figure", "log", "report")
# CSS of a text. A text is drawn again after each new line. A reversed column is scrolled to its end
# when it is drawn, so the last line is always visible
STYLE = (
    "white-space: pre-wrap; line-height: 1.3; max-height: 24em; overflow: auto; display: flex; "
    "flex-direction: column-reverse"
)
# Program that runs rloo-kit. Between cells, a kernel ignores SIGINT, and processes that it starts
# inherit this. The program therefore restores the default handler first
RLOO_KIT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from rloo_kit.cli import main
sys.exit(main())
"""


def form(path: str | Path = "form.yaml") -> Any:
    """Return a notebook form for editing a run file, planning its run, and training.

    Args:
        path: The run file. The form starts with the settings in this file or, if the file does not
            exist, with the settings of the example ``quickstart``. Before each command the form
            writes the file, which removes the comments in it.

    Returns:
        An ipywidgets ``VBox``, which a notebook displays.

    Raises:
        SetupError: ipywidgets is not installed.
        ConfigError: The run file has an error.
    """
    if find_spec("ipywidgets") is None:
        raise SetupError("rk.form() needs ipywidgets: pip install ipywidgets")
    return Form(path).page


class Form:
    """The widgets of a form and what they do; ``page`` is the widget that contains all others."""

    def __init__(self, path: str | Path) -> None:
        import ipywidgets as widgets

        self.path = Path(path).absolute()
        self.process: subprocess.Popen[str] | None = None
        tasks = [name for name, task in HUB_TASKS.items() if task.train]
        wide = {"layout": {"width": "36em"}, "style": {"description_width": "6em"}}
        self.start = widgets.Dropdown(
            options=["", *EXAMPLE_NAMES], description="begin with", **wide
        )
        self.fields = {
            "model": widgets.Text(**wide),
            "prompts": widgets.Combobox(options=[*BUILTIN, *tasks], **wide),
            "rewards": widgets.Textarea(**wide),
            "card": widgets.Combobox(options=["this", "8GB", "12GB", "16GB", "24GB"], **wide),
            "settings": widgets.Textarea(**wide),
        }
        for name, field in self.fields.items():
            field.description = name
        self.buttons = {name: widgets.Button(description=name) for name in (*COMMANDS, "stop")}
        self.parts = {name: widgets.HTML().add_class(f"rloo-kit-{name}") for name in PARTS}
        self.start.observe(lambda change: self._begin_with(change["new"]), "value")
        for name in COMMANDS:
            self.buttons[name].on_click(lambda button: self.run(button.description))
        self.buttons["stop"].on_click(lambda _: self.stop())
        buttons = widgets.HBox([*self.buttons.values()])
        self.page = widgets.VBox([self.start, buttons, *self.fields.values(), *self.parts.values()])
        self._set_running(False)
        self._begin_with(self.path if self.path.exists() else "quickstart")

    def _begin_with(self, source: str | Path) -> None:
        """Fill the fields with the settings of a run file; do nothing if ``source`` is ""."""
        if not source:
            return
        config = read_run_file(source)
        file = find_run_file(source)
        self._content = yaml.safe_load(file.read_text(encoding="utf-8-sig")) or {}
        base = Path() if source == self.path else file.parent
        rewards = yaml.safe_dump(config.rewards, default_flow_style=True, width=1 << 30)
        values = {
            "model": beside(config.model.name, base),
            "prompts": beside(config.data.prompts, base),
            "rewards": rewards.strip()[1:-1],
            "card": "this",
            "settings": "",
        }
        for name, value in values.items():
            self.fields[name].value = value

    def _write(self) -> RunConfig:
        """Write all fields except ``card`` to the run file, and return its settings.

        Raises:
            ConfigError: A field has an error. Nothing is written.
            DiskError: The file cannot be written.
        """
        values = {name: field.value.strip() for name, field in self.fields.items()}
        content = dict(self._content)
        # not as overrides, which are parsed as YAML: `my data #2.csv` and 2024 would change
        for section, key, field in (("model", "name", "model"), ("data", "prompts", "prompts")):
            content[section] = {**(content.get(section) or {}), key: values[field] or None}
        settings = filter(str.strip, values["settings"].splitlines())
        content = read_overrides([f"rewards=[{values['rewards']}]", *settings], content)
        config = make_run_config(content)
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        write_atomically(self.path, text.encode())
        return config

    def run(self, name: str) -> None:
        """Write the run file, start the command of a button, and show its output in the log.

        Args:
            name: Name of the button, a key of ``COMMANDS``.
        """
        if self.buttons[name].disabled:  # a second click, made before the page was updated
            return
        words = [*COMMANDS[name], str(self.path)]
        if name == "plan":
            words += ["--gpu", self.fields["card"].value]
        try:
            config = self._write()
            folder = latest_folder(config.output_dir) if name == "resume" else None
            folder = folder or free_folder(config.output_dir)
        except (KitError, OSError) as exc:
            self._put("status", redact(str(exc)))
            return
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-X", "utf8", "-c", RLOO_KIT, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        for part in PARTS:
            self._put(part, "")
        self._put("status", f"{name}: running")
        self._set_running(True)
        threading.Thread(
            target=self._follow, args=(self.process, name, folder), daemon=True
        ).start()

    def stop(self) -> None:
        """Ask the run to finish its step, save and stop; a second call stops it at once.

        On Windows the first call already kills the run.
        """
        if self.process is not None:
            self.process.terminate()

    def _follow(self, process: subprocess.Popen[str], name: str, folder: Path) -> None:
        """Show the output of a command until it ends, and the figure and the report of its run.

        Args:
            process: The process of the command.
            name: Name of its button.
            folder: Folder of the run.
        """
        lines = deque(maxlen=LOG_LINES)
        due = 0.0
        for line in process.stdout or ():
            lines.append(line)
            self._put("log", "".join(lines))
            if time.monotonic() >= due:
                self._draw(folder)
                due = time.monotonic() + DRAWING_SECONDS
        process.communicate()  # closes the output
        self._draw(folder)
        report = folder / "report.html"
        if report.exists():
            content = base64.b64encode(report.read_bytes()).decode("ascii")
            self.parts["report"].value = (
                '<iframe title="report" sandbox="allow-scripts" width="100%" height="700" '
                f'src="data:text/html;base64,{content}"></iframe>'
            )
        code = process.returncode
        ended = f"ended with code {code}, see the last lines of the log" if code else "done"
        self._put("status", f"{name}: {'stopped' if code in STOPPED else ended}")
        self._set_running(False)

    def _draw(self, folder: Path) -> None:
        """Draw the figure of the run if it has made its first step; errors are ignored."""
        with contextlib.suppress(Exception):
            progress = progress_of(read_run(folder))
            if progress.metrics.rows:
                self.parts["figure"].value = page_of(progress)["text/html"]

    def _put(self, name: str, text: str) -> None:
        """Show a text in one of ``PARTS``; hide the part if the text is ""."""
        page = f'<b>{name}</b><pre style="{STYLE}">{html.escape(text)}</pre>'
        self.parts[name].value = page if text else ""

    def _set_running(self, running: bool) -> None:
        """While a command runs, enable only the button "stop"; otherwise enable all others."""
        for name, button in self.buttons.items():
            button.disabled = running != (name == "stop")
