"""Score a model on prompts it never trained on."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rloo_kit.data import prompt_ids
from rloo_kit.errors import DataError
from rloo_kit.generation import Sampling
from rloo_kit.nonfinite import check_finite, finite_logits
from rloo_kit.out_of_memory import Pieces

if TYPE_CHECKING:
    from datasets import Dataset

    from rloo_kit.generation import Engine
    from rloo_kit.reward_loading import LoadedReward


RESERVED = ("prompt", "prompts", "completions", "completion_ids")
"""Names that the kit fills itself; a column of that name is not handed on."""
REMEDY = "lower max_completion_length, take a smaller model, or set model.load_in_4bit"


@dataclass(frozen=True)
class Evaluation:
    """Means over held-out prompts, one completion each."""

    rewards: dict[str, float | None]
    """Mean of each reward function over the rows it applies to; None where it applies to none."""
    num_prompts: int
    mean_length: float
    """Completion tokens."""
    temperature: float
    """0 for greedy."""
    samples: list[dict[str, Any]]
    """Every prompt, completion and its scores, in order."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @classmethod
    def joined(cls, parts: "Sequence[Evaluation]") -> "Evaluation":
        """Return one evaluation of all prompts from those of some each, in order."""
        samples = [sample for part in parts for sample in part.samples]
        names = parts[0].rewards
        means = {name: _mean([s["rewards"][name] for s in samples]) for name in names}
        length = sum(part.mean_length * part.num_prompts for part in parts) / len(samples)
        return cls(means, len(samples), length, parts[0].temperature, samples)


def evaluate(
    model: Any,
    tokenizer: Any,
    dataset: "Dataset",
    rewards: "Sequence[LoadedReward]",
    *,
    max_completion_length: int = 256,
    temperature: float = 1.0,
    sampling: dict[str, Any] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    batch_size: int = 64,
    seed: int = 42,
    engine: "Engine | None" = None,
) -> Evaluation:
    """Complete every prompt once and score the completions; random states are left as they were.

    Args:
        model: A causal language model, with or without an adapter.
        tokenizer: Its tokenizer.
        dataset: ``prompt`` (text or chat messages) and the columns the rewards ask for; n rows.
        rewards: As ``load_rewards`` returned them; two of one name are an error of the caller.
        max_completion_length: Tokens.
        temperature: Of sampling; 0 is greedy.
        sampling: ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty``; TRL's defaults (the whole
            distribution) when None.
        chat_template_kwargs: Passed to the chat template, such as ``enable_thinking``.
        batch_size: Completions at one time.
        seed: Of sampling.
        engine: Samples in the place of ``model.generate``; it is sent the adapter first.

    Raises:
        DataError: The dataset is empty.
        DivergedError: A trained weight is no finite number.
        MemoryRanOutError: Not even a single completion fits; until then fewer are drawn at a time.
        RewardContractError: From a reward.
    """
    rows = list(dataset)
    if not rows:
        raise DataError("there is no held-out prompt to evaluate on: set data.held_out above 0")
    check_finite(p for p in model.parameters() if p.requires_grad)
    prompts = [prompt_ids(tokenizer, row["prompt"], chat_template_kwargs) for row in rows]
    if engine is None:
        settings = {"max_new_tokens": max_completion_length, **_sampling(temperature, sampling)}
        ids = _complete(model, tokenizer, prompts, settings, batch_size=batch_size, seed=seed)
    else:
        engine.sync(model)
        ids = engine.generate(
            prompts,
            Sampling(
                max_completion_length,
                tuple(model.generation_config.eos_token_id),
                temperature,
                **{name: value for name, value in (sampling or {}).items() if value is not None},
            ),
            seed,
        ).completion_ids
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    completions = [
        [{"role": "assistant", "content": text}] if isinstance(row["prompt"], list) else text
        for row, text in zip(rows, texts, strict=True)
    ]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in RESERVED}
    columns |= {
        "prompts": [row["prompt"] for row in rows],
        "completions": completions,
        "completion_ids": ids,
        "trainer_state": None,
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }
    scores = {reward.name: _scores(reward.func, columns) for reward in rewards}
    samples = [
        {
            "prompt": row["prompt"],
            "completion": text,
            "rewards": {name: values[i] for name, values in scores.items()},
        }
        for i, (row, text) in enumerate(zip(rows, texts, strict=True))
    ]
    means = {name: _mean(values) for name, values in scores.items()}
    mean_length = sum(map(len, ids)) / len(ids)
    return Evaluation(means, len(rows), mean_length, temperature, samples)


def settings_of(args: Any) -> dict[str, Any]:
    """Return keywords of ``evaluate`` that draw as a run's ``LeaveOneOutConfig`` says."""
    names = ("top_p", "top_k", "min_p", "repetition_penalty")
    return {
        "max_completion_length": args.max_completion_length,
        "temperature": args.temperature,
        "sampling": {name: getattr(args, name) for name in names},
        "chat_template_kwargs": args.chat_template_kwargs,
        "batch_size": args.per_device_train_batch_size,
        "seed": args.seed,
    }


def _mean(values: list[float | None]) -> float | None:
    scored = [value for value in values if value is not None]
    return sum(scored) / len(scored) if scored else None


def _scores(reward: Any, columns: dict[str, Any]) -> list[float | None]:
    import asyncio
    import inspect

    found = reward(**columns)
    return asyncio.run(found) if inspect.iscoroutine(found) else found


def _sampling(temperature: float, settings: dict[str, Any] | None) -> dict[str, Any]:
    if temperature == 0:
        return {"do_sample": False}
    whole = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    return {"do_sample": True, "temperature": temperature, **whole, **(settings or {})}


def _complete(
    model: Any,
    tokenizer: Any,
    prompts: list[list[int]],
    settings: dict[str, Any],
    *,
    batch_size: int,
    seed: int,
) -> list[list[int]]:
    """Return completion token ids up to and including EOS, one list a prompt."""
    import torch

    ends = set(model.generation_config.eos_token_id)

    def complete(piece: Sequence[list[int]]) -> list[list[int]]:
        inputs = tokenizer.pad(
            {"input_ids": list(piece)}, return_tensors="pt", padding_side="left"
        ).to(model.device)
        with torch.inference_mode(), finite_logits():
            output = model.generate(**inputs, use_cache=True, **settings)
        width = inputs["input_ids"].shape[1]
        return [_until_end(row[width:].tolist(), ends) for row in output]

    with _inference(model, seed):
        return Pieces("evaluating", REMEDY).run(complete, prompts, batch_size)


def _until_end(ids: list[int], ends: set[int]) -> list[int]:
    for position, token in enumerate(ids):
        if token in ends:
            return ids[: position + 1]
    return ids


@contextlib.contextmanager
def _inference(model: Any, seed: int) -> Iterator[None]:
    """Put the model into eval mode under a seed of its own, then restore mode and random states."""
    import torch

    was_training = model.training
    switch = getattr(model, "for_inference", None)  # Unsloth's fast decoding
    switch() if switch else model.eval()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            yield
    finally:
        restore = getattr(model, "for_training", None)
        restore() if restore and was_training else model.train(was_training)
