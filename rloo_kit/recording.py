"""What a run leaves while it goes: a line on the screen, metrics.jsonl, completions.jsonl."""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from transformers import TrainerCallback

from rloo_kit.rollout import Rollout


class LiveProgress(TrainerCallback):
    """Print one line a step; on a terminal the line is rewritten in place."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self._start = self._last = 0.0
        self._tokens = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self._start = self._last = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Print the step's line."""
        if "reward" not in logs:
            return
        now = time.monotonic()
        total = state.max_steps
        left = (now - self._start) / max(1, state.global_step) * (total - state.global_step)
        tokens = logs.get("num_tokens") or self._tokens
        speed = (tokens - self._tokens) / max(1e-9, now - self._last)
        line = progress_line(state.global_step, total, logs, speed, left)
        self._last, self._tokens = now, tokens
        if self.stream.isatty():
            self.stream.write(f"\r\x1b[K{line}")
        else:
            self.stream.write(f"{line}\n")
        self.stream.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the last line standing."""
        if self.stream.isatty():
            self.stream.write("\n")


class RunRecorder(TrainerCallback):
    """Append every step's metrics and every completion to the run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Append one line to metrics.jsonl."""
        row = {"step": state.global_step, "time": time.time(), **logs}
        _append(self.folder / "metrics.jsonl", [row])

    def write_completions(self, step: int, rollout: Rollout, names: list[str]) -> None:
        """Append the completions of one generation batch, with rewards, KL and advantages.

        Args:
            step: Optimizer step they train first.
            rollout: The batch, its advantages final.
            names: Of the reward functions.
        """
        rows = [{"step": step, **record} for record in rollout.records(names)]
        _append(self.folder / "completions.jsonl", rows)


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
    parts = [f"step {step:>{len(str(total))}}/{total}", f"reward {_number(logs['reward'], 3)}"]
    names = [
        key.split("/")[1] for key in logs if key.startswith("rewards/") and key.endswith("/mean")
    ]
    if len(names) > 1:
        parts += [f"{name} {_number(logs[f'rewards/{name}/mean'], 3)}" for name in names]
    if "kl" in logs:
        parts.append(f"kl {_number(logs['kl'], 4)}")
    length = logs.get("completions/mean_length")
    if length is not None:
        parts.append(f"length {_number(length, 1)}")
    if logs.get("signal/groups_without"):
        parts.append(f"no signal {logs['signal/groups_without']:.0%}")
    if logs.get("completions/clipped_ratio"):
        parts.append(f"cut off {logs['completions/clipped_ratio']:.0%}")
    parts += [f"{tokens_per_second:.0f} tokens/s", f"{_clock(seconds_left)} left"]
    return "  ".join(parts)


def _number(value: float | None, digits: int) -> str:
    return "none" if value is None else f"{value:.{digits}f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as lines:
        for row in rows:
            lines.write(json.dumps(_finite(row), ensure_ascii=False) + "\n")


def _finite(value: Any) -> Any:
    """Return ``value`` with NaN and infinities as None: JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
