"""Reward model: a trained sequence classifier with one output scores every completion."""

import contextlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rloo_kit.errors import ModelError
from rloo_kit.types import Completion, Score

from ._classifier import (
    CALIBRATION,
    Source,
    find_source,
    load_classifier,
    logits,
    read_json,
    token_ids,
)

TOKENS_PER_BATCH = 8192
CACHE_SIZE = 4096


@dataclass
class RewardModel:
    """Reward what a trained model prefers: the one logit of a sequence classifier.

    Range: any finite number, higher is better, never None; the scale is the model's own, or with a
    ``calibration.json`` in its folder (logit - mean) / std. The model is loaded at the first call
    and dropped by ``release``; a pickle holds the parameters only. Conversational prompts go
    through the model's own chat template; plain ones are put before the completion as they are.

    A folder is a whole model, or a PEFT adapter with its score head, as ``rloo-kit reward-model
    train`` writes it. Only safetensors are read, and no code that comes with a model is run.

    >>> reward = RewardModel("models/my-reward-model", tokens_per_batch=4096, clip=(-3, 3))
    >>> reward.__name__, reward.is_loaded, reward.clip
    ('reward_model', False, (-3, 3))
    """

    __name__: ClassVar[str] = "reward_model"

    model: str
    """Folder with config.json (or adapter_config.json), weights and tokenizer, or a hub name."""
    batch_size: int | None = None
    """Most completions per forward pass; None: as many as ``tokens_per_batch`` holds."""
    max_length: int | None = None
    """Most tokens of prompt and completion; the left is cut off. None: what it was trained with,
    where that is noted, else the model's own limit."""
    keep_thought: bool | None = None
    """Whether the model reads the thought; else only what follows the last ``</think>``. None: as
    it was trained, where that is noted, else no."""
    policy_tokens: bool = False
    """Whether completions are read by their own token ids, the EOS token with them, as the older
    TRL did, thought and all; for a model that has the policy's tokenizer."""
    device: str | None = None
    """Such as "cpu" or "cuda:0"; None: the GPU if there is one."""
    tokens_per_batch: int = TOKENS_PER_BATCH
    """Most tokens of a forward pass, padding included."""
    load_in_4bit: bool | None = None
    """NF4 weights (bitsandbytes), the score head apart. None: as an adapter's base was trained."""
    offload: bool | None = None
    """Whether the weights wait in the machine's memory between scorings; None: on a GPU. Without
    effect on a CPU."""
    cache_size: int = CACHE_SIZE
    """Scores that are remembered, by the exact tokens; 0: none."""
    calibration: str | None = None
    """JSON file with ``mean`` and ``std``; None: ``calibration.json`` in the model's folder."""
    calibrated: bool | None = None
    """Whether scores are centred and scaled; None: if there is a calibration; True: it must be
    there; False: the logits as they are."""
    clip: tuple[float, float] | None = None
    """Lowest and highest score, applied last."""
    base: str | None = None
    """Folder or hub name of an adapter's base, where it is not found by itself."""
    tokenizer: Any = None
    """Folder or hub name of a tokenizer, or the tokenizer itself; None: the model's own."""
    _loaded: "_Loaded | None" = field(default=None, init=False, repr=False, compare=False)
    _cache: "OrderedDict[bytes, float]" = field(
        default_factory=OrderedDict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Refuse sizes below 1 and bounds out of order."""
        for name in ("batch_size", "max_length", "tokens_per_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value!r}; set it to 1 or more")
        if self.cache_size < 0:
            raise ValueError(f"cache_size is {self.cache_size!r}; set it to 0 or more")
        if self.calibration is not None and self.calibrated is False:
            raise ValueError("calibrated is False beside a calibration; remove one of the two")
        if self.clip is not None:
            self.clip = _as_bounds(self.clip)

    @property
    def is_loaded(self) -> bool:
        """Whether the model is in memory."""
        return self._loaded is not None

    def release(self) -> None:
        """Drop the model and the scores it gave; the next call loads it again."""
        self._loaded = None
        self._cache.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Return the parameters, without the model."""
        return {**self.__dict__, "_loaded": None, "_cache": OrderedDict()}

    def __call__(
        self,
        completions: list[Completion],
        prompts: list[Completion],
        completion_ids: list[list[int]] | None = None,
        **_: object,
    ) -> list[Score]:
        """Return one score per completion.

        Args:
            completions: B completions, conversational or plain.
            prompts: B prompts, conversational or plain.
            completion_ids: B lists of the policy's token ids; read with ``policy_tokens`` alone.

        Raises:
            ModelError: The model, its tokenizer or its calibration cannot be loaded, or the
                tokenizer is another than the policy's.
        """
        if self._loaded is None:
            self._loaded = self._load()
        loaded = self._loaded
        own: list[Any] = [None] * len(completions)
        if self.policy_tokens and completion_ids is not None:
            own = completion_ids
        rows = [
            token_ids(
                loaded.tokenizer,
                prompt,
                completion,
                keep_thought=loaded.keep_thought,
                max_length=loaded.max_length,
                completion_ids=ids,
            )
            for prompt, completion, ids in zip(prompts, completions, own, strict=True)
        ]
        return [self._finished(logit) for logit in self._logits(loaded, rows)]

    def _finished(self, logit: float) -> float:
        """Return a logit centred, scaled and clipped; NaN stays NaN."""
        assert self._loaded is not None
        score = (logit - self._loaded.mean) / self._loaded.std
        if self.clip is None:
            return score
        low, high = self.clip
        return max(min(score, high), low)

    def _logits(self, loaded: "_Loaded", rows: Sequence[list[int]]) -> list[float]:
        """Return one logit per row, each text being read once."""
        keys = [array("I", row).tobytes() for row in rows]
        known = {key: self._cache[key] for key in keys if key in self._cache}
        fresh = {key: row for key, row in zip(keys, rows, strict=True) if key not in known}
        if fresh:
            with loaded.at_work() as model:
                found = logits(
                    model,
                    loaded.tokenizer.pad_token_id,
                    list(fresh.values()),
                    self.tokens_per_batch,
                    self.batch_size,
                    at_last_token=self.policy_tokens,
                )
            known.update(zip(fresh, found, strict=True))
        for key in keys:
            self._cache[key] = known[key]
            self._cache.move_to_end(key)
        while len(self._cache) > self.cache_size:
            self._cache.popitem(last=False)
        return [known[key] for key in keys]

    def _load(self) -> "_Loaded":
        """Return the model where it waits, its tokenizer, and how it reads and counts."""
        import torch

        source = find_source(self.model)
        mean, std = self._mean_and_std(source)
        facts = source.facts
        in_4bit = self.load_in_4bit
        if in_4bit is None:
            in_4bit = bool(source.is_adapter and facts.get("load_in_4bit"))
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        model, tokenizer = load_classifier(
            source,
            load_in_4bit=in_4bit,
            device=device,
            base=self.base,
            tokenizer=self.tokenizer,
        )
        keep = facts.get("keep_thought") if self.keep_thought is None else self.keep_thought
        offload = device != "cpu" and self.offload is not False
        model.to("cpu" if offload else device)
        return _Loaded(
            model,
            tokenizer,
            device=device,
            offload=offload,
            keep_thought=bool(keep),
            max_length=self.max_length or facts.get("max_length"),
            mean=mean,
            std=std,
        )

    def _mean_and_std(self, source: Source) -> tuple[float, float]:
        """Return what scores are centred on and divided by; (0, 1) without a calibration."""
        if self.calibrated is False:
            return 0.0, 1.0
        path = Path(self.calibration).expanduser() if self.calibration else None
        if path is None and source.folder is not None:
            path = source.folder / CALIBRATION
        if path is None or not path.is_file():
            if self.calibration is None and not self.calibrated:
                return 0.0, 1.0
            raise ModelError(
                f"reward model {self.model!r} has no calibration in "
                f"{str(path or CALIBRATION)!r}; give a JSON file with mean and std as "
                "calibration, or set calibrated to False"
            )
        return _read_mean_and_std(path)


@dataclass
class _Loaded:
    """A model in memory, and how it is used."""

    model: Any
    tokenizer: Any
    device: str
    offload: bool
    keep_thought: bool
    max_length: int | None
    mean: float
    std: float

    @contextlib.contextmanager
    def at_work(self) -> Iterator[Any]:
        """Give the model on its device; bring it back afterwards where it is offloaded."""
        if not self.offload:
            yield self.model
            return
        import torch

        self.model.to(self.device)
        try:
            yield self.model
        finally:
            self.model.to("cpu")
            torch.accelerator.empty_cache()


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _as_bounds(clip: Any) -> tuple[float, float]:
    """Return (low, high).

    Raises:
        ValueError: They are not two finite numbers in order.
    """
    if isinstance(clip, list | tuple) and len(clip) == 2 and all(map(_is_finite, clip)):
        low, high = clip
        if low < high:
            return low, high
    raise ValueError(f"clip is {clip!r}; give the lowest and the highest score, such as [-3, 3]")


def _read_mean_and_std(path: Path) -> tuple[float, float]:
    content = read_json(path)
    mean, std = (content.get(name) for name in ("mean", "std"))
    if not _is_finite(mean) or not _is_finite(std) or float(std or 0) <= 0:
        raise ModelError(
            f"the calibration {str(path)!r} has mean {mean!r} and std {std!r}; give a number for "
            "mean and one above 0 for std"
        )
    return float(mean or 0), float(std or 0)
