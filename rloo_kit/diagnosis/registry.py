"""Registry of the rules that diagnose runs and rewards: findings, their kinds and their order."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ParamSpec

from rloo_kit.text.wording import printable

P = ParamSpec("P")

# Share of groups whose scores differ: below the first value most compute is wasted, and below the
# second a run can learn almost nothing
LITTLE_SIGNAL = 0.25
ALMOST_NONE = 0.05
# If at least this share of the completions has a fault, it is a fault of the whole run
MOSTLY = 0.9


@dataclass(frozen=True)
class Finding:
    """One fault that was found: its evidence, why it matters, and what to change."""

    kind: str
    level: str  # `error`: the run cannot learn; `warning`: the run can learn, but has a fault
    reward: str | None  # the faulty reward; None if no single reward is at fault
    evidence: str
    why: str
    remedy: str
    setting: str = ""  # suggested settings, as written after ``--set``; "" if there are none

    @property
    def title(self) -> str:
        """Level, kind and faulty reward, on one line."""
        of = f" ({self.reward})" if self.reward else ""
        return printable(f"{self.level}: {self.kind}{of}")


@dataclass(frozen=True)
class Seen:
    """Evidence of a fault, as a rule yields it.

    ``Rules`` adds the texts of the fault's kind, which makes it a ``Finding``.
    """

    evidence: str
    level: str = "error"
    reward: str | None = None
    remedy: str = ""  # "" uses the remedy of the kind
    setting: str = ""
    kind: str = ""  # "" uses the kind that the rule was registered with


@dataclass(frozen=True)
class Kind:
    """Texts and flags that all findings of a kind share."""

    why: str
    remedy: str
    about_signal: bool  # True if the fault is, or causes, equal scores within a group
    # Kinds that this kind causes. A finding of this kind with level `error` hides their findings
    explains: frozenset[str]


class Rules:
    """A registry of rules and kinds of findings.

    Kinds are registered in order of harm, the most harmful first.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, Kind] = {}
        self.checks: list[Callable[..., list[Finding]]] = []

    def rule(
        self,
        kind: str,
        why: str,
        remedy: str,
        *,
        about_signal: bool = False,
        explains: str = "",
    ) -> Callable[[Callable[P, Iterator[Seen]]], Callable[P, list[Finding]]]:
        """Register a kind of finding, and return a decorator that registers the rule for it.

        The decorated rule is a generator that yields a ``Seen`` for each fault. After decoration it
        returns a list of findings.

        Args:
            kind: Name of the kind.
            why: Why a finding of this kind matters.
            remedy: What to change.
            about_signal: True if the fault is, or causes, equal scores within a group.
            explains: Names of the kinds that this kind causes, separated by spaces. A finding of
                this kind with the level ``error`` hides the findings of those kinds.
        """
        self.kinds[kind] = Kind(why, remedy, about_signal, frozenset(explains.split()))

        def decorate(rule: Callable[P, Iterator[Seen]]) -> Callable[P, list[Finding]]:
            def check(*args: P.args, **kwargs: P.kwargs) -> list[Finding]:
                return [self.finding(seen.kind or kind, seen) for seen in rule(*args, **kwargs)]

            self.checks.append(check)
            return check

        return decorate

    def finding(self, name: str, seen: Seen) -> Finding:
        """Return a finding of the kind ``name`` with the evidence in ``seen``."""
        kind = self.kinds[name]
        remedy = seen.remedy or kind.remedy
        return Finding(name, seen.level, seen.reward, seen.evidence, kind.why, remedy, seen.setting)

    def ordered(self, found: Sequence[Finding]) -> list[Finding]:
        """Return the errors, then the warnings, each from the most to the least harmful.

        A finding is left out if one of level ``error`` explains its kind (see ``rule``).
        """
        order = list(self.kinds)
        causes = [self.kinds[one.kind].explains for one in found if one.level == "error"]
        return sorted(
            (one for one in found if one.kind not in chain(*causes)),
            key=lambda one: (one.level != "error", order.index(one.kind)),
        )


def findings_text(findings: Sequence[Finding]) -> str:
    """Return a numbered list of the findings: evidence, why it matters, and what to do."""
    lines = []
    for number, finding in enumerate(findings, 1):
        lines.append(f"{number}. {finding.title}")
        # `wrap` returns no line for an empty text
        for name, text in (
            ("seen", finding.evidence),
            ("why", finding.why),
            ("do", finding.remedy),
            ("set", finding.setting),
        ):
            lines += textwrap.wrap(
                printable(text), 100, initial_indent=f"   {name:<5}", subsequent_indent=" " * 8
            )
    return "\n".join(lines)
