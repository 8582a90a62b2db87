"""Check one setting against its type and its rule; a message names the key that the user wrote."""

import pkgutil
import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from rloo_kit.config.settings import Rule
from rloo_kit.text.wording import did_you_mean, format_value

STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def check_value(path: str, value: object, hint: Any, rule: Rule) -> list[str]:
    """Return a list with the error message for an invalid value, or [] if the value is valid.

    Args:
        path: The key, such as ``trainer.beta``; the message begins with it.
        value: The value, as YAML returns it.
        hint: Type that the value must have. A number given as a string is an error.
        rule: Allowed range and choices.
    """
    start = f"{path} is {format_value(value)},"
    bounds = Field(ge=rule.minimum, gt=rule.above, le=rule.maximum, lt=rule.below)
    kind: Any = Annotated[hint, bounds]  # pyright: ignore[reportInvalidTypeForm]  # made here
    try:
        TypeAdapter(kind, config=STRICT).validate_python(value)
    except ValidationError as exc:
        found = dict.fromkeys(error["msg"] for error in exc.errors())
        wanted = re.sub("(Input|List) should", "must", " or ".join(found))
        wanted = wanted.replace("Invalid JSON", "valid JSON")
        is_text = isinstance(value, str) and "a valid number" in wanted
        note = " (YAML reads 1e-5 as text: write 1.0e-5)" if is_text else ""
        return [f"{start} {wanted}{note}"]
    choices = pkgutil.resolve_name(rule.table) if rule.table else rule.choices
    for item in value if isinstance(value, list) else [value]:
        if choices and item is not None and item not in choices:
            names = [str(choice) for choice in choices]
            wanted = f"must be among {', '.join(names)}{did_you_mean(item, names)}"
            return [f"{start} {rule.instead or wanted}"]
    return []


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name.

    The text suggests the most similar known name. If no known name is similar, it lists all of
    them, or says "drop it" if there are more than 20.
    """
    names = sorted(known)
    listed = f"; known are {', '.join(names)}" if len(names) <= 20 else "; drop it"
    return did_you_mean(name, names) or listed
