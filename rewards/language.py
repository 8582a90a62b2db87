"""Reward for the share of a text that is in the wanted language."""

import functools
import importlib.util
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rloo_kit.errors import RewardLoadError
from rloo_kit.types import Score

from ._text import THINK_CLOSE, check_choices, check_least, is_unclosed
from .thinking import Part, TextReward, part_text

# Scripts, by the first words of the letters' Unicode names, and the languages written in them
_SCRIPTS = """
ARABIC ar fa ps ug ur
ARMENIAN hy
BENGALI as bn
CJK zh
CYRILLIC ba be bg kk ky mk mn ru sr tg tt uk
DEVANAGARI hi mr ne sa
ETHIOPIC am
GEORGIAN ka
GREEK el
GUJARATI gu
GURMUKHI pa
HANGUL ko
HEBREW he
KANA ja
KANNADA kn
KHMER km
LAO lo
LATIN af an az br bs ca cs cy da de en eo es et eu fi fo fr fy ga gd gl ha hr ht hu id ig is it jv
LATIN ku la lb lg ln lt lv mg ms mt nl nn no oc om pl pt qu ro rw se sk sl sn so sq st sv sw tk tl
LATIN tr uz vi vo wa xh yo zu
MALAYALAM ml
MYANMAR my
ORIYA or
SINHALA si
TAMIL ta
TELUGU te
THAI th
"""
_SCRIPT_OF = {
    code: script
    for script, *codes in map(str.split, _SCRIPTS.strip().split("\n"))
    for code in codes
}
# Languages that do not share their script with another language of the table
_ALONE = {code for code, script in _SCRIPT_OF.items() if [*_SCRIPT_OF.values()].count(script) == 1}
_NAMED_OTHERWISE = {
    "HIRAGANA": "KANA", "KATAKANA": "KANA", "KATAKANA-HIRAGANA": "KANA",
    "IDEOGRAPHIC": "CJK", "BOPOMOFO": "CJK",
}  # fmt: skip
# Languages that a short text does not distinguish; one is accepted for the other
_RELATIVES = [{"bs", "hr"}, {"id", "ms"}, {"nn", "no"}]

# A sentence with fewer letters is joined to the next one before its language is guessed. Of 60
# English fragments ("Units digit", "Tens digit plus carry"), 15 were taken for another language,
# and all of these had at most 18 letters.
_PASSAGE_LETTERS = 20

# Counts are limited: a long run of opening marks would otherwise be searched from each mark
_NOT_LANGUAGE = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`"  # code
    r"|\$[^$\n]{1,200}\$|\\[(\[].{0,200}?\\[)\]]|\\[A-Za-z]+"  # LaTeX
    r"|https?://\S+|</?[A-Za-z][^<>\n]{0,60}>|(?<!\w)[A-Za-z0-9]*_\w*"  # addresses, tags, names
    # a single letter of Latin, Greek or Cyrillic: a variable more often than a word
    r"|(?<![A-Za-z\u00aa-\u052f])[A-Za-z\u00aa-\u052f](?![A-Za-z\u00aa-\u052f])",
    re.DOTALL,
)
# Ends of sentences. White space must follow a full stop, so that "3.5" is not split.
_SENTENCE_END = re.compile(r"\.\s|[!?\n\u3002\u061f\u0964]")


@dataclass(frozen=True)
class Language(TextReward):
    """Reward the wanted language: the share of letters that belong to text in that language.

    Range: [0.0, 1.0], higher is better. By default only the thought is judged, even if it is not
    finished; ``part`` can choose the answer or the whole completion instead. The score is None if
    there is no such part, or if it has fewer than ``min_letters`` letters. Digits, punctuation,
    code, LaTeX, URLs, tags and single letters (variables) do not count. Source: the language
    consistency reward of DeepSeek-R1 (arXiv 2501.12948, section 2.3.2). That reward counts words;
    this one counts letters, since not every script separates words.

    Letters of another script never count as wanted. A language with its own script (Greek, Korean)
    is recognised by its letters. Chinese characters count as Japanese in a sentence with kana, and
    as Chinese in any other sentence. Many languages share a script (Latin, Cyrillic, Arabic,
    Devanagari, Bengali). For these, py3langid guesses the language of each sentence, after a short
    sentence has been joined to the next one. If the guess is not certain, the sentence counts as
    wanted. Each sentence gets one language, so foreign words inside it may be missed.

    >>> chinese, english = "\u56db\u52a0\u56db\u7b49\u4e8e\u516b", "so eight"
    >>> reward = Language("zh", min_letters=6)
    >>> reward(completions=[f"{chinese}</think>8", f"{chinese}, {chinese} {english}</think>8"])
    [1.0, 0.631578947368421]
    >>> reward(completions=["4 + 4 = 8</think>8"])
    [None]
    """

    __name__ = "language"

    language: str = "en"
    """ISO 639-1 code of the wanted language. In YAML, write Norwegian as "no" in quotes, since YAML
    reads no without quotes as false."""
    part: Part = "thought"
    """Part of the completion that is judged: ``completion`` (all of it), ``thought`` or
    ``answer``."""
    min_letters: int = 20
    """Fewest letters that the part must have to be judged; with fewer, the score is None."""

    def __post_init__(self) -> None:
        """Check the parameters, and that py3langid is installed if the language needs it."""
        if self.language not in _SCRIPT_OF:
            raise ValueError(
                f"language is {self.language!r}, which cannot be recognised; give one of: "
                f"{', '.join(sorted(_SCRIPT_OF))} (in YAML quote 'no')"
            )
        check_choices(self)
        check_least(self, "min_letters", 1)
        if self.language not in _ALONE and importlib.util.find_spec("py3langid") is None:
            raise RewardLoadError(
                f"reward {self.__name__!r} recognises {self.language!r} with "
                "py3langid, which is not installed; pip install py3langid"
            )

    def _score(self, text: str, opened: bool) -> Score:
        if self.part == "thought" and THINK_CLOSE not in text and is_unclosed(text, opened=opened):
            text += THINK_CLOSE
        part = part_text(text, self.part, opened=opened)
        if part is None:
            return None
        words = _NOT_LANGUAGE.sub(" ", unicodedata.normalize("NFKC", part))
        wanted = total = 0
        sentences = _SENTENCE_END.split(words)
        if self.language not in _ALONE:
            sentences = _joined(sentences, _SCRIPT_OF[self.language])
        for passage in sentences:
            letters = _letters(passage)
            total += letters.total()
            wanted += self._wanted(passage, letters)
        return wanted / total if total >= self.min_letters else None

    def _wanted(self, passage: str, letters: Counter[str]) -> int:
        """Return how many letters of a passage count as text in the wanted language.

        Args:
            passage: A sentence, or short sentences that were joined.
            letters: Number of its letters by script.
        """
        script = _SCRIPT_OF[self.language]
        if self.language == "ja":
            return letters["KANA"] + letters["CJK"] if letters["KANA"] else 0
        if self.language == "zh":
            return 0 if letters["KANA"] else letters["CJK"]
        if self.language in _ALONE or not letters[script]:
            return letters[script]
        own = "".join(character for character in passage if _script(character) in (script, ""))
        return letters[script] if _is_in(own, self.language) else 0


@functools.cache
def _script(character: str) -> str:
    """Return the script of a letter, or "" if the character is not a letter."""
    if not character.isalpha():
        return ""
    first = unicodedata.name(character, "UNKNOWN").split()[0]
    return _NAMED_OTHERWISE.get(first, first)


def _letters(text: str) -> Counter[str]:
    """Count the letters of a text by script."""
    return Counter(filter(None, map(_script, text)))


def _joined(sentences: Iterable[str], script: str) -> Iterator[str]:
    """Yield the sentences, after joining short ones until each has enough letters of the script.

    A short sentence is joined to the next one, and at the end of the text to the one before it.
    """
    full: list[str] = []
    waiting: list[str] = []
    count = 0
    for sentence in sentences:
        waiting.append(sentence)
        count += _letters(sentence)[script]
        if count >= _PASSAGE_LETTERS:
            if full:
                yield "\n".join(full)
            full = waiting
            waiting = []
            count = 0
    yield "\n".join([*full, *waiting])


@functools.cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def _is_in(text: str, language: str) -> bool:
    """Return whether a text may be in a language.

    False means that py3langid finds another language more than twice as likely.
    """
    passing = next((group for group in _RELATIVES if language in group), {language})
    likely = dict(_identifier().rank(text))
    best = max(likely.pop(code) for code in passing)
    return 2 * best >= max(likely.values())


def __getattr__(name: str) -> Language:
    """Create the reward with its defaults when ``language`` is read from this module.

    The reward is not created on import, because it needs py3langid and the module does not.
    """
    if name == "language":
        return Language()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
