"""A finding: what was seen, why it matters, what to change; and how it is told on the screen."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rloo_kit.text.wording import printable


@dataclass(frozen=True)
class Finding:
    """One fault: what was seen, why it matters, what to change."""

    kind: str
    level: str
    """``error``: the run cannot learn from this; ``warning``: it can, and something is off;
    ``note``: normal, though it looks odd."""
    reward: str | None
    """None: it concerns all of them."""
    evidence: str
    why: str
    remedy: str
    setting: str = ""
    """For the run file, or after ``--set``; "" where there is none."""

    def as_dict(self) -> dict[str, str | None]:
        """Return plain values for JSON."""
        return asdict(self)


def findings_text(findings: Sequence[Finding]) -> str:
    """Return numbered findings, each with what was seen, why it matters and what to do."""
    return "\n".join(
        line
        for number, finding in enumerate(findings, 1)
        for line in _finding_lines(finding, number)
    )


def _finding_lines(finding: Finding, number: int) -> list[str]:
    of = f" ({finding.reward})" if finding.reward else ""
    parts = {"seen": finding.evidence, "why": finding.why, "do": finding.remedy}
    if finding.setting:
        parts["set"] = finding.setting
    lines = [f"{number}. {finding.level}: {finding.kind}{printable(of)}"]
    for name, text in parts.items():
        indent = {"initial_indent": f"   {name:<5}", "subsequent_indent": " " * 8}
        lines += textwrap.wrap(printable(text), 100, **indent)
    return lines
