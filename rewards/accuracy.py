"""Reward for the expected answer after the thought: a text, a number, or the letter of a choice."""

import re
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Literal

from rloo_kit.types import Score

from ._text import check_choices, check_least, expected_text
from .thinking import AnswerReward, TextReward

# A number: an optional sign (not the hyphen after a word), digits (whole, or in groups of three),
# an optional decimal part and an optional exponent. ".5" is a number too
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[+-])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]{1,3})?"
)
# Between thousands: 72{,}000 and 72\,000 and 72,\!000 in LaTeX, and narrow spaces
_GROUP = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[,!]|,\\ |[\u2009\u202f])(?=[0-9]{3}(?![0-9]))")
# Not after the hyphen of a range, as in 5%-$10 and $20$-$30$
_CURRENCY_AFTER_SIGN = re.compile(
    r"(?<![\w.)%])(?<![0-9][$€£¥])(?<![0-9]\\[$])([-+])\\?[$€£¥](?=[0-9.])"
)
_DIGITS = "0123456789"
_OF_A_NUMBER = _DIGITS + "+-.,eE"
_MINUS = str.maketrans("\u2212\u2013\uff0d", "---")


def parse_number(text: str) -> Decimal | None:
    """Return the exact value of a text that is a number, or None if it is not a number.

    The number may have a sign, correct thousands separators, a decimal part, an exponent, and a
    full stop at the end. Nothing else may be in the text.

    >>> parse_number("1,234.50."), parse_number("$5"), parse_number("12,34")
    (Decimal('1234.50'), None, None)
    """
    match = _NUMBER.fullmatch(_plain(text).strip().removesuffix("."))
    return Decimal(match[0].replace(",", "")) if match else None


def _plain(text: str) -> str:
    """Return a text with ASCII minus signs, and with commas between thousands."""
    return _GROUP.sub(",", text.translate(_MINUS))


def last_number(text: str) -> Decimal | None:
    r"""Return the exact value of the last number in a text, or None if the text has no number.

    Numbers have ASCII digits, with or without thousands separators. A currency sign or a unit may
    be next to a number. A fraction counts as two numbers, and the exponent of ``cm^2`` counts as a
    number too.

    >>> last_number("6 + 6 = 12, so $1,234.50 in total."), last_number("from 5-3 to -2%")
    (Decimal('1234.50'), Decimal('-2'))
    >>> last_number("\\boxed{72{,}000}")
    Decimal('72000')
    """
    text = _CURRENCY_AFTER_SIGN.sub(r"\1", _plain(text))
    end = max(map(text.rfind, _DIGITS)) + 1
    if not end:
        return None
    # Search only the last run of characters that a number may have: a search from the left is slow.
    before = text[:end]
    start = len(before.rstrip(_OF_A_NUMBER))
    (*_, last) = _NUMBER.finditer(before, start)
    return Decimal(last[0].replace(",", ""))


# Only the end of an answer is searched for a letter
_MAX_CHOICE_CHARACTERS = 4000
# Counts are limited: a long run of the same mark would otherwise be searched from each mark
_NOT_IN_WORD = r"(?![A-Za-z0-9_'])"
_LETTER = (
    r"[\s*_:([{$\"'`]{0,12}(?:\\(?:boxed|text|textbf|mathbf|mathrm)\{[\s*(]{0,4}){0,3}"
    rf"([A-HJ-Z]|I(?!\s+[a-z])|(?<=\()[a-z](?=\))|(?<=\{{)[a-z](?=\}})"
    rf"|(?<=: )[a-z](?=[.)*]|\s*$)){_NOT_IN_WORD}"
)
# "Answer: B", "the answer is **(B)**", "\boxed{B}"; then "option B", "I pick B", which are weaker
# evidence, since a text may also discuss options; then "B is correct", "(B) is the right answer".
_STATED = [
    re.compile(rf"(?:{words}){_LETTER}", re.MULTILINE)
    for words in (
        r"\b(?i:answer)\b(?:\W{0,3}\b(?i:is|would be|to be)\b)?|\\boxed\{",
        r"\b(?i:option|choice|choose|pick|select)\b(?:\W{0,3}\b(?i:is|would be|to be)\b)?",
    )
] + [
    re.compile(
        r"(?<![A-Za-z0-9_'.])([A-HJ-Z])[)*]{0,3} "
        r"(?i:is (?:the )?(?:correct|right))\b(?!-| (?:of|next|angled?)\b)"
    )
]
# "(B)", "**B**", "**B. Paris**", and "B", "B.", "B) Paris" at the beginning of a line.
_MARKED = re.compile(
    r"[(\[{]\s{0,4}\*{0,2}([A-Z])\*{0,2}\s{0,4}[)\]}]|\*\*\(?([A-Z])(?:\)|\*\*|[.:])"
    r"|^[ \t]*([A-Z])(?:[.):]|[ \t]*$)",
    re.MULTILINE,
)
# A letter that stands alone. "I" before another word is a word itself, and so is an "A" that begins
# a sentence
_ALONE = re.compile(rf"(?<![A-Za-z0-9_'.])(?:[B-HJ-Z]|[AI](?!\s+\w)|(?<=[a-z,:] )A){_NOT_IN_WORD}")
_WHOLE = re.compile(r"[\s*(\[]*([A-Za-z])[\s*)\].:]*")


def chosen_letter(text: str) -> str | None:
    r"""Return the letter that an answer to a multiple-choice question chooses, or None.

    A text that consists of one letter, with or without brackets and asterisks, chooses that letter.
    For any other text, these rules are tried in order until one of them finds a letter:

    1. the last letter that is stated as the answer ("Answer: B", "\boxed{B}")
    2. the last letter that is stated as the choice ("option (B)", "I pick B")
    3. the last letter that is called correct or right ("B is correct", "(B) is the right answer")
    4. the last letter that is marked ("(B)", "**B**", or "B. Paris" at the beginning of a line)
    5. the only capital letter that stands alone as a word. An "I" before another word does not
       count. An "A" before another word counts only after a space that follows a lower-case letter,
       a comma or a colon.

    >>> [chosen_letter(text) for text in ("b", "(A) no. Answer: **B**", "I pick C.", "A cat or B?")]
    ['B', 'B', 'C', 'B']
    >>> chosen_letter("B or C"), chosen_letter("A cat")
    (None, None)
    """
    if whole := _WHOLE.fullmatch(text):
        return whole[1].upper()
    text = text[-_MAX_CHOICE_CHARACTERS:]
    for pattern in _STATED:
        if stated := [*pattern.finditer(text)]:
            return stated[-1][1].upper()
    if marked := [*_MARKED.finditer(text)]:
        return next(filter(None, marked[-1].groups()))
    alone = set(_ALONE.findall(text))
    return alone.pop() if len(alone) == 1 else None


@dataclass(frozen=True)
class Accuracy(TextReward, AnswerReward):
    """Reward the expected answer: 1.0 if it is given, 0.0 if not.

    The answer is all text after the last ``</think>``, without white space at its ends; ``match``
    decides how it is compared. The score is None if the expected answer is missing (None, NaN or
    blank). With ``match`` "number" or "choice", it is also None if the expected answer is not a
    number or not a letter. By default, a completion scores 0.0 if a thought is opened, in the
    prompt or in the completion, but not closed.

    >>> Accuracy()(completions=["2+2...</think>4", "5"], answer=[4, "4"])
    [1.0, 0.0]
    >>> Accuracy(column="total")(completions=["1,234."], total=[1234.0])
    [1.0]
    >>> Accuracy()(completions=["17"], prompts=["8 + 9 = <think>"], answer=["17"])
    [0.0]
    >>> Accuracy(match="number")(completions=["hm</think>It is 4 and not 5."], answer=["4"])
    [0.0]
    >>> Accuracy(match="choice")(completions=["hm</think>The answer is (B)."], answer=["B"])
    [1.0]
    """

    __name__ = "accuracy"

    column: str = "answer"
    """Dataset column of the expected answers."""
    match: Literal["auto", "exact", "number", "choice"] = "auto"
    """When the answer counts as right. ``auto``: it equals the expected text, or both are numbers
    with the same value (85 equals 85.0, and 1,234 equals 1234). ``exact``: it equals the expected
    text. ``number``: the last number in it equals the expected number. ``choice``: it chooses the
    expected letter."""
    tolerance: float = 0.0
    """With ``match: number``, the largest absolute difference between numbers that count as
    equal."""

    def __post_init__(self) -> None:
        """Check ``match``, and that ``tolerance`` is not negative and can have an effect."""
        check_choices(self)
        check_least(self, "tolerance", 0)
        if self.tolerance and self.match != "number":
            raise ValueError(
                f"tolerance {self.tolerance!r} has no meaning with match {self.match!r}; set match "
                "to 'number', or remove tolerance"
            )

    def _score(self, text: str, opened: bool, answer: object) -> Score:
        expected = expected_text(answer) or ""
        given = (self.answer(text, opened) or "").strip()
        if self.match == "choice":
            letter = _WHOLE.fullmatch(expected)
            return float(chosen_letter(given) == letter[1].upper()) if letter else None
        number = None if self.match == "exact" else parse_number(expected)
        if self.match == "number":
            if number is None:
                return None
            found = last_number(given)
            if found is None:
                return 0.0
            # Rounded to 28 digits, which never makes it 0, and infinite if it is too large
            difference = abs(Context(traps=[]).subtract(found, number))
            return float(difference <= Decimal(str(self.tolerance)))
        if not expected:
            return None
        return float(given == expected or (number is not None and parse_number(given) == number))


# The reward with its defaults
accuracy = Accuracy()
