"""Rule registry of the diagnosis, for runs and for rewards: findings, their kinds, their order."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec

from rloo_kit.text.wording import printable

P = ParamSpec("P")

# Shares of groups with differing scores; below the first, most compute is wasted
LITTLE_SIGNAL = 0.25
ALMOST_NONE = 0.05
# Share of completions, or of groups, from which a fault counts as the fault of the run
MOSTLY = 0.9


@dataclass(frozen=True)
class Finding:
    """One fault: its evidence, why it matters, and what to change."""

    kind: str
    level: str  # `error`: the run cannot learn from this; `warning`: something is off
    reward: str | None  # None if it concerns all rewards
    evidence: str
    why: str
    remedy: str
    setting: str = ""  # for the run file, or after ``--set``; "" without a suggestion


@dataclass(frozen=True)
class Seen:
    """Result of a rule that found a problem; the registry adds the texts of that kind."""

    evidence: str
    level: str = "error"
    reward: str | None = None
    remedy: str = ""  # "" for the remedy of the kind
    setting: str = ""
    kind: str = ""  # "" for the kind of the rule


@dataclass(frozen=True)
class Kind:
    """Texts and flags that all findings of a kind share."""

    why: str
    remedy: str
    stops: bool  # for rewards: a run with such a reward stops at its first step
    about_signal: bool  # the fault is, or causes, that the scores of a group do not differ
    explains: frozenset[str]  # kinds that it causes, and so replaces


class Rules:
    """A registry of rules and of their kinds of findings, the most harmful first."""

    def __init__(self) -> None:
        self.kinds: dict[str, Kind] = {}
        self.checks: list[Callable[..., list[Finding]]] = []

    def rule(
        self,
        kind: str,
        why: str,
        remedy: str,
        *,
        stops: bool = False,
        about_signal: bool = False,
        explains: str = "",
    ) -> Callable[[Callable[P, Iterator[Seen]]], Callable[P, list[Finding]]]:
        """Register a kind of finding, and the decorated rule, which yields its evidence.

        The arguments are the fields of ``Kind``; the names in ``explains`` are separated by spaces.
        """
        self.kinds[kind] = Kind(why, remedy, stops, about_signal, frozenset(explains.split()))

        def decorate(rule: Callable[P, Iterator[Seen]]) -> Callable[P, list[Finding]]:
            @wraps(rule)
            def check(*args: P.args, **kwargs: P.kwargs) -> list[Finding]:
                return [self.finding(seen.kind or kind, seen) for seen in rule(*args, **kwargs)]

            self.checks.append(check)
            return check

        return decorate

    def finding(self, name: str, seen: Seen) -> Finding:
        """Return a finding of a registered kind."""
        kind = self.kinds[name]
        remedy = seen.remedy or kind.remedy
        return Finding(name, seen.level, seen.reward, seen.evidence, kind.why, remedy, seen.setting)

    def ordered(self, found: Iterable[Finding]) -> list[Finding]:
        """Return findings without those that an error explains, the most harmful first."""
        found = list(found)
        order = list(self.kinds)
        causes = [self.kinds[finding.kind] for finding in found if finding.level == "error"]
        explained = {kind for cause in causes for kind in cause.explains}
        return sorted(
            (finding for finding in found if finding.kind not in explained),
            key=lambda finding: (finding.level != "error", order.index(finding.kind)),
        )


def findings_text(findings: Sequence[Finding]) -> str:
    """Return numbered findings, each with its evidence, why it matters and what to do."""
    lines = []
    for number, finding in enumerate(findings, 1):
        of = f" ({finding.reward})" if finding.reward else ""
        lines.append(f"{number}. {finding.level}: {finding.kind}{printable(of)}")
        # `wrap` returns no line for an empty text
        parts = {
            "seen": finding.evidence,
            "why": finding.why,
            "do": finding.remedy,
            "set": finding.setting,
        }
        for name, text in parts.items():
            lines += textwrap.wrap(
                printable(str(text)), 100, initial_indent=f"   {name:<5}", subsequent_indent=" " * 8
            )
    return "\n".join(lines)
