"""Two games as environments that need no download: guessing a number, and a maze.

The text of the prompt decides the game, so that all completions of a prompt play the same game.
"""

import random
from typing import Any

# A room at column x and row y is the complex number x + yj, so that a step is an addition
DIRECTIONS = {"north": -1j, "east": 1, "south": 1j, "west": -1}
SIZE = 4
START = 0j
EXIT = complex(SIZE - 1, SIZE - 1)


class GuessNumber:
    """Game in which the model guesses a number from 1 to 100.

    The reward is 1 minus 0.1 for each wrong guess, but never below 0. It is 0 if the number was not
    found.
    """

    def reset(self, prompt: Any, **row: Any) -> str:
        """Begin a new game and return the text that is added to the end of the prompt."""
        self._number = random.Random(f"guess {prompt}").randint(1, 100)
        self._wrong = 0
        self._won = False
        return "\nI have a number from 1 to 100. Call guess until it is right."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: A whole number from 1 to 100.

        Returns:
            "right", or whether the number to find is "higher" or "lower" than the guess.
        """
        if self._won:
            return "right, the game is over"
        if number == self._number:
            self._won = True
            return "right"
        self._wrong += 1
        return "higher" if number < self._number else "lower"

    def get_reward(self) -> float:
        """Return the reward of the game, from 0 to 1; 0 if the number was not found."""
        return max(0.0, 1.0 - 0.1 * self._wrong) if self._won else 0.0


class Maze:
    """Maze of 4 x 4 rooms in which the model moves to the exit.

    The reward says how much of the way from the start to the exit the model has covered, from 0 at
    the start to 1 at the exit.
    """

    def reset(self, prompt: Any, **row: Any) -> str:
        """Begin in a new maze and return the text that is added to the end of the prompt."""
        self._doors = _dug(random.Random(f"maze {prompt}"))
        self._to_exit = _distances(self._doors)
        self._here = START
        return f"\nFind the way out of the maze with calls of move. {self._view()}"

    def move(self, direction: str) -> str:
        """Go to the next room.

        Args:
            direction: north, east, south or west.

        Returns:
            The directions in which the new room has doors.

        Raises:
            ValueError: ``direction`` is not one of the four directions.
        """
        if direction not in DIRECTIONS:
            raise ValueError("direction must be north, east, south or west")
        room = self._here + DIRECTIONS[direction]
        if room not in self._doors[self._here]:
            return f"There is a wall. {self._view()}"
        self._here = room
        return self._view()

    def get_reward(self) -> float:
        """Return the reward, from 1 at the exit down to 0.

        It decreases with the distance of the current room from the exit. It is 0 in a room that is
        as far from the exit as the start, or farther.
        """
        return max(0.0, 1.0 - self._to_exit[self._here] / self._to_exit[START])

    def _view(self) -> str:
        if self._here == EXIT:
            return "You are at the exit."
        doors = self._doors[self._here]
        open_to = [name for name, step in DIRECTIONS.items() if self._here + step in doors]
        return f"Doors: {', '.join(open_to)}."


def _dug(rng: random.Random) -> dict[complex, set[complex]]:
    """Return a random maze, as a dict from each room to the rooms that its doors lead to.

    There is exactly one path between any two rooms.
    """
    doors: dict[complex, set[complex]] = {
        complex(x, y): set() for x in range(SIZE) for y in range(SIZE)
    }

    def dig(here: complex) -> None:
        beside = [here + step for step in DIRECTIONS.values()]
        while new := [room for room in beside if room in doors and not doors[room]]:
            room = rng.choice(new)
            doors[here].add(room)
            doors[room].add(here)
            dig(room)

    dig(START)
    return doors


def _distances(doors: dict[complex, set[complex]]) -> dict[complex, int]:
    """Return a dict from each room to the number of doors on its path to the exit."""
    found = {EXIT: 0}
    queue = [EXIT]
    for here in queue:  # which grows while it is read
        for room in doors[here] - found.keys():
            found[room] = found[here] + 1
            queue.append(room)
    return found
