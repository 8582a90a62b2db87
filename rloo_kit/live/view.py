"""Where a run is, from the events of its trainer, and the base of what shows it.

Every view is a callback of the trainer. It follows the run in a ``Progress`` and shows that in its
own way; whatever goes wrong in it ends the view and never the run.
"""

import contextlib
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, median, variance
from typing import Any

from rloo_kit.diagnosis.record import finite_number, finite_numbers, mean_or_none
from rloo_kit.diagnosis.rules import Finding
from rloo_kit.text.redaction import redact_tree
from rloo_kit.text.wording import format_duration, printable

PACE_STEPS = 20
"""Steps whose median tells the time that is left."""
TREND_STEPS = 10
"""Steps, at most, that are compared with as many before them."""
SURE = 2.0
"""Standard errors from which a difference is a trend."""
REFRESH_SECONDS = 0.25
"""Least time between two drawings."""
BLOCKS = "▁▂▃▄▅▆▇█"
FOLLOWED: dict[str, tuple[str, ...]] = {
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
"""Name of a series -> metrics, of which the first that a row has is taken."""


class Progress:
    """Where a run is, from the events of its trainer.

    Args:
        step: Optimizer steps done when it begins.
        total: Optimizer steps of the run.
        now: Seconds of a monotonic clock.
    """

    def __init__(self, step: int = 0, total: int = 0, now: float = 0.0) -> None:
        self.step, self.total = step, total
        self.logs: dict[str, Any] = {}
        self.steps: list[int] = []
        self.series: dict[str, list[float | None]] = {name: [] for name in FOLLOWED}
        self.rewards: dict[str, list[float | None]] = {}
        """Name of a reward function -> its mean at each step."""
        self.completions: list[dict[str, Any]] = []
        self.findings: list[Finding] = []
        self.tokens_per_second = 0.0
        self._paces: deque[float] = deque(maxlen=PACE_STEPS)
        self._last, self._tokens = now, 0.0

    def add(self, step: int, total: int, logs: dict[str, Any], now: float) -> None:
        """Take in the metrics of a step that sampled."""
        seconds = max(1e-9, now - self._last)
        self._paces.append(seconds / max(1, step - self.step))
        tokens = finite_number(logs.get("num_tokens")) or self._tokens
        self.tokens_per_second = (tokens - self._tokens) / seconds
        self._last, self._tokens = now, tokens
        self.step, self.total, self.logs = step, total, logs
        self.steps.append(step)
        for name, metrics in FOLLOWED.items():
            self.series[name].append(next(iter(finite_numbers(map(logs.get, metrics))), None))
        for name in reward_names(logs):
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
        """The newest step as one line."""
        if not self.steps:
            return f"step {self.step}/{self.total}"
        return progress_line(
            self.step, self.total, self.logs, self.tokens_per_second, self.seconds_left
        )


def reward_names(logs: dict[str, Any]) -> list[str]:
    """Return the names of the reward functions in a row of metrics."""
    ends = ("rewards/", "/mean")
    return [
        key[len(ends[0]) : -len(ends[1])]
        for key in logs
        if key.startswith(ends[0]) and key.endswith(ends[1])
    ]


def progress_line(
    step: int, total: int, logs: dict[str, Any], tokens_per_second: float, seconds_left: float
) -> str:
    """Return one step as text: rewards, KL, length, speed, time left.

    Args:
        step: Optimizer steps done.
        total: Optimizer steps of the run.
        logs: As TRL logs them.
        tokens_per_second: Prompt and completion tokens of this step over its wall time.
        seconds_left: Estimate for the rest.
    """
    parts = [
        f"step {step:>{len(str(total))}}/{total}",
        f"reward {number_text(logs.get('reward'), 3)}",
    ]
    names = reward_names(logs)
    if len(names) > 1:
        parts += [
            f"{printable(name)} {number_text(logs.get(f'rewards/{name}/mean'), 3)}"
            for name in names
        ]
    for name, metric, digits in (("kl", "kl", 4), ("length", "completions/mean_length", 1)):
        if metric in logs:
            parts.append(f"{name} {number_text(logs[metric], digits)}")
    shares = (("no signal", "signal/groups_without"), ("cut off", "completions/clipped_ratio"))
    for name, metric in shares:
        if share := finite_number(logs.get(metric)):
            parts.append(f"{name} {share:.0%}")
    parts += [f"{tokens_per_second:.0f} tokens/s", f"{format_duration(seconds_left)} left"]
    return "  ".join(parts)


def finding_line(finding: Finding) -> str:
    """Return a finding as one line: what it is, and the setting to change or what was seen."""
    of = f" ({finding.reward})" if finding.reward else ""
    rest = f"set {finding.setting}" if finding.setting else finding.remedy
    return printable(f"{finding.level}: {finding.kind}{of}; {rest}")


def trend(values: Sequence[float | None]) -> str:
    """Return how a series moves: ``up 0.12``, ``down 0.03``, ``steady``, or "" of a short one.

    The last steps, at most ten, are compared with as many before them; what is less than two
    standard errors is steady.
    """
    known = _known(values[-4 * TREND_STEPS :])
    num = min(TREND_STEPS, len(known) // 2)
    if num < 2:
        return ""
    new, old = known[-num:], known[-2 * num : -num]
    moved = fmean(new) - fmean(old)
    error = math.sqrt((variance(new) + variance(old)) / num)
    if abs(moved) <= max(SURE * error, 1e-9 * max(1.0, abs(fmean(old)))):
        return "steady"
    return f"{'up' if moved > 0 else 'down'} {abs(moved):.2g}"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return a series as at most ``width`` blocks, from its lowest to its highest value."""
    points = thinned(values, width)
    known = _known(points)
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    flat = "" if scale else BLOCKS[len(BLOCKS) // 2]
    return "".join(
        " " if value is None else flat or BLOCKS[round((value - low) * scale)] for value in points
    )


def thinned(values: Sequence[float | None], most: int) -> list[float | None]:
    """Return at most so many values, each the mean of its neighbours."""
    count = len(values)
    if count <= most:
        return list(values)
    edges = [place * count // most for place in range(most + 1)]
    return [mean_or_none(_known(values[edges[place] : edges[place + 1]])) for place in range(most)]


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def number_text(value: object, digits: int) -> str:
    """Return a number with so many digits; none where it is no finite number."""
    number = finite_number(value)
    return "none" if number is None else f"{number:.{digits}f}"


class LiveView:
    """Follow a run and show nothing of it; the views say what is done at its events.

    A trainer's callback without transformers' base class, whose import takes seconds: the view is
    chosen, and a wrong ``RLOO_KIT_LIVE`` refused, before anything heavy is loaded.
    """

    def __init__(self) -> None:
        self.progress = Progress()
        self._open = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Let the trainer's other events pass."""
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock; only the first of several processes shows anything."""
        self.close()
        self._open = bool(getattr(state, "is_world_process_zero", True))

        def begin() -> None:
            self.progress = Progress(state.global_step, state.max_steps, time.monotonic())
            self._begin()

        self._safely(begin)

    def on_completions(
        self, args: Any, state: Any, control: Any, records: Any = (), **_: Any
    ) -> None:
        """Keep the completions of the newest batch, rows as in completions.jsonl."""
        self._safely(lambda: setattr(self.progress, "completions", redact_tree([*(records or ())])))

    def on_findings(
        self, args: Any, state: Any, control: Any, findings: Any = (), **_: Any
    ) -> None:
        """Take in what the doctor finds now; an empty list when it is gone."""

        def take() -> None:
            self.progress.findings = list(findings or ())
            self._show_findings()

        self._safely(take)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Show a step; a further pass over a batch, and the summary, have no reward."""

        def show() -> None:
            if logs and "reward" in logs:
                self.progress.add(state.global_step, state.max_steps, logs, time.monotonic())
                self._show_step()

        self._safely(show)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the last state standing."""
        self.close()

    def close(self) -> None:
        """Leave the last state standing and give the terminal back; harmless when done before."""
        self._safely(self._end)
        self._open = False

    def _begin(self) -> None:
        """Get ready; nothing has been sampled yet."""

    def _show_step(self) -> None:
        """Show the newest step of ``self.progress``."""

    def _show_findings(self) -> None:
        """Show findings that are new, or gone."""

    def _end(self) -> None:
        """Finish."""

    def _safely(self, act: Callable[[], None]) -> None:
        """Do it while the view is open; a fault closes the view, with a warning."""
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
                    f"the live view ended and the run goes on: {type(exc).__name__}: {exc}",
                    RuntimeWarning,
                    stacklevel=2,
                )
