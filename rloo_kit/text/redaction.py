"""Mask keys and tokens in text that the kit writes to files or prints.

Two things are masked, as ``[hidden: NAME]`` or ``[hidden]``: values known to be secrets (variables
of the environment and of ``.env``, settings whose names say so), and texts with the shape of one
(``hf_...``, ``Bearer ...``, a password in a URL).
"""

import contextlib
import json
import logging
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

# Characters from which a value is searched for in other texts
MIN_LENGTH = 8
HIDDEN = re.compile(r"\[hidden(?:: [\w.-]{1,64})?\]")

# --- which names and values are those of secrets -------------------------------------------------

# Of a name in lower case with `_` between its words: any value is a secret
ALWAYS_SECRET = re.compile(
    r"passw(or)?d|passphrase|secret|credential|api_?keys?(?![a-z])"
    r"|(access|api|auth|hf|hub|bot|refresh|bearer|session)_?token(?![a-z])"
    r"|(access|private|auth|account|encryption|signing|master)_key(?![a-z])"
)
# A word of a name: the value is a secret unless it is plain (see `is_plain`)
OFTEN_SECRET = re.compile("auth|authorization|bearer|cookie|jwt|key|pass|pat|pwd|token")
# A word before `token` that makes it one of a vocabulary
OF_A_TOKENIZER = re.compile("bos|cls|end|eos|image|mask|pad|per|sep|special|start|stop|think|unk")
# A last word that makes the value a fact about a secret
NOT_THE_VALUE = re.compile(
    "column|dir|endpoint|env|field|file|format|length|limit|name|path|size|sock|timeout|type|url"
)


def is_secret_name(name: str) -> bool:
    """Return whether the name of a variable or setting says that its value is a secret."""
    return _how_secret(name) is not None


@lru_cache(maxsize=4096)
def _how_secret(name: str) -> str | None:
    """Return ``always``, ``often`` or None."""
    last = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rsplit(".", 1)[-1]).lower()
    words = [word for word in re.split(r"[^a-z]+", last) if word]
    if not words or NOT_THE_VALUE.fullmatch(words[-1]) or "public" in words:
        return None
    if ALWAYS_SECRET.search("_".join(words)):
        return "always"
    if words[-1] == "id" or ("token" in words and any(map(OF_A_TOKENIZER.fullmatch, words))):
        return None
    telling = words if name.isupper() else words[-1:]
    return "often" if any(map(OFTEN_SECRET.fullmatch, telling)) else None


def is_plain(value: str) -> bool:
    """Return whether a value is too usual to be masked wherever it occurs.

    That is a short one, a number or date, a word, a path, or an address without a password.
    """
    text = value.strip()
    has_digit = any(map(str.isdigit, text))
    if len(text) < MIN_LENGTH or not any(map(str.isalpha, text)) or HIDDEN.fullmatch(text):
        return True
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        return not any(_passwords_in(text))
    # A key in base64 may begin with / too, and holds digits
    return not has_digit and (len(text) < 2 * MIN_LENGTH or bool(re.match("[~.]{0,2}/", text)))


# --- known values --------------------------------------------------------------------------------

_known: set[str] = set()
# (text, replacement), longest first
_forms: list[tuple[str, str]] = []


def remember_secret(value: object, name: str = "") -> None:
    """Mask a text or number from now on wherever it occurs, unless it is plain (``is_plain``)."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return
    text = str(value).strip()
    if text not in _known and not is_plain(text):
        new = [(form, _label(name)) for form in _written_forms(text)]
        _forms[:] = sorted([*_forms, *new], key=lambda form: -len(form[0]))
        _known.add(text)


def remember_settings(settings: object, name: str = "") -> None:
    """Remember every value in nested dicts and lists whose name says that it is a secret."""
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            remember_settings(value, str(key))
    elif isinstance(settings, list | tuple):
        for value in settings:
            remember_settings(value, name)
    elif is_secret_name(name):
        remember_secret(settings, name)
    elif isinstance(settings, str):
        for password in _passwords_in(settings):
            remember_secret(password, "password")


def remember_arguments(arguments: Iterable[str]) -> None:
    """Remember the secrets among the ``name=value`` arguments of a command."""
    for argument in arguments:
        name, _, value = argument.partition("=")
        secret = next((part for part in name.split(".")[::-1] if is_secret_name(part)), "")
        remember_settings(value.strip("'\" "), secret)


def _remember_environment() -> None:
    for name, value in os.environ.items():
        if name != "PWD":  # the shell's working folder, no password
            remember_settings(value, name)


def _label(name: str) -> str:
    known = re.sub(r"[^\w.-]", "", name.rsplit(".", 1)[-1])[:64]
    return f"[hidden: {known}]" if known else "[hidden]"


def _passwords_in(text: str) -> Iterator[str]:
    """Yield the passwords of addresses in a text, as written and decoded."""
    for match in IN_AN_ADDRESS.finditer(text) if "@" in text else ():
        for password in {match["value"], unquote(match["value"])}:
            if not is_plain(password):
                yield password


def _written_forms(value: str) -> set[str]:
    """Return a secret as text, JSON and an address write it."""
    escaped = {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    return {value, repr(value)[1:-1], quote(value), quote(value, safe=""), *escaped}


# --- shapes --------------------------------------------------------------------------------------

IN_AN_ADDRESS = re.compile(
    r"(?<=:/)/?[^\s/:@\"'<>\\]*:(?P<value>[^\s/@\"'<>\\]+)(?=@)"  # pathlib leaves one slash
)
_VALUE = r"(?P<value>[^\s\"'\\<>&,;(){}\[\]]{8,})"
_ASSIGNED = r"[\"'\\]{0,4}\s{0,3}[:=]\s{0,3}[\"'\\]{0,4}"
# `value` is what is masked; without it the whole match
SHAPES = [re.compile(pattern, re.ASCII) for pattern in (
    r"hf_[A-Za-z0-9]{20,}",
    r"(?:(?<![A-Za-z0-9-])|(?<=\\[nrt]))sk-(?=[\w-]{0,64}[0-9])[\w-]{16,}",  # not so in "task-"
    IN_AN_ADDRESS.pattern,
    rf"(?i)[?&](?:[\w.-]{{0,40}}(?:token|api[_-]?key|secret|password)|key)={_VALUE}",
    rf"(?i)(?:(?:authorization|api-key){_ASSIGNED}(?:(?:basic|bearer|token)\s{{1,3}})?"
    rf"|\bbearer\s{{1,3}}(?=\S*[0-9])){_VALUE}",
    r"\b(?:[A-Z][A-Z0-9_]{0,60}?(?:_KEY|_TOKEN|_SECRET|PASSWORD)|api_key|hub_token"
    rf"|(?:access|auth|secret)_(?:key|token)){_ASSIGNED}(?=\S*[0-9]){_VALUE}",
)]  # fmt: skip


def _mask_shape(match: re.Match[str]) -> str:
    """Return the match without its value, which may stay where it is plain."""
    if "value" not in match.re.groupindex:
        return "[hidden]"
    if match.re.pattern != IN_AN_ADDRESS.pattern and is_plain(match["value"]):
        return match[0]
    start, end = (place - match.start() for place in match.span("value"))
    return f"{match[0][:start]}[hidden]{match[0][end:]}"


# --- masking -------------------------------------------------------------------------------------


def redact(text: str) -> str:
    """Return a text with every secret in it replaced by ``[hidden: NAME]`` or ``[hidden]``.

    Known values are found also as JSON or a percent-encoded address writes them. JSON stays valid
    JSON.
    """
    _remember_environment()
    return _redact(text)


def _redact(text: str) -> str:
    if len(text) < MIN_LENGTH:
        return text
    for form, label in _forms:
        text = text.replace(form, label)
    for pattern in SHAPES:
        text = pattern.sub(_mask_shape, text)
    return text


def redact_tree(value: Any, name: str = "") -> Any:
    """Return nested dicts and lists with every secret in their texts and keys masked."""
    _remember_environment()
    return _redact_tree(value, name)


def _redact_tree(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        items = [(key, _redact_tree(item, str(key))) for key, item in value.items()]
        return {_redact(key) if isinstance(key, str) else key: item for key, item in items}
    if isinstance(value, list | tuple):
        items = [_redact_tree(item, name) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, str):
        how = _how_secret(name)
        hides = how == "always" or (how == "often" and not is_plain(value))
        return _label(name) if value and hides and not HIDDEN.fullmatch(value) else _redact(value)
    if isinstance(value, Path) and (text := _redact(str(value))) != str(value):
        return text
    return value


def without_hidden(settings: Any, place: str = "") -> tuple[Any, list[str]]:
    """Return (settings read back without those that were masked, the names of these).

    A text that is masked in part, such as an address without its password, stays.
    """
    if not isinstance(settings, Mapping | list):
        return settings, []
    kept, names = [], []
    for key, item in settings.items() if isinstance(settings, Mapping) else enumerate(settings):
        name = f"{place}.{key}" if place else str(key)
        if isinstance(item, str) and HIDDEN.fullmatch(item):
            names.append(name)
        else:
            inside, more = without_hidden(item, name)
            kept.append((key, inside))
            names += more
    return dict(kept) if isinstance(settings, Mapping) else [item for _, item in kept], names


# --- what the kit prints -------------------------------------------------------------------------


def redacting(say: Callable[[str], Any]) -> Callable[[str], None]:
    """Return ``say`` for lines that may hold secrets."""
    return lambda line: say(redact(line))


def redacted_traceback(exc: BaseException) -> str:
    """Return what Python prints for an error that nobody caught, with secrets masked."""
    return redact("".join(traceback.format_exception(exc)))


@contextlib.contextmanager
def redacted_logs() -> Iterator[None]:
    """Mask secrets in what any library logs inside the block."""
    make_record = logging.getLogRecordFactory()

    def make_redacted(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        with contextlib.suppress(Exception):  # wrong arguments: logging reports them itself
            record.msg, record.args = redact(record.getMessage()), ()
        return record

    logging.setLogRecordFactory(make_redacted)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make_record)
