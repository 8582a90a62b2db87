"""Reward model: a trained sequence classifier with one output scores every completion."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rloo_kit.errors import ModelError
from rloo_kit.types import Completion, Score

from ._text import completion_text, content_text, text_after_thought

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class RewardModel:
    """Reward what a trained model prefers: the one logit of a sequence classifier.

    Range: any finite number, higher is better; the scale is the model's own. The model and its
    own tokenizer are loaded at the first call and dropped by ``release``; a pickle holds the
    parameters only. Conversational prompts go through the model's own chat template; plain ones
    are put before the completion as they are.

    >>> reward = RewardModel("models/my-reward-model", batch_size=8)
    >>> reward.__name__, reward.is_loaded
    ('reward_model', False)
    """

    __name__: ClassVar[str] = "reward_model"

    name_or_path: str
    """Folder with config.json, weights and tokenizer, or a hub name."""
    batch_size: int = 16
    """Completions per forward pass."""
    max_length: int | None = None
    """Most tokens of prompt and completion; the left is cut off. None: the model's own limit."""
    keep_thought: bool = False
    """Whether the model reads the thought; else only what follows the last ``</think>``."""
    device: str | None = None
    """Such as "cpu" or "cuda:0"; None: the GPU if there is one."""
    _loaded: "tuple[PreTrainedModel, PreTrainedTokenizerBase] | None" = field(
        default=None, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Refuse sizes below 1."""
        for name in ("batch_size", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value!r}; set it to 1 or more")

    @property
    def is_loaded(self) -> bool:
        """Whether the model is in memory."""
        return self._loaded is not None

    def release(self) -> None:
        """Drop the model; the next call loads it again."""
        self._loaded = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the parameters, without the model."""
        return {**self.__dict__, "_loaded": None}

    def __call__(
        self, completions: list[Completion], prompts: list[Completion], **_: object
    ) -> list[Score]:
        """Return one score per completion.

        Args:
            completions: B completions, conversational or plain.
            prompts: B prompts, conversational or plain.

        Raises:
            ModelError: The model or its tokenizer cannot be loaded.
        """
        import torch

        if self._loaded is None:
            self._loaded = self._load()
        model, tokenizer = self._loaded
        rows = [
            self._token_ids(tokenizer, prompt, completion)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        # Neighbours of like length need little padding; the scores go back to their own rows.
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]), reverse=True)
        scores: list[Score] = [None] * len(rows)
        with torch.inference_mode():
            for start in range(0, len(order), self.batch_size):
                chosen = order[start : start + self.batch_size]
                batch = tokenizer.pad({"input_ids": [rows[i] for i in chosen]}, return_tensors="pt")
                logits = model(**batch.to(model.device)).logits  # (batch, 1)
                for row, score in zip(chosen, logits[:, 0].float().tolist(), strict=True):
                    scores[row] = score
        return scores

    def _token_ids(
        self, tokenizer: "PreTrainedTokenizerBase", prompt: Completion, completion: Completion
    ) -> list[int]:
        """Return the ids of prompt and completion, cut from the left."""
        answer = completion_text(completion)
        if not self.keep_thought:
            answer = text_after_thought(answer)
        has_template = isinstance(prompt, list) and bool(tokenizer.chat_template)
        if has_template:
            turn = [*prompt, {"role": "assistant", "content": answer}]
            text = str(tokenizer.apply_chat_template(turn, tokenize=False))
        elif isinstance(prompt, list):
            text = "\n".join([*(content_text(turn.get("content")) for turn in prompt), answer])
        else:
            text = prompt + answer
        text = text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate is no text to it
        # A template writes the special tokens itself.
        ids = tokenizer.encode(text, add_special_tokens=not has_template, truncation=True)
        # No token at all is no row a model can read: an empty completion of an empty prompt.
        return ids or [tokenizer.pad_token_id]

    def _load(self) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
        """Return the model, in evaluation mode, and its tokenizer, ready to pad and to cut."""
        import torch

        if Path(self.name_or_path).is_absolute() and not Path(self.name_or_path).is_dir():
            raise ModelError(
                f"reward model {self.name_or_path!r} is not a folder; give a folder with "
                "config.json, weights and tokenizer, or a hub name"
            )
        try:
            model, tokenizer, missing = self._from_pretrained()
        except (OSError, ValueError, RuntimeError, ImportError, KeyError) as exc:
            reason = (str(exc).strip() or type(exc).__name__).splitlines()[0][:200]
            raise ModelError(
                f"reward model {self.name_or_path!r} cannot be loaded ({reason}); give a folder "
                "with config.json, weights and tokenizer, or a hub name while online"
            ) from exc
        if missing:
            raise ModelError(
                f"reward model {self.name_or_path!r} has no trained weights for "
                f"{', '.join(sorted(missing))}; give a sequence classifier with one output"
            )
        self._set_up_tokenizer(model, tokenizer)
        default = "cuda" if torch.cuda.is_available() else "cpu"
        model.eval()
        model.to(self.device or default)  # pyright: ignore[reportArgumentType]
        return model, tokenizer

    def _from_pretrained(self) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase, set[str]]":
        """Return model, tokenizer and the names of the weights the checkpoint lacks."""
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.name_or_path)
        model, info = AutoModelForSequenceClassification.from_pretrained(
            self.name_or_path, num_labels=1, dtype="auto", output_loading_info=True
        )
        return model, tokenizer, set(info["missing_keys"])

    def _set_up_tokenizer(
        self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase"
    ) -> None:
        """Give the pair a pad token, right padding, and one limit, cut from the left."""
        if tokenizer.pad_token is None:
            if tokenizer.eos_token is None:
                raise ModelError(
                    f"the tokenizer of reward model {self.name_or_path!r} has neither pad nor eos "
                    "token; set pad_token in its tokenizer_config.json"
                )
            tokenizer.pad_token = tokenizer.eos_token
        config = model.config.get_text_config()
        config.pad_token_id = tokenizer.pad_token_id
        limit = getattr(config, "max_position_embeddings", tokenizer.model_max_length)
        tokenizer.model_max_length = self.max_length or min(limit, tokenizer.model_max_length)
        tokenizer.truncation_side = "left"
        tokenizer.padding_side = "right"


def reward_model(
    model: str,
    *,
    batch_size: int = 16,
    max_length: int | None = None,
    keep_thought: bool = False,
    device: str | None = None,
) -> RewardModel:
    """Return a RewardModel; the parameters are those of a run file's ``reward_model`` table.

    >>> reward_model("models/my-reward-model", batch_size=8).batch_size
    8

    Args:
        model: Folder with config.json, weights and tokenizer, or a hub name.
        batch_size: Completions per forward pass.
        max_length: Most tokens of prompt and completion; None: the model's own limit.
        keep_thought: Whether the model reads the thought.
        device: Such as "cpu" or "cuda:0"; None: the GPU if there is one.
    """
    return RewardModel(model, batch_size, max_length, keep_thought, device)
