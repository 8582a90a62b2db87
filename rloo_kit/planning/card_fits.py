"""Search for models that fit on a GPU, among the run files that ship with the kit."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from rloo_kit.config.run_file import EXAMPLES, read_run_file
from rloo_kit.errors import ConfigError
from rloo_kit.machine.hardware import GIB, Hardware
from rloo_kit.models.adapters import EMBEDDED
from rloo_kit.planning.advice import apply
from rloo_kit.planning.facts import read_facts
from rloo_kit.planning.planner import Plan

# Completion lengths to try, in tokens
LENGTHS = (16_384, 8192, 4096, 2048, 1024, 512)
# Run file whose settings are used for a model that has no run file
TYPICAL = "qwen3-4b-thinking-12gb"


@dataclass(frozen=True)
class Fit:
    """A run file that fits on a GPU, with the settings for the longest completions that fit."""

    name: str  # the run file
    plan: Plan
    overrides: list[str]  # changes, each ``section.key=value``; [] if none is needed

    def __str__(self) -> str:
        command = " ".join(["rloo-kit train", self.name, *(f"--set {o}" for o in self.overrides)])
        return (
            f"  {self.plan.config.model.name}: completions up to {self.plan.job.completion:,} "
            f"tokens, peak {self.plan.peak_bytes / GIB:.1f} GiB"
            f"\n    {command}"
        )


def describe_fits(card: Hardware) -> str:
    """Return a text that lists the models that fit on a GPU, the largest first.

    Only the Qwen3 models of the run files that ship with the kit are tried. For each model that
    fits, the text says how long its completions can be, and gives the command that trains it.

    Raises:
        ConfigError: ``card`` is this machine's CPU.
    """
    if not card.on_gpu:
        raise ConfigError("this machine has no GPU: name a GPU, as in --gpu 12GB, or a run file")
    names = sorted(path.stem for path in EXAMPLES.glob("qwen3-*.yaml"))
    fits = [fit for name in names if (fit := longest_fit(name, card))]
    best = {}  # size of a model -> its fit with the longest completions
    for fit in sorted(fits, key=lambda one: (one.plan.job.completion, -len(one.overrides))):
        best[fit.plan.facts.shape.num_parameters] = fit
    lines = [f"on {card.name}, with Unsloth and vLLM; peaks are estimates:"]
    lines += [str(best[size]) for size in sorted(best, reverse=True)]
    if not best:
        lines.append("  none of the run files that ship with the kit fits")
    return "\n".join([*lines, "rloo-kit plan RUN.yaml --gpu GPU shows the memory of one run"])


def longest_fit(name: str, card: Hardware) -> Fit | None:
    """Return the ``Fit`` of a run file with the longest completions that fit on a GPU.

    ``LENGTHS`` (16384 down to 512 tokens) and the completion length in the run file are tried. The
    result is None if no length fits.

    Args:
        name: Name of a run file that ships with the kit.
        card: The GPU.
    """
    config = read_run_file(name)
    own = config.trainer["max_completion_length"]
    prompt = config.model.max_seq_length - own
    facts = read_facts(config, EXAMPLES, card, card.usable)
    facts = replace(facts, vllm=True, unsloth=True)  # as on a machine where both are installed
    for length in sorted({own, *LENGTHS}, reverse=True):
        overrides = [
            f"trainer.max_completion_length={length}",
            f"model.max_seq_length={length + prompt}",
        ]
        plan = Plan(apply(config, [overrides]), facts)
        if plan.fits:
            return Fit(name, plan, [] if length == own else overrides)
    return None


def is_model(source: str) -> bool:
    """Return True if ``source`` names a model, not a run file or a run's folder.

    ``source`` is the argument of the command ``rloo-kit plan``.
    """
    if os.path.isdir(source):
        return Path(source, "config.json").is_file() and not Path(source, "run.yaml").exists()
    if source in EMBEDDED:
        return True
    return "/" in source and not os.path.exists(source) and not source.endswith((".yaml", ".yml"))
