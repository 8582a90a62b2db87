"""Check of the installation for ``rloo-kit doctor``: versions, device and backends."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

from rloo_kit.errors import KitError
from rloo_kit.machine.environment import Environment, setup
from rloo_kit.machine.hardware import GIB, TESTED, installed_version, why_not_vllm
from rloo_kit.text.wording import first_line

OPTIONAL = ("unsloth", "unsloth_zoo", "vllm")
NEEDED = tuple(name for name in TESTED if name not in OPTIONAL)
# Folder of pip's constraint files; in an editable install it is next to the package
SETS = Path(__file__).resolve().parents[1] / "requirements"
if not SETS.is_dir():
    SETS = SETS.parents[1] / "requirements"


def examine() -> tuple[list[str], bool]:
    """Check whether training can start on this machine, and describe the installation.

    The check imports all packages that training needs.

    Returns:
        The description, as lines of text about versions, device and backends, and True if training
        can start.
    """
    versions = {name: installed_version(name) for name in TESTED}
    _, tested = set_for(versions["torch"])
    lines = [_version_line(name, found, tested[name]) for name, found in versions.items()]
    missing = [f"{name}=={tested[name]}" for name in NEEDED if versions[name] is None]
    if missing:
        return [*lines, f"training cannot start: pip install {' '.join(missing)}"], False
    try:
        environment = setup()
        for name in NEEDED:
            importlib.import_module(name)
    except KitError as exc:
        return [*lines, f"training cannot start: {exc}"], False
    except Exception as exc:  # whatever a broken installation raises
        return [
            *lines,
            f"training cannot start: {type(exc).__name__}: {first_line(exc)}; install the tested "
            f"versions: pip install {' '.join(f'{name}=={tested[name]}' for name in NEEDED)}",
        ], False
    backends = {
        "unsloth": environment.why_not_unsloth,
        "transformers": None,
        "vllm": why_not_vllm() or _why_no_import(),
    }
    lines = [*_machine(environment), "versions:", *lines, "backends:"]
    lines += [f"  {name:<13} {reason or 'starts'}" for name, reason in backends.items()]
    if command := install_command(versions["torch"]):
        lines.append(f"install: {command}")
    return lines, True


def set_for(torch: str | None) -> tuple[Path | None, dict[str, str]]:
    """Return the package versions that were tested together with a version of torch.

    Returns:
        The path of pip's constraint file with these versions, and a dict of package -> version. If
        the kit has no such file for this version of torch, the path is None, and the dict is
        ``TESTED``.
    """
    minor = ".".join((torch or "").split(".")[:2])
    path = SETS / f"constraints-torch{minor}.txt"
    if not path.is_file():
        return None, TESTED
    lines = path.read_text(encoding="utf-8").replace("-", "_").splitlines()
    return path, TESTED | dict(line.split("==") for line in lines if not line.startswith("#"))


def install_command(torch: str | None) -> str | None:
    """Return the pip command that installs the kit's GPU packages, or None without an NVIDIA GPU.

    The command keeps the minor version of torch if the kit has tested versions for it. It leaves
    vLLM out on systems other than Linux, and for a torch with CUDA 12, because vLLM's wheels are
    for CUDA 13.

    Args:
        torch: The installed version of torch, such as ``2.13.0+cu130``; None if torch is not
            installed.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    path = set_for(torch)[0] or SETS / "constraints-torch2.13.txt"
    first, _, _ = path.read_text(encoding="utf-8").partition("\n")
    command = first.removeprefix("# ").replace(path.name, f'"{path}"')
    if sys.platform != "linux" or "+cu12" in (torch or ""):
        command = command.replace(" vllm-bnb-plugin", "").replace(" vllm", "")
    return command


def _why_no_import() -> str | None:
    """Return the reason why vLLM cannot be imported in a new process, or None if it can."""
    # `import vllm` does not load vLLM's compiled kernels, so it succeeds even if these cannot load
    kernels = "torch.version.cuda and __import__('vllm._C_stable_libtorch')"
    words = [sys.executable, "-c", f"import torch, vllm; vllm.LLM; {kernels}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    _, _, why = done.stderr.strip().rpartition("\n")
    return f"vLLM cannot be imported: {why}" if done.returncode else None


def _version_line(name: str, found: str | None, tested: str) -> str:
    line = f"  {name:<13} {found or 'not installed'}"
    if found is None:
        return line if name in NEEDED else f"{line} (optional)"
    is_tested = found.split("+")[0] in (tested, TESTED[name])
    return line if is_tested else f"{line}, tested with {tested}: pip install {name}=={tested}"


def _machine(environment: Environment) -> list[str]:
    hardware = environment.hardware
    lines = [
        f"device: {hardware.device}, {hardware.name}",
        f"memory: {hardware.free_memory / GIB:.1f} of {hardware.total_memory / GIB:.1f} GiB free",
        f"precision: {hardware.mixed_precision}",
        f".env: {environment.dotenv or 'none'}",
    ]
    if hardware.num_devices > 1:
        lines.append(
            f"{hardware.num_devices} devices: only the first is used, unless you train with "
            f"torchrun --nproc-per-node {hardware.num_devices} -m rloo_kit train RUN.yaml"
        )
    return lines
