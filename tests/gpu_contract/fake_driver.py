"""A libcuda.so.1 of fake_driver.c, which finds no device."""

import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def build_driver(folder):
    """Compile it into a folder, and return its path."""
    library = folder / "libcuda.so.1"
    soname = "-Wl,-soname,libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", soname, SOURCE, "-o", library], check=True)
    return library
