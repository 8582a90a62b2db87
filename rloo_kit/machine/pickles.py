"""Files that are pickles: which these are, why none is opened, and what to write in their place.

A pickle is a program that runs when it is opened. Weights are read from safetensors files alone.
"""

import contextlib
import json
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "random_states")
"""Beginnings of pickles that a trainer leaves beside the weights; they are not looked at."""
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

    Args:
        files: Names of the files that lie in the model's folder.

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
        return None  # reading it says so better
    if pickle := pickled_weights(names):
        return f"has its weights in {pickle}, {WHY}: {_convert(folder, names, load_with)}"
    for name in names:
        if name.endswith(INDEX) and (strange := _strange_shard(folder / name)):
            return (
                f"names {strange!r} in {name}, which is no safetensors file of its own folder: "
                "download it again from a source you trust"
            )
    return None


def why_not_downloaded(name: str, files: Iterable[str], load_with: str = CAUSAL_LM) -> str | None:
    """Return why the weights of a hub model are not read, with the remedy; None where they are.

    Args:
        name: On the hub.
        files: Names of its files.
        load_with: As in ``why_not_opened``.
    """
    names = list(files)
    pickle = pickled_weights(name for name in names if "/" not in name)
    return pickle and no_safetensors(name, pickle, names, load_with)


def no_safetensors(
    name: str, pickle: str = "", files: Iterable[str] = (), load_with: str = CAUSAL_LM
) -> str:
    """Return why a hub model without safetensors is not read, with the remedy."""
    folder = Path(PurePosixPath(name).name)
    held = f"in {pickle}" if pickle else "in no safetensors file but in pickles"
    why = WHY if pickle else "which can run any code when they are opened"
    return (
        f"has its weights {held}, {why}: download it (hf download {shlex.quote(name)} --local-dir "
        f"{shlex.quote(str(folder))}), {_convert(folder, list(files), load_with)}, and give "
        f"{str(folder)!r} as the model"
    )


def as_json_lines(path: Path) -> str:
    """Return the command that writes a pickled table as .jsonl beside it."""
    old, new = (_quoted(place) for place in (path, path.with_suffix(".jsonl")))
    code = (
        f"import pandas; pandas.DataFrame(pandas.read_pickle({old}))"
        f'.to_json({new}, orient="records", lines=True)'
    )
    return f"python -c {shlex.quote(code)}"


def _quoted(path: Path) -> str:
    return json.dumps(str(path), ensure_ascii=False)


def _convert(folder: Path, names: list[str], load_with: str) -> str:
    """Return the command that writes weights once more, beside the pickle."""
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


def _strange_shard(index: Path) -> str | None:
    """Return a file of an index that is no safetensors file beside it."""
    try:
        shards = json.loads(index.read_bytes())["weight_map"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # no index of weights
    for name in map(str, shards):
        if name != Path(name).name or "\\" in name or not name.endswith(".safetensors"):
            return name[:100]
    return None


@contextlib.contextmanager
def none_opened(refuse: Callable[[str], Exception]) -> Iterator[None]:
    """Make ``torch.load`` raise for the time of the block, whoever calls it.

    Libraries fall back to a pickle where a folder, an index or a repository offers one.

    Args:
        refuse: Returns the error to raise, of the file's name.
    """
    import torch

    opened = torch.load

    def refused(f: Any, *_: Any, **__: Any) -> Any:
        raise refuse(str(f))

    torch.load = refused
    try:
        yield
    finally:
        torch.load = opened
