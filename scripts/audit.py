"""Check the locked versions against the database of known vulnerabilities (``make audit``).

pip-audit looks up the advisories. Its text output says "no known vulnerabilities" even if it could
not look up a package, so this script reads its JSON output. The exit code is 1 if there is an
advisory and a newer version fixes it. Packages that were not found in the database are counted in
one line, and are not an error.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Time limit of the whole audit
SECONDS = 35.0
SECONDS_PER_ANSWER = 5
# Also printed if the audit took longer than `SECONDS`
UNREACHABLE = (
    "dependencies were not audited: the database of advisories cannot be reached from here"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit the requirement files of the command line, print the result, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", help="the command pip-audit, or its path")
    parser.add_argument("files", nargs="+", metavar="FILE.lock")
    given = parser.parse_args(arguments)
    lines, code = verdict(ask(given.program, given.files))
    print("\n".join(lines))
    return code


def ask(program: str, files: Sequence[str], seconds: float = SECONDS) -> dict[str, Any] | None:
    """Run pip-audit and return its report, or None if it failed or took too long.

    Args:
        program: The command pip-audit, or its path.
        files: Requirement files with a pinned version and a hash for each package. Nothing is
            installed.
        seconds: Time limit in seconds.
    """
    command = [program, "--format", "json", "--require-hashes", "--disable-pip"]
    command += ["--progress-spinner", "off", "--timeout", str(SECONDS_PER_ANSWER)]
    for file in files:
        command += ["--requirement", str(Path(file))]
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
        report = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return report if isinstance(report, dict) else None


def verdict(report: dict[str, Any] | None) -> tuple[list[str], int]:
    """Return the lines to print about a report, and the exit code.

    Args:
        report: Report of pip-audit. Each of its ``dependencies`` has ``vulns`` or a
            ``skip_reason``. None: there is no report.
    """
    packages = (report or {}).get("dependencies", [])
    asked = [package for package in packages if "vulns" in package]
    if not asked:
        return [UNREACHABLE], 0
    lines = []
    code = 0
    for package in asked:
        for found in package["vulns"]:
            fixed = ", ".join(found.get("fix_versions") or [])
            what = f"{package['name']} {package['version']}: {found['id']}"
            lines.append(f"{what}, fixed in {fixed}" if fixed else f"{what}, not fixed yet")
            code = 1 if fixed else code
    lines.append(f"{len(asked)} locked packages audited, {len(lines)} advisories")
    if unknown := len(packages) - len(asked):
        lines.append(f"{unknown} packages were not found in the database")
    if code:
        lines.append("get the fixed versions: run make lock, then make test")
    return lines, code


if __name__ == "__main__":
    sys.exit(main())
