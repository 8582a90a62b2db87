"""Plan of a run's memory on a GPU, with changes of settings if it does not fit.

A plan is computed from the run file, the model's config and the GPU's memory. No weights are read.
``benchmarks/plan_accuracy.py`` compares plans with real runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rloo_kit.config.run_file import RunConfig
from rloo_kit.errors import ConfigError, KitError
from rloo_kit.job import read_config
from rloo_kit.machine.environment import quiet, setup
from rloo_kit.machine.hardware import GIB, USABLE, Hardware, detect_hardware, find_card
from rloo_kit.models.engine_memory import MIB
from rloo_kit.planning.advice import Change, find_changes
from rloo_kit.planning.cards import find_ways
from rloo_kit.planning.facts import Facts, assumptions, make_job, read_facts
from rloo_kit.planning.memory import CONTEXT, DOING, Job, MemoryPlan, plan_memory

# Width of the longest bar and of a part's name, in characters; with the number a line has 80
BAR = 26
NAME = 33
# Numbers of GPUs to try if the run cannot fit on one
MORE_CARDS = (2, 4, 8, 16)
# Parts with a smaller share of the peak than this are shown as one part
SMALLEST_PART = 0.01


@dataclass(frozen=True, repr=False)
class Plan:
    """Memory plan of a run on a GPU or a CPU. ``print`` shows the whole plan as text."""

    config: RunConfig
    facts: Facts
    changes: tuple[Change, ...] = ()  # changes that make the run fit, the least harmful first
    cards: int = 1  # number of GPUs; above 1 the text also shows ways to train on all of them

    @property
    def room(self) -> int:
        """Memory that this process may use, in bytes: GPU memory, or main memory without a GPU."""
        return self.facts.room

    @cached_property
    def job(self) -> Job:
        """Properties of the run from which its memory use is computed."""
        return make_job(self.config, self.facts)

    @cached_property
    def memory(self) -> MemoryPlan:
        """Memory of the run: the total of each phase, and its parts, such as weights."""
        return plan_memory(self.job)

    @property
    def peak_bytes(self) -> int:
        """Peak memory in bytes: GPU memory, or memory of the process if the run uses a CPU."""
        return self.memory.peak_bytes

    @property
    def fits(self) -> bool:
        """True if the peak fits into the memory, and if vLLM can start or is not used."""
        return self.peak_bytes <= self.room and self.refusal is None

    @property
    def vllm_share(self) -> float | None:
        """Share of the GPU's memory that vLLM gets; None if vLLM does not run in this process."""
        engine = self.memory.engine
        return engine and (self.job.share or engine.share(self.job.card))

    @property
    def refusal(self) -> str | None:
        """Reason why vLLM cannot start; None if vLLM can start or is not used."""
        return self.memory.engine and self.memory.engine.refusal

    def fitting_ways(self, cards: int) -> list[str]:
        """Return the names of the ways to train on several GPUs that do not run out of memory.

        In each of these ways, the estimated peak memory of the fullest GPU is at most ``room``.

        Args:
            cards: Number of GPUs of this kind, at least 2.
        """
        return [name for name, peak in find_ways(self.job, cards).items() if peak <= self.room]

    @property
    def verdict(self) -> str:
        """One line that says if the run fits, and how much memory is left or missing."""
        what = f"{self.config.model.name} on {self.facts.card.name}"
        left = self.room - self.peak_bytes
        if left < 0:
            return f"{what}: does not fit, {_gib(-left)} of {_gib(self.peak_bytes)} are missing"
        if self.refusal:
            return f"{what}: {self.refusal}"
        tight = " (tight)" if left < 3 * (1 - USABLE) * self.room else ""
        return f"{what}: fits{tight}, {_gib(left)} of {_gib(self.room)} stay free"

    def __repr__(self) -> str:
        """Return the whole plan. Lines have at most 80 columns if the names are short."""
        memory = self.memory
        shape = self.facts.shape
        parts = memory.at(memory.phase)
        longest = max(size for _, size in parts)
        large = [part for part in parts if part[1] >= SMALLEST_PART * memory.peak_bytes]
        rest = memory.peak_bytes - sum(size for _, size in large)
        phases = ", ".join(f"{phase} {_gib(size)}" for phase, size in memory.phases.items())
        lines = [
            self.verdict,
            f"{_count(shape.num_parameters)} parameters, according to {shape.source}; "
            f"{self.job.at_once} completions at once, rows up to {self.job.width:,} tokens",
            "",
            f"the peak, {_gib(memory.peak_bytes)}, is reached while {DOING[memory.phase]}:",
            *(
                f"  {name[:NAME]:<{NAME}} {'█' * round(BAR * (size / longest)):<{BAR}} "
                f"{_gib(size):>10}"
                for name, size in [*large, ("all else", rest)]
            ),
            "",
            f"phases: {phases}",
            f"a pass with gradient has {memory.budget:,} positions (tokens_per_micro_batch)",
        ]
        if self.vllm_share is not None:
            lines.append(
                f"vLLM gets {self.vllm_share:.3f} of the card (vllm_gpu_memory_utilization)"
            )
        lines += [f"note: {note}" for note in assumptions(self.config, self.facts, self.job)]
        if self.changes:
            lines += ["", "to make it fit:"]
            lines += [
                f"  {', '.join(change.settings)}  (saves {_gib(change.saves)})"
                for change in self.changes
            ]
        elif not self.fits and self.refusal is None:
            enough = next((cards for cards in MORE_CARDS if self.fitting_ways(cards)), None)
            several = f", or {enough} cards (--cards {enough})" if enough else ""
            lines += ["", f"no setting makes it fit: use a smaller model{several}"]
        if self.cards > 1 and self.job.on_gpu:
            lines += [
                "",
                f"on {self.cards} such cards (estimates of the peak on the fullest card):",
            ]
            for name, peak in find_ways(self.job, self.cards).items():
                verdict = "fits" if peak <= self.room else "no"
                lines.append(f"  {verdict:<4}  {name:<{NAME + BAR - 4}}{_gib(peak):>11}")
            lines.append("docs/how-to/more_than_one_card.md says what each of these ways needs")
        return "\n".join(lines)


def plan(
    source: str | Path | RunConfig,
    gpu: str | None = None,
    overrides: Sequence[str] = (),
    cards: int = 1,
) -> Plan:
    """Estimate the memory that a run needs, without loading a model.

    Example:
        print(rk.plan("qwen3-4b-thinking", gpu="12GB"))

    Args:
        source: Path of a run file, name of a run file that ships with the kit, folder of a run, or
            a ``RunConfig``.
        gpu: Memory of a GPU (``12GB``) or its name (``RTX 4070``). None or ``this`` means the GPU
            of this machine, or its CPU if it has no GPU.
        overrides: Changes to the run file, each as ``section.key=value`` (like ``--set``).
        cards: Number of GPUs of this kind. Above 1, the plan also estimates which ways to train on
            all of them would fit.

    Raises:
        ConfigError: The run file, the GPU or the number of GPUs is wrong.
        ModelError: The model's config cannot be read.
    """
    config, base = read_config(source, overrides)
    setup(config.model.backend)  # imports Unsloth, which must come before transformers
    return make_plan(config, gpu, base=base, cards=cards)


def make_plan(
    config: RunConfig, gpu: str | None = None, *, base: Path = Path(), cards: int = 1
) -> Plan:
    """Estimate the memory of a run from its settings, without importing Unsloth (see ``plan``).

    Args:
        config: Settings of the run.
        gpu: Memory or name of a GPU, as for ``plan``.
        base: Folder that the relative paths of model and prompts start from.
        cards: Number of GPUs, as for ``plan``.

    Raises:
        ConfigError: The GPU or the number of GPUs is wrong.
        ModelError: The model's config cannot be read.
    """
    if cards < 1:
        raise ConfigError(f"--cards is {cards}: give 1 or more")
    card, room = find_room(gpu)
    with quiet():  # transformers is imported here
        facts = read_facts(config, base, card, room)
    return Plan(config, facts, tuple(find_changes(config, facts, room)), cards)


def find_room(gpu: str | None) -> tuple[Hardware, int]:
    """Return the GPU (or CPU) to plan for, and the bytes of its memory that a run may use.

    Args:
        gpu: Memory or name of a GPU, as for ``plan``.
    """
    if gpu is None or str(gpu).strip().lower() == "this":
        return detect_hardware(), room_here()
    card = find_card(str(gpu))
    return card, card.usable


def room_here() -> int:
    """Return the bytes of memory that this process may use: free memory plus what it already holds.

    This is GPU memory, or main memory on a machine without a GPU.
    """
    hardware = detect_hardware()
    if hardware.on_gpu:
        import torch

        # Asking a GPU for its free memory creates a CUDA context. Its size is added to what is free
        held = torch.cuda.memory_reserved() if hardware.device == "cuda" else 0
        return min(hardware.usable, hardware.free_memory + CONTEXT + held)
    import psutil

    return hardware.free_memory + psutil.Process().memory_info().rss


def remedy(config: RunConfig, room: int, *, base: Path = Path()) -> str:
    """Return a clause that says what to change after memory ran out; "" if no change helps.

    The changes make the planned peak fit into ``room`` bytes. They lower it by at least a tenth,
    even if the run should have fitted according to the plan.

    Args:
        config: Settings of the run.
        room: Memory that the run may use, in bytes.
        base: Folder that the relative paths of model and prompts start from.
    """
    try:
        facts = read_facts(config, base, detect_hardware(), room)
        less = min(room, int(0.9 * Plan(config, facts).peak_bytes))
        return ", and ".join(map(str, find_changes(config, facts, less)))
    except KitError:
        return ""


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} billion" if number >= 1e8 else f"{number / 1e6:,.2f} million"


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / MIB:,.0f} MiB"
