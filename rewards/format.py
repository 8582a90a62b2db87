"""Format: the completion fits a regular expression, a row of tags, or a JSON schema."""

import functools
import importlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar, Literal, get_args

from rloo_kit.errors import RewardLoadError
from rloo_kit.types import Completion, Score

from ._checks import check_choice
from ._text import THINK_OPEN
from .thinking import TemplateAware, part_text

Part = Literal["completion", "answer"]

_TAG_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_FENCED = re.compile(r"```(?:[jJ][sS][oO][nN])?[ \t]*\n(.*)```", re.DOTALL)


@dataclass(frozen=True)
class _Format(TemplateAware):
    """What the formats share: the part they look at, and how they are called."""

    __name__: ClassVar[str] = "format"

    def __call__(
        self,
        completions: list[Completion],
        prompts: list[Completion] | None = None,
        **_: object,
    ) -> list[Score]:
        """Return one score per completion, in {0.0, 1.0}."""
        fits = self._test()
        return [float(fits(text, opened)) for text, opened in self.rows(completions, prompts)]

    def _test(self) -> Callable[[str, bool], bool]:
        """Return what says of a text, and of who opened its thought, whether it fits."""
        raise NotImplementedError


@dataclass(frozen=True)
class RegexFormat(_Format):
    r"""Reward a completion that fits a regular expression: 1.0 if it does, 0.0 if not.

    White space at the ends of the part is cut off first, a dot matches line ends too, and the
    syntax is that of Python's ``re``. A ``<think>`` that stands in the prompt is no part of the
    completion; ``part`` "answer" leaves the whole thought out, and a completion whose thought is
    not closed then scores 0.0.

    A pattern that takes longer than ``timeout`` on a completion scores it 0.0, where the package
    ``regex`` is there to stop it (transformers brings it); without it a pattern that backtracks
    without end is not stopped.

    >>> RegexFormat(r"<think>.*</think>\s*\d+")(completions=["<think>a\nb</think>\n4", "4"])
    [1.0, 0.0]
    >>> RegexFormat("[0-9]+", part="answer")(completions=["so</think> 4\n", "so</think>It is 4."])
    [1.0, 0.0]
    >>> RegexFormat("[0-9]+", full=False, part="answer")(completions=["so</think>It is 4."])
    [1.0]
    """

    pattern: str
    """The regular expression."""
    full: bool = True
    """Whether it must match the whole part, or be found anywhere in it."""
    part: Part = "completion"
    """``completion``, or ``answer``: what follows the last ``</think>``."""
    timeout: float = 0.2
    """Seconds of computing that one completion may take."""

    def __post_init__(self) -> None:
        """Refuse a bad pattern, another part, and a time limit that is none."""
        try:
            _compiled(self.pattern)
        except (TypeError, _engine().error) as exc:
            raise ValueError(
                f"pattern {self.pattern!r} is no regular expression ({exc}); correct it, and mind "
                "that YAML keeps backslashes in single quotes"
            ) from exc
        check_choice("part", self.part, get_args(Part))
        if not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise ValueError(
                f"timeout is {self.timeout!r}; give a finite number of seconds above 0"
            )

    def _test(self) -> Callable[[str, bool], bool]:
        pattern = _compiled(self.pattern)
        match = pattern.fullmatch if self.full else pattern.search
        limit = {} if _engine() is re else {"timeout": self.timeout}

        def fits(text: str, opened: bool) -> bool:
            part = part_text(text, self.part, opened=opened)
            try:
                return part is not None and match(part.strip(), **limit) is not None
            except TimeoutError:
                return False

        return fits


@dataclass(frozen=True)
class TagFormat(_Format):
    """Reward XML tags, each exactly once, in order, with nothing outside: 1.0 if so, 0.0 if not.

    Each tag is opened and closed once, before the next one is opened; inside anything may stand
    but another of these tags, outside only white space. Where the thought is opened in the prompt
    and ``think`` is the first tag, that ``<think>`` counts as the completion's beginning. Tags with
    attributes are not read as tags.

    >>> reward = TagFormat(tags=("think", "answer"))
    >>> reward(completions=["<think>hm</think> <answer>4</answer>", "<answer>4</answer>"])
    [1.0, 0.0]
    >>> reward(completions=["hm</think><answer>4</answer>"], prompts=["2 + 2 = <think>"])
    [1.0]
    >>> TagFormat(tags="answer", part="answer")(completions=["hm</think><answer>4</answer>"])
    [1.0]
    """

    tags: tuple[str, ...]
    """Names of the tags, without brackets."""
    part: Part = "completion"
    """``completion``, or ``answer``: what follows the last ``</think>``."""

    def __post_init__(self) -> None:
        """Take a list or a single name, and refuse names that are none or come twice."""
        given: object = self.tags
        names = (given,) if isinstance(given, str) else given
        if not isinstance(names, Sequence) or not names:
            raise ValueError(f"tags is {given!r}, not a list of names; give one name or more")
        for name in names:
            if not isinstance(name, str) or not _TAG_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} in tags is no name of a tag; write it without brackets, such as "
                    "'answer'"
                )
        if len(set(names)) < len(names):
            raise ValueError(f"tags {given!r} names one twice; each stands once, so name it once")
        check_choice("part", self.part, get_args(Part))
        object.__setattr__(self, "tags", tuple(names))

    def _test(self) -> Callable[[str, bool], bool]:
        marks = [(f"<{name}>", f"</{name}>") for name in self.tags]
        may_begin_in_prompt = self.part == "completion" and marks[0][0] == THINK_OPEN

        def fits(text: str, opened: bool) -> bool:
            part = part_text(text, self.part, opened=opened)
            if part is None:
                return False
            return _stand_in_order(
                THINK_OPEN + part if opened and may_begin_in_prompt else part, marks
            )

        return fits


@dataclass(frozen=True)
class JsonFormat(_Format):
    """Reward an answer that is JSON and valid under a JSON schema: 1.0 if it is, 0.0 if not.

    The answer is all that follows the last ``</think>``, white space at its ends aside: JSON
    itself, or one ``` fence, with or without ``json``, and nothing else. A thought that is not
    closed leaves no answer and scores 0.0. NaN and infinite numbers are no JSON. The schema's
    ``$schema`` says which draft it is written in (without one: 2020-12); references are followed
    inside the schema alone, and no network is asked. A ``pattern`` in it is searched for with the
    time limit of ``RegexFormat``.

    >>> reward = JsonFormat(schema={"type": "object", "required": ["total"]})
    >>> reward(completions=['hm</think>{"total": 4}', 'hm</think>{"sum": 4}', "hm</think>4"])
    [1.0, 0.0, 0.0]
    """

    schema: dict[str, Any] | bool = field(hash=False)
    """The JSON schema; ``{}`` is any JSON."""

    def __post_init__(self) -> None:
        """Refuse a schema that is none, and keep a copy of it that nobody else holds.

        Raises:
            ValueError: The schema is no JSON schema.
            RewardLoadError: The library that checks it is not installed.
        """
        try:
            text = json.dumps(self.schema, sort_keys=True)
            _validator(text)
        except (TypeError, ValueError) as exc:
            raise ValueError(
                f"schema {self.schema!r} is no JSON schema ({exc}); give a table such as "
                "{type: object, required: [total]}"
            ) from exc
        object.__setattr__(self, "schema", json.loads(text))

    def _test(self) -> Callable[[str, bool], bool]:
        validator = _validator(json.dumps(self.schema, sort_keys=True))

        def fits(text: str, opened: bool) -> bool:
            answer = part_text(text, "answer", opened=opened)
            if answer is None:
                return False
            try:
                value = _read_json(_unfenced(answer.strip()))
            except (ValueError, RecursionError):  # no JSON, or nested beyond what can be read
                return False
            try:
                return validator.is_valid(value)
            except (OverflowError, RecursionError):  # numbers or nesting beyond what it can check
                return False

        return fits


def make_format(
    *,
    pattern: str | None = None,
    tags: Sequence[str] | None = None,
    schema: dict[str, Any] | bool | None = None,
    full: bool | None = None,
    part: Part | None = None,
    timeout: float | None = None,
) -> RegexFormat | TagFormat | JsonFormat:
    r"""Reward a completion in a given format: a regular expression, a row of tags, or JSON.

    Give exactly one of ``pattern`` (``RegexFormat``), ``tags`` (``TagFormat``) and ``schema``
    (``JsonFormat``). A completion in the format scores 1.0, any other 0.0.

    >>> make_format(tags=["think", "answer"])
    TagFormat(thought_opened=None, tags=('think', 'answer'), part='completion')
    >>> make_format(pattern=r"\d+", part="answer").pattern
    '\\d+'

    Raises:
        ValueError: None or several of them are given, or a parameter does not go with it.
        RewardLoadError: The library that checks JSON schemas is not installed.
    """
    kinds: dict[str, tuple[type, Any, tuple[str, ...]]] = {
        "pattern": (RegexFormat, pattern, ("full", "part", "timeout")),
        "tags": (TagFormat, tags, ("part",)),
        "schema": (JsonFormat, schema, ()),
    }
    given = [name for name, (_, value, _) in kinds.items() if value is not None]
    if len(given) != 1:
        raise ValueError(
            f"reward 'format' is given {' and '.join(given) or 'no format'}; give exactly one of "
            "pattern, tags and schema"
        )
    kind, value, taken = kinds[given[0]]
    settings = {"full": full, "part": part, "timeout": timeout}
    settings = {name: setting for name, setting in settings.items() if setting is not None}
    for name in settings:
        if name not in taken:
            raise ValueError(f"{name} has no meaning for {given[0]!r}; remove it")
    return kind(**{given[0]: value}, **settings)


# --- regular expressions -----------------------------------------------------------------------


def _engine() -> ModuleType:
    """Return the package regex, which can be given a time limit, or re where it is not there."""
    try:
        return importlib.import_module("regex")
    except ImportError:
        return re


def _compiled(pattern: str) -> Any:
    return _engine().compile(pattern, re.DOTALL)


# --- tags --------------------------------------------------------------------------------------


def _stand_in_order(text: str, marks: list[tuple[str, str]]) -> bool:
    """Return whether each pair stands once in the text, one after the other, and nothing else."""
    end = 0
    for opening, closing in marks:
        if text.count(opening) != 1 or text.count(closing) != 1:
            return False
        start, close = text.find(opening), text.find(closing)
        if not end <= start < close or text[end:start].strip():
            return False
        end = close + len(closing)
    return not text[end:].strip()


# --- JSON --------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def _validator(schema: str) -> Any:
    """Return the validator of a schema written as JSON.

    Raises:
        ValueError: It is no JSON schema.
        RewardLoadError: jsonschema is not installed.
    """
    try:
        import jsonschema
        import jsonschema.validators
        import referencing.jsonschema
    except ImportError as exc:
        raise RewardLoadError(
            "reward 'format' checks a schema with jsonschema, which is not installed; "
            'pip install "rloo-kit[rewards]"'
        ) from exc
    loaded = json.loads(schema)
    kind = jsonschema.validators.validator_for(loaded, jsonschema.Draft202012Validator)
    try:
        kind.check_schema(loaded)
    except jsonschema.SchemaError as exc:
        raise ValueError(exc.message) from exc
    timed = jsonschema.validators.extend(kind, {"pattern": _check_pattern})
    return timed(loaded, registry=referencing.jsonschema.EMPTY_REGISTRY)


def _check_pattern(_validator: Any, pattern: str, instance: Any, _schema: Any) -> Any:
    """Yield the fault of a string that a schema's ``pattern`` is not found in."""
    import jsonschema

    if isinstance(instance, str):
        fits = RegexFormat(pattern, full=False)._test()
        if not fits(instance, False):
            yield jsonschema.ValidationError("the pattern is not found")


def _unfenced(text: str) -> str:
    """Return what stands in a text that is one fence; any other text as it is."""
    fenced = _FENCED.fullmatch(text)
    return fenced[1] if fenced else text


def _read_json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is beyond any float")
    return number
