"""Rules that find faults in a model's use of tools, in a run or in a check of rewards."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rloo_kit.diagnosis.registry import Rules, Seen

# Kind of finding -> why it matters, what to do
KINDS = {
    "tools_never_called": (
        "RLOO can reward only calls that the model makes, so the model does not learn to use tools",
        "ask for tool calls in data.system, or use a model that was trained to call tools",
    ),
    "tool_calls_fail": (
        "the model gets error messages instead of results",
        "read the errors in the report, then correct the tool or the description of its parameters",
    ),
    "calls_without_answer": (
        "a completion that ends with a call has no answer, because the result did not fit or no "
        "further turn was allowed",
        "raise trainer.max_completion_length, model.max_seq_length or "
        "trainer.max_tool_calling_iterations, or return shorter results",
    ),
    "tool_results_cut": (
        "the model gets only the first 10,000 characters of a result",
        "make the tool return shorter results",
    ),
    "needless_calls": (
        "a call that does not raise the score only costs time",
        "add a reward that subtracts a cost for each call, {name: tool_use, called: 0, cost: 0.1}, "
        "or leave the tool out",
    ),
}

# One row for each metric that is a share: its name, the lowest share that is a fault, the share
# above which the fault is an error, the kind of the finding, and what the share counts
_SHARES = (
    ("tools/failure_frequency", 0.5, 0.9, "tool_calls_fail", "of the calls failed"),
    (
        "tools/unread_frequency",
        0.1,
        0.5,
        "calls_without_answer",
        "of the completions end with a call",
    ),
    ("tools/cut_frequency", 0.1, 1.0, "tool_results_cut", "of the results are cut"),
)


def add_kinds(rules: Rules, truncated: str) -> Callable[..., Any]:
    """Register the kinds of findings about tools in ``rules``.

    Args:
        rules: The registry.
        truncated: Kind of the finding that completions are truncated. A completion that ends with a
            call counts as truncated, so ``calls_without_answer`` explains this kind.

    Returns:
        A decorator that registers a rule for all kinds about tools. Each ``Seen`` that the rule
        yields must name its kind, as those of ``seen_in_calls`` do.
    """
    decorators = [
        rules.rule(kind, *texts, explains=truncated if kind == "calls_without_answer" else "")
        for kind, texts in KINDS.items()
    ]
    return decorators[0]  # they differ only in the default kind of a `Seen`


def seen_in_calls(numbers: Mapping[str, float]) -> Iterator[Seen]:
    """Yield each fault that the metrics of tool calls show.

    Args:
        numbers: Metrics of the calls, as ``call_numbers`` returns them; NaN if a metric is unknown.
    """
    if numbers["tools/call_frequency"] == 0:
        yield Seen("no completion calls a tool", "warning", kind="tools_never_called")
    for name, least, harmful, kind, seen in _SHARES:
        share = numbers[name]
        if share >= least:
            level = "error" if share > harmful else "warning"
            yield Seen(f"{share:.0%} {seen}", level, kind=kind)
    gain = numbers["tools/score_gain"]
    if gain <= 0 and numbers["tools/compared_frequency"] >= 0.5:
        less = f"{-gain:.2g} less than" if gain else "the same as"
        seen = f"completions with a call score {less} completions of the same prompt without a call"
        yield Seen(seen, "warning", kind="needless_calls")
