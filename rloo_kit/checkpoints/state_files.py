"""A tree of numbers, texts and tensors as JSON beside safetensors: read back bit for bit.

No pickle is written or read. The sums are what identifies the base weights and the prompts.
"""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from rloo_kit.errors import CheckpointError

TREE, TENSORS = "state.json", "state.safetensors"
SAMPLED_ROWS = 512
"""Rows of a data set that its sum looks at, evenly spaced."""
SAMPLED_VALUES = 64
"""Values of each frozen weight that their sum looks at."""


def write_tree(folder: Path, tree: dict[str, Any]) -> None:
    """Write a tree to ``state.json`` and ``state.safetensors``.

    Args:
        folder: That exists.
        tree: Of dicts (keys are texts or numbers), lists, tuples, numbers, texts, None, tensors of
            torch and arrays of NumPy.

    Raises:
        CheckpointError: It holds something else.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Any] = {}
    plain = _encode(tree, "", tensors)
    (folder / TREE).write_text(json.dumps(plain), encoding="ascii")
    save_file(tensors, str(folder / TENSORS))


def read_tree(folder: Path) -> dict[str, Any]:
    """Return what ``write_tree`` wrote; tensors are on the CPU.

    Raises:
        CheckpointError: The files are missing, or no tree.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        plain = json.loads((folder / TREE).read_bytes())
        tensors = load_file(str(folder / TENSORS))
        tree = _decode(plain, tensors)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as exc:
        tree = exc
    if not isinstance(tree, dict):
        raise CheckpointError(
            f"{str(folder)!r} holds no state of a training ({tree!r}): take an earlier checkpoint"
        )
    return tree


def _encode(value: Any, path: str, tensors: dict[str, Any]) -> Any:
    import numpy as np
    import torch

    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value)
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
    name = f"{len(tensors)}{path}"
    if isinstance(value, np.ndarray):
        tensors[name] = torch.from_numpy(value.copy())
        return {"array": name}
    if isinstance(value, torch.Tensor):
        # a copy of its own: safetensors takes no views, and this state may be written later
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    raise CheckpointError(
        f"the training's state holds a {type(value).__name__} at {path[1:]!r}, which only a pickle "
        f"could keep: use an optimizer or reward whose state is numbers, texts and tensors"
    )


def _decode(plain: Any, tensors: dict[str, Any]) -> Any:
    if isinstance(plain, list):
        return [_decode(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tuple":
        return tuple(_decode(content, tensors))
    if kind == "dict":
        return {_decode(key, tensors): _decode(item, tensors) for key, item in content}
    # a clone: what safetensors maps from the file must not change with it
    tensor = tensors[content].clone()
    return tensor.numpy() if kind == "array" else tensor


# --- random states -------------------------------------------------------------------------------


def random_states() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators, a GPU's included."""
    import numpy as np
    import torch

    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": on_gpu,
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Put back what ``random_states`` returned; a GPU's only where there are as many GPUs."""
    import numpy as np
    import torch

    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


# --- which model, which prompts ------------------------------------------------------------------


def sum_of_weights(model: Any) -> str:
    """Return a sum of the frozen weights: names, shapes, types and some values of each.

    Args:
        model: Whose trained parameters have ``requires_grad``; those are left out.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or ".ref." in name:  # TRL's copy of the adapter
            continue
        values = parameter.detach().reshape(-1)[:SAMPLED_VALUES].cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(str(values.tolist()).encode())
    return digest.hexdigest()


def sum_of_rows(dataset: Any) -> str | None:
    """Return a sum of a data set: its length and some of its rows; None of a stream."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return None
    size = len(dataset)
    digest = hashlib.sha256(str(size).encode())
    for place in range(0, size, max(1, size // SAMPLED_ROWS)):
        digest.update(json.dumps(dataset[place], sort_keys=True, default=str).encode())
    return digest.hexdigest()
