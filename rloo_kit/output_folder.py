"""Where a command writes: a folder that is not there yet, so that nothing is overwritten."""

from pathlib import Path

from rloo_kit.errors import ConfigError


def free_folder(wanted: str | Path) -> Path:
    """Return ``wanted``, or the next ``wanted-N`` that does not exist; nothing is made.

    Raises:
        ConfigError: It would lie in a file.
    """
    wanted = Path(wanted)
    folder, number = wanted, 1
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    parent = next(p for p in folder.absolute().parents if p.exists())
    if not parent.is_dir():
        raise ConfigError(
            f"output_dir {str(wanted)!r} lies in {str(parent)!r}, which is a file: choose another"
        )
    return folder
