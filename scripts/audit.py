"""Hold the locked versions against the database of known vulnerabilities; see ``make audit``.

pip-audit asks the package index and says "no known vulnerabilities" of packages that it found
nothing about, so its answer is read in JSON. Exit code 1: there is an advisory, and a version that
fixes it. A package that cannot be looked up is named in one line and fails nothing.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Of the whole audit
SECONDS = 35.0
SECONDS_PER_ANSWER = 5
# Said too where it took longer than `SECONDS`
UNREACHABLE = (
    "dependencies were not audited: the database of advisories cannot be reached from here"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit one or more requirement files with hashes; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", help="pip-audit")
    parser.add_argument("files", nargs="+", metavar="FILE.lock")
    given = parser.parse_args(arguments)
    lines, code = verdict(ask(given.program, given.files))
    print("\n".join(lines))
    return code


def ask(program: str, files: Sequence[str], seconds: float = SECONDS) -> dict[str, Any] | None:
    """Return pip-audit's report, or None where it gave none.

    Args:
        program: pip-audit.
        files: Requirement files, every version pinned and hashed; nothing is installed.
        seconds: Most that it may take.
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
    """Return what to print of a report, and the exit code.

    Args:
        report: As pip-audit writes it: ``dependencies``, each with ``vulns`` or a ``skip_reason``.
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
        lines.append("take the fixed versions: make lock, then make test")
    return lines, code


if __name__ == "__main__":
    sys.exit(main())
