"""Evaluation of one model: completions of held-out prompts, and the scores they get."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rloo_kit.config.engine_settings import blame_generation_kwargs
from rloo_kit.errors import ConfigError, DataError, RewardLoadError
from rloo_kit.evaluation.statistics import Estimate, estimate, pass_at_k
from rloo_kit.machine.processes import with_seed
from rloo_kit.machine.tensors import check_not_released
from rloo_kit.rloo.guards import check_finite
from rloo_kit.sampling.choice import thought_limit
from rloo_kit.sampling.engine import Engine, Sampling, draw_from
from rloo_kit.scoring.contract import CheckedReward
from rloo_kit.scoring.specs import LoadedReward, RewardSpec, load_rewards
from rloo_kit.text.chat_templates import end_token_ids
from rloo_kit.text.numbers import mean_or_none
from rloo_kit.text.redaction import redact_tree
from rloo_kit.text.thoughts import find_thoughts, thought_marks
from rloo_kit.text.wording import text_of
from rloo_kit.types import Completion, Model, Row, Score, Tokenizer

if TYPE_CHECKING:
    from rloo_kit.rloo.rollout import Completions
    from rloo_kit.tools.loop import ToolLoop
    from rloo_kit.training.arguments import LeaveOneOutConfig

REMEDY = "lower max_completion_length, use a smaller model, or set model.load_in_4bit"


@dataclass(frozen=True)
class Evaluation:
    """Result of ``evaluate``: scores of ``num_samples`` completions for each held-out prompt."""

    rewards: dict[str, float | None]  # mean of each reward; None if it scored no completion
    num_prompts: int
    mean_length: float  # mean number of tokens in a completion
    temperature: float  # 0 for greedy
    samples: list[dict[str, Any]]
    """Every prompt and completion with its scores and token counts, ordered by prompt."""
    num_samples: int = 1  # completions of each prompt
    # Reward that decides which completions are correct. "": no reward does. None: `correct_by`
    # chooses the reward
    judged_by: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as plain values for JSON, with intervals, pass@k and mean lengths."""
        found = asdict(self) | {"thinking_length": self.thinking_length, "cut_off": self.cut_off}
        found["intervals"] = {
            name: [one.low, one.high] for name in self.rewards if (one := self.estimate(name))
        }
        if self.correct_by is not None:
            found |= {
                "correct_by": self.correct_by,
                "pass_at_k": {str(k): one.mean for k, one in self.pass_at.items()},
            }
        return found

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> "Evaluation":
        """Rebuild an evaluation from the values that ``as_dict`` returned.

        Raises:
            TypeError: A field is missing.
        """
        return cls(**{one.name: found[one.name] for one in fields(cls) if one.name in found})

    @property
    def drawn(self) -> str:
        """How the completions were sampled, in words: ``greedy`` or the temperature."""
        return f"sampled at {self.temperature:g}" if self.temperature else "greedy"

    @property
    def by_prompt(self) -> list[list[dict[str, Any]]]:
        """The samples grouped by prompt: one list of ``num_samples`` samples for each prompt."""
        size = self.num_samples
        return [self.samples[at : at + size] for at in range(0, len(self.samples), size)]

    def values(self, name: str) -> list[float | None]:
        """Return the mean score that the reward ``name`` gives the completions of each prompt.

        It is None for a prompt without a scored completion.
        """
        return [mean_or_none(sample["rewards"][name] for sample in one) for one in self.by_prompt]

    def estimate(self, name: str) -> Estimate | None:
        """Return a reward's mean over prompts with its 95% confidence interval.

        The result is None if the reward scored no completion.
        """
        scored = [value for value in self.values(name) if value is not None]
        return estimate(scored) if scored else None

    @functools.cached_property
    def correct_by(self) -> str | None:
        """Name of the reward that decides which completions are correct, or None.

        It is ``judged_by`` if that is set, or else the first reward whose scores are all 0 or 1.
        None means that there is no such reward.
        """
        if self.judged_by is not None:
            return self.judged_by or None
        return next(filter(self.says_right_or_wrong, self.rewards), None)

    def says_right_or_wrong(self, name: str) -> bool:
        """Return True if the reward scored a completion, and all of its scores are 0 or 1."""
        return {None} != {sample["rewards"][name] for sample in self.samples} <= {0.0, 1.0, None}

    @functools.cached_property
    def pass_at(self) -> dict[int, Estimate]:
        """Table of k -> pass@k, where the reward ``correct_by`` decides what is correct.

        The values of k are the powers of two up to ``num_samples``, and ``num_samples`` itself.
        Prompts with an unscored completion do not count. The table is empty if ``correct_by`` is
        None or no prompt counts.
        """
        name = self.correct_by
        scores = [[s["rewards"][name] for s in one] for one in self.by_prompt] if name else []
        rows = [one for one in scores if None not in one]
        if not rows:
            return {}
        powers = {2**power for power in range(self.num_samples.bit_length())}
        return {
            k: estimate([pass_at_k(len(one), one.count(1.0), k) for one in rows])
            for k in sorted(powers | {self.num_samples})
        }

    @property
    def thinking_length(self) -> float | None:
        """Mean number of tokens in a thought; None if no completion has a closed thought."""
        return mean_or_none(sample.get("thought_tokens") for sample in self.samples)

    @property
    def cut_off(self) -> float | None:
        """Share of completions that a limit cut off before their end token; None if unknown."""
        return mean_or_none(sample.get("cut_off") for sample in self.samples)


def evaluate(
    model: Model,
    tokenizer: Tokenizer,
    dataset: Any,
    rewards: Sequence[RewardSpec] | str,
    *,
    max_completion_length: int = 256,
    temperature: float = 1.0,
    sampling: dict[str, Any] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    batch_size: int = 64,
    seed: int = 42,
    engine: Engine | None = None,
    num_samples: int = 1,
    thinking_budget: int | None = None,
    sample: "Callable[[list[Any]], Completions] | None" = None,
    tool_loop: "ToolLoop | None" = None,
) -> Evaluation:
    """Sample ``num_samples`` completions of every prompt and score them.

    The state of torch's random number generators is restored after sampling.

    Args:
        model: A causal language model, with or without an adapter.
        tokenizer: The model's tokenizer, or a processor that contains it.
        dataset: A ``datasets.Dataset`` or a list of dicts. Each row has ``prompt`` (text or chat
            messages) and the columns that the rewards read.
        rewards: Specs of the rewards, as for ``load_rewards``, or the list of rewards that
            ``load_rewards`` returned.
        max_completion_length: Maximum number of tokens in a completion.
        temperature: Sampling temperature; 0 is greedy.
        sampling: Other sampling settings: ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty``,
            and ``others``, a dict of further arguments of the sampler (``generation_kwargs`` of a
            run). Settings that are left out have TRL's defaults.
        chat_template_kwargs: Arguments of the chat template, such as ``enable_thinking``.
        batch_size: Number of completions that ``model.generate`` samples at a time. With
            environments, it is also the number of completions that are sampled and scored together.
        seed: Seed of sampling.
        engine: Engine that samples instead of ``model.generate``. The model's adapter is sent to
            it first.
        num_samples: Number of completions for each prompt, for pass@k.
        thinking_budget: Maximum number of tokens in a thought. If a thought is still open after
            that many tokens, the completion is truncated. None means no limit.
        sample: Function that samples instead of ``model`` and ``engine``. It is called with a list
            of rows and returns one completion for each. Over all calls, it gets every row of the
            dataset ``num_samples`` times.
        tool_loop: Loop that runs the tools that completions call. None means no tools.

    Returns:
        The mean scores, and every completion with its scores.

    Raises:
        ConfigError: ``num_samples`` or ``batch_size`` is below 1, ``num_samples`` is above 1 while
            ``temperature`` is 0 (all completions of a prompt would be the same), or a thinking
            budget is set for a model that has no thinking tokens.
        DataError: The dataset is empty, or has images and ``sample`` is None.
        DivergedError: A trained weight or a logit of the model is NaN or Inf.
        ModelError: The memory of the model was released.
        MemoryRanOutError: Not even a single completion fits in memory.
        RewardContractError: A column that a reward reads is missing, or a reward raised an error or
            did not return one score per completion.
        RewardLoadError: A reward cannot be loaded, or is a model object.
    """
    check_not_released(model)
    if min(num_samples, batch_size) < 1:
        raise ConfigError(
            f"num_samples is {num_samples} and batch_size is {batch_size}: both must be at least 1"
        )
    if num_samples > 1 and temperature == 0:
        raise ConfigError(
            f"{num_samples} greedy completions of a prompt are all the same: set num_samples to 1, "
            f"or temperature above 0"
        )
    rows = [row for row in dataset for _ in range(num_samples)]
    if not rows:
        raise DataError("there are no prompts to evaluate on: set data.held_out above 0")
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    loaded = load_rewards(rewards, tokenizer, chat_template_kwargs=chat_template_kwargs)
    columns = {name for row in rows for name in row}
    if tool_loop is not None:
        columns |= {"completion_turns"} | ({"environments"} if tool_loop.environments else set())
    for reward in loaded:
        if not isinstance(reward.func, CheckedReward):
            raise RewardLoadError(
                f"reward {reward.name!r} is a model object, which only a trainer can call: give "
                "its folder or its name on the hub"
            )
        reward.func.check_columns(columns)
    ends = tuple(end_token_ids(model.generation_config.eos_token_id, tokenizer))
    limit = thought_limit(tokenizer, thinking_budget)
    how = Sampling(max_completion_length, ends, temperature, **(sampling or {}), thought=limit)
    marks = thought_marks(tokenizer)
    samples = [
        {
            "prompt": prompt,
            "completion": text_of(completion),
            "rewards": scores,
            **find_thoughts(marks, turns, completion),
            "cut_off": not ended,
        }
        for _, prompt, completion, turns, ended, scores in sample_and_score(
            model,
            tokenizer,
            rows,
            how,
            loaded,
            template_settings=chat_template_kwargs,
            batch_size=batch_size,
            seed=seed,
            engine=engine,
            tool_loop=tool_loop,
            sample=sample,
        )
    ]
    means = {
        reward.name: mean_or_none(one["rewards"][reward.name] for one in samples)
        for reward in loaded
    }
    length = fmean(one["tokens"] for one in samples)
    return Evaluation(means, len(dataset), length, temperature, samples, num_samples)


def check_held_out(dataset: Any, before: Evaluation) -> None:
    """Check that a run still has the held-out prompts that it scored before training.

    Args:
        dataset: The prompts, a ``datasets.Dataset``; None if there are none.
        before: The evaluation that the run recorded before training. Its prompts may be longer,
            since an environment or an image adds text at their end.

    Raises:
        DataError: The prompts or their number differ from those of the recorded evaluation.
    """
    then = [text_of(group[0]["prompt"]) for group in before.by_prompt]
    prompts = [] if dataset is None else dataset["prompt"][:]  # without decoding images
    now = list(map(text_of, redact_tree(prompts)))
    if len(then) != len(now) or not all(map(str.startswith, then, now)):
        raise DataError(
            "the held-out prompts differ from the prompts that the run scored before training: "
            "restore the old content of data.prompts (or the old version of rloo-kit), or begin a "
            "new run"
        )


def settings_of(args: "LeaveOneOutConfig") -> dict[str, Any]:
    """Return the keyword arguments with which ``evaluate`` samples as a run does.

    Args:
        args: The run's settings of the trainer.
    """
    return {
        "max_completion_length": args.max_completion_length,
        "temperature": args.temperature,
        "sampling": {
            "top_p": args.top_p,
            "top_k": args.top_k or 0,
            "min_p": args.min_p or 0.0,
            "repetition_penalty": args.repetition_penalty,
            "others": args.generation_kwargs or {},
        },
        "chat_template_kwargs": args.chat_template_kwargs,
        "batch_size": args.per_device_train_batch_size,
        "seed": args.seed,
        "thinking_budget": args.thinking_budget,
    }


# --- sampling ------------------------------------------------------------------------------------


def sample_and_score(
    model: Model,
    tokenizer: Tokenizer,
    rows: list[Row],
    how: Sampling,
    rewards: Sequence[LoadedReward],
    *,
    template_settings: dict[str, Any] | None,
    batch_size: int,
    seed: int,
    engine: Engine | None,
    tool_loop: "ToolLoop | None",
    sample: "Callable[[list[Any]], Completions] | None" = None,
) -> Iterator[tuple[Row, Any, Completion, list[list[int]], bool, dict[str, Score]]]:
    """Sample one completion of each row without a trainer, and score it.

    Without environments, all rows are one batch. With environments, a batch has at most
    ``batch_size`` rows, and its environments are reused for the next batch.

    Args:
        model: A causal language model, with or without an adapter.
        tokenizer: The model's tokenizer.
        rows: Rows with ``prompt`` and the columns that the rewards read.
        how: Sampling settings, with the maximum length and the tokens that end a completion.
        rewards: Rewards that score the completions.
        template_settings: Arguments of the chat template.
        batch_size: Number of completions that ``model.generate`` samples at a time, and number of
            rows in a batch with environments.
        seed: Seed of sampling.
        engine: Engine that samples instead of ``model.generate``.
        tool_loop: Loop that runs the tools that completions call. None means no tools.
        sample: Function that samples a batch instead of ``model`` and ``engine``; see ``evaluate``.

    Yields:
        For each row: the row, its prompt (with the observations of an environment), the completion,
        the token ids of the completion's turns, True if the completion ended before a limit, and a
        dict of reward -> score.
    """
    from rloo_kit.sampling.completer import Completer  # torch, which takes seconds to load
    from rloo_kit.sampling.decoding import Pieces, complete, finite_logits

    ends = how.stop_token_ids
    pad = tokenizer.pad_token_id
    if pad is None:  # many base models have none
        pad = next(iter(ends), 0)
    is_greedy = how.temperature == 0
    of_draws = {
        "temperature": how.temperature,
        "top_p": how.top_p,
        "top_k": how.top_k,
        "min_p": how.min_p or None,
    }
    # these settings override the model's own generation_config
    settings: dict[str, Any] = {
        "use_cache": True,
        "repetition_penalty": how.repetition_penalty,
        **({} if is_greedy else of_draws),
        **how.others,
        "do_sample": not is_greedy,
    }
    of_piece = functools.partial(
        complete,
        model,
        pad_token_id=pad,
        ends=ends,
        thought=how.thought,
        max_new_tokens=how.max_tokens,
        **settings,
    )

    turns = itertools.count(seed)  # with tools, each turn of a conversation has its own seed

    def draw(prompt_ids: list[list[int]]) -> tuple[list[list[int]], None]:
        of_turn = next(turns)
        check_finite(p for p in model.parameters() if p.requires_grad)
        if engine is not None:
            engine.sync(model)
            completion_ids = draw_from(engine, prompt_ids, how, of_turn).completion_ids
            engine.sleep()  # rewards on the GPU need the memory
            return completion_ids, None
        with blame_generation_kwargs(how.others), _inference(model, of_turn), finite_logits():
            return Pieces("evaluating", REMEDY).run(of_piece, prompt_ids, batch_size), None

    completer = Completer(
        draw=draw,
        processing_class=tokenizer,
        template_settings=template_settings,
        ends=frozenset((*ends, pad)),
        functions=lambda: [reward.func for reward in rewards],
        tool_loop=tool_loop,
    )
    size = batch_size if tool_loop and tool_loop.environments else len(rows)
    for at in range(0, len(rows), size):
        batch = rows[at : at + size]
        drawn = (sample or completer.sample)(batch)
        found = completer.score(batch, drawn).result()
        scores = [
            {reward.name: own[place] for reward, own in zip(rewards, found, strict=True)}
            for place in range(len(batch))
        ]
        columns = (batch, drawn.prompts, drawn.completions, drawn.tokens.turns, drawn.ended, scores)
        yield from zip(*columns, strict=True)


@contextlib.contextmanager
def _inference(model: Model, seed: int) -> Iterator[None]:
    """Put the model into eval mode and set the seed during a ``with`` block.

    The model's mode and the states of the random number generators are restored after the block.
    """
    import torch

    was_training = model.training
    getattr(model, "for_inference", model.eval)()  # Unsloth's fast decoding
    try:
        with torch.inference_mode(), with_seed(seed):
            yield
    finally:
        if was_training:
            getattr(model, "for_training", model.train)()
