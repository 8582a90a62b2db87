"""Client of a judge's server: parallel requests, retries within limits, and verdicts."""

import asyncio
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

# Mode -> key of the judge's JSON, and the names that a template must hold
MODES = {"rubric": ("score", ("completion",)), "pairwise": ("winner", ("first", "second"))}
_RETRIED = {408, 409, 429}
# Seconds before the first retry; doubles with each one
BACKOFF_SECONDS = 0.5
# A server that asks for a longer pause counts as failed
_LONGEST_WAIT = 60.0
# The verdict is looked for in this many last characters of the answer
_MAX_VERDICT_CHARACTERS = 20_000
_VERDICT_LINE = r"(?i)[ \t>*_#-]*{key}[*_]*\s*[:=][\s*_]*([^\s*_]+)[\s*_]*"
_JITTER = random.Random()  # the run's seeded random state stays as it is


def read_verdict(text: str, key: str = "score") -> float | None:
    """Return the number that a judge gave, or None.

    It is the value of ``key`` in the last JSON object of the text, or without an object the number
    in the last line that is only ``key: number``. A thought before it is ignored.

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
        if match := re.fullmatch(_VERDICT_LINE.format(key=re.escape(key)), line):
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
    """A question without an answer: what happened, and what to do about it."""

    what: str
    remedy: str
    is_retried: bool = False
    wait: float = 0.0  # seconds that the server asks to wait


class _Unusable(Failure):
    """An answer without a usable score; the question is asked once more."""


@dataclass
class Server:
    """A judge's server during one call of the reward: its counts, and the first failure."""

    judge: Any  # the `Judge` that asks; its module imports this one
    key: str | None = field(repr=False)
    failure: Failure | None = None
    tokens: int = 0
    latencies: list[float] = field(default_factory=list)

    async def answers(self, questions: Iterable[str]) -> dict[str, float]:
        """Return the judge's number for every question that has one.

        Raises:
            RewardContractError: With ``on_failure="stop"``, a question has none.
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
            """Put the answer to a question into ``found``.

            Raises:
                Failure: With ``on_failure="stop"``, there is no answer.
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
        """Return a failure as one sentence."""
        judge = self.judge
        skip = ", or set on_failure: skip" if judge.on_failure == "stop" else ""
        return f"reward {judge.__name__!r}: {judge.url} {failure.what}; {failure.remedy}{skip}"

    async def _ask(self, client: "httpx.AsyncClient", text: str) -> float:
        """Return the judge's number; after an answer without one, ask again."""
        try:
            return self._read(await self._request(client, self.judge.body(text)))
        except _Unusable:
            return self._read(await self._request(client, self.judge.body(text, again=True)))

    async def _request(self, client: "httpx.AsyncClient", body: dict[str, Any]) -> "httpx.Response":
        """Return an answer with status 200, retrying as often as allowed."""
        attempt = 0
        while True:
            try:
                return await self._post(client, body)
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
        """Return the number of a chat completion.

        Raises:
            _Unusable: It is something else, or holds no number that the judge may give.
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
            why = f"a {key} that is not asked for"
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
            return Failure(what, remedy, True, _seconds_to_wait(answer.headers))
        if status == 401:
            sent = "refuses the key" if self.key else "asks for a key"
            return Failure(
                f"{sent} (401)",
                f"set the environment variable {judge.api_key_env or 'that api_key_env names'}",
            )
        if 300 <= status < 400:
            return Failure(f"redirects ({status})", "give the final address as base_url")
        return Failure(
            what,
            f"check base_url, model {judge.model!r}, extra_body and the server's context length",
        )

    def _excerpt(self, text: str) -> str:
        """Return the beginning of a text in one line, without the key and other secrets."""
        if self.key:
            text = text.replace(self.key, "***")
        return repr(" ".join(redact(text).split())[:160])


def _seconds_to_wait(headers: "httpx.Headers") -> float:
    """Return the seconds in Retry-After; 0.0 if it holds no number."""
    try:
        return max(0.0, float(headers.get("Retry-After", "")))  # 0.0 for NaN too
    except ValueError:
        return 0.0
