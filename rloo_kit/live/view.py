"""Progress of a run from its trainer's events, and views as plain lines.

An error in a view closes the view and never ends the run.
"""

import contextlib
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any, TextIO

from rloo_kit.diagnosis.record import RunRecord
from rloo_kit.diagnosis.rules import Finding
from rloo_kit.diagnosis.run_rules import find_in_run
from rloo_kit.text.numbers import finite_number, finite_numbers
from rloo_kit.text.wording import format_duration, printable

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

# Steps whose median gives the time that is left
PACE_STEPS = 20
# Least time between two drawings
REFRESH_SECONDS = 0.25
# Name of a series -> its metrics, newest name first; the first one that a run has is shown
METRICS: dict[str, tuple[str, ...]] = {
    "reward": ("reward",),
    "spread": ("score/raw_group_std", "score/group_std", "reward_std"),
    "kl/token": ("kl/token", "kl"),
    "kl/sequence": ("kl/sequence", "objective/kl"),
    "length": ("completions/mean_length",),
    "truncated": ("completions/truncated", "completions/clipped_ratio"),
    "without_signal": ("signal/groups_without", "frac_reward_zero_std"),
    "gradient": ("grad_norm",),
    "sampling": ("speed/generation_tokens_per_second",),
    "learning": ("speed/learning_tokens_per_second",),
    "memory": ("memory/peak_gib",),
}


class Progress:
    """Where a run is: its newest step and what is known of the earlier ones.

    Args:
        step: Optimizer steps done when it begins.
        total: Optimizer steps of the run.
        now: Seconds of a monotonic clock.
    """

    def __init__(self, step: int = 0, total: int = 0, now: float = 0.0) -> None:
        self.step, self.total = step, total
        self.logs: dict[str, Any] = {}
        self.steps: list[int] = []
        self.series: dict[str, list[float | None]] = {name: [] for name in METRICS}
        self.rewards: dict[str, list[float | None]] = {}  # name -> its mean at each step
        self.completions: list[dict[str, Any]] = []
        self.findings: list[Finding] = []
        self.tokens_per_second = 0.0
        self._paces: deque[float] = deque(maxlen=PACE_STEPS)
        self._last, self._tokens = now, 0.0

    def add(self, step: int, total: int, logs: dict[str, Any], now: float) -> None:
        """Add the metrics of a step that sampled."""
        seconds = max(1e-9, now - self._last)
        # After a resume, or with several passes over a batch, steps between were not logged.
        self._paces.append(seconds / max(1, step - self.step))
        tokens = finite_number(logs.get("num_tokens")) or self._tokens
        self.tokens_per_second = (tokens - self._tokens) / seconds
        self._last, self._tokens = now, tokens
        self.step, self.total, self.logs = step, total, logs
        self.steps.append(step)
        for name, metrics in METRICS.items():
            self.series[name].append(next(iter(finite_numbers(map(logs.get, metrics))), None))
        for name in _reward_names(logs):
            # A reward may first appear late: the steps before it are gaps.
            self.rewards.setdefault(name, [None] * (len(self.steps) - 1))
        for name, values in self.rewards.items():
            values.append(finite_number(logs.get(f"rewards/{name}/mean")))

    def last(self, name: str) -> float | None:
        """Return the newest value of a series."""
        return self.series[name][-1] if self.series[name] else None

    @property
    def with_signal(self) -> list[float | None]:
        """Share of the groups of each step whose scores differ."""
        return [None if value is None else 1.0 - value for value in self.series["without_signal"]]

    @property
    def seconds_left(self) -> float:
        """By the median of the last steps; 0 before the first."""
        return median(self._paces) * max(0, self.total - self.step) if self._paces else 0.0

    @property
    def line(self) -> str:
        """The newest step as one line: rewards, KL, length, speed, time left."""
        if not self.steps:
            return f"step {self.step}/{self.total}"
        logs, names = self.logs, _reward_names(self.logs)
        numbers = [("reward", "reward", 3)]
        if len(names) > 1:
            numbers += [(printable(name), f"rewards/{name}/mean", 3) for name in names]
        numbers += [("kl", "kl", 4), ("length", "completions/mean_length", 1)]
        parts = [f"step {self.step:>{len(str(self.total))}}/{self.total}"]
        parts += [
            f"{name} {number_text(logs[key], digits)}"
            for name, key, digits in numbers
            if key in logs
        ]
        for name, key in (("no signal", "without_signal"), ("cut off", "truncated")):
            if share := self.last(key):
                parts.append(f"{name} {share:.0%}")
        left = format_duration(self.seconds_left)
        return "  ".join([*parts, f"{self.tokens_per_second:.0f} tokens/s", f"{left} left"])


def progress_of(record: RunRecord) -> Progress:
    """Return where a recorded run is, with the curves of all its steps."""
    rows = [row for row in record.metrics if "reward" in row]
    total = (record.config.trainer.get("max_steps") if record.config else None) or 0
    first = rows[0] if rows else {}
    progress = Progress(now=first.get("time", 0.0) - first.get("step_time", 0.0))
    for row in rows:
        progress.add(row["step"], max(total, rows[-1]["step"]), row, row["time"])
    progress.findings = find_in_run(record)
    return progress


def _reward_names(logs: dict[str, Any]) -> list[str]:
    ends = ("rewards/", "/mean")
    keys = (key for key in logs if key.startswith(ends[0]) and key.endswith(ends[1]))
    return [key.removeprefix(ends[0]).removesuffix(ends[1]) for key in keys]


def finding_line(finding: Finding) -> str:
    """Return a finding as one line: what it is, and the setting to change or what to do."""
    of = f" ({finding.reward})" if finding.reward else ""
    rest = f"set {finding.setting}" if finding.setting else finding.remedy
    return printable(f"{finding.level}: {finding.kind}{of}; {rest}")


def number_text(value: object, digits: int) -> str:
    """Return a number with so many digits; ``none`` for anything but a finite number."""
    number = finite_number(value)
    return "none" if number is None else f"{number:.{digits}f}"


class LiveView:
    """Follow a run and show nothing; subclasses show it.

    A trainer's callback without transformers' base class, whose import takes seconds: the view is
    chosen, and a wrong ``RLOO_KIT_LIVE`` refused, before anything heavy is loaded.
    """

    def __init__(self) -> None:
        self.progress = Progress()
        self._open = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Ignore the trainer's other events."""
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(name)

    def on_train_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **_: Any
    ) -> None:
        """Start the clock."""
        self.close()
        self._open = True
        self.progress = Progress(state.global_step, state.max_steps, time.monotonic())
        self._safely(self._begin)

    def on_completions(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        records: Any = (),
        **_: Any,
    ) -> None:
        """Keep the completions of the newest batch, rows as in completions.jsonl."""
        self.progress.completions = list(records or ())

    def on_findings(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        findings: Any = (),
        **_: Any,
    ) -> None:
        """Replace the findings by those of now."""
        self.progress.findings = list(findings or ())
        if self.progress.steps:
            self._safely(self._show_step)

    def on_log(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        logs: Any = None,
        **_: Any,
    ) -> None:
        """Show a step; a further pass over a batch, and the summary, have no reward."""

        def show() -> None:
            self.progress.add(state.global_step, state.max_steps, logs, time.monotonic())
            self._show_step()

        if logs and "reward" in logs:
            self._safely(show)

    def on_train_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **_: Any
    ) -> None:
        """Keep the last state on the screen."""
        self.close()

    def close(self) -> None:
        """Keep the last state on the screen and restore the terminal; may be called again."""
        self._safely(self._end)
        self._open = False

    def _begin(self) -> None:
        """Prepare; nothing has been sampled yet."""

    def _show_step(self) -> None:
        """Show the newest step of ``self.progress``."""

    def _end(self) -> None:
        """Finish."""

    def _safely(self, act: Callable[[], None]) -> None:
        """Call while the view is open; an error closes the view, with a warning."""
        if not self._open:
            return
        try:
            act()
        except Exception as exc:
            self._open = False
            with contextlib.suppress(Exception):
                self._end()
            with contextlib.suppress(Warning):  # where warnings are errors
                warnings.warn(
                    f"the live view ended, the run continues: {type(exc).__name__}: {exc}",
                    RuntimeWarning,
                    stacklevel=2,
                )


class PlainLines(LiveView):
    """One line a step, and one for each finding when it first appears."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self.stream = stream or sys.stdout
        self._shown: set[str] = set()

    def _begin(self) -> None:
        self._shown.clear()

    def _show_step(self) -> None:
        # The line of a step is new, findings are lines that were not shown before.
        for line in (self.progress.line, *map(finding_line, self.progress.findings)):
            if line not in self._shown:
                self._shown.add(line)
                encoding = self.stream.encoding or "utf-8"
                text = line.encode(encoding, "backslashreplace").decode(encoding)
                self.stream.write(f"{text}\n")
        self.stream.flush()
