"""Python, a tool that runs programs in the sandbox of the reward ``code``."""

from rloo_kit.rewards._sandbox import run_python

# The program in a frame that prints its error, which would else go to standard error
_FRAME = """\
import traceback
try:
    exec(compile({code!r}, "program", "exec"), {{"__name__": "__main__"}})
except Exception:
    print(traceback.format_exc(limit=-1))
"""


def python(code: str) -> str:
    """Run a Python program and return what it prints. It has no network and no files.

    Args:
        code: The program; it must print its result. Nothing is kept from earlier programs.
    """
    outcome = run_python(_FRAME.format(code=code))
    ended = "" if outcome.ok else f"\nThe program was ended: {outcome.reason}."
    return outcome.stdout + ended
