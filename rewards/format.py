"""Rewards for a format: a regular expression, a sequence of tags, or a JSON schema."""

import functools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import regex  # re has no time limit; transformers needs this package too

from rloo_kit.errors import RewardLoadError

from ._text import THINK_OPEN, check_choices
from .thinking import TextReward, part_text

Part = Literal["completion", "answer"]

_MATCH_SECONDS = 0.2
_TAG_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_FENCED = re.compile(r"```(?:[jJ][sS][oO][nN])?[ \t]*\n(.*)```", re.DOTALL)


@dataclass(frozen=True)
class RegexFormat(TextReward):
    r"""Reward a completion that matches a regular expression: 1.0 if it does, 0.0 if not.

    The expression must match the whole text or, with ``full=False``, any part of it. The syntax is
    that of Python's ``re``, and a dot also matches line ends. White space at the ends of the text
    is removed first. A ``<think>`` in the prompt is not part of the completion. With
    ``part`` "answer", only the text after the thought is matched, and a completion whose thought is
    not closed scores 0.0.

    If matching takes longer than a fifth of a second, the completion scores 0.0.

    >>> RegexFormat(r"<think>.*</think>\s*\d+")(completions=["<think>a\nb</think>\n4", "4"])
    [1.0, 0.0]
    >>> RegexFormat("[0-9]+", part="answer")(completions=["so</think> 4\n", "so</think>It is 4."])
    [1.0, 0.0]
    >>> RegexFormat("[0-9]+", full=False, part="answer")(completions=["so</think>It is 4."])
    [1.0]
    """

    __name__ = "format"

    pattern: str
    """The regular expression."""
    full: bool = True
    """True (or None with ``pattern``): the pattern must match the whole text. False: it may match
    anywhere in the text."""
    part: Part = "completion"
    """Text to match: ``completion`` (all of it), or ``answer`` (after the last ``</think>``)."""

    def __post_init__(self) -> None:
        """Check that the pattern is a regular expression and that ``part`` is known."""
        try:
            regex.compile(self.pattern)
        except (TypeError, regex.error) as exc:
            raise ValueError(
                f"pattern {self.pattern!r} is not a regular expression ({exc}); correct it, and "
                "use single quotes in YAML, which keep backslashes"
            ) from exc
        check_choices(self)

    def _score(self, text: str, opened: bool) -> float:
        part = part_text(text, self.part, opened=opened)
        return float(part is not None and _matches(self.pattern, part.strip(), full=self.full))


@dataclass(frozen=True)
class TagFormat(TextReward):
    """Reward a completion that consists of given XML tags in order: 1.0 if it does, 0.0 if not.

    Each tag must be opened and closed exactly once, before the next one is opened. A tag may
    contain anything except another of these tags, and only white space may be outside the tags. If
    the prompt opens the thought and ``think`` is the first tag, the ``<think>`` of the prompt
    counts as the beginning of the completion. Tags with attributes do not count as tags.

    >>> reward = TagFormat(tags=("think", "answer"))
    >>> reward(completions=["<think>hm</think> <answer>4</answer>", "<answer>4</answer>"])
    [1.0, 0.0]
    >>> reward(completions=["hm</think><answer>4</answer>"], prompts=["2 + 2 = <think>"])
    [1.0]
    >>> TagFormat(tags="answer", part="answer")(completions=["hm</think><answer>4</answer>"])
    [1.0]
    """

    __name__ = "format"

    tags: tuple[str, ...]
    """Names of the tags in order, without brackets."""
    part: Part = "completion"
    """Text to check: ``completion`` (all of it), or ``answer`` (after the last ``</think>``)."""

    def __post_init__(self) -> None:
        """Convert a list or a single name to a tuple, and check the names."""
        names = (self.tags,) if isinstance(self.tags, str) else tuple(self.tags)
        for name in names:
            if not isinstance(name, str) or not _TAG_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} in tags is not the name of a tag; write it without brackets, such "
                    "as 'answer'"
                )
        if not names or len(set(names)) < len(names):
            raise ValueError(f"tags is {self.tags!r}; give one or more names, each once")
        check_choices(self)
        object.__setattr__(self, "tags", names)

    def _score(self, text: str, opened: bool) -> float:
        part = part_text(text, self.part, opened=opened)
        if part is None:
            return 0.0
        # The <think> at the end of the prompt is the first tag
        if opened and self.part == "completion" and self.tags[0] == "think":
            part = THINK_OPEN + part
        names = "|".join(map(re.escape, self.tags))
        inside = rf"(?:(?!</?(?:{names})>).)*+"  # anything but one of the tags
        elements = (f"<{name}>{inside}</{name}>" for name in map(re.escape, self.tags))
        return float(bool(re.fullmatch(r"\s*+".join(["", *elements, ""]), part, re.DOTALL)))


@dataclass(frozen=True)
class JsonFormat(TextReward):
    """Reward an answer that is JSON and valid under a JSON schema: 1.0 if it is, 0.0 if not.

    The answer is all text after the last ``</think>``, without white space at its ends. It must be
    only JSON, or one block of JSON between ``` fences. A completion whose thought is not closed has
    no answer and scores 0.0. NaN and infinite numbers are not JSON. The key ``$schema`` of the
    schema names its draft (default: 2020-12). References are resolved only inside the schema, never
    over the network. Matching a ``pattern`` has the same time limit as in ``RegexFormat``.

    >>> reward = JsonFormat(schema={"type": "object", "required": ["total"]})
    >>> reward(completions=['hm</think>{"total": 4}', 'hm</think>{"sum": 4}', "hm</think>4"])
    [1.0, 0.0, 0.0]
    """

    __name__ = "format"

    schema: dict[str, Any] | bool = field(hash=False)
    """The JSON schema; ``{}`` accepts any JSON."""

    def __post_init__(self) -> None:
        """Check the schema, and store a copy that later changes of the original do not affect."""
        try:
            text = json.dumps(self.schema, sort_keys=True)
            _validator(text)
        except (TypeError, ValueError) as exc:
            raise ValueError(
                f"schema {self.schema!r} is not a JSON schema ({exc}); give a table such as "
                "{type: object, required: [total]}"
            ) from exc
        object.__setattr__(self, "schema", json.loads(text))

    def _score(self, text: str, opened: bool) -> float:
        answer = (part_text(text, "answer", opened=opened) or "").strip()
        fenced = _FENCED.fullmatch(answer)
        try:
            value = json.loads(
                fenced[1] if fenced else answer, parse_constant=_finite, parse_float=_finite
            )
            validator = _validator(json.dumps(self.schema, sort_keys=True))
            return float(validator.is_valid(value))
        # Not JSON, or numbers or nesting beyond what can be read or checked
        except (ValueError, OverflowError, RecursionError):
            return 0.0


def make_format(
    *,
    pattern: str | None = None,
    tags: Sequence[str] | None = None,
    schema: dict[str, Any] | bool | None = None,
    full: bool | None = None,
    part: Part | None = None,
) -> RegexFormat | TagFormat | JsonFormat:
    r"""Reward a completion in a given format: a regular expression, a sequence of tags, or JSON.

    Give exactly one of ``pattern``, ``tags`` and ``schema``. The function returns the reward:
    ``RegexFormat`` for a pattern, ``TagFormat`` for tags, or ``JsonFormat`` for a schema. The
    reward scores a completion in this format 1.0, and any other 0.0.

    >>> make_format(tags=["think", "answer"])
    TagFormat(thought_opened=None, tags=('think', 'answer'), part='completion')
    >>> make_format(pattern=r"\d+", part="answer").pattern
    '\\d+'

    Raises:
        ValueError: No format or more than one is given, or a parameter has no effect on the format.
    """
    kinds: dict[str, Any] = {"pattern": RegexFormat, "tags": TagFormat, "schema": JsonFormat}
    settings = {"pattern": pattern, "tags": tags, "schema": schema, "full": full, "part": part}
    settings = {name: value for name, value in settings.items() if value is not None}
    given = [name for name in kinds if name in settings]
    if len(given) != 1:
        raise ValueError(
            f"reward 'format' has {' and '.join(given) or 'no format'}; give exactly one of "
            "pattern, tags and schema"
        )
    kind = kinds[given[0]]
    for name in settings.keys() - kind.__dataclass_fields__:
        raise ValueError(f"{name} has no effect on {given[0]!r}; remove it")
    return kind(**settings)


def _matches(pattern: str, text: str, *, full: bool) -> bool:
    """Return whether a pattern matches a text within the time limit.

    It must match the whole text if ``full`` is set, else any part of it.
    """
    compiled = regex.compile(pattern, regex.DOTALL)
    try:
        match = compiled.fullmatch if full else compiled.search
        return match(text, timeout=_MATCH_SECONDS) is not None
    except TimeoutError:
        return False


@functools.lru_cache(maxsize=16)
def _validator(schema: str) -> Any:
    """Return a jsonschema validator for a schema, which is given as JSON text.

    Raises:
        RewardLoadError: The package jsonschema is missing.
        ValueError: The schema is invalid.
    """
    try:
        import jsonschema.validators
        import referencing.jsonschema
    except ImportError as exc:
        raise RewardLoadError(
            "reward 'format' checks a schema with jsonschema, which is not installed; "
            "pip install jsonschema"
        ) from exc
    loaded = json.loads(schema)
    registry = referencing.jsonschema.EMPTY_REGISTRY
    kind = jsonschema.validators.validator_for(loaded, jsonschema.Draft202012Validator)
    try:
        kind.check_schema(loaded)
    except jsonschema.SchemaError as exc:
        raise ValueError(exc.message) from exc
    draft = referencing.jsonschema.specification_with(kind.META_SCHEMA["$schema"])
    root = draft.create_resource(loaded)
    _check_references(root, registry.resolver_with_root(root))
    timed = jsonschema.validators.extend(kind, {"pattern": _check_pattern})
    return timed(loaded, registry=registry)


def _check_references(schema: Any, resolver: Any) -> None:
    """Check that the references of a schema lead to a place inside it.

    Args:
        schema: A ``referencing.Resource``.
        resolver: A ``referencing`` resolver, whose base is this schema or a schema that contains
            it.

    Raises:
        ValueError: A reference leads outside the schema, or cannot be resolved.
    """
    from referencing.exceptions import Unresolvable

    contents = schema.contents
    if not isinstance(contents, dict):  # true, false, or a list of names
        return
    for name in ("$ref", "$dynamicRef"):
        try:
            if name in contents:
                resolver.lookup(contents[name])
        except (Unresolvable, AttributeError) as exc:  # AttributeError: it is no text
            raise ValueError(f"it refers to {contents[name]!r}, which it does not contain") from exc
    for part in schema.subresources():
        is_schema = isinstance(part.contents, dict)
        _check_references(part, resolver.in_subresource(part) if is_schema else resolver)


def _check_pattern(_validator: object, pattern: str, instance: object, _schema: object) -> Any:
    """Yield an error if a schema's ``pattern`` is not found in a text within the time limit."""
    import jsonschema

    if isinstance(instance, str) and not _matches(pattern, instance, full=False):
        yield jsonschema.ValidationError("the pattern is not found")


def _finite(text: str) -> float:
    """Return a number in JSON as a float.

    Raises:
        ValueError: It is NaN, infinite, or too large for a float.
    """
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number
