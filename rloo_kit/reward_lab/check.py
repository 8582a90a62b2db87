"""Result of a reward check: its verdict, its findings and its table as printed text."""

import textwrap
from dataclasses import dataclass
from typing import Any

from rloo_kit.diagnosis.registry import Finding, findings_text
from rloo_kit.reward_lab.score_statistics import RewardStats, Signal
from rloo_kit.text.wording import printable, text_of

# Title of a column -> field of ``RewardStats``
COLUMNS = {
    "weight": "weight",
    "mean": "mean",
    "std": "std",
    "in-group": "group_std",
    "low": "low",
    "high": "high",
    "fires": "fires",
    "none": "none_share",
    "ms": "milliseconds",
    "length": "length_correlation",
}


@dataclass(frozen=True, repr=False)
class RewardCheck:
    """Result of ``check_rewards``: how a run's rewards scored a set of completions."""

    verdict: str  # one sentence that says whether RLOO will learn from the rewards
    findings: list[Finding]  # the most harmful first
    table: list[RewardStats]  # one row for each reward
    total: RewardStats  # the row of the weighted sum
    signal: Signal
    samples: list[dict[str, Any]]  # each completion, in order, with its prompt, rewards and score
    notes: list[str]  # what the check could not do, and why

    @property
    def has_errors(self) -> bool:
        """True if at least one finding is an error, which means that the run cannot learn."""
        return any(finding.level == "error" for finding in self.findings)

    def __repr__(self) -> str:
        return f"RewardCheck({self.verdict!r}, {len(self.findings)} findings)"

    def __str__(self) -> str:
        rows = [*self.table, *([self.total] if len(self.table) > 1 else [])]
        table = [f"{'reward':<24}" + "".join(f" {title:>8}" for title in COLUMNS)]
        for row in rows:
            cells = "".join(f" {_short(getattr(row, name)):>8}" for name in COLUMNS.values())
            note = "  faulty, see below" if row.fault else ""
            table.append(f"{printable(row.name)[:24]:<24}{cells}{note}")
        parts = [
            "\n".join(table),
            textwrap.fill(self.verdict, 100),
            findings_text(self.findings) or "no fault found in the rewards",
        ]
        return "\n\n".join([*parts, _samples_text(self.samples), *self.notes])


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def _samples_text(samples: list[dict[str, Any]]) -> str:
    """Return two lines, with the completion that scores highest and the one that scores lowest."""
    scored = [sample for sample in samples if sample["score"] is not None] or samples[:1]
    scored.sort(key=lambda sample: -(sample["score"] or 0.0))
    chosen = {"best": scored[0], "worst": scored[-1]}
    return "\n".join(
        f"{which:<6}{_short(sample['score']):>6}  {_cut(text_of(sample['prompt']), 40)} -> "
        f"{_cut(sample['completion'], 90)}"
        for which, sample in chosen.items()
    )


def _cut(text: str, limit: int) -> str:
    """Return a text as one printable line, shortened to about ``limit`` characters.

    If the text is longer, its middle is left out, because a completion's answer is at the end.
    """
    flat = text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
    return printable(flat)
