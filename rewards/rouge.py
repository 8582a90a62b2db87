"""Rewards for a summary: the words that it shares with a reference (ROUGE) or with its source."""

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from rloo_kit.text.wording import text_of
from rloo_kit.types import Score

from ._text import check_choices, n_grams
from .thinking import TextReward, part_text


@dataclass(frozen=True)
class Rouge(TextReward):
    """Reward the words that an answer shares with a reference summary.

    Range: [0.0, 1.0], higher is better. ROUGE-L counts the words of the longest common subsequence,
    ROUGE-1 the common words, and ROUGE-2 the common pairs of words. Precision is their share of the
    answer, recall their share of the reference, and F1 the harmonic mean of both. The answer is the
    text after the last ``</think>``. The score is 0.0 if the thought is not closed, and None if
    there is no reference.

    Source: Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries", with beta 1 and
    without stemming. Words are runs of letters and digits in lower case. On English text the scores
    are those of the package rouge-score.

    >>> columns = {"prompts": ["", ""], "reference": ["the cat sat on a mat"] * 2}
    >>> Rouge()(completions=["a cat sat on the mat", "a dog"], **columns)
    [0.6666666666666666, 0.25]
    >>> Rouge("1", "recall")(completions=["a cat sat on the mat", "a dog"], **columns)
    [1.0, 0.16666666666666666]
    """

    __name__ = "rouge"

    kind: Literal["L", "1", "2"] = "L"
    """Kind of ROUGE: ``L`` (longest common subsequence), ``1`` (words) or ``2`` (pairs of
    words)."""
    measure: Literal["f1", "precision", "recall"] = "f1"
    """``f1``, ``precision`` or ``recall``. Recall alone rewards long answers."""
    column: str = "reference"
    """Dataset column of the reference texts."""

    def __post_init__(self) -> None:
        """Check the kind and the measure."""
        object.__setattr__(self, "kind", str(self.kind))  # YAML reads 1 as a number
        check_choices(self)

    def _score(self, text: str, opened: bool, reference: object) -> Score:
        wanted = _words(reference) if isinstance(reference, str) else []
        if not wanted:
            return None
        given = _words(part_text(text, "answer", opened=opened) or "")
        if self.kind == "L":
            common = longest_common_subsequence(wanted, given)
        else:
            wanted, given = (n_grams(words, int(self.kind)) for words in (wanted, given))
            common = (Counter(wanted) & Counter(given)).total()
        sizes = {
            "precision": len(given),
            "recall": len(wanted),
            "f1": (len(given) + len(wanted)) / 2,  # F1 = 2PR / (P + R), simplified
        }
        return common / sizes[self.measure] if common else 0.0


_SHARED_WORDS = Rouge("1", "precision")


@dataclass(frozen=True)
class Coverage(TextReward):
    """Reward the share of the answer's words that are also in the source text.

    Range: [0.0, 1.0], higher is better. A word counts at most as often as it is in the source, so
    that repeating it earns nothing. The answer is the text after the last ``</think>``. The score
    is 0.0 if the thought is not closed or the answer has no words, and None if there is no source.
    The reward does not know which words matter, and an answer of a single word from the source
    scores 1.0. Therefore combine it with ``length_band``.

    Source: the coverage of Grusky et al. 2018, "Newsroom" (arXiv 1804.11283, section 4.1), with
    counts clipped as in ROUGE-1.

    >>> Coverage()(completions=["the cat sat", "a dog sat"], prompts=["Here the cat sat down."] * 2)
    [1.0, 0.3333333333333333]
    """

    __name__ = "coverage"
    _reads = ("prompts",)

    column: str | None = None
    """Dataset column of the source texts; None: the source is the prompt, or its last chat
    message."""

    def _score(self, text: str, opened: bool, source: object) -> Score:
        return _SHARED_WORDS._score(text, opened, text_of(source))


def longest_common_subsequence(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Return the length of the longest common subsequence of two sequences.

    The algorithm is that of Hyyrö 2004, "Bit-parallel LCS-length computation revisited". Dynamic
    programming computes a table of the lengths for every beginning of ``first`` (columns) and of
    ``second`` (rows). Here a row is an integer with one bit for each item of ``first``: 0 if the
    length increases at this item, and 1 if not.

    >>> longest_common_subsequence("abcbdab", "bdcaba")
    4
    """
    places: dict[Hashable, int] = {}
    for place, item in enumerate(first):
        places[item] = places.get(item, 0) | 1 << place
    # A row of the table is one integer, so that each word of `second` needs only one addition.
    full = row = (1 << len(first)) - 1
    for item in second:
        hits = row & places.get(item, 0)
        row = (row + hits | row - hits) & full
    return len(first) - row.bit_count()


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())
