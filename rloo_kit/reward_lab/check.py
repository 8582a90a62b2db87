"""What trying rewards came to: the verdict, the findings, a table on the screen, a picture."""

import math
import sys
import textwrap
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rloo_kit.diagnosis.rules import Finding, findings_text
from rloo_kit.reward_lab.statistics import RewardStats, Signal
from rloo_kit.text.wording import printable
from rloo_kit.types import Completion

BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, repr=False)
class RewardCheck:
    """What the rewards of a run say of the completions it would train on."""

    verdict: str
    """Whether RLOO will learn from them, in one sentence."""
    findings: list[Finding]
    """The most harmful first."""
    table: list[RewardStats]
    """One row a reward."""
    total: RewardStats
    """The same of the weighted sum."""
    signal: Signal
    samples: list[dict[str, Any]]
    """Every prompt, completion, its rewards and its score, in order."""
    notes: list[str] = field(default_factory=list)
    """What was not checked, and why."""

    @property
    def has_errors(self) -> bool:
        """Whether there is a fault from which the run cannot learn."""
        return any(finding.level == "error" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def __repr__(self) -> str:
        return f"RewardCheck({self.verdict!r}, {len(self.findings)} findings)"

    def __str__(self) -> str:
        parts = [
            _table_text(self),
            textwrap.fill(self.verdict, 100),
            findings_text(self.findings) or "nothing is wrong with the rewards",
        ]
        return "\n\n".join([*parts, _samples_text(self.samples), *self.notes])


def text_of(completion: Completion) -> str:
    """Return the text of a completion, plain or conversational."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


# --- on the screen -------------------------------------------------------------------------------


def _table_text(check: RewardCheck) -> str:
    rows = [*check.table, *([check.total] if len(check.table) > 1 else [])]
    width = min(24, max(len("reward"), *(len(row.name) for row in rows)))
    head = (
        f"{'reward':<{width}} {'weight':>6} {'mean':>7} {'std':>6} {'in-group':>8} {'range':>15} "
        f"{'fires':>5} {'none':>5} {'ms':>6} {'length':>6}  scores"
    )
    return "\n".join([head, *(_row_text(row, width) for row in rows)])


def _row_text(row: RewardStats, width: int) -> str:
    name = printable(row.name)
    start = f"{name if len(name) <= width else name[: width - 1] + '…':<{width}} {row.weight:>6.3g}"
    if row.mean is None:
        return f"{start}    {'no scores' if row.fault is None else 'faulty, see below'}"
    numbers = f"{_short(row.mean):>7} {_short(row.std):>6} {_short(row.group_std):>8}"
    span = f"{_short(row.low)} .. {_short(row.high)}"
    correlation = row.length_correlation
    length = "-" if correlation is None else f"{correlation:+.2f}"
    return (
        f"{start} {numbers} {span:>15} {row.fires or 0:>5.0%} {row.none_share:>5.0%} "
        f"{_milliseconds(row):>6} {length:>6}  {_bars(row.histogram)}"
    )


def _milliseconds(row: RewardStats) -> str:
    if 0 < row.milliseconds < 0.01:
        return "<0.01"
    return _short(row.milliseconds or None)


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def _bars(counts: list[int]) -> str:
    """Return a histogram of one character a bin; what is not 0 can be seen."""
    bars = BARS if _can_print(BARS) else " .:-=+*#@"
    most = max(*counts, 1)
    return "".join(bars[math.ceil(8 * count / most)] for count in counts)


def _can_print(text: str) -> bool:
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _samples_text(samples: list[dict[str, Any]], num: int = 2) -> str:
    """Return the best and the worst completions in a line each."""
    different = {(str(s["prompt"]), s["completion"]): s for s in samples if s["score"] is not None}
    scored = sorted(different.values(), key=lambda sample: -sample["score"])
    if not scored:
        return f"sample        {_sample_text(samples[0])}"
    lines = [f"{'best':<6}{_short(s['score']):>6}  {_sample_text(s)}" for s in scored[:num]]
    rest = [sample for sample in scored[num:] if sample["score"] < scored[0]["score"]]
    lines += [f"{'worst':<6}{_short(s['score']):>6}  {_sample_text(s)}" for s in rest[-num:]]
    return "\n".join(lines)


def _sample_text(sample: dict[str, Any]) -> str:
    return f"{_cut(text_of(sample['prompt']), 40)} -> {_cut(sample['completion'], 90)}"


def _cut(text: str, limit: int) -> str:
    """Return the beginning and, since the answer stands there, the end."""
    flat = text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
    return printable(flat)


def draw(table: list[RewardStats], path: Path) -> None:
    """Draw a histogram of every reward."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.6 + 1.9 * len(table)), layout="constrained")
    for place, row in enumerate(table, 1):
        axes = figure.add_subplot(len(table), 1, place)
        low, high = row.low or 0.0, row.high or 0.0
        width = (high - low) / len(row.histogram) or 0.1
        places = [low + width * (n + 0.5) for n in range(len(row.histogram))]
        counts = row.histogram
        if low == high:  # one bar on the value
            places, counts = [low], [sum(row.histogram)]
        axes.bar(places, counts, width * 0.92)
        spread = _short(row.group_std)
        axes.set_title(
            f"{printable(row.name)}: mean {_short(row.mean)}, spread within a group {spread}",
            fontsize=10, loc="left", parse_math=False,
        )  # fmt: skip
        axes.set_ylabel("completions")
    figure.savefig(path, dpi=120)
