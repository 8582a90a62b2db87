"""Reward of a trained sequence classifier with one output."""

from dataclasses import dataclass, field
from typing import Any

from rloo_kit.errors import ModelError
from rloo_kit.text.numbers import finite_number
from rloo_kit.types import Completions, Scores

from ._classifier import (
    CALIBRATION,
    Source,
    find_source,
    load_classifier,
    logits,
    read_json,
    token_ids,
)
from ._text import check_least

TOKENS_PER_BATCH = 8192


@dataclass
class RewardModel:
    """Reward what a trained model prefers: the one logit of a sequence classifier.

    Range: any finite number, higher is better, never None. The score is the model's logit, or
    (logit - mean) / std if its folder has a ``calibration.json``. The model is loaded at the first
    call and dropped by ``release``; a pickle holds only the parameters. Conversational prompts go
    through the model's own chat template; plain ones are put before the completion.

    A folder is a whole model, or a PEFT adapter with its score head, as ``rloo-kit reward-model
    train`` writes it. Only safetensors are read, and no code that comes with a model is run.

    >>> reward = RewardModel("models/my-reward-model", tokens_per_batch=4096)
    >>> reward.__name__, reward.is_loaded
    ('reward_model', False)
    """

    __name__ = "reward_model"

    model: str
    """Folder with config.json (or adapter_config.json), weights and tokenizer, or a hub name."""
    max_length: int | None = None
    """Most tokens of prompt and completion; more are cut off on the left. None: the limit it was
    trained with, if that is noted, else the model's own."""
    keep_thought: bool | None = None
    """Let the model read the thought; False: only the text after the last ``</think>``; None: as it
    was trained, if that is noted, else False."""
    policy_tokens: bool = False
    """Read completions by their own token ids, with the thought and the EOS token, as the older TRL
    did; for a model that has the policy's tokenizer."""
    device: str | None = None
    """Device, such as "cpu" or "cuda:0"; None: the GPU if there is one."""
    tokens_per_batch: int = TOKENS_PER_BATCH
    """Most tokens of a forward pass, padding included."""
    load_in_4bit: bool | None = None
    """Load NF4 weights (bitsandbytes), except the score head; None: as an adapter was trained."""
    offload: bool | None = None
    """Keep the weights in the machine's memory between scorings; None: on a GPU. It has no effect
    on a CPU."""
    calibrated: bool = True
    """Centre and scale the scores as ``calibration.json`` in the model's folder says; without that
    file, and with False, the scores are the logits."""
    base: str | None = None
    """Folder or hub name of an adapter's base, if it is not found automatically."""
    tokenizer: Any = None
    """Folder or hub name of a tokenizer, or the tokenizer itself; None: the model's own."""
    _loaded: "_Loaded | None" = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse sizes below 1."""
        check_least("tokens_per_batch", self.tokens_per_batch, 1)
        if self.max_length is not None:
            check_least("max_length", self.max_length, 1)

    @property
    def is_loaded(self) -> bool:
        """True if the model is in memory."""
        return self._loaded is not None

    def release(self) -> None:
        """Drop the model; the next call loads it again."""
        self._loaded = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the parameters, without the model."""
        return {**self.__dict__, "_loaded": None}

    def __call__(
        self,
        completions: Completions,
        prompts: Completions,
        completion_ids: list[list[int]] | None = None,
        **_: object,
    ) -> Scores:
        """Return one score per completion; ``completion_ids`` are read with ``policy_tokens``."""
        import torch

        if self._loaded is None:
            self._loaded = self._load()
        loaded = self._loaded
        own = (self.policy_tokens and completion_ids) or [None] * len(completions)
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
        loaded.model.to(loaded.device)
        try:
            found = logits(
                loaded.model,
                loaded.tokenizer.pad_token_id,
                rows,
                self.tokens_per_batch,
                at_last_token=self.policy_tokens,
            )
        finally:
            if loaded.offload:
                loaded.model.to("cpu")
                torch.accelerator.empty_cache()
        return [(logit - loaded.mean) / loaded.std for logit in found]

    def _load(self) -> "_Loaded":
        """Load the model and its tokenizer with the settings that its training noted."""
        import torch

        source = find_source(self.model)
        mean, std = _mean_and_std(source) if self.calibrated else (0.0, 1.0)

        def chosen(name: str) -> Any:
            value = getattr(self, name)
            return source.facts.get(name) if value is None else value

        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        model, tokenizer = load_classifier(
            source,
            load_in_4bit=bool(chosen("load_in_4bit")),
            device=device,
            base=self.base,
            tokenizer=self.tokenizer,
        )
        # On one GPU the policy needs the memory between scorings.
        offload = device != "cpu" and self.offload is not False
        keep = bool(chosen("keep_thought"))
        return _Loaded(model, tokenizer, device, offload, keep, chosen("max_length"), mean, std)


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


def _mean_and_std(source: Source) -> tuple[float, float]:
    """Return the mean and the standard deviation of a calibration; (0, 1) without one."""
    path = source.folder / CALIBRATION
    if not path.is_file():
        return 0.0, 1.0
    content = read_json(path)
    mean, std = (finite_number(content.get(name)) for name in ("mean", "std"))
    if mean is None or std is None or std <= 0:
        raise ModelError(
            f"the calibration {str(path)!r} has mean {content.get('mean')!r} and std "
            f"{content.get('std')!r}; give a number for mean and one above 0 for std"
        )
    return mean, std
