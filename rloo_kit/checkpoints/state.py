"""State of a training: a tree of values in JSON and safetensors, random states, checksums.

``state.json`` holds the tree. A value that JSON lacks is an object with one key:
``{"dict": items}`` (so that keys may be numbers), ``{"tuple": items}``, and ``{"tensor": name}`` or
``{"array": name}`` for a value in ``state.safetensors``.
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
# Rows of a dataset that its checksum reads, evenly spaced
SAMPLED_ROWS = 512
# Values of each frozen weight that the checksum reads
SAMPLED_VALUES = 64


def write_tree(folder: Path, tree: dict[str, Any]) -> None:
    """Write a tree to ``state.json`` and ``state.safetensors``.

    Args:
        folder: An existing folder.
        tree: Nested dicts (keys are texts or numbers), lists, tuples, numbers, texts, None, tensors
            of torch and arrays of NumPy.

    Raises:
        CheckpointError: The tree holds a value of another type.
    """
    tensors: dict[str, torch.Tensor] = {}
    plain = _encode(tree, "", tensors)
    (folder / TREE).write_text(json.dumps(plain), encoding="ascii")
    save_file(tensors, str(folder / TENSORS))


def read_tree(folder: Path) -> dict[str, Any]:
    """Read the tree that ``write_tree`` wrote to a verified checkpoint; tensors are on the CPU."""
    return _decode(json.loads((folder / TREE).read_bytes()), load_file(str(folder / TENSORS)))


def _encode(value: object, path: str, tensors: dict[str, torch.Tensor]) -> Any:
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
            f"the training's state holds a {type(value).__name__} at {path[1:]!r}, which only a "
            f"pickle could keep: use an optimizer or reward whose state is numbers, texts and "
            f"tensors"
        )
    name = f"{len(tensors)}{path}"
    # a copy, because safetensors rejects views, and this state may be written later
    tensors[name] = torch.as_tensor(value).detach().to("cpu", copy=True).contiguous()
    return {"array" if isinstance(value, np.ndarray) else "tensor": name}


def _decode(plain: object, tensors: dict[str, torch.Tensor]) -> Any:
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
    """Return the states of the generators of Python, NumPy, torch and the GPU that trains."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        # of this device only: asking the others would put a CUDA context on each
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Set the states that ``random_states`` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


# --- which model, which prompts ------------------------------------------------------------------


def checksum_of_weights(model: Model) -> str:
    """Return a checksum of the frozen weights: names, shapes, types and some values of each.

    Args:
        model: The policy; its trained parameters, those with ``requires_grad``, do not count.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        # TRL's copy of the adapter
        if parameter.requires_grad or ".ref." in name:
            continue
        values = parameter.detach().reshape(-1)[:SAMPLED_VALUES].cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(str(values.tolist()).encode())
    return digest.hexdigest()


def checksum_of_rows(dataset: Any) -> str | None:
    """Return a checksum of a dataset's length and some of its rows; None for a stream."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return None
    size = len(dataset)
    digest = hashlib.sha256(str(size).encode())
    for place in range(0, size, max(1, size // SAMPLED_ROWS)):
        digest.update(json.dumps(dataset[place], sort_keys=True, default=_as_text).encode())
    return digest.hexdigest()


def _as_text(value: Any) -> str:
    if hasattr(value, "thumbnail"):  # an image of PIL, whose text is its address in memory
        return f"{value.mode} {value.size} {hashlib.sha256(value.tobytes()).hexdigest()}"
    return str(value)
