"""Write and check requirements/constraints-torchX.Y.txt, the versions that fit a version of torch.

python scripts/update_constraints.py [--check]

With such a constraints file, pip installs the kit and the extras unsloth and vllm with that minor
version of torch. Each file is resolved for Linux and for every supported version of Python. Nothing
is installed. With ``--check``, the files are only checked.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Minor version of torch -> extras. vLLM pins torch: 0.26 needs 2.11, 0.27 to 0.32 need 2.13. The
# plug-in in the extra vllm is for vLLM 0.28 and later.
SETS = {"2.11": ("unsloth",), "2.13": ("unsloth", "vllm")}
PYTHONS = ("3.11", "3.12", "3.13")
UV = shutil.which("uv") or str(ROOT / ".cache/uv/bin/uv")
OPTIONS = (
    # without the project's own override, which pip does not know
    *("pip", "compile", "--no-config", "--quiet", "--no-header", "--no-annotate"),
    *("--python-platform", "linux"),
)
# Packages that are pinned, since a resolver could choose a version that does not work
NAMES = (
    *("unsloth", "unsloth-zoo"),
    *("torch", "torchvision", "torchaudio", "triton", "vllm", "vllm-bnb-plugin", "xformers"),
    *("transformers", "trl", "peft", "accelerate", "bitsandbytes", "datasets", "numpy"),
)


def resolve(constraints: str, extras: tuple[str, ...], python: str) -> dict[str, str]:
    """Resolve the kit and some extras under constraints on Linux, and return package -> version.

    Args:
        constraints: Text of a constraints file.
        extras: Extras of the kit to resolve.
        python: Version of Python.

    Raises:
        SystemExit: No versions satisfy the constraints. The message is that of the resolver.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(constraints)
        file.flush()
        words = [UV, *OPTIONS, *(f"--extra={name}" for name in extras), "--python-version", python]
        done = subprocess.run(
            [*words, "-c", file.name, "pyproject.toml", "-"],
            cwd=ROOT, input="vllm", capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        sys.exit(f"Python {python}, {constraints.strip()}:\n{done.stderr}")
    return dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.M))


def main() -> None:
    """Write every constraints file unless ``--check`` is given, then check it for every Python."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only check the files, write nothing")
    check = parser.parse_args().check
    for minor, extras in SETS.items():
        path = ROOT / f"requirements/constraints-torch{minor}.txt"
        if not check:
            found = resolve(f"torch=={minor}.*\n", extras, PYTHONS[0])
            pins = [f"{name}=={found[name]}" for name in NAMES if name in found]
            plugin = " vllm-bnb-plugin" if "vllm" in extras else ""
            head = f"# pip install unsloth unsloth_zoo vllm{plugin} -c {path.name}"
            path.write_text("\n".join([head, *pins, ""]), encoding="utf-8")
        text = path.read_text(encoding="utf-8")
        for python in PYTHONS:
            found = resolve(text, extras, python)
            for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.M):
                assert found.get(name, version) == version, (path.name, python, name)
            some = " ".join(f"{n} {found[n]}" for n in ("torch", "vllm", "unsloth", "trl"))
            print(f"{path.name}, Python {python}: {len(found)} packages, {some}")


if __name__ == "__main__":
    main()
