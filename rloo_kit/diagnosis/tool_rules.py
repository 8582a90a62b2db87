"""Rules that find faults in the use of tools, for runs and for the check of rewards."""

from collections.abc import Iterator, Mapping

from rloo_kit.diagnosis.registry import Rules, Seen

# Finding -> why it matters, remedy
KINDS = {
    "tools_never_called": (
        "what the model never does cannot be rewarded, so it does not learn to use its tools",
        "ask for calls in data.system, or take a model that was trained to call tools",
    ),
    "tool_calls_fail": (
        "the model reads errors instead of results",
        "read the errors in the report, then correct the tool or the description of its parameters",
    ),
    "calls_without_answer": (
        "a trajectory that ends with a call has no answer: the result did not fit, or no round was "
        "left",
        "raise trainer.max_completion_length, model.max_seq_length or "
        "trainer.max_tool_calling_iterations, or return shorter results",
    ),
    "tool_results_cut": (
        "the model reads only the first 10,000 characters of a result",
        "return shorter results",
    ),
    "needless_calls": (
        "a call that does not raise the score costs time",
        "subtract something for it, {name: tool_use, called: 0, cost: 0.1}, or leave the tool out",
    ),
}


def add_kinds(rules: Rules) -> None:
    """Register the kinds of findings."""
    for kind, texts in KINDS.items():
        rules.rule(kind, *texts)


def seen_in_calls(numbers: Mapping[str, float]) -> Iterator[Seen]:
    """Yield what is wrong with the calls.

    Args:
        numbers: As ``call_numbers`` returns them; NaN if unknown.
    """
    calls = numbers["tools/call_frequency"]
    if calls == 0:
        yield Seen("no completion calls a tool", "warning", kind="tools_never_called")
    failed = numbers["tools/failure_frequency"]
    if calls > 0 and failed >= 0.5:
        level = "error" if failed > 0.9 else "warning"
        yield Seen(f"{failed:.0%} of the calls failed", level, kind="tool_calls_fail")
    unread = numbers["tools/unread_frequency"]
    if unread >= 0.1:
        level = "error" if unread > 0.5 else "warning"
        seen = f"{unread:.0%} of the completions end with a call"
        yield Seen(seen, level, kind="calls_without_answer")
    cut = numbers["tools/cut_frequency"]
    if cut >= 0.1:
        yield Seen(f"{cut:.0%} of the results are cut", "warning", kind="tool_results_cut")
    gain = numbers["tools/score_gain"]
    if gain <= 0 and numbers["tools/compared_frequency"] >= 0.5:
        seen = f"completions with a call score {-gain:.2g} less than others of their prompt"
        if gain == 0:
            seen = "completions with a call score like the others of their prompt"
        yield Seen(seen, "warning", kind="needless_calls")
