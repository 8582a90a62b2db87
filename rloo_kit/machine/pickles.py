"""Pickles are not opened: the scan of a folder or hub listing before a load, and the remedies.

A pickle is a program that runs when it is opened. Whoever loads weights scans first and passes
``use_safetensors=True``.
"""

import json
import shlex
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
# Pickles of a trainer's state start so; nobody opens them
NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "random_states")
INDEX = ".safetensors.index.json"
WHY = "a pickle, which can run any code when it is opened"
CAUSAL_LM = "AutoModelForCausalLM"
CLASSIFIER = "AutoModelForSequenceClassification"


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
    names = sorted(files)
    if any(name.endswith(".safetensors") for name in names):
        return None
    weights = [name for name in names if is_pickle(name) and not name.startswith(NO_WEIGHTS)]
    return next(iter(weights), None)


def why_not_opened(folder: Path, load_with: str = CAUSAL_LM) -> str | None:
    """Return why the weights of a folder are not read, with the remedy; None where they are.

    Args:
        folder: A model's or an adapter's.
        load_with: The class of transformers that the remedy loads a whole model with.
    """
    try:
        names = [entry.name for entry in folder.iterdir() if entry.is_file()]
    except OSError:
        return None  # reading it fails with a better message
    if pickle := pickled_weights(names):
        return f"has its weights in {pickle}, {WHY}: {_convert(folder, names, load_with)}"
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


def why_not_downloaded(name: str, files: Iterable[str], load_with: str = CAUSAL_LM) -> str | None:
    """Return why the weights of a hub model with these files are not read; None where they are."""
    names = list(files)
    pickle = pickled_weights(name for name in names if "/" not in name)
    return pickle and no_safetensors(name, pickle, names, load_with)


def no_safetensors(
    name: str, pickle: str = "", files: Iterable[str] = (), load_with: str = CAUSAL_LM
) -> str:
    """Return why a hub model without safetensors is not read, with the remedy."""
    folder = Path(PurePosixPath(name).name)
    held = f"in {pickle}, {WHY}" if pickle else "in no safetensors file but in pickles"
    return (
        f"has its weights {held}: download it (hf download {shlex.quote(name)} --local-dir "
        f"{shlex.quote(str(folder))}), {_convert(folder, list(files), load_with)}, and give "
        f"{str(folder)!r} as the model"
    )


def as_json_lines(path: Path) -> str:
    """Return the command that writes a pickled table as .jsonl in the same folder."""
    old, new = (_quoted(place) for place in (path, path.with_suffix(".jsonl")))
    code = (
        f"import pandas; pandas.DataFrame(pandas.read_pickle({old}))"
        f'.to_json({new}, orient="records", lines=True)'
    )
    return f"python -c {shlex.quote(code)}"


def _quoted(path: Path) -> str:
    return json.dumps(str(path), ensure_ascii=False)


def _convert(folder: Path, names: list[str], load_with: str) -> str:
    """Return the command that writes a pickle's weights as safetensors in the same folder."""
    if "adapter_model.bin" in names and "config.json" not in names:
        old, new = (_quoted(folder / f"adapter_model{end}") for end in (".bin", ".safetensors"))
        code = (
            "import torch, safetensors.torch as safe; "
            f'safe.save_file(torch.load({old}, map_location="cpu", weights_only=True), {new})'
        )
    else:
        code = (
            f"from transformers import {load_with} as Model; "
            f"Model.from_pretrained({_quoted(folder)}).save_pretrained({_quoted(folder)})"
        )
    return f"where you trust it, write them as safetensors with python -c {shlex.quote(code)}"
