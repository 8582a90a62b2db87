"""Plan of a run's memory on a card, with changes if it does not fit.

A plan is arithmetic on the run file, the model's config and the card; no weights are read.
``benchmarks/plan_accuracy.py`` compares it with real runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from rloo_kit.config.run_file import RunConfig
from rloo_kit.errors import ConfigError, KitError
from rloo_kit.job import read_config
from rloo_kit.machine.environment import quiet, setup
from rloo_kit.machine.hardware import GIB, USABLE, Hardware, detect_hardware, find_card
from rloo_kit.models.engine_memory import MIB
from rloo_kit.planning.advice import Change, find_changes, peak_with
from rloo_kit.planning.cards import Way, find_ways
from rloo_kit.planning.facts import Facts, assumptions, make_job, read_facts
from rloo_kit.planning.memory import CONTEXT, DOING, Job, MemoryPlan, plan_memory, planned_engine

# Columns of the longest bar and of a part's name, 80 with the number
BAR = 26
NAME = 33
# Numbers of cards to try if nothing fits on one
MORE_CARDS = (2, 4, 8, 16)
# Parts with a smaller share of the peak are shown together
SMALLEST_PART = 0.01


@dataclass(frozen=True, repr=False)
class Plan:
    """Memory plan of a run on a card; ``print`` shows all of it."""

    config: RunConfig
    facts: Facts
    changes: tuple[Change, ...] = ()  # that make it fit, the least harmful first
    cards: int = 1  # above 1: the text also shows ways to train on this many cards

    @property
    def room(self) -> int:
        """Bytes of GPU memory that this process may use; of main memory without a GPU."""
        return self.facts.room

    @cached_property
    def job(self) -> Job:
        """Facts that decide the memory."""
        return make_job(self.config, self.facts)

    @cached_property
    def memory(self) -> MemoryPlan:
        """Memory of the run by phase, and by part, such as weights or activations."""
        return plan_memory(self.job)

    @property
    def peak_bytes(self) -> int:
        """Peak memory in bytes, on the card or, on a CPU, of the process."""
        return self.memory.peak_bytes

    @property
    def fits(self) -> bool:
        """True if the peak fits and vLLM starts."""
        return self.peak_bytes <= self.room and self.refusal is None

    @property
    def vllm_share(self) -> float | None:
        """Share of the card's memory for vLLM; None if vLLM does not sample in this process."""
        if not self.job.on_gpu or self.job.engine in ("server", "transformers"):
            return None
        return self.job.share or planned_engine(self.job).share(self.job.card or self.room)

    @property
    def refusal(self) -> str | None:
        """Reason why vLLM would not start, even if the peak fits; None if there is no reason."""
        return None if self.vllm_share is None else planned_engine(self.job).refusal

    def fitting_ways(self, cards: int) -> list[Way]:
        """Return the ways to train on ``cards`` cards of this kind whose estimated peak fits."""
        return [way for way in find_ways(self.job, cards) if way.peak_bytes <= self.room]

    @property
    def verdict(self) -> str:
        """One line that says whether the run fits, and how much memory is left or missing."""
        what = f"{self.config.model.name} on {self.facts.card.name}"
        left = self.room - self.peak_bytes
        if left < 0:
            return f"{what}: does not fit, {_gib(-left)} are missing of {_gib(self.peak_bytes)}"
        if self.refusal:
            return f"{what}: {self.refusal}"
        tight = " (tight)" if left < 3 * (1 - USABLE) * self.room else ""
        return f"{what}: fits{tight}, {_gib(left)} of {_gib(self.room)} stay free"

    def __repr__(self) -> str:
        return "\n".join(_picture(self))


def plan(
    source: str | Path | RunConfig,
    gpu: str | None = None,
    overrides: Sequence[str] = (),
    cards: int = 1,
) -> Plan:
    """Plan the memory of a run before anything is loaded.

    Example:
        print(rk.plan("qwen3-4b-thinking", gpu="12GB"))

    Args:
        source: A run file, the name of one that ships with the kit, the folder of a run, or a
            ``RunConfig``.
        gpu: A card's memory (``12GB``) or name (``RTX 4070``); None or ``this``: the card in this
            machine, or else its CPU.
        overrides: ``section.key=value``, as after ``--set``.
        cards: Number of such cards; above 1 the plan also shows which ways to train on them fit,
            on paper.

    Raises:
        ConfigError: The run file, the card or the number of cards is wrong.
        ModelError: The model's config cannot be read.
    """
    config, base = read_config(source, overrides)
    setup(config.model.backend)  # Unsloth must be imported before transformers, which follows
    return make_plan(config, gpu, base=base, cards=cards)


def make_plan(
    config: RunConfig, gpu: str | None = None, *, base: Path = Path(), cards: int = 1
) -> Plan:
    """Return the plan of settings that were read; see ``plan``. Unsloth is not imported.

    Args:
        config: Settings of the run.
        gpu: As for ``plan``.
        base: Folder that the paths of model and prompts start from.
        cards: As for ``plan``.

    Raises:
        ConfigError: The card or the number of cards is wrong.
        ModelError: The model's config cannot be read.
    """
    if cards < 1:
        raise ConfigError(f"--cards is {cards}: give 1 or more")
    card, room = find_room(gpu)
    with quiet():  # transformers is imported here
        facts = read_facts(config, base, card, room)
    made = Plan(config, facts, cards=cards)
    if made.peak_bytes <= room:
        return made
    return replace(made, changes=tuple(find_changes(config, facts, room)))


def find_room(gpu: str | None) -> tuple[Hardware, int]:
    """Return the card to plan for, and the bytes of memory there that this process may use.

    Args:
        gpu: As for ``plan``.
    """
    if gpu is None or gpu.strip().lower() == "this":
        return detect_hardware(), room_here()
    card = find_card(gpu)
    return card, card.usable


def room_here() -> int:
    """Return the bytes of memory that are free or that this process holds already.

    They are the GPU's, or those of main memory on a machine without a GPU.
    """
    hardware = detect_hardware()
    if hardware.on_gpu:
        import torch

        # asking a GPU for its memory makes a CUDA context there
        held = torch.cuda.memory_reserved() if hardware.device == "cuda" else 0
        return min(hardware.usable, hardware.free_memory + CONTEXT + held)
    import psutil

    return hardware.free_memory + psutil.Process().memory_info().rss


def remedy(config: RunConfig, room: int, *, base: Path = Path()) -> str:
    """Return the changes to make after memory ran out, as a clause; "" if no change helps.

    The changes make the planned peak fit into ``room`` bytes and lower it by at least a tenth,
    even if the plan said that the run would fit.
    """
    try:
        facts = read_facts(config, base, detect_hardware(), room)
    except KitError:
        return ""
    less = min(room, int(0.9 * peak_with(config, facts, ())))
    return ", and ".join(map(str, find_changes(config, facts, less)))


def _picture(made: Plan) -> list[str]:
    """Return the lines of a plan, at most 80 columns where names are short."""
    memory = made.memory
    shape = made.facts.shape
    parts = memory.at(memory.phase)
    longest = max(size for _, size in parts)
    large = [part for part in parts if part[1] >= SMALLEST_PART * memory.peak_bytes]
    rest = memory.peak_bytes - sum(size for _, size in large)
    phases = ", ".join(f"{phase} {_gib(size)}" for phase, size in memory.phases.items())
    lines = [
        made.verdict,
        f"{_count(shape.num_parameters)} parameters, by {shape.source}; "
        f"{made.job.at_once} completions at once, rows up to {made.job.width:,} tokens",
        "",
        f"the peak, {_gib(memory.peak_bytes)}, is when {DOING[memory.phase]}:",
        *(_bar(name, size, size / longest) for name, size in [*large, ("all else", rest)]),
        "",
        f"phases: {phases}",
        f"a pass with gradient has {memory.budget:,} positions (tokens_per_micro_batch)",
    ]
    if made.vllm_share is not None:
        lines.append(f"vLLM gets {made.vllm_share:.3f} of the card (vllm_gpu_memory_utilization)")
    lines += [f"note: {note}" for note in assumptions(made.config, made.facts, made.job)]
    if made.changes:
        lines += ["", "to make it fit:"]
        lines += [
            f"  {', '.join(change.settings)}  (saves {_gib(change.saves)})"
            for change in made.changes
        ]
    elif not made.fits and made.refusal is None:
        enough = next((cards for cards in MORE_CARDS if made.fitting_ways(cards)), None)
        several = f", or {enough} cards (--cards {enough})" if enough else ""
        lines += ["", f"no setting makes it fit: use a smaller model{several}"]
    return lines + _several_cards(made)


def _several_cards(made: Plan) -> list[str]:
    """Return the lines on more than one card; [] for one card or a CPU."""
    if made.cards == 1 or not made.job.on_gpu:
        return []
    lines = ["", f"on {made.cards} such cards, on paper; memory of the fullest one:"]
    for way in find_ways(made.job, made.cards):
        verdict = "fits" if way.peak_bytes <= made.room else "no"
        lines.append(f"  {verdict:<4}  {way.name:<{NAME + BAR - 4}}{_gib(way.peak_bytes):>11}")
    return [*lines, "docs/how-to/more_than_one_card.md lists what each of them needs"]


def _bar(name: str, size: int, share: float) -> str:
    return f"  {name[:NAME]:<{NAME}} {'█' * round(BAR * share):<{BAR}} {_gib(size):>10}"


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} billion" if number >= 1e8 else f"{number / 1e6:,.2f} million"


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / MIB:,.0f} MiB"
