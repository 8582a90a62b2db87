"""A pytest plugin: one line of JSON for each test, written while the tests run.

So that a process that is killed or crashes loses no more than the test it was in. The file is named
by RLOO_KIT_TEST_LINES; ``pytest -p gpu_pytest`` turns it on.
"""

import json
import os
from collections import defaultdict

durations: dict[str, float] = defaultdict(float)
reported: set[str] = set()


def _write(row):
    with open(os.environ["RLOO_KIT_TEST_LINES"], "a") as file:
        file.write(json.dumps(row, default=str) + "\n")


def pytest_runtest_logstart(nodeid):
    """Say which test is begun."""
    _write({"name": _name(nodeid), "status": "begun"})


def pytest_runtest_logreport(report):
    """Say how a test ended; what its set-up took counts as its own."""
    durations[report.nodeid] += report.duration
    if report.outcome == "passed" and report.when != "call":
        return
    if report.nodeid in reported and report.outcome != "failed":
        return
    reported.add(report.nodeid)
    _write(
        {
            "name": _name(report.nodeid),
            "status": report.outcome,
            "seconds": round(durations[report.nodeid], 1),
            "reason": _reason(report),
            "measured": dict(report.user_properties),
        }
    )


def pytest_collectreport(report):
    """Say why a file could not be read."""
    if report.outcome == "failed":
        _write({"name": report.nodeid, "status": "failed", "reason": _last_line(report.longrepr)})


def _name(nodeid):
    return nodeid.split("::", 1)[-1].removeprefix("test_").replace("_", " ")


def _reason(report):
    if report.outcome == "passed":
        return None
    if report.outcome == "skipped":
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return _last_line(report.longrepr)
    return f"{crash.message} ({os.path.basename(crash.path)}:{crash.lineno})"


def _last_line(text):
    lines = [line for line in str(text).splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no reason was given"
