"""Functions that mask secrets in text before the kit prints it or writes it to a file.

A secret is replaced by ``[hidden: NAME]`` or ``[hidden]``. Two kinds of text are masked. The first
kind is known values: environment variables, variables of ``.env`` and settings whose names mark
them as secret. The second kind is text that looks like a secret: ``hf_...``, ``Bearer ...``, or a
password in a URL.
"""

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

# A text with fewer characters is never treated as a secret
MIN_LENGTH = 8
HIDDEN = re.compile(r"\[hidden(?:: [\w.-]{1,64})?\]")

# --- names and values of secrets -----------------------------------------------------------------

# Names whose value is always a secret. They are matched in lower case, with `_` between words.
ALWAYS_SECRET = re.compile(
    r"passw(or)?d|passphrase|secret|credential|api_?keys?(?![a-z])"
    r"|(access|api|auth|hf|hub|bot|refresh|bearer|session)_?token(?![a-z])"
    r"|(access|private|auth|account|encryption|signing|master)_key(?![a-z])"
)
# Words that mark a value as a secret, unless the value is plain. The name of a setting must end
# with the word; the name of an environment variable may have it anywhere.
OFTEN_SECRET = "(?<![a-z])(auth|authorization|bearer|cookie|jwt|key|pass|pat|pwd|token)"
OFTEN_SECRET_SETTING = re.compile(f"{OFTEN_SECRET}$")
OFTEN_SECRET_VARIABLE = re.compile(f"{OFTEN_SECRET}(?![a-z])")
# Names of facts about a secret, such as its length or file
NOT_THE_VALUE = re.compile(
    "(?<![a-z])(public(?![a-z])|(column|dir|endpoint|env|field|file|format|length|limit|name|path"
    "|size|sock|timeout|type|url)$)"
)
# Names of identifiers, and of tokens of a vocabulary
NO_SECRET = re.compile(
    "(?<![a-z])(id$|(bos|cls|end|eos|image|mask|pad|per|sep|special|start|stop|think|unk)_(.*_)?token(?![a-z]))"
)
# Values without letters, values of one word, and paths
PLAIN = re.compile(r"[\W\d_]*|\D{0,15}|[~.]{0,2}/\D*")


def is_secret_name(name: str) -> bool:
    """Return whether the name of a variable or setting marks its value as a secret."""
    return _how_secret(name) is not None


@lru_cache(maxsize=4096)
def _how_secret(name: str) -> str | None:
    """Return whether the value of a name is a secret: ``always``, ``often`` or None (never).

    The value of an ``often`` name is a secret unless it is plain (see ``is_plain``).
    """
    last = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rsplit(".", 1)[-1]).lower()
    words = "_".join(re.findall("[a-z]+", last))
    if NOT_THE_VALUE.search(words):
        return None
    if ALWAYS_SECRET.search(words):
        return "always"
    often = OFTEN_SECRET_VARIABLE if name.isupper() else OFTEN_SECRET_SETTING
    return "often" if often.search(words) and not NO_SECRET.search(words) else None


def is_plain(value: str) -> bool:
    """Return whether a value is too ordinary to be a secret.

    Plain values are texts of less than 8 characters, texts of at most 15 characters without a
    digit, texts without letters (such as numbers and dates), paths without a digit, URLs without a
    password, and masks.
    """
    text = value.strip()
    if len(text) < MIN_LENGTH or _is_hidden(text):
        return True
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        return not any(_passwords_in(text))
    return bool(PLAIN.fullmatch(text))  # no digits in a path: a base64 key may begin with / too


# --- known values --------------------------------------------------------------------------------

# Text of a secret -> text that replaces it
_known: dict[str, str] = {}


def remember_secret(value: str, name: str = "") -> None:
    """Mask a secret from now on, wherever it occurs in a text.

    A plain value (see ``is_plain``) is not masked, since this would hide ordinary words and
    numbers.

    Args:
        value: The secret.
        name: Name of the setting or variable, which the mask shows; "" for a mask without a name.
    """
    text = value.strip()
    if text in _known or is_plain(text):
        return
    # The secret as it is written in plain text, in JSON and in a URL
    forms = {text, repr(text)[1:-1], quote(text), quote(text, safe="")}
    forms |= {json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
    for form in forms:
        _known.setdefault(form, _label(name))


def remember_settings(settings: object, name: str = "") -> None:
    """Search nested dicts and lists for secrets, and mask each of them from now on.

    A text is a secret if its key marks it as one (see ``is_secret_name``). The password in a URL is
    a secret under any key.

    Args:
        settings: Dict, list or tuple to search, or a single value.
        name: Key under which a dict holds ``settings``; "" if there is none.
    """
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            remember_settings(value, str(key))
    elif isinstance(settings, list | tuple):
        for value in settings:
            remember_settings(value, name)
    elif isinstance(settings, str) and is_secret_name(name):
        remember_secret(settings, name)
    elif isinstance(settings, str):
        for password in _passwords_in(settings):
            remember_secret(password, "password")


def remember_arguments(arguments: Iterable[str]) -> None:
    """Mask the secrets among the ``name=value`` arguments of a command from now on."""
    for argument in arguments:
        name, _, value = argument.partition("=")
        remember_settings(value.strip("'\" "), name)


def _remember_environment() -> None:
    remember_settings({**os.environ, "PWD": ""})  # PWD is the working folder, not a password


def _label(name: str) -> str:
    known = re.sub(r"[^\w.-]", "", name.rsplit(".", 1)[-1])[:64]
    return f"[hidden: {known}]" if known else "[hidden]"


def _passwords_in(text: str) -> Iterator[str]:
    """Yield the password of each URL in a text, as written and with percent-encoding decoded."""
    for match in IN_AN_ADDRESS.finditer(text):
        for password in {match["secret"], unquote(match["secret"])}:
            if not is_plain(password):
                yield password


# --- shapes --------------------------------------------------------------------------------------

IN_AN_ADDRESS = re.compile(
    r"(?<=:/)/?[^\s/:@\"'<>\\]*:(?P<secret>[^\s/@\"'<>\\]+)(?=@)"  # pathlib leaves one slash
)
_VALUE = r"(?P<value>[^\s\"'\\<>&,;(){}\[\]]{8,})"
_ASSIGNED = r"[\"'\\]{0,4}\s{0,3}[:=]\s{0,3}[\"'\\]{0,4}"
# Each pattern ends with the group `secret`, which is always masked, or the group `value`, which is
# masked unless it is plain
SHAPES = [re.compile(pattern, re.ASCII) for pattern in (
    r"(?P<secret>hf_[A-Za-z0-9]{20,})",
    # not inside a word, such as "task-"
    r"(?:(?<![A-Za-z0-9-])|(?<=\\[nrt]))(?P<secret>sk-(?=[\w-]{0,64}[0-9])[\w-]{16,})",
    IN_AN_ADDRESS.pattern,
    rf"(?i)[?&](?:[\w.-]{{0,40}}(?:token|api[_-]?key|secret|password)|key)={_VALUE}",
    rf"(?i)(?:(?:authorization|api-key){_ASSIGNED}(?:(?:basic|bearer|token)\s{{1,3}})?"
    rf"|\bbearer\s{{1,3}}(?=\S*[0-9])){_VALUE}",
    r"\b(?:[A-Z][A-Z0-9_]{0,60}?(?:_KEY|_TOKEN|_SECRET|PASSWORD)|api_key|hub_token"
    rf"|(?:access|auth|secret)_(?:key|token)){_ASSIGNED}(?=\S*[0-9]){_VALUE}",
)]  # fmt: skip


def _mask_shape(match: re.Match[str]) -> str:
    kind = str(match.lastgroup)
    if kind == "value" and is_plain(match[kind]):
        return match[0]
    return f"{match[0].removesuffix(match[kind])}[hidden]"


# --- masking -------------------------------------------------------------------------------------


def redact(text: str) -> str:
    """Return a text with every secret in it replaced by ``[hidden: NAME]`` or ``[hidden]``.

    Remembered secrets are also found in their JSON or percent-encoded form. JSON stays valid.
    """
    _remember_environment()
    return _redact(text)


def _redact(text: str) -> str:
    if len(text) < MIN_LENGTH:
        return text
    for form in sorted(_known, key=len, reverse=True):
        text = text.replace(form, _known[form])
    for pattern in SHAPES:
        text = pattern.sub(_mask_shape, text)
    return text


def redact_tree(value: Any) -> Any:
    """Return nested dicts, lists and tuples with every secret in their texts and keys masked."""
    _remember_environment()
    return _redact_tree(value, "")


def _redact_tree(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return {
            _redact(key) if isinstance(key, str) else key: _redact_tree(item, str(key))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        kept = [_redact_tree(item, name) for item in value]
        return tuple(kept) if isinstance(value, tuple) else kept
    if not isinstance(value, str):
        return value
    how = _how_secret(name)
    hides = how == "always" or (how == "often" and not is_plain(value))
    return _label(name) if value and hides and not _is_hidden(value) else _redact(value)


def without_hidden(settings: Any) -> Any:
    """Return settings that were read back from a file, without the values that are masked in it.

    A text that is masked only in part, such as a URL with a masked password, stays.
    """
    if isinstance(settings, Mapping):
        return {key: without_hidden(item) for key, item in settings.items() if not _is_hidden(item)}
    if isinstance(settings, list):
        return [without_hidden(item) for item in settings if not _is_hidden(item)]
    return settings


def _is_hidden(value: object) -> bool:
    return isinstance(value, str) and HIDDEN.fullmatch(value) is not None


# --- printing and logs ---------------------------------------------------------------------------


def redacting(say: Callable[[str], Any]) -> Callable[[str], None]:
    """Return a function that masks the secrets in a line and passes it to ``say``."""
    return lambda line: say(redact(line))


class _RedactedRecord(logging.LogRecord):
    def getMessage(self) -> str:  # noqa: N802
        return redact(super().getMessage())


@contextlib.contextmanager
def redacted_logs() -> Iterator[None]:
    """Context manager that masks secrets in the log records of all libraries during its block."""
    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(_RedactedRecord)
    try:
        yield
    finally:
        logging.setLogRecordFactory(before)
