"""Score a model on prompts it never trained on."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rloo_kit.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

    from rloo_kit.reward_loading import LoadedReward


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


def evaluate(
    model: Any,
    tokenizer: Any,
    dataset: "Dataset",
    rewards: "Sequence[LoadedReward]",
    *,
    max_completion_length: int = 256,
    temperature: float = 1.0,
    batch_size: int = 64,
    seed: int = 42,
) -> Evaluation:
    """Complete every prompt once and score the completions; random states are left as they were.

    Args:
        model: A causal language model, with or without an adapter.
        tokenizer: Its tokenizer.
        dataset: ``prompt`` (text or chat messages) and the columns the rewards ask for; n rows.
        rewards: As ``load_rewards`` returned them; two of one name are an error of the caller.
        max_completion_length: Tokens.
        temperature: Of sampling; 0 is greedy.
        batch_size: Completions at one time.
        seed: Of sampling.

    Raises:
        DataError: The dataset is empty.
        RewardContractError: From a reward.
    """
    rows = list(dataset)
    if not rows:
        raise DataError("there is no held-out prompt to evaluate on: set data.held_out above 0")
    ids = _complete(
        model, tokenizer, rows, max_completion_length, temperature, batch_size=batch_size, seed=seed
    )
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    completions = [
        [{"role": "assistant", "content": text}] if isinstance(row["prompt"], list) else text
        for row, text in zip(rows, texts, strict=True)
    ]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    prompts = [row["prompt"] for row in rows]
    scores = {
        reward.name: reward.func(
            prompts=prompts, completions=completions, completion_ids=ids, **columns
        )
        for reward in rewards
    }
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


def _mean(values: list[float | None]) -> float | None:
    scored = [value for value in values if value is not None]
    return sum(scored) / len(scored) if scored else None


def _complete(
    model: Any,
    tokenizer: Any,
    rows: list[dict[str, Any]],
    max_completion_length: int,
    temperature: float,
    *,
    batch_size: int,
    seed: int,
) -> list[list[int]]:
    """Return completion token ids up to and including EOS, one list a row."""
    import torch

    sampling = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    ends = set(model.generation_config.eos_token_id)
    found: list[list[int]] = []
    with _inference(model, seed):
        for start in range(0, len(rows), batch_size):
            prompts = [
                prompt_ids(tokenizer, row["prompt"]) for row in rows[start : start + batch_size]
            ]
            inputs = tokenizer.pad(
                {"input_ids": prompts}, return_tensors="pt", padding_side="left"
            ).to(model.device)
            with torch.inference_mode():
                output = model.generate(
                    **inputs, max_new_tokens=max_completion_length, use_cache=True, **sampling
                )
            width = inputs["input_ids"].shape[1]
            found += [_until_end(row[width:].tolist(), ends) for row in output]
    return found


def prompt_ids(tokenizer: Any, prompt: str | list[dict[str, Any]]) -> list[int]:
    """Return the tokens of a prompt as the policy sees it: T ints."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]


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
