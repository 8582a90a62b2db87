"""Save and load the state of a training, get and set random states, and compute checksums.

The state is a tree of nested values. ``state.json`` has the tree without its tensors, which are in
``state.safetensors``. A value of a type that JSON lacks is written as an object with one key:

- ``{"dict": items}`` for a dict, because its keys may be numbers;
- ``{"tuple": items}`` for a tuple;
- ``{"tensor": name}`` or ``{"array": name}`` for a tensor of torch or an array of NumPy, with its
  name in ``state.safetensors``.
"""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from rloo_kit.errors import CheckpointError
from rloo_kit.types import Model

TREE = "state.json"
TENSORS = "state.safetensors"
# Approximate number of evenly spaced rows that the checksum of a dataset covers
SAMPLED_ROWS = 512
# Number of values that the checksum of the weights covers in each frozen weight
SAMPLED_VALUES = 64


def write_tree(folder: Path, tree: dict[str, Any]) -> None:
    """Write a tree of values to ``state.json`` and ``state.safetensors``.

    Args:
        folder: An existing folder.
        tree: Nested dicts, lists and tuples of numbers, strings, None, tensors of torch and arrays
            of NumPy. Keys of dicts are strings or numbers.

    Raises:
        CheckpointError: The tree has a value of another type.
    """
    tensors: dict[str, torch.Tensor] = {}
    plain = _encode(tree, "", tensors)
    (folder / TREE).write_text(json.dumps(plain), encoding="ascii")
    save_file(tensors, str(folder / TENSORS))


def read_tree(folder: Path) -> dict[str, Any]:
    """Read the tree that ``write_tree`` wrote into a folder; all tensors are on the CPU.

    The checksums of the files must have been verified before.
    """
    return _decode(json.loads((folder / TREE).read_bytes()), load_file(str(folder / TENSORS)))


def _encode(value: object, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a value in the form of ``state.json``.

    Args:
        value: A part of the tree.
        path: Position of the value in the tree, for names of tensors and for messages.
        tensors: Tensors and arrays are added to this dict by name.

    Raises:
        CheckpointError: The value has a type that cannot be written.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_encode(item, f"{path}.{place}", tensors) for place, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": _encode(list(value), path, tensors)}
    if isinstance(value, dict):
        items = [
            [_encode(key, path, tensors), _encode(item, f"{path}.{key}", tensors)]
            for key, item in value.items()
        ]
        return {"dict": items}
    if not isinstance(value, np.ndarray | torch.Tensor):
        raise CheckpointError(
            f"the state to save holds a {type(value).__name__} at {path[1:]!r}, which cannot be "
            f"saved without pickle: use an optimizer or reward whose state consists of numbers, "
            f"strings and tensors"
        )
    name = f"{len(tensors)}{path}"
    # a copy, because safetensors rejects views, and this state may be written later
    tensors[name] = torch.as_tensor(value).detach().to("cpu", copy=True).contiguous()
    return {"array" if isinstance(value, np.ndarray) else "tensor": name}


def _decode(plain: object, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the value that ``_encode`` has written."""
    if isinstance(plain, list):
        return [_decode(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tuple":
        return tuple(_decode(content, tensors))
    if kind == "dict":
        return dict(_decode(content, tensors))
    # a clone, because safetensors maps the file into memory
    tensor = tensors[content].clone()
    return tensor.numpy() if kind == "array" else tensor


# --- random states -------------------------------------------------------------------------------


def random_states() -> dict[str, Any]:
    """Return the states of the random generators of Python, NumPy, torch and the current GPU.

    The state of the GPU is None on a machine without CUDA.
    """
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        # only the current GPU, because a query would create a CUDA context on every other GPU
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Set all random generators to the states that ``random_states`` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


# --- checksums of model and prompts --------------------------------------------------------------


def checksum_of_weights(model: Model) -> str:
    """Return a SHA-256 checksum of the frozen weights: names, shapes, dtypes and first values.

    Args:
        model: The policy. Its trained parameters (``requires_grad``) are left out.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        # `.ref.` is TRL's copy of the adapter
        if parameter.requires_grad or ".ref." in name:
            continue
        values = parameter.detach().reshape(-1)[:SAMPLED_VALUES].cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(str(values.tolist()).encode())
    return digest.hexdigest()


def checksum_of_rows(dataset: Any) -> str | None:
    """Return a SHA-256 checksum of a dataset's length and some of its rows; None for a stream."""
    if not hasattr(dataset, "__len__"):
        return None
    size = len(dataset)
    digest = hashlib.sha256(str(size).encode())
    for place in range(0, size, max(1, size // SAMPLED_ROWS)):
        digest.update(json.dumps(dataset[place], sort_keys=True, default=_as_text).encode())
    return digest.hexdigest()


def _as_text(value: Any) -> str:
    """Return a text for a value of a type that JSON lacks; equal values have equal texts."""
    if hasattr(value, "thumbnail"):  # a PIL image; its str() has an address in memory
        return f"{value.mode} {value.size} {hashlib.sha256(value.tobytes()).hexdigest()}"
    return str(value)
