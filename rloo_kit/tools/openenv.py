"""Environments on an OpenEnv server (the package ``openenv-core``)."""

import contextlib
import json
import threading
import weakref
from typing import Any, ClassVar

from rloo_kit.errors import ConfigError


class OpenEnv:
    """Base class of environments on an OpenEnv server, with a session for each trajectory.

    A subclass has the address of the server, and a method for each kind of action, such as
    ``def guess(self, number: int) -> str`` that returns ``self._step(number=number)``
    (docs/how-to/tools.md). The server must allow a session for each completion of a batch, and as
    many for held-out ones (``max_concurrent_envs`` of its ``create_app``).
    """

    url: ClassVar[str]
    """Address of the server, ``http://`` or ``ws://``."""

    _client: Any = None

    def reset(self, **row: Any) -> str:
        """Begin an episode; return its first observation, for the end of the prompt.

        A lost connection is opened again.

        Args:
            **row: Columns of the prompt's row; the server takes those that its ``reset`` has.

        Raises:
            ConfigError: ``openenv-core`` is missing.
            ConnectionError: The server cannot be reached.
        """
        self._reward = 0.0
        self._done = False
        sent = {name: value for name, value in row.items() if _is_json(value)}
        if self._client is not None:
            with contextlib.suppress(Exception):
                return self._ask("reset", **sent)
        if self._client is None:
            self._connect()
        return self._ask("reset", **sent)

    def get_reward(self) -> float:
        """Return the sum of the rewards that the server gave in the episode."""
        return self._reward

    def _step(self, **action: Any) -> str:
        """Take an action; return the observation as a text.

        Args:
            **action: Fields of the server's action.
        """
        if self._client is None:  # a new session would know nothing of the episode
            raise ConnectionError("the session was lost, and the episode with it")
        return "The episode has ended." if self._done else self._ask("step", action)

    def _text(self, observation: dict[str, Any]) -> str:
        """Return the text that the model reads: the value of an only field, or JSON."""
        value = next(iter(observation.values())) if len(observation) == 1 else observation
        return value if isinstance(value, str) else json.dumps(value)

    def _ask(self, what: str, *args: Any, **columns: Any) -> str:
        """Call the server; after a call that did not end in time, its answer must not be read."""
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
        return self._text(result.observation)

    def _connect(self) -> None:
        try:
            from openenv.core import GenericEnvClient
        except ImportError as exc:
            raise ConfigError(
                "an OpenEnv server needs the package openenv-core: pip install openenv-core"
            ) from exc
        self._client = GenericEnvClient(self.url).sync()
        self._end = weakref.finalize(self, _close, self._client)
        self._end.atexit = False  # the server notices that the program ends


def _close(client: Any) -> None:
    """End a session in the background: the server may be busy."""
    threading.Thread(target=client.close, daemon=True).start()


def _is_json(value: object) -> bool:
    with contextlib.suppress(TypeError, ValueError):
        json.dumps(value)
        return True
    return False
