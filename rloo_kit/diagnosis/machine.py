"""``rloo-kit doctor``: what this machine can run, against the tested set, and how to mend it."""

import importlib
from dataclasses import dataclass

from rloo_kit.errors import KitError
from rloo_kit.machine.environment import Environment, setup
from rloo_kit.machine.hardware import GIB, TESTED, installed_version, why_not_vllm

OPTIONAL = ("unsloth", "unsloth_zoo", "vllm")
NEEDED = tuple(name for name in TESTED if name not in OPTIONAL)


@dataclass(frozen=True)
class Examination:
    """The doctor's findings as lines of text."""

    lines: list[str]
    can_train: bool


def examine() -> Examination:
    """Look at versions, device and backends; import what training would import."""
    lines, missing = _versions()
    if missing:
        lines.append(f"training cannot start: pip install {' '.join(missing)}")
        return Examination(lines, can_train=False)
    try:
        environment = setup()
        for name in NEEDED:
            importlib.import_module(name)
    except KitError as exc:
        return Examination([*lines, f"training cannot start: {exc}"], can_train=False)
    except Exception as exc:  # whatever a broken installation raises
        lines.append(
            f"training cannot start: {type(exc).__name__}: {str(exc).splitlines()[0][:200]}; "
            f"install the tested set: pip install {' '.join(f'{n}=={TESTED[n]}' for n in NEEDED)}"
        )
        return Examination(lines, can_train=False)
    return Examination([*_machine(environment), *lines, *_backends(environment)], can_train=True)


def _versions() -> tuple[list[str], list[str]]:
    """Return a line per package and the pins that are missing and needed."""
    lines, missing = [], []
    for name, tested in TESTED.items():
        found = installed_version(name)
        if found is None:
            lines.append(f"  {name:<13} not installed" + ("" if name in NEEDED else " (optional)"))
            if name in NEEDED:
                missing.append(f"{name}=={tested}")
        elif found.split("+")[0] == tested:
            lines.append(f"  {name:<13} {found}")
        else:
            lines.append(
                f"  {name:<13} {found}, tested with {tested}: pip install {name}=={tested}"
            )
    return lines, missing


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
            f"{hardware.num_devices} devices: set CUDA_VISIBLE_DEVICES=0 in .env to use one"
        )
    lines += [
        f"{name} is installed but cannot be imported and is hidden ({reason}): pip uninstall {name}"
        for name, reason in environment.hidden.items()
    ]
    return [*lines, "versions:"]


def _backends(environment: Environment) -> list[str]:
    reasons = {
        "unsloth": environment.why_not_unsloth,
        "transformers": None,
        "vllm": why_not_vllm(),
    }
    return [
        "backends:",
        *(f"  {name:<13} {'starts' if why is None else why}" for name, why in reasons.items()),
    ]
