"""Base class for environments that run on an OpenEnv server (package ``openenv-core``)."""

import contextlib
import json
import threading
import weakref
from typing import Any, ClassVar

from rloo_kit.errors import ConfigError


class OpenEnv:
    """Base class of environments on an OpenEnv server; each trajectory has its own session.

    A subclass sets ``url`` and has a method for each kind of action, such as ``def guess(self,
    number: int) -> str`` that returns ``self._step(number=number)``. See docs/how-to/tools.md. The
    server must allow one session for each completion of a training batch, and twice as many if
    there are held-out prompts. Pass this number to the server's ``create_app`` as
    ``max_concurrent_envs``.
    """

    url: ClassVar[str]
    """Address of the server, ``http://`` or ``ws://``."""

    _client: Any = None

    def reset(self, **row: Any) -> str:
        """Begin an episode and return its first observation, which is added to the prompt.

        If the connection to the server was lost, connect again.

        Args:
            **row: Columns of the prompt's row. The server uses the columns that its ``reset`` has
                as parameters. A value that JSON cannot express, such as a date, is sent as text.

        Raises:
            ConfigError: ``openenv-core`` is missing.
            ConnectionError: The server cannot be reached.
        """
        try:
            from openenv.core import GenericEnvClient
        except ImportError as exc:
            raise ConfigError(
                "an OpenEnv server needs the package openenv-core: pip install openenv-core"
            ) from exc
        self._reward = 0.0
        self._done = False
        sent = json.loads(json.dumps(row, default=str))
        if self._client is not None:
            with contextlib.suppress(Exception):
                return self._ask("reset", **sent)
        if self._client is None:
            self._client = GenericEnvClient(self.url).sync()
            # Close it in a background thread, because a busy server may reply late
            closing = threading.Thread(target=self._client.close, daemon=True)
            self._end = weakref.finalize(self, closing.start)
            self._end.atexit = False  # not needed: the server notices the end of the program
        return self._ask("reset", **sent)

    def get_reward(self) -> float:
        """Return the sum of the rewards that the server has returned in this episode."""
        return self._reward

    def _step(self, **action: Any) -> str:
        """Send an action to the server and return the observation as text.

        If the episode has ended, nothing is sent, and the returned text says that it has ended.

        Args:
            **action: Fields of the action, as the server defines them.

        Raises:
            ConnectionError: The session was lost, so that the episode cannot continue.
        """
        if self._client is None:  # a new session would know nothing of the episode
            raise ConnectionError(
                "the session was lost, so the episode cannot continue: check the OpenEnv server"
            )
        return "The episode has ended." if self._done else self._ask("step", action)

    def _ask(self, what: str, *args: Any, **columns: Any) -> str:
        """Call a method of the client, add up the reward, and return the observation as text.

        The text is the observation as JSON or, if it has only one field, the value of this field.

        If the call is interrupted, or fails without an answer from the server, close the session.
        Otherwise the next call could read a late result of this call. If the server answers with an
        error (RuntimeError), the session stays open.
        """
        try:
            result = getattr(self._client, what)(*args, **columns)
        except RuntimeError:  # the server's own answer
            raise
        except BaseException:
            self._end()
            self._client = None
            raise
        self._done = result.done
        self._reward += float(result.reward or 0.0)
        seen = result.observation
        if len(seen) == 1:
            (seen,) = seen.values()
        return seen if isinstance(seen, str) else json.dumps(seen)
