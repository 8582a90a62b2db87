"""Sampling with transformers: each prompt runs once, and finished rows are dropped from the batch.

``generate`` runs a prompt again for each of its completions, and decodes every row until the
longest has ended. ``sample_rows`` is a decoding method for its ``custom_generate`` argument. It has
the same distribution, since it uses generate's logits processors, stopping criteria and masks.

Shapes: B rows, U different prompts, L rows that still grow, W prompt tokens, C completion tokens.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations import sdpa_attention

from rloo_kit.errors import DivergedError, MemoryRanOutError
from rloo_kit.rloo.guards import RESUME, retry_smaller
from rloo_kit.sampling.dense import dense_layers
from rloo_kit.sampling.engine import Begun, Generations, ThoughtLimit
from rloo_kit.types import Model

Row = TypeVar("Row")
Found = TypeVar("Found")

# Share of ended rows at which they are dropped; not each at once, since that copies the cache
LEAVING_SHARE = 1 / 8
# Columns by which a cache grows at least
GROWTH = 64


def complete(
    model: Model,
    prompt_ids: Sequence[list[int]],
    pad_token_id: int,
    ends: Sequence[int],
    thought: ThoughtLimit | None = None,
    **how: Any,
) -> list[list[int]]:
    """Return a completion of each of B prompts, up to and including the first of ``ends``.

    Args:
        model: A causal language model of transformers, also in PEFT's wrapper.
        prompt_ids: B prompts; equal neighbours share their prefill.
        pad_token_id: Pads prompts on the left.
        ends: Ids of the tokens that end a completion.
        thought: Limit that ends a completion whose thought is too long, without an end token.
        **how: Arguments of ``generate``.

    Raises:
        RuntimeError: The logits hold NaN or Inf; ``finite_logits`` translates it.
    """
    if thought is not None:
        width = max(map(len, prompt_ids))
        how["stopping_criteria"] = StoppingCriteriaList([_LongThought(width, thought)])
    method = None if _decodes_itself(model) else sample_rows
    drawn = _generate(model, prompt_ids, pad_token_id, custom_generate=method, **how)
    if thought is not None:
        drawn = [thought.cut(*pair) for pair in zip(prompt_ids, drawn, strict=True)]
    return [until_end(ids, ends) for ids in drawn]


def grow(
    model: Model,
    begun: Begun,
    pad_token_id: int,
    thought: ThoughtLimit | None = None,
    *,
    max_tokens: int,
    temperature: float,
    **how: Any,
) -> Generations:
    """Continue begun completions until enough of them have ended; return their new tokens.

    Args:
        model: A causal language model for which ``can_grow`` holds, also in PEFT's wrapper.
        begun: B completions, whose ``is_enough`` decides when to stop.
        pad_token_id: Pads prompts on the left.
        thought: Limit that ends a completion whose thought is too long.
        max_tokens: Most tokens of a whole completion.
        temperature: The temperature of the log-probabilities.
        **how: Arguments of ``generate``.

    Raises:
        RuntimeError: The logits hold NaN or Inf; ``finite_logits`` translates it.
    """
    growth = _Growth(begun, thought, max_tokens, temperature, model.device)
    method = partial(sample_rows, growth=growth)
    drawn = _generate(model, begun.all_ids, pad_token_id, custom_generate=method, **how)
    return growth.cut(drawn)


def _generate(
    model: Model, prompt_ids: Sequence[list[int]], pad_token_id: int, **how: Any
) -> list[list[int]]:
    """Return what ``generate`` adds to each of B prompts, padding included."""
    width = max(map(len, prompt_ids))
    device = model.device
    padded = [[pad_token_id] * (width - len(ids)) + ids for ids in prompt_ids]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids]
    with as_sampled(model):
        rows = model.generate(
            input_ids=torch.tensor(padded, device=device),  # (B, W)
            attention_mask=torch.tensor(mask, device=device),
            **how,
        )
    return rows[:, width:].tolist()  # of (B, W + C)


@contextlib.contextmanager
def as_sampled(model: Any) -> Iterator[None]:
    """Set the model up for sampling: base and adapter as one matrix, attention without copies."""
    if _decodes_itself(model):
        yield
        return
    with dense_layers(model), _grouped_attention(model.device):
        yield


@contextlib.contextmanager
def _grouped_attention(device: torch.device) -> Iterator[None]:
    """Let the heads of a group read the same keys and values during the body, on a CPU.

    If there is a mask, transformers copies them for each head, as the fast kernels of a GPU need.
    The kernel of a CPU takes them as they are: with 35 rows of 300 tokens it is five times faster.
    """
    repeats = sdpa_attention.use_gqa_in_sdpa
    if device.type == "cpu":
        sdpa_attention.use_gqa_in_sdpa = lambda mask, key, value: key.shape == value.shape
    try:
        yield
    finally:
        sdpa_attention.use_gqa_in_sdpa = repeats


class _LongThought(StoppingCriteria):
    """Stopping criterion for rows whose thought is open at the limit."""

    def __init__(self, width: int, limit: ThoughtLimit) -> None:
        self.width = width + limit.tokens
        self.limit = limit

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: Any) -> Any:
        """Return ``(L,)`` bool for ``(L, W + t)`` ids."""
        is_open = [False] * len(input_ids)
        if input_ids.shape[1] == self.width:
            is_open = list(map(self.limit.marks.is_open, input_ids.tolist()))
        return torch.tensor(is_open, device=input_ids.device)


class _Growth:
    """The rows of ``sample_rows`` that continue begun completions.

    Args:
        begun: B completions.
        thought: Limit that ends a completion whose thought is too long.
        max_tokens: Most tokens of a whole completion.
        temperature: The temperature of the log-probabilities.
        device: The model's device.
    """

    def __init__(
        self,
        begun: Begun,
        thought: ThoughtLimit | None,
        max_tokens: int,
        temperature: float,
        device: torch.device,
    ) -> None:
        self._begun = begun
        self._thought = thought
        self._max_tokens = max_tokens
        self._temperature = temperature
        lengths = [len(ids) for ids in begun.completion_ids]
        self._lengths = torch.tensor(lengths, device=device)  # (B,) tokens of the completions
        self._new = torch.zeros_like(self._lengths)  # (B,) those of them that are new
        self._columns: list[torch.Tensor] = []  # (B,) log-probabilities of each step
        self._ended: set[int] = set()

    def note(
        self, live: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor, grows: torch.Tensor
    ) -> torch.Tensor:
        """Note the newest tokens of some rows; return ``(L,)`` bool, those at a limit.

        Args:
            live: ``(L,)`` row numbers.
            ids: ``(L, W)`` prompts and completions.
            logits: ``(L, vocabulary)`` from which the newest tokens were drawn.
            grows: ``(L,)`` bool, rows that had not ended before.
        """
        scaled = logits / self._temperature
        drawn = scaled.gather(1, ids[:, -1:]).squeeze(1) - scaled.logsumexp(1)  # (L,)
        column = torch.zeros_like(self._new, dtype=drawn.dtype)
        column[live] = drawn
        self._columns.append(column)
        self._new[live] += grows
        self._lengths[live] += grows
        lengths = self._lengths[live]
        at_limit = lengths >= self._max_tokens
        if self._thought is not None:
            for place in (grows & (lengths == self._thought.tokens)).nonzero().flatten().tolist():
                new = ids[place, -int(self._new[live[place]]) :].tolist()
                is_over = self._begun.is_thought_over(int(live[place]), new, self._thought)
                at_limit[place] |= is_over
        return at_limit

    def is_enough(self, rows: torch.Tensor) -> bool:
        """Return whether enough completions have ended, with these rows among them."""
        self._ended.update(rows.tolist())
        return self._begun.is_enough(self._ended)

    def cut(self, drawn: list[list[int]]) -> Generations:
        """Return the new tokens of B rows, without padding, and their log-probabilities."""
        counts = self._new.tolist()
        log_probs = torch.stack(self._columns, 1).tolist()  # (B, C)
        return Generations(
            [ids[:count] for ids, count in zip(drawn, counts, strict=True)],
            [values[:count] for values, count in zip(log_probs, counts, strict=True)],
        )


def can_grow(model: Model) -> bool:
    """Return whether sampling can end early and continue later, with other prompts."""
    base = _base(model)
    if _decodes_itself(model) or not isinstance(base, PreTrainedModel) or base._is_stateful:
        return False
    return _lets_rows_leave(DynamicCache(config=base.config.get_text_config()))


def _base(model: Model) -> Any:
    """Return the model of transformers that PEFT may have wrapped."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _decodes_itself(model: Model) -> bool:
    """Return whether Unsloth has replaced the model's forward pass, as it does on a GPU."""
    return "unsloth" in type(_base(model)).forward.__module__


def continues_prompts(model: Model) -> bool:
    """Return whether several completions can continue one pass of a prompt from its cache."""
    base = _base(model)
    if _decodes_itself(model) or not isinstance(base, PreTrainedModel) or base._is_stateful:
        return False
    layers = DynamicCache(config=base.config.get_text_config()).layers
    return all(type(layer) is DynamicLayer for layer in layers)


def until_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    """Return the ids up to and including the first of ``ends``."""
    last = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return ids[: last + 1]


class GrowingLayer(DynamicLayer):
    """Dynamic layer with spare columns, so that keys are written in place and not concatenated."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values, both ``(L, heads, tokens, size)``; return all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._spare: dict[str, torch.Tensor] = {}
        self.keys = self._grown("keys", key_states)
        self.values = self._grown("values", value_states)
        return self.keys, self.values

    def _grown(self, name: str, new: torch.Tensor) -> torch.Tensor:
        old = getattr(self, name)
        spare = self._spare.get(name)
        start = old.shape[-2] if old.numel() else 0
        end = start + new.shape[-2]
        # After rows were selected the keys are a copy, and the spare columns belong to other rows
        is_own = spare is not None and spare.data_ptr() == old.data_ptr()
        if spare is None or not is_own or spare.shape[-2] < end:
            num_rows, num_heads, _, size = new.shape
            spare = new.new_empty(num_rows, num_heads, end + max(GROWTH, end // 4), size)
            if start:
                spare[..., :start, :] = old
            self._spare[name] = spare
        spare[..., start:end, :] = new
        return spare[..., :end, :]


def _lets_rows_leave(cache: object) -> bool:
    """Return whether rows of this cache can be selected."""
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    return (
        isinstance(cache, Cache)
        and not cache.offloading
        and bool(cache.layers)
        and all(type(layer) in plain for layer in cache.layers)
    )


def sample_rows(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    growth: _Growth | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Return ``(B, W + C)`` prompts and completions; for ``generate(custom_generate=...)``.

    With ``growth`` the loop ends as soon as enough rows have ended.

    ``generate``'s own loop runs if the cache cannot select rows (state-space layers, static and
    quantised caches), or if a logits processor holds a state for each row.
    """
    cache: Any = kwargs.get("past_key_values")
    num_rows, width = input_ids.shape
    if not _lets_rows_leave(cache) or _has_row_state(logits_processor, num_rows):
        return type(model)._sample(
            model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs
        )
    cache.layers = [GrowingLayer() if type(one) is DynamicLayer else one for one in cache.layers]
    kwargs = {k: v for k, v in kwargs.items() if k not in ("synced_gpus", "streamer")}
    logits, kwargs = _shared_prefill(model, input_ids, generation_config, kwargs)
    pad = int(generation_config.pad_token_id or 0)
    all_ids = input_ids.new_full((num_rows, stopping_criteria.max_length), pad)
    all_ids[:, :width] = input_ids
    live = torch.arange(num_rows, device=input_ids.device)  # (L,) their places in the batch
    ended = torch.zeros_like(live, dtype=torch.bool)  # (L,)
    while True:
        scores = logits_processor(input_ids, logits)
        # for all rows, so that samples do not depend on which rows were dropped
        chances = torch.rand(num_rows, dtype=torch.float64, device=input_ids.device)[live]
        tokens = _draw(scores, chances) if generation_config.do_sample else scores.argmax(-1)
        tokens = tokens.masked_fill(ended, pad)
        input_ids = torch.cat([input_ids, tokens[:, None]], 1)
        all_ids[live, input_ids.shape[1] - 1] = tokens
        over = stopping_criteria(input_ids, None)
        if growth is not None:
            over = over | growth.note(live, input_ids, logits, ~ended)
        ended = ended | over
        num_ended = int(ended.sum())
        if num_ended == len(live) or (growth is not None and growth.is_enough(live[ended])):
            return all_ids[:, : input_ids.shape[1]]
        if num_ended >= max(1, LEAVING_SHARE * len(live)):
            stay = (~ended).nonzero().flatten()
            kwargs = _select(kwargs, stay, len(live))
            input_ids, live, ended = input_ids[stay], live[stay], ended[stay]
        logits, kwargs = _decode(model, input_ids, kwargs)


def _decode(
    model: Any, input_ids: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Run the last column of ``(L, W)`` ids; return ``(L, vocabulary)`` logits and arguments."""
    inputs = model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **kwargs)
    outputs = model(**inputs, return_dict=True)
    kwargs = model._update_model_kwargs_for_generation(outputs, kwargs)
    return outputs.logits[:, -1].float(), kwargs


def _draw(scores: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """Sample ``(L,)`` tokens from ``(L, vocabulary)`` scores with ``(L,)`` numbers in [0, 1)."""
    sums = scores.softmax(-1).double().cumsum(-1)
    if not sums[:, -1].isfinite().all():
        raise RuntimeError("probability tensor contains NaN or Inf")  # as torch.multinomial says
    # the first token with a greater sum, whose probability is thus above 0
    return torch.searchsorted(sums, (chances * sums[:, -1])[:, None], right=True).squeeze(1)


def _shared_prefill(
    model: Model, input_ids: torch.Tensor, generation_config: Any, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Run each different prompt once; return ``(B, vocabulary)`` logits, and arguments for B."""
    differs = (input_ids[1:] != input_ids[:-1]) | (
        kwargs["attention_mask"][1:] != kwargs["attention_mask"][:-1]
    )
    is_new = torch.cat([differs.new_ones(1), differs.any(1)])  # (B,)
    first, place = is_new.nonzero().flatten(), is_new.cumsum(0) - 1  # (U,), (B,)
    kwargs = _select(kwargs, first, len(is_new))
    outputs = model._prefill(input_ids[first], generation_config, kwargs)
    kwargs = model._update_model_kwargs_for_generation(outputs, kwargs)
    return outputs.logits[:, -1].float()[place], _select(kwargs, place, len(first))


def _select(kwargs: dict[str, Any], rows: torch.Tensor, size: int) -> dict[str, Any]:
    """Return a model's arguments for some rows of a batch of ``size``."""
    cache = kwargs["past_key_values"]
    if cache.get_seq_length():
        cache.batch_select_indices(rows)
    return {
        name: value[rows]
        if isinstance(value, torch.Tensor) and value.dim() and len(value) == size
        else value
        for name, value in kwargs.items()
    }


def _has_row_state(processors: LogitsProcessorList, num_rows: int) -> bool:
    """Return whether a logits processor holds a state for each completion, as guidance does."""
    values = [value for one in processors for value in vars(one).values()]
    return num_rows > 1 and any(
        isinstance(one, dict) or (isinstance(one, torch.Tensor) and one.dim() > 1) for one in values
    )


# --- guards --------------------------------------------------------------------------------------


@contextlib.contextmanager
def finite_logits() -> Iterator[None]:
    """Translate torch's error about NaN or Inf in probabilities into one with a remedy.

    Raises:
        DivergedError: The logits that the body samples from hold NaN or Inf.
    """
    try:
        yield
    except RuntimeError as exc:
        if "probability tensor contains" not in str(exc):
            raise
        raise DivergedError(
            "the model's logits hold NaN or Inf, so nothing can be sampled: compute in bf16 or "
            f"float32 instead of fp16, or lower trainer.learning_rate; {RESUME}"
        ) from exc


@dataclass
class Pieces:
    """Calls a function on many rows; if memory runs out, on fewer rows at a time."""

    what: str  # the work, such as "sampling"
    remedy: str
    size: int | None = None  # rows of a piece; None if memory has not run out yet

    def run(
        self, call: Callable[[Sequence[Row]], list[Found]], rows: Sequence[Row], at_most: int
    ) -> list[Found]:
        """Return the results of ``call`` for all rows, in their order.

        Out of memory halves the rows of a piece, here and in later runs; finished pieces are kept.

        Args:
            call: Returns a list with one result for each of the rows it is called with.
            rows: All rows.
            at_most: Largest number of rows of a piece.

        Raises:
            MemoryRanOutError: A single row does not fit into memory.
        """
        found: list[Found] = []

        def size() -> int:
            return min(at_most, len(rows) - len(found), self.size or at_most)

        def attempt() -> None:
            while size():
                found.extend(call(rows[len(found) : len(found) + size()]))

        retry_smaller(attempt, lambda exc: self.halve(exc, size()))
        return found

    def halve(self, exc: Exception, tried: int) -> None:
        """Halve the rows of a piece after ``tried`` rows at once raised the out-of-memory ``exc``.

        Raises:
            MemoryRanOutError: ``tried`` is 1.
        """
        if tried < 2:
            raise MemoryRanOutError(
                f"memory ran out while {self.what} a single completion: {self.remedy}"
            ) from exc
        if self.size is None:
            warnings.warn(
                f"memory ran out while {self.what} {tried} completions at once: trying "
                f"{tried // 2}, and fewer if needed",
                RuntimeWarning,
                stacklevel=2,
            )
        self.size = tried // 2
