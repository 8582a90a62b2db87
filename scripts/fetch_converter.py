"""Fetch llama.cpp's converter, which turns a model's folder into a GGUF file.

The PyPI package ``llama-cpp-python`` contains the sources of llama.cpp. This script downloads its
source archive (about 75 MB) without building it, and keeps the converter, its modules and the
licence of llama.cpp (MIT). If the converter is already there, the script downloads nothing.

    python scripts/fetch_converter.py                # into the kit's cache, where export finds it
    python scripts/fetch_converter.py --out tools    # then: rloo-kit export ... --converter tools
"""

import argparse
import os
import sys
import tarfile
import tempfile
from pathlib import Path

from fetch_smollm2 import FetchError, find_pip, run

from rloo_kit.export.llama_cpp import SCRIPT
from rloo_kit.machine.environment import cache_folder

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
# Below `vendor/llama.cpp` of the archive.
KEPT = (SCRIPT, "conversion", "gguf-py/gguf", "LICENSE")


def unpack(archive: Path, folder: Path) -> None:
    """Extract the converter, its modules and the licence from a source archive into a folder.

    Raises:
        FetchError: The archive has no converter.
    """
    with tarfile.open(archive) as files:
        for member in files:
            name = member.name.partition("/vendor/llama.cpp/")[2]
            if member.isfile() and any(name == k or name.startswith(f"{k}/") for k in KEPT):
                member.name = name
                files.extract(member, folder, filter="data")
    if not (folder / SCRIPT).is_file():
        raise FetchError(f"{archive.name} holds no {SCRIPT}: set VERSION to another release")


def download(folder: Path) -> Path:
    """Download the source archive of the package with pip, and return its path.

    Raises:
        FetchError: pip was not found, or the download failed.
    """
    if (pip := find_pip()) is None:
        raise FetchError(f"pip was not found: install it with `{sys.executable} -m ensurepip`")
    source = ["--no-deps", "--no-binary", PACKAGE, "--dest", str(folder)]
    run([*pip, "download", "--quiet", *source, f"{PACKAGE}=={VERSION}"])
    return next(folder.glob("*.tar.gz"))


def fetch(out: Path) -> Path:
    """Download the converter into a folder, unless it is there already, and return the folder.

    Raises:
        FetchError: The converter cannot be downloaded, or the folder has other files.
    """
    if (out / SCRIPT).is_file():
        return out
    if out.is_dir() and any(out.iterdir()):
        raise FetchError(f"{out} has files but no {SCRIPT}: give a new folder to --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=out.parent) as place:
        fresh = Path(place) / "llama.cpp"
        unpack(download(Path(place)), fresh)
        if out.is_dir():
            out.rmdir()  # it is empty; Windows does not replace folders
        os.replace(fresh, out)
    return out


def main(argv: list[str] | None = None) -> int:
    """Fetch the converter, print its folder and return the exit status."""
    parser = argparse.ArgumentParser(description="Fetch llama.cpp's converter to GGUF.")
    default = cache_folder() / "llama.cpp"
    parser.add_argument(
        "--out", type=Path, default=default, help="folder of the converter; default: kit's cache"
    )
    try:
        print(fetch(parser.parse_args(argv).out))
    except FetchError as exc:
        print(f"fetch_converter: {exc}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
