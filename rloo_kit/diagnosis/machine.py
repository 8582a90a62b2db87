"""Check of the machine for ``rloo-kit doctor``: versions, device, backends, what to install."""

import importlib

from rloo_kit.errors import KitError
from rloo_kit.machine.environment import Environment, setup
from rloo_kit.machine.hardware import GIB, TESTED, installed_version, why_not_vllm
from rloo_kit.text.wording import first_line

OPTIONAL = ("unsloth", "unsloth_zoo", "vllm")
NEEDED = tuple(name for name in TESTED if name not in OPTIONAL)


def examine() -> tuple[list[str], bool]:
    """Return versions, device and backends as lines, and whether training can start here.

    What training would import is imported.
    """
    versions = {name: installed_version(name) for name in TESTED}
    lines = [_version_line(name, found) for name, found in versions.items()]
    missing = [f"{name}=={TESTED[name]}" for name in NEEDED if versions[name] is None]
    if missing:
        lines.append(f"training cannot start: pip install {' '.join(missing)}")
        return lines, False
    try:
        environment = setup()
        for name in NEEDED:
            importlib.import_module(name)
    except KitError as exc:
        return [*lines, f"training cannot start: {exc}"], False
    except Exception as exc:  # whatever a broken installation raises
        lines.append(
            f"training cannot start: {type(exc).__name__}: {first_line(exc)}; install the tested "
            f"set: pip install {' '.join(f'{name}=={TESTED[name]}' for name in NEEDED)}"
        )
        return lines, False
    backends = {
        "unsloth": environment.why_not_unsloth,
        "transformers": None,
        "vllm": why_not_vllm(),
    }
    lines = [*_machine(environment), "versions:", *lines, "backends:"]
    lines += [f"  {name:<13} {reason or 'starts'}" for name, reason in backends.items()]
    return lines, True


def _version_line(name: str, found: str | None) -> str:
    tested, line = TESTED[name], f"  {name:<13} {found or 'not installed'}"
    if found is None:
        return line if name in NEEDED else f"{line} (optional)"
    is_tested = found.split("+")[0] == tested
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
            f"{hardware.num_devices} devices: the first is used; CUDA_VISIBLE_DEVICES in .env "
            f"chooses another"
        )
    return lines
