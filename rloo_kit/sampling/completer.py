"""Sampling of completions and calling of rewards, shared by all commands.

Shapes: B completions, F reward functions.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rloo_kit.data.images import has_images
from rloo_kit.data.lengths import tokenize_prompts
from rloo_kit.errors import DataError
from rloo_kit.rloo.batching import TokenRows
from rloo_kit.rloo.rollout import Completions
from rloo_kit.rloo.step import Pending
from rloo_kit.scoring.contract import AsyncCheckedReward, call_reward, reward_columns
from rloo_kit.text.thoughts import completion_texts
from rloo_kit.tools.loop import Draw, ToolLoop
from rloo_kit.types import Score, Tokenizer


@dataclass(kw_only=True, eq=False)
class Completer:
    """Sampler that draws one completion for each row of a dataset, and scores it with rewards."""

    draw: Draw  # samples a completion of each tokenized prompt
    processing_class: Tokenizer  # the tokenizer, or a processor that has one
    template_settings: dict[str, Any] | None  # arguments of the chat template
    ends: frozenset[int]  # ids of tokens that end a completion
    # returns the F rewards: functions, async functions, or models
    functions: Callable[[], Sequence[Any]] = list
    tokenizers: Sequence[Any] = ()  # one for each of the F rewards, used if the reward is a model
    # returns `trainer_state`, `log_extra` and `log_metric` for the rewards
    for_rewards: Callable[[], dict[str, Any]] = dict
    tool_loop: ToolLoop | None = None  # runs the tools that completions call
    # context around all draws of a batch; with tools, a batch has one draw for each turn
    turns: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    # event loop in its own thread that runs async rewards; None runs them one after another
    loop: asyncio.AbstractEventLoop | None = None

    def sample(self, rows: Sequence[Mapping[str, Any]]) -> Completions:
        """Sample one completion of each row.

        Raises:
            DataError: The chat template cannot render a prompt, or the rows have images.
            StalePolicyError: The engine did not sample from the current policy.
            MemoryRanOutError: Not even a single completion fits into memory.
        """
        if self.tool_loop is not None:
            return self.tool_loop.sample(rows, self.draw, self.turns, self.ends)
        prompt_ids = self.tokenize(rows)
        ids, log_probs = self.draw(prompt_ids)
        return self.completions(rows, TokenRows(prompt_ids, ids), log_probs)

    def tokenize(self, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """Return the token ids of the rows' prompts.

        Raises:
            DataError: The chat template cannot render a prompt, or the rows have images.
        """
        if has_images(rows):
            raise DataError(
                "the prompts have images, but only a training can sample from images: remove the "
                "images, or train on these prompts (a training also scores its held-out prompts)"
            )
        prompts = [row["prompt"] for row in rows]
        return tokenize_prompts(self.processing_class, prompts, self.template_settings)

    def completions(
        self,
        rows: Sequence[Mapping[str, Any]],
        tokens: TokenRows,
        log_probs: list[list[float]] | None,
    ) -> Completions:
        """Decode sampled tokens, and return them with their texts as ``Completions``.

        Args:
            rows: The B rows that were completed.
            tokens: The tokens of prompts and completions.
            log_probs: The engine's log-probabilities of the completion tokens, or None.
        """
        prompts = [row["prompt"] for row in rows]
        texts = completion_texts(self.processing_class, tokens.completion_ids)
        return Completions(
            prompts=prompts,
            completions=as_completions(prompts, texts),
            tokens=tokens,
            ended=[ids[-1] in self.ends for ids in tokens.completion_ids],
            sampler_log_probs=log_probs,
        )

    def score(self, rows: Sequence[Mapping[str, Any]], completions: Completions) -> Pending:
        """Start to compute the rewards of completions.

        If there is an event loop (``loop``), async rewards start now. All other rewards are called
        by the handle's ``result``.

        Returns:
            A handle whose ``result()`` returns one list for each reward function, with one score
            for each completion.

        Raises:
            RewardContractError: A reward raised an error or returned wrong values. ``result``
                raises it, not this call.
        """
        with_tools = {}
        if self.tool_loop is not None:
            with_tools = {
                "prompts": completions.prompts,  # with the observations of environments
                "completion_turns": completions.tokens.turns,
            }
            if self.tool_loop.environments is not None:
                with_tools["environments"] = self.tool_loop.environments.current
        columns = reward_columns(
            rows,
            completions.completions,
            completions.tokens.sampled_ids,
            **self.for_rewards(),
            **with_tools,
        )
        waits: list[Callable[[], list[Score]]] = []  # one for each of the F rewards
        in_background = False
        for place, function in enumerate(self.functions()):
            if self.loop is not None and isinstance(function, AsyncCheckedReward):
                started = asyncio.run_coroutine_threadsafe(function(**columns), self.loop)
                waits.append(started.result)
                in_background = True
            elif isinstance(function, torch.nn.Module):
                waits.append(partial(self._logits, function, self.tokenizers[place], columns))
            else:
                waits.append(partial(call_reward, function, columns))
        return Pending(in_background, lambda: [wait() for wait in waits])

    def _logits(
        self, model: torch.nn.Module, tokenizer: Any, columns: dict[str, Any]
    ) -> list[Score]:
        """Return the B logits of a sequence-classification model; texts are formatted as in TRL."""
        from trl.data_utils import apply_chat_template

        pairs = zip(columns["prompts"], columns["completions"], strict=True)
        texts = [prompt + completion for prompt, completion in pairs]
        if not isinstance(texts[0], str):
            texts = [
                apply_chat_template(
                    {"messages": messages}, tokenizer, **(self.template_settings or {})
                )["text"]
                for messages in texts
            ]
        inputs = tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right",
            add_special_tokens=False,
        )  # fmt: skip
        with torch.inference_mode():
            return model(**inputs.to(next(model.parameters()).device)).logits[:, 0].tolist()


def as_completions(prompts: Sequence[Any], texts: Sequence[str]) -> list[Any]:
    """Return completions in the form that rewards expect.

    If the prompt is a text, the completion is a text. If the prompt is a conversation, the
    completion is a list with one assistant message.
    """
    return [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
