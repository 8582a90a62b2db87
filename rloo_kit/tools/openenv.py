"""Environments on an OpenEnv server (the package ``openenv-core``)."""

import json
import weakref
from typing import Any, ClassVar

from rloo_kit.errors import ConfigError


class OpenEnv:
    """Base class of environments on an OpenEnv server, with a session for each trajectory.

    A subclass has the address of the server, and a method for each kind of action::

        class Guess(OpenEnv):
            url = "http://127.0.0.1:8000"

            def guess(self, number: int) -> str:
                \"\"\"Guess the number.

    Args:
                    number: A whole number from 1 to 100.
                \"\"\"
                return self._step(number=number)

    The server must allow a session for each completion that is sampled at a time, held-out ones
    included (``max_concurrent_envs`` of its ``create_app``).
    """

    url: ClassVar[str]
    """Address of the server, ``http://`` or ``ws://``."""

    _client: Any = None

    def reset(self, **row: Any) -> str:
        """Begin an episode; return its first observation, for the end of the prompt.

        Args:
            **row: Columns of the prompt's row; the server takes those that its ``reset`` has.

        Raises:
            ConfigError: ``openenv-core`` is missing.
            ConnectionError: The server cannot be reached.
        """
        if self._client is None:
            try:
                from openenv.core import GenericEnvClient
            except ImportError as exc:
                raise ConfigError(
                    "an OpenEnv server needs the package openenv-core: pip install openenv-core"
                ) from exc
            self._client = GenericEnvClient(self.url).sync()
            # its thread would keep the session; also at exit, before that thread ends
            weakref.finalize(self, self._client.close)
        self._reward = 0.0
        self._done = False
        return self._seen(self._client.reset(**row))

    def get_reward(self) -> float:
        """Return the sum of the rewards that the server gave in the episode."""
        return self._reward

    def _step(self, **action: Any) -> str:
        """Take an action; return the observation as a text.

        Args:
            **action: Fields of the server's action.
        """
        if self._done:
            return "The episode has ended."
        return self._seen(self._client.step(action))

    def _text(self, observation: dict[str, Any]) -> str:
        """Return the text that the model reads: the value of an only field, or JSON."""
        if len(observation) == 1:
            (observation,) = observation.values()
        return observation if isinstance(observation, str) else json.dumps(observation)

    def _seen(self, result: Any) -> str:
        self._done = result.done
        self._reward += float(result.reward or 0.0)
        return self._text(result.observation)
