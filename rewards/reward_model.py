"""Reward from a reward model: a trained sequence classifier with one output."""

import copy
import functools
from dataclasses import dataclass
from typing import Any

from rloo_kit.errors import ModelError
from rloo_kit.text.numbers import finite_number
from rloo_kit.types import Completions, Scores

from ._classifier import (
    CALIBRATION,
    Source,
    find_base,
    find_source,
    load_classifier,
    loading,
    logits,
    read_json,
    set_up_tokenizer,
    token_ids,
)
from ._text import check_least, is_unclosed
from .thinking import TemplateAware

TOKENS_PER_BATCH = 8192


@dataclass(frozen=True)
class RewardModel(TemplateAware):
    """Reward what a trained reward model prefers: the only logit of a sequence classifier.

    Range: any finite number, higher is better, never None. The score is the model's logit, or
    (logit - mean) / std if the model's folder has a ``calibration.json``. The model is loaded at
    the first call, and ``release`` drops it from memory. A pickle of this reward contains its
    parameters, such as ``max_length``, but not the loaded model. Conversations are rendered with
    the reward model's own chat template. Plain prompts are joined with the completion. If the model
    does not read the thought, a completion whose thought is not closed is scored like an empty
    completion.

    The folder contains a whole model or a PEFT adapter with its score head. The command ``rloo-kit
    reward-model train`` writes such an adapter. Weights are read only from safetensors files, and
    code that comes with a model is never run.

    >>> reward = RewardModel("models/my-reward-model", tokens_per_batch=4096)
    >>> reward.__name__, reward.is_loaded
    ('reward_model', False)
    """

    __name__ = "reward_model"

    model: str
    """Folder with config.json (or adapter_config.json), weights and tokenizer, or a hub name."""
    max_length: int | None = None
    """Maximum number of tokens of prompt and completion; a longer text is truncated on the left.
    None: the limit recorded in training, or else the model's context length."""
    keep_thought: bool | None = None
    """Let the model read the thought. False: only the text after the last ``</think>``. None: the
    value recorded in training, or else False."""
    policy_tokens: bool = False
    """Read the token ids that the policy sampled, with the thought and the EOS token, as older
    versions of TRL did. The reward model must have the policy's tokenizer."""
    device: str | None = None
    """Device of the model, such as "cpu" or "cuda:0"; None: the GPU if there is one."""
    tokens_per_batch: int = TOKENS_PER_BATCH
    """Maximum number of tokens in a forward pass, padding included."""
    load_in_4bit: bool | None = None
    """Load the weights in 4 bits (NF4, bitsandbytes), except the score head. None: the value
    recorded in training, or else False."""
    offload: bool | None = None
    """Move the weights from the GPU to main memory between calls. None: yes, if the device is a
    GPU."""
    calibrated: bool = True
    """Centre and scale the scores with ``calibration.json`` in the model's folder. If False, or if
    there is no such file, the scores are the logits."""
    base: str | None = None
    """Folder or hub name of an adapter's base model, if it is not found automatically."""
    tokenizer: Any = None
    """Tokenizer, or its folder or hub name; None: the model's own."""

    def __post_init__(self) -> None:
        """Check that the numbers of tokens are at least 1."""
        check_least(self, "tokens_per_batch", 1)
        if self.max_length is not None:
            check_least(self, "max_length", 1)

    @property
    def is_loaded(self) -> bool:
        """True if the model is in memory."""
        return "_loaded" in vars(self)

    def release(self) -> None:
        """Drop the model from memory; the next call loads it again."""
        vars(self).pop("_loaded", None)

    def __getstate__(self) -> dict[str, Any]:
        """Return the parameters without the loaded model, for a pickle."""
        return {name: value for name, value in vars(self).items() if name != "_loaded"}

    def __call__(
        self,
        completions: Completions,
        prompts: Completions,
        completion_ids: list[list[int]] | None = None,
        **_: object,
    ) -> Scores:
        """Return one score per completion.

        ``completion_ids`` are used only if ``policy_tokens`` is set.

        Raises:
            ModelError: The model cannot be loaded, or ``policy_tokens`` is set although the reward
                model has another tokenizer than the policy.
        """
        import torch

        loaded = self._loaded
        whole = loaded.keep_thought or self.policy_tokens
        own = (self.policy_tokens and completion_ids) or [None] * len(completions)
        rows = [
            token_ids(
                loaded.tokenizer,
                prompt,
                completion if whole or not is_unclosed(text, opened=opened) else "",
                keep_thought=loaded.keep_thought,
                max_length=loaded.max_length,
                completion_ids=ids,
            )
            for completion, (text, opened, prompt, ids) in zip(
                completions, self.rows(completions, prompts, prompts, own), strict=True
            )
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

    @functools.cached_property
    def _loaded(self) -> "_Loaded":
        """The model and its tokenizer, which are loaded when they are first needed.

        If ``load_in_4bit``, ``keep_thought`` or ``max_length`` is None, the value recorded in the
        model's training is used.
        """
        import torch
        from transformers import AutoTokenizer

        source = find_source(self.model)
        mean, std = _mean_and_std(source) if self.calibrated else (0.0, 1.0)

        def chosen(name: str) -> Any:
            value = getattr(self, name)
            return source.facts.get(name) if value is None else value

        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        in_4bit = bool(chosen("load_in_4bit"))
        with loading(f"reward model {self.model!r}", source.place):
            base = find_base(source, self.base)
            model = load_classifier(source, base, load_in_4bit=in_4bit, device=device)
            tokenizer = copy.deepcopy(self.tokenizer)
            if tokenizer is None or isinstance(tokenizer, str):
                has_own = (source.folder / "tokenizer_config.json").is_file()
                place = tokenizer or (source.place if has_own else base)
                tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        set_up_tokenizer(model, tokenizer, self.model)
        # On one GPU the policy needs the memory between scorings.
        offload = device != "cpu" and self.offload is not False
        keep = bool(chosen("keep_thought"))
        return _Loaded(model, tokenizer, device, offload, keep, chosen("max_length"), mean, std)


@dataclass
class _Loaded:
    """Reward model in memory, with the settings with which it is used."""

    model: Any
    tokenizer: Any
    device: str
    offload: bool
    keep_thought: bool
    max_length: int | None
    mean: float
    std: float


def _mean_and_std(source: Source) -> tuple[float, float]:
    """Return (mean, standard deviation) from the model's calibration file, or (0, 1) without one.

    Raises:
        ModelError: The file cannot be read, or its numbers are invalid.
    """
    path = source.folder / CALIBRATION
    if not path.is_file():
        return 0.0, 1.0
    content = read_json(path)
    mean, std = (finite_number(content.get(name)) for name in ("mean", "std"))
    if mean is None or std is None or std <= 0:
        raise ModelError(
            f"the calibration {str(path)!r} has mean {content.get('mean')!r} and std "
            f"{content.get('std')!r}; set mean to a number, and std to a number above 0"
        )
    return mean, std
