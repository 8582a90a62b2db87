"""Sampling with transformers: each prompt runs once, and finished rows are dropped from the batch.

transformers' ``generate`` runs a prompt again for each of its completions, and decodes every row
until the longest one has ended. ``sample_rows`` is a faster decoding method, which is passed to
``generate`` as its argument ``custom_generate``. It samples from the same distribution, because it
uses the logits processors, stopping criteria and masks of ``generate``.

Shapes: B rows, U distinct prompts, L rows that are still in the batch, W prompt tokens, C
completion tokens.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rloo_kit.errors import DivergedError, MemoryRanOutError
from rloo_kit.rloo.batching import padded
from rloo_kit.rloo.guards import RESUME, retry_smaller
from rloo_kit.sampling.dense import dense_layers, fused_layers
from rloo_kit.sampling.engine import Begun, Generations, ThoughtLimit
from rloo_kit.types import Model

Row = TypeVar("Row")
Found = TypeVar("Found")

# Ended rows are dropped when they are this fraction of the batch. Dropping each row at once would
# be slower, because each time the cache is copied
LEAVING_SHARE = 1 / 8
# Minimum number of columns by which a cache grows
GROWTH = 64
# Settings of a model's own `generation_config` that apply. The others, such as `min_p`, would
# change the distribution that is sampled from
OWN_SETTINGS = {"bos_token_id", "eos_token_id", "pad_token_id", "suppress_tokens"}


def complete(
    model: Model,
    prompt_ids: Sequence[list[int]],
    pad_token_id: int,
    ends: Sequence[int],
    thought: ThoughtLimit | None = None,
    **how: Any,
) -> list[list[int]]:
    """Sample one completion of each of B prompts; return the sampled ids, including end tokens.

    Args:
        model: A causal language model of transformers, with or without PEFT's wrapper.
        prompt_ids: B prompts. Adjacent equal prompts share their prefill, unless Unsloth or the
            decoding loop of transformers runs instead of ``sample_rows``.
        pad_token_id: The id that pads prompts on the left.
        ends: Ids of the tokens that end a completion.
        thought: Limit on the length of a thought. A completion whose thought is still open at the
            limit is truncated there, so it has no end token. None for no limit.
        **how: Further arguments of ``generate``.

    Raises:
        RuntimeError: The logits contain NaN or Inf; ``finite_logits`` translates this error.
    """
    width = max(map(len, prompt_ids))
    if thought is not None:
        end = width + thought.tokens

        def too_long(all_ids: torch.Tensor, scores: object, **_: Any) -> torch.Tensor:
            """Return an ``(L,)`` bool mask of the rows to end, given the ``(L, W + t)`` ids."""
            is_open = [False] * len(all_ids)
            if all_ids.shape[1] == end:
                is_open = list(map(thought.marks.is_open, all_ids.tolist()))
            return torch.tensor(is_open, device=all_ids.device)

        how["stopping_criteria"] = StoppingCriteriaList([too_long])
    method = None if _decodes_itself(model) else sample_rows
    rows = generate(model, prompt_ids, pad_token_id, custom_generate=method, **how)
    drawn = rows[:, width:].tolist()
    if thought is not None:
        drawn = map(thought.cut, prompt_ids, drawn)
    return [until_end(ids, ends) for ids in drawn]


def grow(
    model: Model,
    begun: Begun,
    pad_token_id: int,
    thought: ThoughtLimit | None = None,
    **how: Any,
) -> Generations:
    """Continue unfinished completions until enough of them have ended.

    Args:
        model: A causal language model for which ``can_grow`` is True, with or without PEFT's
            wrapper.
        begun: The unfinished completions; ``begun.is_enough`` decides when to stop.
        pad_token_id: The id that pads prompts on the left.
        thought: Limit that ends a completion whose thought is too long; None for no limit.
        **how: Further arguments of ``generate``, such as ``generation_config``. Its
            ``max_new_tokens`` limits a whole completion, including the tokens in ``begun``.

    Returns:
        The new tokens of each completion, and their log-probabilities at the sampling temperature.

    Raises:
        RuntimeError: The logits contain NaN or Inf; ``finite_logits`` translates this error.
    """
    lengths = torch.tensor(list(map(len, begun.completion_ids)), device=model.device)
    growth = _Growth(begun, thought, lengths)
    method = partial(sample_rows, growth=growth)
    grown = generate(model, begun.all_ids, pad_token_id, custom_generate=method, **how)
    drawn = grown[:, -len(growth.columns) :].tolist()
    log_probs = torch.stack(growth.columns, 1).tolist()  # (B, C)
    rows = zip(begun.completion_ids, lengths.tolist(), drawn, log_probs, strict=True)
    return Generations.of(
        [(ids[: end - len(old)], values[: end - len(old)]) for old, end, ids, values in rows]
    )


def generate(model: Model, prompt_ids: Sequence[list[int]], pad_token_id: int, **how: Any) -> Any:
    """Call transformers' ``generate``, ignoring the model's own settings except ``OWN_SETTINGS``.

    Args:
        model: A causal language model of transformers, with or without PEFT's wrapper.
        prompt_ids: B prompts, whose longest has W tokens.
        pad_token_id: The id that pads prompts on the left.
        **how: Further arguments of ``generate``.

    Returns:
        What ``generate`` returns: ``(B, W + C)`` ids, or an output object that contains them.
    """
    ids = padded(prompt_ids, pad_token_id, side="left")  # (B, W)
    mask = padded([[1] * len(one) for one in prompt_ids], side="left")
    settings = vars(model.generation_config)
    own = dict(settings)
    # transformers adds the model's own settings to the given ones, and warns of its `max_length`
    settings.update(dict.fromkeys(own.keys() - OWN_SETTINGS))
    try:
        with as_sampled(model):
            return model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                **how,
            )
    finally:
        settings.update(own)


@contextlib.contextmanager
def as_sampled(model: Any) -> Iterator[None]:
    """Speed up sampling during a ``with`` block.

    LoRA layers are merged if memory allows, the output layer is faster, and attention is faster on
    a CPU. If Unsloth has replaced the model's forward pass, nothing changes.
    """
    if _decodes_itself(model):
        yield
        return
    with dense_layers(model), fast_attention(model.device), contiguous_head(model):
        yield


@contextlib.contextmanager
def as_learned(model: Any) -> Iterator[None]:
    """Speed up forward and backward passes of a learning step during a ``with`` block.

    LoRA layers make fewer casts, and attention is faster on a CPU. If Unsloth has replaced the
    model's forward pass, nothing changes, because its own layers are fast already.
    """
    if _decodes_itself(model):
        yield
        return
    with fused_layers(model), fast_attention(model.device):
        yield


@contextlib.contextmanager
def contiguous_head(model: Model) -> Iterator[None]:
    """Speed up the output layer during a ``with`` block.

    After a pass over prompts, the last hidden states of the rows are a view into a
    ``(rows, tokens, hidden)`` tensor. torch does not multiply such a view by the weight matrix in
    one product. On a CPU it copies the matrix for each row, which takes longer than all layers
    before the output layer. So the states are made contiguous first.
    """

    def to_contiguous(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        return tuple(one.contiguous() for one in inputs)

    head = model.get_output_embeddings()
    hook = (
        contextlib.nullcontext() if head is None else head.register_forward_pre_hook(to_contiguous)
    )
    with hook:
        yield


@contextlib.contextmanager
def fast_attention(device: torch.device) -> Iterator[None]:
    """Speed up attention on a CPU during a ``with`` block.

    If there is a mask, transformers copies keys and values for each query head of grouped-query
    attention, because the fast kernels of a GPU need the copies. The CPU kernel does not need them,
    and without them it is five times faster for 35 rows of 300 tokens.
    """
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if device.type != "cpu" or getattr(before, "func", None) is _attend:
        yield
        return
    repeats = sdpa_attention.use_gqa_in_sdpa
    sdpa_attention.use_gqa_in_sdpa = lambda mask, key, value: key.shape == value.shape
    ALL_ATTENTION_FUNCTIONS["sdpa"] = partial(_attend, before)
    try:
        yield
    finally:
        sdpa_attention.use_gqa_in_sdpa = repeats
        ALL_ATTENTION_FUNCTIONS["sdpa"] = before


def _attend(
    attention: Callable[..., tuple[torch.Tensor, Any]],
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **how: Any,
) -> tuple[torch.Tensor, Any]:
    """Call transformers' attention in the form that is fastest on a CPU.

    If a row has several query tokens, attention is computed in float32, because the backward pass
    of torch's kernel takes four times as long in bfloat16. If a row has a single query token, the
    query heads that share keys and values are passed to the kernel as if they were tokens. The
    kernel is slow for a single token: six times slower in bfloat16, for 12 rows of 300 tokens and
    groups of 3 heads.

    Args:
        attention: transformers' function.
        module: The attention layer.
        query: ``(rows, query heads, tokens, head size)``.
        key: ``(rows, heads, columns, head size)``.
        value: As ``key``.
        attention_mask: As in transformers, ``(rows, 1, tokens, columns)``.
        **how: Further arguments of ``attention``.

    Returns:
        ``(rows, tokens, query heads, head size)``, and the weights or None.
    """
    dtype, shape = query.dtype, query.shape
    by_group = shape[2] == 1 and how.get("position_bias") is None
    if by_group:
        query = query.unflatten(1, (key.shape[1], -1)).squeeze(3)  # (rows, heads, group, head size)
        how["is_causal"] = False
    else:
        query, key, value = query.float(), key.float(), value.float()
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = attention_mask.float()
    found, weights = attention(module, query, key, value, attention_mask, **how)
    if by_group:
        found = found.transpose(1, 2).reshape(shape[0], 1, shape[1], -1)
    return found.to(dtype), weights


@dataclass
class _Growth:
    """Limits, lengths and log-probabilities of the completions that ``sample_rows`` continues."""

    begun: Begun  # B completions to continue
    thought: ThoughtLimit | None  # ends a completion whose thought is too long; None for no limit
    lengths: torch.Tensor  # (B,) tokens of each completion, updated by `note`
    columns: list[torch.Tensor] = field(default_factory=list)  # (B,) log-probabilities of each step

    def note(
        self,
        live: torch.Tensor,
        ids: torch.Tensor,
        logits: torch.Tensor,
        grows: torch.Tensor,
        config: Any,
    ) -> torch.Tensor:
        """Record the newest token of each row, and find the rows that have reached a limit.

        Sampling starts with B rows and drops rows that have ended; L rows are left.

        Args:
            live: ``(L,)`` indices of the rows that are left, in the range from 0 to B - 1.
            ids: ``(L, W + t)`` ids: W columns for prompts with the completions to continue, padded
                on the left, and t columns for the tokens sampled since.
            logits: ``(L, vocabulary)`` logits from which the newest tokens were sampled.
            grows: ``(L,)`` bool, True for rows that had not ended before the newest token.
            config: Settings of sampling, with the temperature and the maximum length.

        Returns:
            ``(L,)`` bool, True for rows at the limit of length or of the thought.
        """
        scaled = logits / config.temperature
        drawn = scaled.gather(1, ids[:, -1:]).squeeze(1) - scaled.logsumexp(1)  # (L,)
        self.columns.append(drawn.new_zeros(len(self.lengths)).index_copy(0, live, drawn))
        self.lengths[live] += grows
        lengths = self.lengths[live]
        at_limit = lengths >= config.max_new_tokens
        if self.thought is not None:
            for place in (grows & (lengths == self.thought.tokens)).nonzero().flatten().tolist():
                at_limit[place] |= self.thought.marks.is_open(ids[place].tolist())
        return at_limit


def can_grow(model: Model) -> bool:
    """Return True if ``grow`` works for the model.

    It works if rows that have ended can be dropped from the model's cache while others continue,
    and if Unsloth has not replaced the model's forward pass.
    """
    return _lets_rows_leave(_new_cache(model))


def _new_cache(model: Model) -> DynamicCache | None:
    """Return an empty cache of keys and values for a model.

    The result is None if the model is not from transformers, if it has states other than keys and
    values, or if Unsloth has replaced its forward pass.
    """
    # only models of transformers have this attribute
    if _decodes_itself(model) or getattr(model, "_is_stateful", True):
        return None
    return DynamicCache(config=model.config.get_text_config())


def _decodes_itself(model: Model) -> bool:
    """Return True if Unsloth has replaced the model's forward pass, as it does on a GPU."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "unsloth" in type(base).forward.__module__


def continues_prompts(model: Model) -> bool:
    """Return True if completions can continue from the cache of one pass over a shared prompt."""
    cache = _new_cache(model)
    return cache is not None and {*map(type, cache.layers)} == {DynamicLayer}


def until_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    """Return the ids up to and including the first id in ``ends``; all ids if there is none."""
    last = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return ids[: last + 1]


class GrowingLayer(DynamicLayer):
    """Cache layer with spare columns, so that new keys and values are written in place."""

    def __init__(self) -> None:
        super().__init__()
        self._spare: dict[str, torch.Tensor] = {}  # keys and values with their spare columns

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new keys and values, both ``(rows, heads, tokens, head size)``.

        Returns:
            All keys and all values.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        self.keys = self._grown("keys", start, key_states)
        self.values = self._grown("values", start, value_states)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep copies of the rows with these numbers, and free the memory of the original rows."""
        super().batch_select_indices(indices)
        self._spare.clear()

    def _grown(self, name: str, start: int, new: torch.Tensor) -> torch.Tensor:
        """Append the columns ``new`` to the ``start`` columns of ``name``; return all columns."""
        spare = self._spare.get(name)
        end = start + new.shape[-2]
        if spare is None or spare.shape[-2] < end:
            num_rows, num_heads, _, size = new.shape
            spare = new.new_empty(num_rows, num_heads, end + max(GROWTH, end // 4), size)
            if start:
                spare[..., :start, :] = getattr(self, name)
            self._spare[name] = spare
        spare[..., start:end, :] = new
        return spare[..., :end, :]


def _lets_rows_leave(cache: object) -> bool:
    """Return True if rows can be dropped from this cache."""
    if not isinstance(cache, Cache) or cache.offloading or not cache.layers:
        return False
    return {*map(type, cache.layers)} <= {DynamicLayer, DynamicSlidingWindowLayer}


def sample_rows(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    growth: _Growth | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Sample completions; a decoding method for ``generate(custom_generate=...)``.

    The decoding loop of transformers runs instead if rows cannot be dropped from the cache
    (state-space layers, static and quantised caches), or if a logits processor has a state for each
    row.

    Args:
        model: The model.
        input_ids: ``(B, W)`` ids of B prompts, padded on the left to the longest one's length W.
        logits_processor: As in ``generate``.
        stopping_criteria: As in ``generate``.
        generation_config: As in ``generate``.
        growth: State of the completions to continue, which can end the loop before all rows have
            ended. None samples until all rows have ended.
        **kwargs: Other arguments of the model's forward pass.

    Returns:
        ``(B, W + C)`` ids of prompts and completions, with C the length of the longest completion.
    """
    cache: Any = kwargs.get("past_key_values")
    num_rows, width = input_ids.shape
    if not _lets_rows_leave(cache) or _has_row_state(logits_processor, num_rows):
        return type(model)._sample(
            model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs
        )
    cache.layers = [GrowingLayer() if type(one) is DynamicLayer else one for one in cache.layers]
    logits, kwargs = _shared_prefill(model, input_ids, generation_config, kwargs)
    pad = int(generation_config.pad_token_id or 0)
    all_ids = input_ids.new_full((num_rows, stopping_criteria.max_length), pad)
    all_ids[:, :width] = input_ids
    live = torch.arange(num_rows, device=input_ids.device)  # (L,) numbers of the rows that are left
    ended = torch.zeros_like(live, dtype=torch.bool)  # (L,)
    while True:
        scores = logits_processor(input_ids, logits)
        # drawn for all rows, so that samples do not depend on which rows were dropped
        chances = torch.rand(num_rows, dtype=torch.float64, device=input_ids.device)[live]
        tokens = _draw(scores, chances if generation_config.do_sample else None)
        tokens = tokens.masked_fill(ended, pad)
        input_ids = torch.cat([input_ids, tokens[:, None]], 1)
        all_ids[live, input_ids.shape[1] - 1] = tokens
        over = stopping_criteria(input_ids, None)
        if growth is not None:
            over = over | growth.note(live, input_ids, logits, ~ended, generation_config)
        ended = ended | over
        left = {*live[~ended].tolist()}
        if not left or (growth is not None and growth.begun.is_enough({*range(num_rows)} - left)):
            return all_ids[:, : input_ids.shape[1]]
        if len(live) - len(left) >= max(1, LEAVING_SHARE * len(live)):
            stay = (~ended).nonzero().flatten()
            kwargs = _select(kwargs, stay)
            input_ids, live, ended = input_ids[stay], live[stay], ended[stay]
        logits, kwargs = _decode(model, input_ids, kwargs)


def _decode(
    model: Any, input_ids: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Run the model on the last column of ``(L, W + t)`` ids.

    Returns:
        ``(L, vocabulary)`` logits, and the model's arguments for the next step.
    """
    inputs = model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **kwargs)
    outputs = model(**inputs, return_dict=True)
    kwargs = model._update_model_kwargs_for_generation(outputs, kwargs)
    return outputs.logits[:, -1].float(), kwargs


def _draw(scores: torch.Tensor, chances: torch.Tensor | None) -> torch.Tensor:
    """Sample one token for each row by inverting the cumulative distribution.

    Args:
        scores: ``(L, vocabulary)`` logits.
        chances: ``(L,)`` random numbers in [0, 1). None chooses the most likely token.

    Returns:
        ``(L,)`` token ids.

    Raises:
        RuntimeError: The scores contain NaN or Inf.
    """
    if chances is None:
        checked, tokens = scores.amax(-1), scores.argmax(-1)
    else:
        sums = scores.softmax(-1).double().cumsum(-1)
        checked = sums[:, -1]
        # the first token whose cumulative sum is greater, so that its probability is above 0
        tokens = torch.searchsorted(sums, (chances * checked)[:, None], right=True).squeeze(1)
    if not checked.isfinite().all():
        raise RuntimeError("probability tensor contains NaN or Inf")  # as torch.multinomial says
    return tokens


def _shared_prefill(
    model: Model, input_ids: torch.Tensor, generation_config: Any, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Run each distinct prompt once; only adjacent equal prompts count as one.

    Returns:
        ``(B, vocabulary)`` logits, and the model's arguments for the next step with all B rows.
    """
    rows = torch.cat([input_ids, kwargs["attention_mask"]], 1)  # (B, 2 * W)
    found = rows.unique_consecutive(dim=0, return_inverse=True, return_counts=True)
    _, place, counts = found  # (B,), (U,)
    first = counts.cumsum(0) - counts  # (U,) the first row of each prompt
    kwargs = _select(kwargs, first)
    outputs = model._prefill(input_ids[first], generation_config, kwargs)
    kwargs = model._update_model_kwargs_for_generation(outputs, kwargs)
    return outputs.logits[:, -1].float()[place], _select(kwargs, place)


def _select(kwargs: dict[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    """Select rows from a model's arguments.

    Args:
        kwargs: The arguments. The cache among them is changed in place. Masks and positions are
            ``(..., rows, columns)``, since some vision models have several positions for a token.
        rows: Numbers of the rows to keep.

    Returns:
        The arguments for the selected rows.
    """
    kwargs["past_key_values"].batch_select_indices(rows)
    return {
        name: value[..., rows, :] if isinstance(value, torch.Tensor) and value.dim() > 1 else value
        for name, value in kwargs.items()
    }


def _has_row_state(processors: LogitsProcessorList, num_rows: int) -> bool:
    """Return True if a logits processor keeps state per row, as classifier-free guidance does."""
    values = [value for one in processors for value in vars(one).values()]
    return num_rows > 1 and any(
        isinstance(one, dict) or (isinstance(one, torch.Tensor) and one.dim() > 1) for one in values
    )


# --- guards --------------------------------------------------------------------------------------


@contextlib.contextmanager
def finite_logits() -> Iterator[None]:
    """Raise ``DivergedError`` in place of torch's error about NaN or Inf during sampling.

    Use it in a ``with`` block around code that samples tokens. The message says what to change.

    Raises:
        DivergedError: The logits of the model contain NaN or Inf.
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
    """Runner of a function over many rows, which uses fewer rows at a time if memory runs out."""

    what: str  # the work, for messages, such as "sampling"
    remedy: str  # advice in the error message if a single row does not fit
    size: int | None = None  # number of rows at a time; None if memory has not run out yet

    def run(
        self, call: Callable[[Sequence[Row]], list[Found]], rows: Sequence[Row], at_most: int
    ) -> list[Found]:
        """Return the results of ``call`` for all rows, in their order.

        If memory runs out, the number of rows at a time is halved, also for later runs. Results
        that have been computed are kept.

        Args:
            call: Called with some rows; returns a list with one result for each of them.
            rows: All rows.
            at_most: Largest number of rows at a time.

        Raises:
            MemoryRanOutError: A single row does not fit into memory.
        """
        found: list[Found] = []

        def next_rows() -> Sequence[Row]:
            return rows[len(found) :][: min(at_most, self.size or at_most)]

        def attempt() -> None:
            while piece := next_rows():
                found.extend(call(piece))

        retry_smaller(attempt, lambda exc: self.halve(exc, len(next_rows())))
        return found

    def halve(self, exc: Exception, tried: int) -> None:
        """Halve the number of rows at a time after memory ran out, and warn the first time.

        Args:
            exc: The out-of-memory error.
            tried: The number of rows at a time that raised it.

        Raises:
            MemoryRanOutError: ``tried`` is 1, so the number cannot be lowered.
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
