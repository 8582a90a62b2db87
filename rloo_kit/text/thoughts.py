"""Functions that find where the thought (the reasoning) in a completion begins and ends.

Each model family marks its thoughts with its own tokens or texts. In the text that rewards,
records and reports read, the marks of every family are replaced by ``<think>`` and ``</think>``.
Token ids are left as the model sampled them.
"""

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from rloo_kit.text.redaction import redact
from rloo_kit.text.wording import text_of
from rloo_kit.types import Tokenizer

THOUGHT_BEGINS = "<think>"
THOUGHT_ENDS = "</think>"
# Name under which the tokenizer's settings keep marks that a user has set
GIVEN = "rloo_kit_thinking"
# Name of a family of models -> texts that open and close its thoughts.
# Sources: the parsers in vLLM's `vllm.reasoning` and `vllm.parser`, and the chat templates in TRL
FAMILIES = {
    "Qwen3, DeepSeek-R1, SmolLM3, GLM-4.5, OLMo 3": ("<think>", "</think>"),
    "Magistral": ("[THINK]", "[/THINK]"),
    "Seed-OSS": ("<seed:think>", "</seed:think>"),
    "MiniMax-M3": ("<mm:think>", "</mm:think>"),
    "Command A": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "Gemma 4": ("<|channel>thought\n", "<channel|>"),
    "gpt-oss": (
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
    "Granite 3.2": ("Here is my thought process:", "Here is my response:"),
}
# Text of a mark that models spell in several ways -> regular expression for every spelling
SPELLINGS = {
    FAMILIES["gpt-oss"][1]: r"(?:<\|end\|><\|start\|>assistant)?<\|channel\|>final<\|message\|>",
    "Here is my thought process:": "Here(?:'s| is) my thought process:",
    "Here is my response:": "Here(?:'s| is) my response:",
}


def token_id(tokenizer: Tokenizer, token: str) -> int | None:
    """Return the id of a token in the tokenizer's vocabulary; None if it is not a single token."""
    found = tokenizer.convert_tokens_to_ids(token)
    # For a token missing from the vocabulary, the tokenizer returns None or the unknown token's id.
    known = isinstance(found, int) and tokenizer.convert_ids_to_tokens(found) == token
    return found if known else None


@dataclass(frozen=True)
class Mark:
    """Mark that opens or closes a thought."""

    text: str  # the mark in its usual spelling
    token: int | None = None  # token id; None if the mark is not a single token
    tokenizer: Any = None  # the model's tokenizer; None: only `token` is searched for

    @property
    def pattern(self) -> str:
        """Regular expression for every spelling that the model may use."""
        return SPELLINGS.get(self.text) or re.escape(self.text)

    def places(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return the token range of each occurrence of the mark, as (start, end), end exclusive.

        If the mark is not a single token, it is searched for in the decoded text. A token that
        holds a part of the mark and also other text counts as part of the mark.
        """
        if self.token is not None or self.tokenizer is None:
            return [(at, at + 1) for at, one in enumerate(ids) if one == self.token]
        text = self.tokenizer.decode(ids, skip_special_tokens=False)

        def length(number: int) -> int:
            return len(self.tokenizer.decode(ids[:number], skip_special_tokens=False))

        numbers = range(len(ids) + 1)
        return [
            (
                bisect.bisect_right(numbers, match.start(), key=length) - 1,
                bisect.bisect_left(numbers, match.end(), key=length),
            )
            for match in re.finditer(self.pattern, text)
        ]


@dataclass(frozen=True)
class ThoughtMarks:
    """Marks that open and close the thoughts of a model."""

    start: Mark
    end: Mark

    def is_open(self, ids: Sequence[int]) -> bool:
        """Return whether the tokens end inside a thought: their last mark is an opening mark."""
        opened, closed = (max(mark.places(ids), default=(-1, 0)) for mark in (self.start, self.end))
        return opened > closed

    def thought(self, ids: Sequence[int]) -> Sequence[int] | None:
        """Return the tokens before the first closing mark, without a leading opening mark.

        Return None if there is no closing mark.
        """
        closed = self.end.places(ids)
        if not closed:
            return None
        end = closed[0][0]
        # Skip an opening mark at the start; there is none if the prompt opened the thought
        begin = dict(self.start.places(ids[:end])).get(0, 0)
        return ids[begin:end]

    def thought_of(self, turns: Sequence[Sequence[int]]) -> list[int] | None:
        """Return the tokens of the thoughts of all turns, joined.

        Return None if the last turn has no closing mark.
        """
        thoughts = [self.thought(ids) for ids in turns]
        if thoughts[-1] is None:
            return None
        return [token for thought in thoughts for token in thought or ()]

    @cached_property
    def _hidden(self) -> set[int]:
        """Ids of the special tokens that ``text`` leaves out: all that are not part of a mark."""
        return {
            number
            for number, token in self.end.tokenizer.added_tokens_decoder.items()
            if token.special and token.content not in self.start.text + self.end.text
        }

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a completion, with its marks written ``<think>`` and ``</think>``."""
        shown = [one for one in ids if one not in self._hidden]
        text = self.end.tokenizer.decode(shown, skip_special_tokens=False)
        text = re.sub(self.start.pattern, THOUGHT_BEGINS, text)
        return re.sub(self.end.pattern, THOUGHT_ENDS, text)

    def own_text(self, text: str) -> str:
        """Return the text with ``<think>`` and ``</think>`` replaced by the model's own marks."""
        text = text.replace(THOUGHT_BEGINS, self.start.text)
        return text.replace(THOUGHT_ENDS, self.end.text)


@cache
def _occurs(pattern: str, template: str) -> bool:
    """Return whether a chat template contains a mark; cached, since every completion needs it."""
    return re.search(pattern, template) is not None


def thought_marks(tokenizer: Tokenizer | None) -> ThoughtMarks | None:
    """Return the marks of a model's thoughts.

    Marks set with ``give_marks`` take precedence. Otherwise the marks are those of the family whose
    closing mark is a token of the vocabulary. If there is no such family, they are those of the
    family whose closing mark occurs in the chat template. Return None without a tokenizer, or if
    the model belongs to no known family. The marks of another family are never used as a default,
    because this model may use the same token ids for ordinary words.
    """
    if tokenizer is None:
        return None
    template = str(tokenizer.chat_template or "")

    def fit(texts: Sequence[str]) -> int:
        end = Mark(texts[1])
        in_vocabulary = token_id(tokenizer, end.text) is not None
        return 2 * in_vocabulary + _occurs(end.pattern, template)

    given = tokenizer.init_kwargs.get(GIVEN)
    found = given or max(FAMILIES.values(), key=fit)
    if not given and not fit(found):
        return None
    return ThoughtMarks(*(Mark(text, token_id(tokenizer, text), tokenizer) for text in found))


def give_marks(tokenizer: Tokenizer, start: str | None, end: str | None) -> None:
    """Set the marks of a model's thoughts; do nothing if ``start`` or ``end`` is missing.

    The tokenizer stores the marks, and saves them together with an adapter.

    Args:
        tokenizer: The tokenizer, which is changed in place.
        start: Text that opens a thought, such as ``<think>``.
        end: Text that closes a thought, such as ``</think>``.
    """
    if start and end:
        tokenizer.init_kwargs[GIVEN] = [start, end]


def opens_thought(tokenizer: Tokenizer | None, text: str) -> bool:
    """Return whether a prompt ends with the model's opening mark, so that it opens a thought.

    The mark is ``<think>`` if there is no tokenizer or the model belongs to no known family.
    """
    marks = thought_marks(tokenizer)
    start = THOUGHT_BEGINS if marks is None else marks.start.pattern
    return re.search(rf"(?:{start})\s*\Z", text) is not None


def completion_texts(tokenizer: Tokenizer, completion_ids: Sequence[list[int]]) -> list[str]:
    """Return the text of each completion, with its marks written ``<think>`` and ``</think>``."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor wraps its tokenizer
    marks = thought_marks(tokenizer)
    if marks is None:
        return tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    return list(map(marks.text, completion_ids))


def find_thoughts(
    marks: ThoughtMarks | None, turns: Sequence[list[int]], completion: object
) -> dict[str, int | None]:
    """Return the fields of ``completions.jsonl`` that describe the thoughts in a completion.

    ``tokens`` is the number of tokens in all turns. ``thought_tokens`` is the number of tokens in
    the thoughts of all turns. ``answer_at`` is the number of characters in the text of the last
    turn up to the end of its last closing mark, where the answer begins. The count refers to the
    text that is written to files, in which secrets are masked. ``thought_tokens`` and ``answer_at``
    are None if the last turn has no closing mark; ``answer_at`` is also None if the text does not
    match the tokens.

    Args:
        marks: Marks of the model's thoughts; None if they are unknown, so that no thought is found.
        turns: Token ids of each turn of the model, at least one.
        completion: The completion as text, or as a list of messages.
    """
    found = {"tokens": sum(map(len, turns)), "thought_tokens": None, "answer_at": None}
    if marks is None or (thought := marks.thought_of(turns)) is None:
        return found
    found["thought_tokens"] = len(thought)
    before = marks.text(turns[-1][: marks.end.places(turns[-1])[-1][1]])
    if text_of(completion).startswith(before):
        found["answer_at"] = len(redact(before))
    return found
