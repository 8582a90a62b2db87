"""The interface of sampling engines, the folder for sent adapters, and the choice of an engine.

The base model stays in the engine. After every optimizer step only the LoRA adapter is sent, as a
small folder in shared memory. If shared memory has too little free space, the folder is in the
system's temporary folder. The adapter is not merged into the base, so 4-bit weights are not rounded
again.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rloo_kit.config.lora import why_not_vllm_takes
from rloo_kit.errors import GenerationError
from rloo_kit.machine.hardware import GIB, SHARED_MEMORY
from rloo_kit.models.adapters import write_adapter
from rloo_kit.models.engine_memory import LORA_RANKS, reserved_rank
from rloo_kit.text.thoughts import ThoughtMarks
from rloo_kit.types import Model

if TYPE_CHECKING:
    import torch


# With less free shared memory, an adapter is written to the system's temporary folder
SMALLEST_SHARED = GIB


@dataclass(frozen=True)
class ThoughtLimit:
    """Limit that truncates a completion to ``tokens`` tokens if its thought is still open there."""

    tokens: int
    marks: ThoughtMarks  # the marks around a thought, which may begin in the prompt

    def exceeds(self, prompt_ids: list[int], ids: list[int]) -> bool:
        """Return True if the completion ``ids`` is still in its thought when it reaches the limit.

        A completion shorter than the limit does not exceed it.
        """
        return len(ids) >= self.tokens and self.marks.is_open(prompt_ids + ids[: self.tokens])

    def cut(self, prompt_ids: list[int], ids: list[int]) -> list[int]:
        """Return the completion ``ids``, truncated at the limit if its thought exceeds it."""
        return ids[: self.tokens] if self.exceeds(prompt_ids, ids) else ids


@dataclass(frozen=True)
class Sampling:
    """Sampling settings, with TRL's names and meanings."""

    max_tokens: int  # maximum tokens of a completion
    stop_token_ids: tuple[int, ...]  # each of them ends a completion
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 for all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    # other arguments of vLLM's `SamplingParams`, by name
    others: dict[str, Any] = field(default_factory=dict)
    thought: ThoughtLimit | None = None  # None if the length of thoughts is not limited

    @property
    def whole_distribution(self) -> bool:
        """True if tokens are sampled from the policy's whole distribution.

        It is False for greedy sampling, and if a setting other than ``temperature``, such as
        ``top_k``, excludes tokens or changes their probabilities.
        """
        top = (self.top_p, self.min_p, self.repetition_penalty) == (1.0, 0.0, 1.0)
        return top and self.top_k <= 0 and self.temperature > 0 and not self.others

    def as_vllm(self) -> dict[str, Any]:
        """Return keyword arguments for vLLM's ``SamplingParams``.

        They also request the log-probabilities of the sampled tokens.
        """
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
    """B unfinished completions to continue; some of them may have no token yet."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]  # the tokens so far
    # Called with the numbers of the rows that have ended; returns True to stop sampling the others
    is_enough: Callable[[Collection[int]], bool] = lambda ended: False

    @property
    def all_ids(self) -> list[list[int]]:
        """For each row, the ids of its prompt and of its completion so far, in one list."""
        pairs = zip(self.prompt_ids, self.completion_ids, strict=True)
        return [prompt + completion for prompt, completion in pairs]


@dataclass(frozen=True)
class Generations:
    """Sampled tokens of B completions, in the order of their prompts."""

    # including the stop token; only `grow` may return a completion without new tokens
    completion_ids: list[list[int]]
    log_probs: list[list[float]]  # in nats, under the distribution that was sampled from

    @classmethod
    def of(cls, rows: Iterable[tuple[list[int], list[float]]]) -> "Generations":
        """Return the generations of B >= 1 rows, given the tokens and log-probabilities of each."""
        return cls(*map(list, zip(*rows, strict=True)))


class Engine(Protocol):
    """Interface of an engine that samples from the policy.

    An engine that can stop sampling early, and continue completions later, also has a method
    ``grow`` (see ``VllmEngine``).
    """

    name: str  # name for messages, such as "vLLM in this process"
    sync_seconds: float  # duration of the last sync
    adapter_dtype: Any  # torch dtype to which an adapter is rounded when it is sent

    @property
    def max_length(self) -> int:
        """Maximum tokens of prompt and completion together."""
        ...

    def sync(self, model: Model) -> None:
        """Send the active adapter of ``model``, or switch to the base model if none is active."""

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling, seed: int) -> Generations:
        """Sample one completion of each of B prompts.

        The results are the same if the seed, the prompts and the adapter are the same.
        """
        ...

    def sleep(self) -> None:
        """Free memory for the learning step; the next ``sync`` or ``generate`` wakes the engine."""

    def close(self) -> None:
        """Shut the engine down and free its memory and files; a second call does nothing."""


def draw_from(
    engine: Engine, prompt_ids: list[list[int]], sampling: Sampling, seed: int
) -> Generations:
    """Sample one completion of each of B prompts, and end it if its thought is too long.

    The maximum length of a thought is ``sampling.thought``. The engine's own limit on thoughts is
    not used, because it would insert the closing token, which the policy has not sampled. Instead,
    this function first samples all completions up to the limit. A completion that has not ended by
    then is continued only if its thought is closed and the engine has room for more tokens.
    Otherwise it ends at the limit.
    """
    limit = sampling.thought
    if limit is None or limit.tokens >= sampling.max_tokens:
        return engine.generate(prompt_ids, sampling, seed)
    first = engine.generate(prompt_ids, replace(sampling, max_tokens=limit.tokens), seed)
    rows = [
        row
        for row, ids in enumerate(first.completion_ids)
        if len(ids) == limit.tokens
        and len(prompt_ids[row] + ids) < engine.max_length
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
    configs = getattr(model, "peft_config", {})
    if not configs:
        return "the model has no LoRA adapter"
    for config in configs.values():
        if config.peft_type != "LORA":
            return f"the adapter is of type {config.peft_type}, but vLLM supports only LoRA"
        if why_not := why_not_vllm_takes(vars(config)):
            return why_not
        if config.r > LORA_RANKS[-1]:
            return f"the adapter's rank is {config.r}, but vLLM supports at most {LORA_RANKS[-1]}"
    return None


def reserved_rank_of(model: Model) -> int:
    """Return the maximum LoRA rank with which vLLM must be started for the model's adapters."""
    return reserved_rank(max(config.r for config in model.peft_config.values()))


def active_adapter(model: Model) -> str | None:
    """Return the name of the active adapter of a PEFT model; None if adapters are disabled."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layer = next(m for m in model.modules() if isinstance(m, BaseTunerLayer))
    return None if layer.disable_adapters else layer.active_adapters[0]


class AdapterFolder:
    """Temporary folder for the newest adapter, and for other files that an engine reads.

    Args:
        parent: The folder in which the new folder is created. None chooses shared memory. If shared
            memory is not writable or has less than 1 GiB free, as in many containers, None chooses
            the system's temporary folder.

    Raises:
        GenerationError: ``parent`` does not exist, or cannot be written to.
    """

    def __init__(self, parent: str | None = None) -> None:
        _remove_leftovers()
        place = SHARED_MEMORY
        if not os.access(place, os.W_OK) or shutil.disk_usage(place).free < SMALLEST_SHARED:
            place = Path(tempfile.gettempdir())
        if parent:
            place = Path(os.path.expanduser(parent)).resolve()
            if not (place.is_dir() and os.access(place, os.W_OK)):
                raise GenerationError(
                    f"trainer.vllm_adapter_dir {parent!r} is not a writable folder: set it to one "
                    "that the server can read too"
                )
        prefix = f"rloo-kit-{_namespace()}-{os.getpid()}-"
        self.root = Path(tempfile.mkdtemp(prefix=prefix, dir=place))

    def write(self, model: Model, dtype: "torch.dtype | None") -> Path:
        """Write the active adapter of a PEFT model; return the folder of its files.

        Args:
            model: The PEFT model.
            dtype: The dtype of the written tensors; None keeps the dtype of each tensor.

        Raises:
            GenerationError: The disk is full or cannot be written to.
        """
        from safetensors import SafetensorError

        folder = self.root / "adapter"
        # the old file is removed and not overwritten, because vLLM may still map its tensors
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
        """Delete the folder and its files."""
        shutil.rmtree(self.root, ignore_errors=True)


def _namespace() -> int:
    """Return the id of this process's PID namespace; 0 if the system has no such namespaces.

    The same process number can mean different processes in two containers that share memory. The
    namespace tells these apart.
    """
    return os.stat("/proc/self/ns/pid").st_ino if os.path.exists("/proc/self/ns/pid") else 0


def _remove_leftovers() -> None:
    """Delete the adapter folders that killed runs have left in shared memory.

    Folders in the system's temporary folder are kept, because other machines may share it, and a
    run on another machine cannot be seen here.
    """
    import psutil

    for folder in SHARED_MEMORY.glob(f"rloo-kit-{_namespace()}-*-*"):
        pid = folder.name.split("-")[3]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Choice:
    """The engine that samples, and the reason why a faster engine cannot be used."""

    engine: str  # `vllm`, `server` or `transformers`
    reason: str | None = None  # one line, if `auto` fell back to transformers; None otherwise


def choose(asked: str, *, on_gpu: bool, why_not: str | None) -> Choice:
    """Choose the engine that samples.

    Args:
        asked: The requested engine: ``auto``, ``vllm``, ``server`` or ``transformers``.
        on_gpu: True if the model is on a GPU.
        why_not: The reason why vLLM cannot sample here; None if it can.

    Raises:
        GenerationError: vLLM was requested by name but cannot sample from the model.
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
