"""Progress of a run: its steps so far, its findings and the remaining time."""

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rloo_kit.diagnosis.record import RunRecord
from rloo_kit.diagnosis.registry import Finding
from rloo_kit.diagnosis.run_rules import find_in_run
from rloo_kit.live.series import CHARTS, Metrics
from rloo_kit.text.numbers import finite_number
from rloo_kit.text.wording import format_duration, printable

# Number of last steps whose median duration is used to estimate the remaining time
PACE_STEPS = 20


@dataclass
class Progress:
    """Progress of a run: its newest step, the metrics of all steps so far, and its findings."""

    step: int = 0  # newest optimizer step; before the first one, the step that a run resumes from
    total: int = 0  # number of optimizer steps in the whole run
    now: float = 0.0  # time at the end of the newest step, in seconds of a monotonic clock
    tokens: float = 0.0  # number of tokens up to the end of the newest step
    metrics: Metrics = field(default_factory=lambda: Metrics([], []))
    findings: list[Finding] = field(default_factory=list)
    tokens_per_second: float = 0.0
    # Seconds per step for each of the last steps
    _paces: deque[float] = field(default_factory=lambda: deque(maxlen=PACE_STEPS))

    def add(self, step: int, total: int, logs: dict[str, Any], now: float) -> None:
        """Add a step that sampled completions.

        Args:
            step: Number of optimizer steps so far.
            total: Number of optimizer steps in the whole run.
            logs: Metrics of the step, as in metrics.jsonl.
            now: Time at the end of the step, in seconds of the same clock as ``Progress.now``.
        """
        seconds = max(1e-9, now - self.now)
        # After a resume, or with several passes over a batch, some steps are not added
        self._paces.append(seconds / max(1, step - self.step))
        tokens = finite_number(logs.get("num_tokens")) or self.tokens
        self.tokens_per_second = (tokens - self.tokens) / seconds
        self.now = now
        self.tokens = tokens
        self.step = step
        self.total = total
        self.metrics.steps.append(step)
        self.metrics.rows.append(logs)

    @property
    def seconds_left(self) -> float:
        """Remaining time in seconds, estimated from the last steps; 0 before the first step."""
        return median(self._paces) * max(0, self.total - self.step) if self._paces else 0.0

    @property
    def line(self) -> str:
        """One line about the newest step: rewards, KL, length, speed, remaining time."""
        if not self.metrics.rows:
            return f"step {self.step}/{self.total}"
        logs = self.metrics.rows[-1]
        newest = Metrics([self.step], [logs])  # all rows would take longer at each step
        rewards = newest.reward_lines()
        numbers = [("reward", "reward", "reward")]
        if len(rewards) > 1:
            numbers += [(printable(line.label), line.metrics[0], "reward") for line in rewards]
        numbers += [("kl", "kl", "kl_token"), ("length", "completions/mean_length", "length")]
        parts = [f"step {self.step:>{len(str(self.total))}}/{self.total}"]
        parts += [
            f"{name} {CHARTS[chart].text(logs[key])}" for name, key, chart in numbers if key in logs
        ]
        with_signal = newest.newest("signal")
        if with_signal < 1:
            parts.append(f"no signal {1 - with_signal:.0%}")
        cut_off = newest.newest("truncated")
        if cut_off > 0:
            parts.append(f"cut off {cut_off:.0%}")
        left = format_duration(self.seconds_left)
        return "  ".join([*parts, f"{self.tokens_per_second:.0f} tokens/s", f"{left} left"])


def progress_of(record: RunRecord) -> Progress:
    """Rebuild the progress of a run from its record, with the metrics of all steps."""
    rows = record.rows
    total = record.planned_steps
    progress = Progress()
    if rows:
        progress.now = rows[0]["time"] - rows[0].get("step_time", 0.0)
    for row in rows:
        progress.add(row["step"], total or rows[-1]["step"], row, row["time"])
    progress.findings = find_in_run(record)
    return progress


def finding_line(finding: Finding) -> str:
    """Return one line about a finding: its kind, and the setting or remedy that helps."""
    rest = f"set {finding.setting}" if finding.setting else finding.remedy
    return printable(f"{finding.title}; {rest}")
