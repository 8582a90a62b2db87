"""Client for the server of a judge, with parallel requests, retries and reading of verdicts."""

import asyncio
import contextlib
import json
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rloo_kit.errors import RewardContractError
from rloo_kit.text.numbers import finite_number
from rloo_kit.text.redaction import redact
from rloo_kit.text.wording import content_text

from ._text import text_after_thought

if TYPE_CHECKING:
    import httpx

# Mode -> (key of the verdict in the judge's JSON, placeholders that a template must have)
MODES = {"rubric": ("score", ("completion",)), "pairwise": ("winner", ("first", "second"))}
_RETRIED = {408, 409, 429}
# Seconds before the first retry; doubles with each one
BACKOFF_SECONDS = 0.5
# A server that asks for a longer pause counts as failed
_LONGEST_WAIT = 60.0
# Only this many characters at the end of the judge's answer are searched for the verdict
_MAX_VERDICT_CHARACTERS = 20_000
_VERDICT_LINE = r"(?i)[ \t>*_#-]*{key}[*_]*\s*[:=][\s*_]*([^\s*_]+)[\s*_]*"
_JITTER = random.Random()  # the run's seeded random state stays as it is


def read_verdict(text: str, key: str = "score") -> float | None:
    """Return the number in a judge's answer, or None if the answer has no number.

    The number is the value of ``key`` in the last JSON object of the answer. If the answer has no
    JSON object, it is the number in the last line of the form ``key: number``. The judge's thought
    is ignored.

    >>> read_verdict('{"score": 2} no, {"score": "3.5"}'), read_verdict("**Score:** 7")
    (3.5, 7.0)
    >>> read_verdict("Score: 7 of 10"), read_verdict('{"score": null} Score: 7')
    (None, None)
    """
    tail = text_after_thought(text)[-_MAX_VERDICT_CHARACTERS:]
    found = _last_object(tail)
    if found is not None:
        value = found.get(key)
        return _number(value) if isinstance(value, str) else finite_number(value)
    for line in reversed(tail.splitlines()):
        if match := re.fullmatch(_VERDICT_LINE.format(key=key), line):
            return _number(match[1])
    return None


def _last_object(text: str) -> dict[str, Any] | None:
    decoder = json.JSONDecoder()
    found = None
    start = text.find("{")
    while start != -1:
        try:
            found, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)
    return found


def _number(text: str) -> float | None:
    match = re.fullmatch(r"\s*(-?[0-9]{1,15}(?:\.[0-9]{0,15})?)\.?\s*", text)
    return float(match[1]) if match else None


@dataclass(eq=False)
class Failure(Exception):  # noqa: N818 - becomes a KitError or a warning
    """The judge's server gave no usable answer to a question."""

    what: str  # what happened
    remedy: str  # what the user can do
    is_retried: bool = False  # whether the request may be sent again
    wait: float = 0.0  # seconds that the server asks to wait


class _Unusable(Failure):
    """The judge's answer has no usable score, so the question is asked once more."""


@dataclass
class Server:
    """Connection to a judge's server during one call of the reward, with the call's statistics."""

    judge: Any  # the `Judge` that asks (not imported here, since its module imports this one)
    key: str | None = field(repr=False)  # API key; None: no key is sent
    failure: Failure | None = None  # the first failure
    tokens: int = 0  # tokens of all requests and answers, as the server counts them
    latencies: list[float] = field(default_factory=list)  # seconds of each successful request

    async def answers(self, questions: Iterable[str]) -> dict[str, float]:
        """Ask all questions in parallel, and return a dict from question to the judge's number.

        Questions that could not be answered are not in the dict.

        Raises:
            RewardContractError: A question could not be answered, and ``on_failure`` is ``stop``.
        """
        import httpx

        found: dict[str, float] = {}
        judge = self.judge
        gate = asyncio.Semaphore(judge.max_concurrency)
        client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=min(5.0, judge.timeout_seconds)),
            limits=httpx.Limits(max_connections=None),
            verify=judge.url.startswith("https:"),  # reading the certificates takes a while
            trust_env=not re.match(r"http://(127\.|localhost\b|\[::1\])", judge.url),  # proxies
            headers={"Authorization": f"Bearer {self.key}"} if self.key else None,
        )

        async def ask(text: str) -> None:
            """Ask one question, and add the judge's number to the dict ``found``.

            If the question could not be answered, note the failure instead.

            Raises:
                Failure: The question could not be answered, and ``on_failure`` is ``stop``.
            """
            async with gate:
                try:
                    found[text] = await self._ask(client, text)
                except Failure as failure:
                    self.failure = self.failure or failure
                    if judge.on_failure == "stop":
                        raise

        try:
            async with client, asyncio.TaskGroup() as group:
                for text in questions:
                    group.create_task(ask(text))
        except* Failure:
            pass
        if self.failure is not None and judge.on_failure == "stop":
            raise RewardContractError(self.sentence(self.failure))
        return found

    def sentence(self, failure: Failure) -> str:
        """Return a failure as a message for the user, in one sentence."""
        judge = self.judge
        skip = ", or set on_failure: skip" if judge.on_failure == "stop" else ""
        return f"reward {judge.__name__!r}: {judge.url} {failure.what}; {failure.remedy}{skip}"

    async def _ask(self, client: "httpx.AsyncClient", text: str) -> float:
        """Ask a question and return the judge's number.

        A request that fails is sent again up to ``max_retries`` times. If the answer has no number,
        the question is asked once more.
        """
        attempt = 0
        again = False
        while True:
            try:
                return self._read(await self._post(client, self.judge.body(text, again=again)))
            except _Unusable:
                if again:
                    raise
                again = True
                attempt = 0
            except Failure as failure:
                if failure.wait > _LONGEST_WAIT:
                    failure.what += f" and asks for a pause of {failure.wait:g} s"
                    raise
                if not failure.is_retried or attempt == self.judge.max_retries:
                    failure.what += f", {attempt + 1} times" if attempt else ""
                    raise
                backoff = min(BACKOFF_SECONDS * 2**attempt, _LONGEST_WAIT)
                await asyncio.sleep(failure.wait or backoff * _JITTER.uniform(0.5, 1.0))
                attempt += 1

    async def _post(self, client: "httpx.AsyncClient", body: dict[str, Any]) -> "httpx.Response":
        import httpx

        judge = self.judge
        try:
            # The limit of httpx is for each read, which a slow trickle never exceeds
            async with asyncio.timeout(judge.timeout_seconds):
                answer = await client.post(f"{judge.url}/chat/completions", json=body)
        except TimeoutError:
            raise Failure(
                f"gave no answer in {judge.timeout_seconds:g} s",
                "look at the server's log, lower max_concurrency, or raise timeout_seconds",
                is_retried=True,
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as exc:
            is_absent = isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout)
            raise Failure(
                f"{'cannot be reached' if is_absent else 'broke the connection off'} "
                f"({self._excerpt(str(exc) or type(exc).__name__)})",
                "start the server, or correct base_url",
                is_retried=True,
            ) from None
        if answer.status_code != httpx.codes.OK:
            raise self._refusal(answer)
        self.latencies.append(answer.elapsed.total_seconds())
        return answer

    def _read(self, response: "httpx.Response") -> float:
        """Return the judge's number from a response.

        Raises:
            _Unusable: The response is not a chat completion, was cut off at the token limit, or has
                no number in the allowed range.
        """
        judge = self.judge
        try:
            answer = response.json()
            choice = answer["choices"][0]
            text = str(content_text(choice["message"]["content"]))
            self.tokens += int((answer.get("usage") or {}).get("total_tokens") or 0)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            raise _Unusable(
                f"gives no chat completion ({self._excerpt(response.text)})",
                "check base_url, which usually ends in /v1",
            ) from None
        key = MODES[judge.mode][0]
        if choice.get("finish_reason") == "length":
            why = f"an answer cut off at max_tokens ({judge.max_tokens})"
        elif (number := read_verdict(text, key)) is None:
            why = f"no {key}"
        elif judge.accepts(number):
            return number
        else:
            why = f"a {key} outside the allowed range"
        raise _Unusable(
            f"gave {why} ({self._excerpt(text)})",
            "ask for JSON with response_format in extra_body, raise max_tokens, or use a "
            "stronger model",
        )

    def _refusal(self, answer: "httpx.Response") -> Failure:
        judge = self.judge
        status = answer.status_code
        what = f"answers {status} ({self._excerpt(answer.text)})"
        if status in _RETRIED or status >= 500:
            remedy = "lower max_concurrency" if status == 429 else "look at the server's log"
            wait = 0.0
            with contextlib.suppress(ValueError):  # no number
                wait = max(wait, float(answer.headers.get("Retry-After", "")))  # 0.0 for NaN too
            return Failure(what, remedy, True, wait)
        if status == 401:
            sent = "refuses the key" if self.key else "asks for a key"
            return Failure(
                f"{sent} (401)",
                "set the environment variable "
                f"{judge.api_key_env or 'with the key, and give its name as api_key_env'}",
            )
        if 300 <= status < 400:
            return Failure(f"redirects ({status})", "give the final address as base_url")
        return Failure(
            what,
            f"check base_url, model {judge.model!r}, extra_body and the server's context length",
        )

    def _excerpt(self, text: str) -> str:
        """Return the beginning of a text on one line, with the API key and other secrets masked."""
        if self.key:
            text = text.replace(self.key, "***")
        return repr(" ".join(redact(text).split())[:160])
