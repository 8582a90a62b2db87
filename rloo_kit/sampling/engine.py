"""The interface of engines that sample, adapter folders, and the choice of an engine.

The base model stays in the engine. Only the LoRA adapter is sent after every optimizer step, as a
small folder in shared memory. Nothing is merged, so 4-bit weights are not rounded.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rloo_kit.config.lora import why_not_vllm_takes
from rloo_kit.errors import GenerationError
from rloo_kit.machine.hardware import SHARED_MEMORY
from rloo_kit.models.adapters import write_adapter
from rloo_kit.models.engine_memory import LORA_RANKS, reserved_rank
from rloo_kit.text.thoughts import ThoughtMarks
from rloo_kit.types import Model

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ThoughtLimit:
    """Limit that truncates a completion whose thought is still open after this many tokens."""

    tokens: int
    marks: ThoughtMarks  # a thought is opened in the prompt or in the completion

    def exceeds(self, prompt_ids: list[int], ids: list[int]) -> bool:
        """Return whether the completion ``ids`` reaches the limit and its thought is open there."""
        return len(ids) >= self.tokens and self.marks.is_open(prompt_ids + ids[: self.tokens])

    def cut(self, prompt_ids: list[int], ids: list[int]) -> list[int]:
        """Return a completion, truncated at the limit if its thought exceeds it."""
        return ids[: self.tokens] if self.exceeds(prompt_ids, ids) else ids


@dataclass(frozen=True)
class Sampling:
    """Sampling settings, with TRL's names and meanings."""

    max_tokens: int  # of a completion
    stop_token_ids: tuple[int, ...]  # each ends a completion
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 for all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    others: dict[str, Any] = field(default_factory=dict)  # of vLLM's `SamplingParams`, by name
    thought: ThoughtLimit | None = None

    @property
    def whole_distribution(self) -> bool:
        """True if every token can be sampled, with the probability that the policy gives it."""
        top = (self.top_p, self.min_p, self.repetition_penalty) == (1.0, 0.0, 1.0)
        return top and self.top_k <= 0 and self.temperature > 0 and not self.others

    def as_vllm(self) -> dict[str, Any]:
        """Return arguments of vLLM's ``SamplingParams``; they ask for log-probs of drawn tokens."""
        values = {
            **vars(self),
            "stop_token_ids": list(self.stop_token_ids),
            "top_k": max(0, self.top_k),
            "logprobs": 0,
            **self.others,
        }
        del values["others"], values["thought"]
        return values


@dataclass(frozen=True)
class Begun:
    """B completions that have begun, some of them without any token yet."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]  # so far
    # Called with the numbers of the rows that have ended; True ends the sampling of the others
    is_enough: Callable[[Collection[int]], bool] = lambda ended: False

    @property
    def all_ids(self) -> list[list[int]]:
        """Prompts and completions so far."""
        pairs = zip(self.prompt_ids, self.completion_ids, strict=True)
        return [prompt + completion for prompt, completion in pairs]

    def is_thought_over(self, row: int, new: list[int], thought: ThoughtLimit) -> bool:
        """Return whether a row's thought exceeds its limit after ``new`` tokens are added."""
        return thought.exceeds(self.prompt_ids[row], self.completion_ids[row] + new)


@dataclass(frozen=True)
class Generations:
    """Completions of B prompts, in their order."""

    completion_ids: list[list[int]]  # the stop token included; not empty but in ``grow``
    log_probs: list[list[float]]  # nats, under the distribution that sampled


class Engine(Protocol):
    """Interface of an engine that samples from the policy."""

    name: str  # in messages, such as "vLLM in this process"
    sync_seconds: float  # of the last sync
    adapter_dtype: Any  # torch's dtype to which an adapter is rounded when it is sent

    def sync(self, model: Model) -> None:
        """Send the active adapter of ``model``, or switch to the base if none is active."""

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling, seed: int) -> Generations:
        """Complete each of B prompts once; equal seed, prompts and adapter give equal results."""
        ...

    def sleep(self) -> None:
        """Free memory for the learning step; ``generate`` wakes the engine up."""

    def close(self) -> None:
        """Free everything; may be called twice."""


@runtime_checkable
class PartialEngine(Engine, Protocol):
    """Interface of an engine that can end early, and continue completions later."""

    def grow(self, begun: Begun, sampling: Sampling, seed: int) -> Generations:
        """Continue B completions until enough of them have ended; return their new tokens."""
        ...


def draw_from(
    engine: Engine, prompt_ids: list[list[int]], sampling: Sampling, seed: int
) -> Generations:
    """Complete each of B prompts once, with thoughts no longer than ``sampling.thought``.

    An engine that limits a thought itself inserts the closing token, which the policy has not
    sampled. So all completions are first sampled up to the limit. Those whose thought is closed by
    then are continued; the others end there.
    """
    limit = sampling.thought
    if limit is None or limit.tokens >= sampling.max_tokens:
        return engine.generate(prompt_ids, sampling, seed)
    first = engine.generate(prompt_ids, replace(sampling, max_tokens=limit.tokens), seed)
    rows = [
        row
        for row, ids in enumerate(first.completion_ids)
        if len(ids) == limit.tokens
        and ids[-1] not in sampling.stop_token_ids
        and not limit.exceeds(prompt_ids[row], ids)
    ]
    if not rows:
        return first
    begun = [prompt_ids[row] + first.completion_ids[row] for row in rows]
    left = sampling.max_tokens - limit.tokens
    rest = engine.generate(begun, replace(sampling, max_tokens=left), seed + len(prompt_ids))
    for row, ids, log_probs in zip(rows, rest.completion_ids, rest.log_probs, strict=True):
        first.completion_ids[row] += ids
        first.log_probs[row] += log_probs
    return first


def why_no_hot_swap(model: Any) -> str | None:
    """Return the reason why vLLM cannot swap the adapters of this model, or None if it can."""
    from peft import LoraConfig

    configs = getattr(model, "peft_config", {})
    if not configs:
        return "the model has no LoRA adapter"
    for config in configs.values():
        if not isinstance(config, LoraConfig):
            return f"the adapter is of the kind {config.peft_type}, and vLLM takes LoRA"
        if why_not := why_not_vllm_takes(vars(config)):
            return why_not
        if config.r > LORA_RANKS[-1]:
            return f"the adapter's rank is {config.r}, and vLLM takes at most {LORA_RANKS[-1]}"
    return None


def reserved_rank_of(model: Model) -> int:
    """Return the rank that vLLM must reserve for the adapters of the model."""
    return reserved_rank(max(config.r for config in model.peft_config.values()))


def active_adapter(model: Model) -> str | None:
    """Return the active adapter of a PEFT model; None if it computes with its base alone."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layer = next(m for m in model.modules() if isinstance(m, BaseTunerLayer))
    return None if layer.disable_adapters else layer.active_adapters[0]


class AdapterFolder:
    """Folder for the adapter that was sent last, and for other files that an engine reads.

    Args:
        parent: Folder that holds it; None for shared memory or the system's temporary folder.

    Raises:
        GenerationError: ``parent`` is not a folder, or cannot be written to.
    """

    def __init__(self, parent: str | None = None) -> None:
        place = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        if place is not None:
            _remove_leftovers(place)
        if parent and not os.access(place := Path(parent).resolve(), os.W_OK):
            raise GenerationError(
                f"trainer.vllm_adapter_dir {parent!r} cannot be written to: give a folder that the "
                f"server sees too"
            )
        prefix = f"rloo-kit-{_namespace()}-{os.getpid()}-"
        self.root = Path(tempfile.mkdtemp(prefix=prefix, dir=place))

    def write(self, model: Model, dtype: "torch.dtype | None") -> Path:
        """Write the active adapter of a PEFT model in a dtype; return its folder.

        Raises:
            GenerationError: The disk is full or cannot be written.
        """
        from safetensors import SafetensorError

        folder = self.root / "adapter"
        # not overwritten, because tensors that vLLM has read may be mapped from the old file
        shutil.rmtree(folder, ignore_errors=True)
        try:
            write_adapter(model, active_adapter(model) or "default", folder, dtype)
        except (OSError, SafetensorError) as exc:
            raise GenerationError(
                f"the adapter cannot be written to {str(self.root)!r} ({exc}): free some space "
                f"there"
            ) from exc
        return folder

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.root, ignore_errors=True)


def _namespace() -> int:
    """Return the id of this process's PID namespace, since containers may share their memory."""
    return os.stat("/proc/self/ns/pid").st_ino if os.path.exists("/proc/self/ns/pid") else 0


def _remove_leftovers(parent: Path) -> None:
    """Remove the folders of killed runs from shared memory."""
    import psutil

    for folder in parent.glob(f"rloo-kit-{_namespace()}-*-*"):
        pid = folder.name.split("-")[3]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Choice:
    """The engine that samples, and the reason why a faster engine does not."""

    engine: str  # `vllm`, `server` or `transformers`
    reason: str | None = None  # in one line, if `auto` fell back


def choose(asked: str, *, on_gpu: bool, why_not: str | None) -> Choice:
    """Return the engine for ``auto``, ``vllm``, ``server`` or ``transformers``.

    Args:
        asked: One of these names.
        on_gpu: True if the model is on a GPU.
        why_not: The reason why vLLM cannot sample here, or None.

    Raises:
        GenerationError: vLLM was requested by name and cannot sample from the model.
    """
    # on a CPU a small model is as fast without vLLM, which needs seconds to start
    if asked == "transformers" or (asked == "auto" and not on_gpu):
        return Choice("transformers")
    if why_not is None:
        return Choice("server" if asked == "server" else "vllm")
    if asked != "auto":
        raise GenerationError(
            f"generation: {asked} cannot be used: {why_not}; set trainer.generation: auto"
        )
    return Choice("transformers", why_not)
