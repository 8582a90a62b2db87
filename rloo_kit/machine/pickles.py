"""Pickles are not opened: the look at a folder's or a hub model's files before weights are loaded.

A pickle is a program that runs when it is opened. Whoever loads weights looks first and passes
``use_safetensors=True``.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
# Pickles of a trainer's state start so; nobody opens them
NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "random_states")
INDEX = ".safetensors.index.json"
WHY = "a pickle, which can run any code when it is opened"
REMEDY = "where you trust it, load it with transformers and save_pretrained it as safetensors"


def is_pickle(name: str | Path) -> bool:
    """Return whether a file is a pickle by the end of its name.

    >>> is_pickle("adapter_model.bin"), is_pickle("model.safetensors")
    (True, False)
    """
    return str(name).lower().endswith(ENDINGS)


def pickled_weights(files: Iterable[str]) -> str | None:
    """Return a pickle that holds a model's weights; None where safetensors hold them, or nothing.

    >>> pickled_weights(["config.json", "pytorch_model.bin", "training_args.bin"])
    'pytorch_model.bin'
    >>> pickled_weights(["model.safetensors", "pytorch_model.bin"])
    """
    names = sorted(name for name in files if "/" not in name)
    if any(name.endswith(".safetensors") for name in names):
        return None
    weights = (name for name in names if is_pickle(name) and not name.startswith(NO_WEIGHTS))
    return next(weights, None)


def why_not_opened(files: Path | Iterable[str]) -> str | None:
    """Return why weights are not read, with the remedy; None where they are.

    Args:
        files: A model's or an adapter's folder, or the names of a hub model's files.
    """
    folder = files if isinstance(files, Path) else None
    try:
        names = [one.name for one in files.iterdir()] if isinstance(files, Path) else list(files)
    except OSError:
        return None  # reading it fails with a better message
    if pickle := pickled_weights(names):
        return f"has its weights in {pickle}, {WHY}: {REMEDY}"
    if folder is None:
        return None
    # transformers also takes names of weights from its config and from an index of shards
    named = [("config.json", _read(folder / "config.json").get("transformers_weights"))]
    for index in (name for name in names if name.endswith(INDEX)):
        shards = _read(folder / index).get("weight_map")
        named += [(index, name) for name in (shards.values() if isinstance(shards, dict) else ())]
    for file, name in named:
        if name and (str(name) != Path(str(name)).name or not str(name).endswith(".safetensors")):
            return (
                f"names {str(name)[:100]!r} in {file}, which is no safetensors file of its own "
                f"folder: download it again from a source you trust"
            )
    return None


def _read(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty where there is none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
