"""Score a model on prompts it never trained on."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rloo_kit.data.prompts import prompt_ids
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.evaluation.statistics import Estimate, estimate, majority_at_k, pass_at_k
from rloo_kit.rloo.guards import Pieces, check_finite, finite_logits
from rloo_kit.sampling.engine import Sampling
from rloo_kit.text.thoughts import THOUGHT_ENDS, ThoughtFinder

if TYPE_CHECKING:
    from datasets import Dataset

    from rloo_kit.sampling.engine import Engine
    from rloo_kit.scoring.loading import LoadedReward


RESERVED = ("prompt", "prompts", "completions", "completion_ids")
"""Names that the kit fills itself; a column of that name is not handed on."""
REMEDY = "lower max_completion_length, take a smaller model, or set model.load_in_4bit"


@dataclass(frozen=True)
class Evaluation:
    """n held-out prompts, ``num_samples`` completions of each, and their scores."""

    rewards: dict[str, float | None]
    """Mean of each reward function over the rows it applies to; None where it applies to none."""
    num_prompts: int
    mean_length: float
    """Completion tokens."""
    temperature: float
    """0 for greedy."""
    samples: list[dict[str, Any]]
    """Every prompt, completion, its scores and token counts; the completions of a prompt together,
    the prompts in order. ``answer`` is what is voted with."""
    num_samples: int = 1
    """Completions of each prompt."""
    judged_by: str | None = None
    """The reward that says right or wrong, "" for none; None: it is told by the scores."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with the statistics of the samples."""
        found = asdict(self) | {"thinking_length": self.thinking_length, "cut_off": self.cut_off}
        found["intervals"] = {
            name: [one.low, one.high] for name in self.rewards if (one := self.estimate(name))
        }
        if self.correct_by is not None:
            found |= {
                "correct_by": self.correct_by,
                "pass_at_k": {str(k): one.mean for k, one in self.pass_at.items()},
                "maj_at_k": {str(k): one.mean for k, one in self.maj_at.items()},
            }
        return found

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> "Evaluation":
        """Return what ``as_dict`` returned.

        Raises:
            TypeError: It is of another shape.
        """
        return cls(**{f.name: found[f.name] for f in fields(cls) if f.name in found})

    @classmethod
    def joined(cls, parts: "Sequence[Evaluation]") -> "Evaluation":
        """Return one evaluation of all prompts from those of some each, in order."""
        samples = [sample for part in parts for sample in part.samples]
        means = {name: _mean([s["rewards"][name] for s in samples]) for name in parts[0].rewards}
        num = sum(part.num_prompts for part in parts)
        length = sum(part.mean_length * part.num_prompts for part in parts) / num
        first = parts[0]
        return cls(means, num, length, first.temperature, samples, first.num_samples)

    # --- what the samples amount to --------------------------------------------------------------

    @property
    def by_prompt(self) -> list[list[dict[str, Any]]]:
        """The samples of each prompt."""
        size = self.num_samples
        return [self.samples[at : at + size] for at in range(0, len(self.samples), size)]

    def values(self, name: str) -> list[float | None]:
        """Return the mean score of each prompt; None where the reward applies to none of it."""
        return [_mean([sample["rewards"][name] for sample in one]) for one in self.by_prompt]

    def estimate(self, name: str) -> Estimate | None:
        """Return the mean of a reward over prompts, and its interval; None without any score."""
        scored = [value for value in self.values(name) if value is not None]
        return estimate(scored) if scored else None

    @cached_property
    def correct_by(self) -> str | None:
        """The first reward that says right or wrong and nothing between; None: there is none."""
        if self.judged_by is not None:
            return self.judged_by or None
        return next(filter(self.says_right_or_wrong, self.rewards), None)

    def says_right_or_wrong(self, name: str) -> bool:
        """Return whether a reward gave 0 and 1 alone."""
        return _right_or_wrong([sample["rewards"][name] for sample in self.samples])

    @property
    def counted(self) -> list[int]:
        """The k that are told of: 1, and powers of two up to ``num_samples``, itself included."""
        powers = {2**power for power in range(self.num_samples.bit_length())}
        return sorted({k for k in powers if k <= self.num_samples} | {self.num_samples})

    @cached_property
    def pass_at(self) -> dict[int, Estimate]:
        """pass@k over the prompts that ``correct_by`` applies to; {} without such a reward."""
        rows = [[right for right, _ in one] for one in self._verdicts]
        return {
            k: estimate([pass_at_k(len(one), sum(one), k) for one in rows])
            for k in (self.counted if rows else [])
        }

    @cached_property
    def maj_at(self) -> dict[int, Estimate]:
        """maj@k over the same prompts: of equal answers, the most frequent one."""
        rows = [tuple(zip(*one, strict=True)) for one in self._verdicts]
        return {
            k: estimate([majority_at_k(answers, right, k) for right, answers in rows])
            for k in (self.counted if rows else [])
        }

    @cached_property
    def _verdicts(self) -> list[list[tuple[bool, Hashable]]]:
        name = self.correct_by
        if name is None:
            return []
        whole = [one for one in self.by_prompt if None not in [s["rewards"][name] for s in one]]
        return [[(s["rewards"][name] == 1.0, s.get("answer")) for s in one] for one in whole]

    @property
    def thinking_length(self) -> float | None:
        """Mean tokens of the thoughts that were closed; None where none was."""
        return _mean([sample.get("thought_tokens") for sample in self.samples])

    @property
    def cut_off(self) -> float | None:
        """Share of completions that ran into the limit; None where it is not known."""
        return _mean([sample.get("cut_off") for sample in self.samples])


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
    num_samples: int = 1,
) -> Evaluation:
    """Complete every prompt and score the completions; random states are left as they were.

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
        num_samples: Completions of each prompt, for pass@k and maj@k.

    Raises:
        ConfigError: Several completions of a prompt, and greedy: they would all be the same.
        DataError: The dataset is empty.
        DivergedError: A trained weight is no finite number.
        MemoryRanOutError: Not even a single completion fits; until then fewer are drawn at a time.
        RewardContractError: From a reward.
    """
    if num_samples > 1 and temperature == 0:
        raise ConfigError(
            f"{num_samples} greedy completions of a prompt are all the same: sample them at a "
            f"temperature above 0, or take one"
        )
    num_prompts = len(dataset)
    rows = [row for row in dataset for _ in range(num_samples)]
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
        engine.sleep()  # rewards on the GPU need its memory
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    scores = score_texts(rows, texts, ids, rewards)
    find, answer_of = ThoughtFinder(tokenizer), _answer_of(rewards, scores)
    ends = set(model.generation_config.eos_token_id)
    samples = [
        {
            "prompt": row["prompt"],
            "completion": text,
            "rewards": {name: values[i] for name, values in scores.items()},
            "tokens": len(ids[i]),
            "thought_tokens": find(ids[i], text)["thought_tokens"],
            "cut_off": not ids[i] or ids[i][-1] not in ends,
            "answer": answer_of(text),
        }
        for i, (row, text) in enumerate(zip(rows, texts, strict=True))
    ]
    means = {name: _mean(values) for name, values in scores.items()}
    mean_length = sum(map(len, ids)) / len(ids)
    return Evaluation(means, num_prompts, mean_length, temperature, samples, num_samples)


def score_texts(
    rows: Sequence[dict[str, Any]],
    texts: Sequence[str],
    ids: list[list[int]],
    rewards: "Sequence[LoadedReward]",
) -> dict[str, list[float | None]]:
    """Return what each reward gives n completions, by its name.

    Args:
        rows: n rows of the prompts' dataset.
        texts: The completions.
        ids: Their token ids.
        rewards: As ``load_rewards`` returned them.

    Raises:
        RewardContractError: From a reward.
    """
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in RESERVED}
    columns |= {
        "prompts": [row["prompt"] for row in rows],
        "completions": [
            [{"role": "assistant", "content": text}] if isinstance(row["prompt"], list) else text
            for row, text in zip(rows, texts, strict=True)
        ],
        "completion_ids": ids,
        "trainer_state": None,
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }
    return {reward.name: _scores(reward.func, columns) for reward in rewards}


def _answer_of(
    rewards: "Sequence[LoadedReward]", scores: Mapping[str, list[float | None]]
) -> Callable[[str], str | None]:
    """Return what tells which answer a completion votes for.

    The reward that says right or wrong may know which answers mean the same (``answer_key``); else
    it is the text after the thought. An empty one is no answer.
    """
    judge = next((one for one in rewards if _right_or_wrong(scores[one.name])), None)
    key = getattr(getattr(judge and judge.func, "reward", None), "answer_key", None)
    if callable(key):
        return key
    return lambda text: " ".join(text.rpartition(THOUGHT_ENDS)[2].casefold().split()) or None


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


def _right_or_wrong(scores: Sequence[float | None]) -> bool:
    """Return whether there are scores, and all of them are 0 or 1."""
    return {None} != {*scores} <= {0.0, 1.0, None}


def _mean(values: Sequence[float | None]) -> float | None:
    scored = [value for value in values if value is not None]
    return fmean(scored) if scored else None


def _scores(reward: Any, columns: dict[str, Any]) -> list[float | None]:
    import asyncio
    import inspect

    found = reward(**columns)
    return asyncio.run(found) if inspect.iscoroutine(found) else found


def _sampling(temperature: float, settings: dict[str, Any] | None) -> dict[str, Any]:
    if temperature == 0:  # a penalty that the model's own settings hold is not the run's
        penalty = (settings or {}).get("repetition_penalty") or 1.0
        return {"do_sample": False, "repetition_penalty": penalty}
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
