"""Out of memory: run a call over fewer rows at a time until they fit."""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

from rloo_kit.errors import MemoryRanOutError
from rloo_kit.machine.memory import is_out_of_memory

Row = TypeVar("Row")
Found = TypeVar("Found")


def free_memory() -> None:
    """Give a GPU's blocks that PyTorch keeps unused to those who allocate by themselves (cuBLAS).

    Called outside of the ``except``, where the error is gone, and with it what its frames held.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class Pieces:
    """Runs a call over rows: all at once, or as many as were found to fit.

    Args:
        what: Of what memory ran out, such as ``sampling``.
        remedy: What to change where a single row does not fit.
    """

    def __init__(self, what: str, remedy: str) -> None:
        self.what = what
        self.remedy = remedy
        self.size: int | None = None
        """Rows at one time; None: nothing was found not to fit."""

    def run(
        self, call: Callable[[Sequence[Row]], list[Found]], rows: Sequence[Row], at_most: int
    ) -> list[Found]:
        """Return what ``call`` gives for all rows, in their order.

        Memory that runs out halves the rows of a call, here and in later runs; pieces that are
        done are kept. A second attempt draws from where the first one left the random state.

        Args:
            call: Returns one value a row.
            rows: The rows.
            at_most: Rows at one time where memory does not decide.

        Raises:
            MemoryRanOutError: A single row does not fit.
        """
        found: list[Found] = []
        while len(found) < len(rows):
            size = min(at_most, self.size or at_most)
            piece = rows[len(found) : len(found) + size]
            try:
                found += call(piece)
                continue
            except Exception as exc:
                if not is_out_of_memory(exc):
                    raise
                self._halve(exc, len(piece))
            free_memory()
        return found

    def _halve(self, exc: Exception, tried: int) -> None:
        if tried < 2:
            raise MemoryRanOutError(
                f"memory ran out while {self.what} a single completion: {self.remedy}"
            ) from exc
        if self.size is None:
            warnings.warn(
                f"memory ran out while {self.what} {tried} completions at once: {tried // 2} are "
                f"tried, and fewer where they do not fit either",
                RuntimeWarning,
                stacklevel=2,
            )
        self.size = tried // 2
