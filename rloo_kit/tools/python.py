"""Tool ``python``, which runs programs in the sandbox of the reward ``code``."""

from typing import Any

from rloo_kit.rewards._sandbox import run_python

# Program that runs the model's programs. It prints errors to standard output, which the model reads
_FRAME = """\
import contextlib
import io
import random
import traceback

random.seed(0)
names = {{"__name__": "__main__"}}
for program in {before!r}:
    dropped = io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stdout(dropped), contextlib.suppress(Exception, SystemExit):
        exec(program, names)
try:
    exec(compile({code!r}, "program", "exec"), names)
except Exception:
    print(traceback.format_exc(limit=-1))
"""


def python(code: str) -> str:
    """Run a Python program and return what it prints. It has no network and no files.

    Args:
        code: The program; it must print its result. Nothing is kept from earlier programs.
    """
    session = PythonSession()
    session.reset()
    return session.python(code)


class PythonSession:
    """Environment in which a Python program can use the names that earlier programs have defined.

    For each call, a new sandbox first runs the earlier programs of the trajectory again, without
    their output, and then the new program. If a program was ended, for example at the time limit,
    later calls leave it out. The time limit applies to all programs of a call together. The random
    generator has the same seed in each call, but programs that run again see a later time.
    """

    def reset(self, **row: Any) -> None:
        """Begin a new trajectory without any earlier programs."""
        self._before: list[str] = []

    def python(self, code: str) -> str:
        """Run a Python program and return what it prints. It has no network and no files.

        Args:
            code: The program; it must print its result. It knows the names of earlier programs.
        """
        outcome = run_python(_FRAME.format(code=code, before=self._before))
        if not outcome.ok:  # a limit, or an exit code other than 0
            return f"{outcome.stdout}\nThe program was ended: {outcome.reason}."
        self._before.append(code)
        return outcome.stdout
