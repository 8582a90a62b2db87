"""Metrics of the tool calls in trajectories, for the log, the doctor and the check of rewards."""

import math
from collections.abc import Sequence
from statistics import fmean

from rloo_kit.text.numbers import finite_numbers
from rloo_kit.text.wording import TOOL_ERROR, calls_of, results_of
from rloo_kit.types import Completion

# Maximum number of characters of a tool's result that the model reads
MAX_RESULT = 10_000
CALL_NUMBERS = (
    "tools/call_frequency",
    "tools/failure_frequency",
    "tools/cut_frequency",
    "tools/unread_frequency",
    "tools/score_gain",
    "tools/compared_frequency",
)


def call_numbers(
    completions: Sequence[Completion],
    scores: Sequence[float | None],
    groups: Sequence[Sequence[int]],
) -> dict[str, float]:
    """Return the metrics of the tool calls in a batch, as name -> value.

    - ``tools/call_frequency``: mean number of calls in a trajectory
    - ``tools/failure_frequency``: share of results that are errors
    - ``tools/cut_frequency``: share of results that are too long and therefore cut
    - ``tools/unread_frequency``: share of trajectories that end with a call, so that the model does
      not read the result
    - ``tools/score_gain``: mean score with a call minus mean score without a call, averaged over
      the groups that have both kinds of trajectories
    - ``tools/compared_frequency``: share of the trajectories with a call that are in such a group

    ``score_gain`` is NaN if no group has both kinds, and ``compared_frequency`` is NaN if no
    trajectory has a call. If there are no results, the failure and cut frequencies are 0.

    Args:
        completions: B completions.
        scores: B scores; None or NaN for a completion without a score.
        groups: For each prompt, the indices of its completions.
    """
    calls = [len(calls_of(one)) for one in completions]
    results = [text for one in completions for text in results_of(one)]
    unread = [bool(calls_of(one[-1:])) for one in completions]
    gains = []
    compared = 0
    for rows in groups:
        with_call = finite_numbers(scores[row] for row in rows if calls[row])
        without = finite_numbers(scores[row] for row in rows if not calls[row])
        if with_call and without:
            gains.append(fmean(with_call) - fmean(without))
            compared += len(with_call)
    num_called = sum(map(bool, calls))
    count = max(1, len(results))
    found = (
        fmean(calls),
        sum(text.startswith(TOOL_ERROR) for text in results) / count,
        sum(len(text) > MAX_RESULT for text in results) / count,
        fmean(unread),
        fmean(gains) if gains else math.nan,
        compared / num_called if num_called else math.nan,
    )
    return dict(zip(CALL_NUMBERS, found, strict=True))
