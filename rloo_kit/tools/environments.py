"""Environments of a batch: one instance for each trajectory, reused from batch to batch."""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from rloo_kit.errors import ConfigError, DataError
from rloo_kit.text.wording import content_text, encodable, first_line, format_value
from rloo_kit.types import Reward

# A function that the model can call
Tool: TypeAlias = Callable[..., Any]
# An environment class for all rows, or a dict of classes by name
Factories: TypeAlias = Mapping[str, Callable[[], Any]] | Callable[[], Any]
# Methods of an environment that are not tools
NOT_TOOLS = ("reset", "get_reward")


class Environments:
    """Pool of environment instances. Each row of a batch gets an instance of its own.

    Args:
        given: An environment class for all rows, or a dict of classes by name. With a dict, the
            column ``environment`` of each row names its class.

    Raises:
        ConfigError: The dict is empty, a class cannot be called without arguments, or its method
            ``reset`` is missing or async.
    """

    def __init__(self, given: Factories) -> None:
        self.by_name = isinstance(given, Mapping)
        self._factories: dict[Any, Any] = {**given} if isinstance(given, Mapping) else {None: given}
        if not self._factories:
            raise ConfigError("the table of environments is empty: name a class, or leave it out")
        self._pool = {name: [_made(factory)] for name, factory in self._factories.items()}
        self.current = []  # instances of the newest batch, one for each row
        for one in self.samples.values():
            reset = getattr(one, "reset", None)
            if not callable(reset) or inspect.iscoroutinefunction(reset):
                raise ConfigError(
                    f"environment {type(one).__name__} needs a method def reset(self, **row) that "
                    "is not async, and returns None or a text for the end of the prompt"
                )

    @property
    def samples(self) -> dict[Any, Any]:
        """One instance of each class, by the name of the class."""
        return {name: pool[0] for name, pool in self._pool.items()}

    def release(self) -> None:
        """Drop all instances, so that their connections and memory are released."""
        self._pool.clear()
        self.current = []

    def name_of(self, row: Mapping[str, Any]) -> str | None:
        """Return the name of a row's environment class, or None if all rows share one class.

        Raises:
            DataError: The row's column ``environment`` is missing or names an unknown class.
        """
        name = row.get("environment") if self.by_name else None
        if name not in list(self._factories):  # a list, because the name may not be hashable
            raise DataError(
                f"the prompts' column environment holds {format_value(name)}, but must name one of "
                f"{', '.join(map(str, self._factories))}"
            )
        return name

    def check_names(self, dataset: Any) -> None:
        """Check that every row of a dataset names a known environment class.

        There is nothing to check if all rows share one class.

        Raises:
            DataError: A row names an unknown class, or there is no column ``environment``.
        """
        if self.by_name and hasattr(dataset, "__len__"):  # a stream's rows are checked when read
            has_names = "environment" in dataset.column_names
            for name in dataset["environment"] if has_names else [None]:
                self.name_of({"environment": name})

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Reset one environment for each row, and return the prompts.

        If ``reset`` returns an observation, it is added to the end of the prompt.

        Raises:
            DataError: A row names an unknown environment class, or ``reset`` raised.
        """
        self.current = []
        taken = Counter()
        prompts = []
        for row in rows:
            name = self.name_of(row)
            pool = self._pool[name]
            if taken[name] == len(pool):
                pool.append(_made(self._factories[name]))
            one = pool[taken[name]]
            taken[name] += 1
            self.current.append(one)
            try:
                columns = copy.deepcopy(dict(row))  # a game may change its values in place
                if self.by_name:
                    del columns["environment"]
                seen = one.reset(**columns)
            except Exception as exc:
                raise DataError(
                    f"{type(one).__name__}.reset raised {type(exc).__name__}: {first_line(exc)}; "
                    "correct it, or the row of the prompt"
                ) from exc
            prompt = row["prompt"]
            if seen is not None:
                *before, last = prompt
                text = content_text(last["content"]) + encodable(content_text(seen))
                prompt = [*before, last | {"content": text}]
            prompts.append(prompt)
        return prompts

    @property
    def rewards(self) -> list[Reward]:
        """Reward functions of the environments, one for each class with a method ``get_reward``.

        A reward function has the name of its class. It returns None for rows of other classes.
        """
        kinds = dict.fromkeys(map(type, self.samples.values()))
        return [_reward_of(kind) for kind in kinds if hasattr(kind, "get_reward")]


def methods_of(environment: Any) -> list[Tool]:
    """Return the tools of an environment: its public methods except ``reset`` and ``get_reward``.

    If the environment is None, the list is empty.
    """
    members = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    return [
        getattr(environment, name)
        for name, _ in members
        if name not in NOT_TOOLS and not name.startswith("_")
    ]


def _made(factory: Callable[[], Any]) -> Any:
    """Return a new environment.

    Raises:
        ConfigError: The class raised an exception.
    """
    try:
        return factory()
    except Exception as exc:
        raise ConfigError(
            f"environment {getattr(factory, '__name__', factory)} raised {type(exc).__name__} when "
            f"it was made without arguments: {first_line(exc)}; correct its __init__"
        ) from exc


def _reward_of(kind: type) -> Reward:
    """Return a reward function that calls ``get_reward`` of the environments of one class.

    The function returns None for rows whose environment has another class.
    """

    def reward(environments: list[Any], **_: Any) -> list[float | None]:
        return [one.get_reward() if type(one) is kind else None for one in environments]

    async def waiting(environments: list[Any], **_: Any) -> list[float | None]:
        return [await one.get_reward() if type(one) is kind else None for one in environments]

    found = waiting if inspect.iscoroutinefunction(kind.get_reward) else reward
    found.__name__ = kind.__name__
    return found
