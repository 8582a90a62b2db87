"""Function that runs Python code in a process of its own."""

import subprocess
import sys


def run_python(code, *arguments, **how):
    """Run code and return what it prints; fail if its exit code is not 0.

    Args:
        code: Source text.
        arguments: Its ``sys.argv[1:]``.
        how: Further arguments of ``subprocess.run``.
    """
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **how)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout
