"""Beginning and end of the thought in a completion, by the marks of its model family.

Token ids are the model's own. In the text that rewards, records and reports read, the marks of
every family are written ``<think>`` and ``</think>``.
"""

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rloo_kit.text.wording import text_of
from rloo_kit.types import Tokenizer

THOUGHT_BEGINS = "<think>"
THOUGHT_ENDS = "</think>"
# Name of marks that were given by hand, in a tokenizer's own settings
GIVEN = "rloo_kit_thinking"


@dataclass(frozen=True)
class Family:
    """Marks of thoughts in a family of models."""

    start: str
    end: str
    sign: str = ""  # text in the family's chat templates; "": the end itself
    start_pattern: str = ""  # regular expression for all opening marks; "": the start itself
    end_pattern: str = ""


# Sources: the parsers in vLLM's `vllm.reasoning` and `vllm.parser`, and the chat templates in TRL
FAMILIES = {
    "Qwen3, DeepSeek-R1, SmolLM3, GLM-4.5, OLMo 3": Family("<think>", "</think>"),
    "Magistral": Family("[THINK]", "[/THINK]"),
    "Seed-OSS": Family("<seed:think>", "</seed:think>"),
    "MiniMax-M3": Family("<mm:think>", "</mm:think>"),
    "Command A": Family("<|START_THINKING|>", "<|END_THINKING|>"),
    "Gemma 4": Family("<|channel>thought\n", "<channel|>"),
    "gpt-oss": Family(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        sign="<|channel|>final<|message|>",
        end_pattern=r"(?:<\|end\|><\|start\|>assistant)?<\|channel\|>final<\|message\|>",
    ),
    "Granite 3.2": Family(
        "Here is my thought process:",
        "Here is my response:",
        sign="Here is my thought process:",
        start_pattern="Here(?:'s| is) my thought process:",
        end_pattern="Here(?:'s| is) my response:",
    ),
}


def token_id(tokenizer: Tokenizer, token: str) -> int | None:
    """Return the id of a token in the tokenizer's vocabulary; None if it is not a single token."""
    found = tokenizer.convert_tokens_to_ids(token)
    # A token the vocabulary lacks comes back as None or as the id of the unknown token.
    known = isinstance(found, int) and tokenizer.convert_ids_to_tokens(found) == token
    return found if known else None


@dataclass(frozen=True)
class Mark:
    """Mark that opens or closes a thought."""

    text: str  # as the kit writes it
    pattern: str = ""  # regular expression for all that a model may write
    token: int | None = None  # its id, if it is one token

    def places(self, ids: Sequence[int], tokenizer: Tokenizer | None) -> list[tuple[int, int]]:
        """Return (first token, one after the last token) of each occurrence of the mark.

        A mark of several tokens is looked for in the text. If its ends share a token with their
        neighbours, that token belongs to the mark.
        """
        if self.token is not None or tokenizer is None:
            return [(at, at + 1) for at, one in enumerate(ids) if one == self.token]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        spans = [match.span() for match in re.finditer(self.pattern, text)]
        if not spans:
            return []

        def length(number: int) -> int:
            return len(tokenizer.decode(ids[:number], skip_special_tokens=False))

        numbers = range(len(ids) + 1)
        return [
            (
                bisect.bisect_right(numbers, begin, key=length) - 1,
                bisect.bisect_left(numbers, end, key=length),
            )
            for begin, end in spans
        ]


@dataclass(frozen=True)
class ThoughtMarks:
    """Marks that open and close the thoughts of a model."""

    start: Mark
    end: Mark
    tokenizer: Tokenizer | None = None  # None: both are known by their ids

    def opened(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return (first token, one after the last token) of each opening mark."""
        return self.start.places(ids, self.tokenizer)

    def closed(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return (first token, one after the last token) of each closing mark."""
        return self.end.places(ids, self.tokenizer)

    def is_open(self, ids: Sequence[int]) -> bool:
        """Return whether the last mark opens a thought."""
        return max(self.opened(ids), default=(-1, 0)) > max(self.closed(ids), default=(-1, 0))

    def thought(self, ids: Sequence[int]) -> Sequence[int] | None:
        """Return the tokens before the first closing mark, without a leading opening mark.

        None if no thought is closed.
        """
        closed = self.closed(ids)
        if not closed:
            return None
        end = closed[0][0]
        opened = self.opened(ids[:end])
        # A template that opens the thought leaves the mark in the prompt
        return ids[opened[0][1] if opened and opened[0][0] == 0 else 0 : end]

    def thought_of(self, turns: Sequence[Sequence[int]]) -> list[int] | None:
        """Return the tokens of the thoughts of all turns; None if the last turn closes none."""
        thoughts = [self.thought(ids) for ids in turns]
        if thoughts[-1] is None:
            return None
        return [token for thought in thoughts for token in thought or ()]

    @cached_property
    def _hidden(self) -> set[int] | None:
        """Special tokens that belong to no mark; None: the plain text shows the usual marks."""
        tokenizer: Any = self.tokenizer
        usual = (self.start.text, self.end.text) == (THOUGHT_BEGINS, THOUGHT_ENDS)
        end = self.end.token
        if usual and (end is None or tokenizer.decode([end], skip_special_tokens=True)):
            return None
        return {
            number
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special and token.content not in self.start.text + self.end.text
        }

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a completion, with ``<think>`` and ``</think>`` as its marks."""
        tokenizer: Any = self.tokenizer
        if self._hidden is None:
            return tokenizer.decode(ids, skip_special_tokens=True)
        shown = [one for one in ids if one not in self._hidden]
        text = re.sub(
            self.start.pattern, THOUGHT_BEGINS, tokenizer.decode(shown, skip_special_tokens=False)
        )
        return re.sub(self.end.pattern, THOUGHT_ENDS, text)

    def own_text(self, text: str) -> str:
        """Return a text with the model's own marks in place of ``<think>`` and ``</think>``."""
        text = text.replace(THOUGHT_BEGINS, self.start.text)
        return text.replace(THOUGHT_ENDS, self.end.text)


def thought_marks(tokenizer: Tokenizer | None) -> ThoughtMarks | None:
    """Return the marks of a model's thoughts, as given by hand or else by its tokenizer.

    The tokenizer decides by the family whose closing mark is in its vocabulary, or else in its chat
    template. None without a tokenizer, and if neither holds the mark of a known family. There is no
    guess, since the id of another family's mark is an ordinary word.
    """
    if tokenizer is None:
        return None
    given = tokenizer.init_kwargs.get(GIVEN)
    if given:
        return _marks(tokenizer, Family(*given))
    template = str(tokenizer.chat_template or "")

    def fit(family: Family) -> int:
        in_vocabulary = token_id(tokenizer, family.end) is not None
        return 2 * in_vocabulary + ((family.sign or family.end) in template)

    found = max(FAMILIES.values(), key=fit)
    return _marks(tokenizer, found) if fit(found) else None


def _marks(tokenizer: Tokenizer, family: Family) -> ThoughtMarks:
    def mark(text: str, pattern: str) -> Mark:
        return Mark(text, pattern or re.escape(text), token_id(tokenizer, text))

    opening = mark(family.start, family.start_pattern)
    return ThoughtMarks(opening, mark(family.end, family.end_pattern), tokenizer)


def give_marks(tokenizer: Tokenizer, start: str | None, end: str | None) -> None:
    """Set the marks of a model's thoughts by hand; if one is None, nothing changes.

    The tokenizer keeps the marks, also when it is saved with an adapter.

    Args:
        tokenizer: The tokenizer, which is changed in place.
        start: Text that opens a thought, such as ``<think>``.
        end: Text that closes it.
    """
    if start and end:
        tokenizer.init_kwargs[GIVEN] = [start, end]


def opens_thought(tokenizer: Tokenizer | None, text: str) -> bool:
    """Return whether a prompt ends with an open thought; without a tokenizer, with ``<think>``."""
    marks = thought_marks(tokenizer)
    start = THOUGHT_BEGINS if marks is None else marks.start.pattern
    return re.search(rf"(?:{start})\s*\Z", text) is not None


def completion_texts(tokenizer: Tokenizer, completion_ids: Sequence[list[int]]) -> list[str]:
    """Return the texts of B completions, with ``<think>`` and ``</think>`` as their marks."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # the one of a processor
    marks = thought_marks(tokenizer)
    if marks is None:
        return tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    return list(map(marks.text, completion_ids))


def find_thoughts(
    marks: ThoughtMarks | None, turns: Sequence[list[int]], completion: object
) -> dict[str, int | None]:
    """Return ``find_thought`` of the last turn, with the tokens and thought tokens of all turns."""
    found = find_thought(marks, turns[-1], completion) | {"tokens": sum(map(len, turns))}
    if marks is not None and (thought := marks.thought_of(turns)) is not None:
        found["thought_tokens"] = len(thought)
    return found


def find_thought(
    marks: ThoughtMarks | None, completion_ids: list[int], completion: object
) -> dict[str, int | None]:
    """Return the fields of a row of completions.jsonl about its thought.

    ``tokens`` are all tokens, ``thought_tokens`` those of the thought, ``answer_at`` the characters
    up to the end of the last closing mark; the last two are None if no thought was closed.
    """
    found = {"tokens": len(completion_ids), "thought_tokens": None, "answer_at": None}
    thought = marks and marks.thought(completion_ids)
    if marks is None or thought is None:
        return found
    found["thought_tokens"] = len(thought)
    before = marks.text(completion_ids[: marks.closed(completion_ids)[-1][1]])
    if text_of(completion).startswith(before):
        found["answer_at"] = len(before)
    return found
