"""Check of one value against its type and its rule; the message names the user's own key."""

import pkgutil
import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from rloo_kit.config.settings import Rule
from rloo_kit.text.wording import did_you_mean, format_value

NO_RULE = Rule()
STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def check_value(path: str, value: object, hint: Any, rule: Rule = NO_RULE) -> list[str]:
    """Return the error in a value: [] or one sentence that names its key.

    Args:
        path: The key, such as ``trainer.beta``.
        value: The value, as YAML gives it.
        hint: Type that the value must have; numbers are not converted from text.
        rule: Range and choices.
    """
    start = f"{path} is {format_value(value)},"
    bounds = Field(ge=rule.minimum, gt=rule.above, le=rule.maximum, lt=rule.below)
    kind: Any = Annotated[hint, bounds]  # pyright: ignore[reportInvalidTypeForm]  # made here
    try:
        TypeAdapter(kind, config=STRICT).validate_python(value)
    except ValidationError as exc:
        found = dict.fromkeys(error["msg"] for error in exc.errors())
        wanted = re.sub("(Input|List) should", "must", " or ".join(found))
        is_text = isinstance(value, str) and "a valid number" in wanted
        note = " (YAML reads 1e-5 as text: write 1.0e-5)" if is_text else ""
        return [f"{start} {wanted}{note}"]
    choices = rule.choices or (tuple(pkgutil.resolve_name(rule.table)) if rule.table else ())
    names = [str(choice) for choice in choices]
    for item in value if isinstance(value, list) else [value]:
        if choices and item is not None and item not in choices:
            wanted = f"must be among {', '.join(names)}{did_you_mean(item, names)}"
            return [f"{start} {rule.instead or wanted}"]
    return []


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name.

    It names a similar one, or else all known names. If these are more than 20, it asks the user to
    drop the name.
    """
    names = sorted(known)
    listed = f"; known are {', '.join(names)}" if len(names) <= 20 else "; drop it"
    return did_you_mean(name, names) or listed
