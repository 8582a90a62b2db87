"""Write and read the weights of a checkpoint.

They are adapters in PEFT's format, or the trained weights of a model without an adapter.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rloo_kit.errors import CheckpointError
from rloo_kit.models.adapters import WEIGHTS as ADAPTER
from rloo_kit.models.adapters import adapter_tensors, trained_parameters, write_adapter
from rloo_kit.types import Model

WEIGHTS = "model.safetensors"


def write_weights(model: Model, folder: Path) -> None:
    """Write all adapters of a model in PEFT's format.

    If the model has no adapter, write its trained weights to ``model.safetensors``.
    """
    if not hasattr(model, "peft_config"):
        values = {
            name: parameter.detach().to("cpu", copy=True).contiguous()
            for name, parameter in trained_parameters(model).items()
        }
        save_file(values, folder / WEIGHTS)
        return
    for name in model.peft_config:
        write_adapter(model, name, folder if name == "default" else folder / name)


def read_weights(model: Model, folder: Path) -> None:
    """Load the weights that ``write_weights`` wrote into the existing tensors of a model.

    TRL's frozen copy of the adapter (``ref``) is added or deleted, so that the model has it if, and
    only if, the folder has it.

    Raises:
        CheckpointError: The model has other layers or another LoRA rank than the checkpoint.
    """
    if not hasattr(model, "peft_config"):
        _copy_into(trained_parameters(model), load_file(str(folder / WEIGHTS)), folder.name)
        return
    has_reference = (folder / "ref" / ADAPTER).exists()
    if "ref" in model.peft_config and not has_reference:
        # TRL has just copied the adapter as the reference, but the run that wrote the checkpoint
        # used the base model as its reference
        model.delete_adapter("ref")
    if has_reference and "ref" not in model.peft_config:
        model.add_adapter("ref", model.peft_config["default"])
    for name in model.peft_config:
        place = folder if name == "default" else folder / name
        _copy_into(adapter_tensors(model, name), load_file(str(place / ADAPTER)), folder.name)
    model.set_adapter("default")


def _copy_into(own: dict[str, Any], kept: dict[str, Any], name: str) -> None:
    """Copy values into the existing tensors of a model, which keep their dtype and device.

    Args:
        own: Tensors of the model, by name.
        kept: Values from the checkpoint, by name.
        name: Name of the checkpoint, for the message.

    Raises:
        CheckpointError: Names or shapes differ.
    """
    wrong = sorted(
        n for n in {*own, *kept} if n not in own or n not in kept or own[n].shape != kept[n].shape
    )
    if wrong:
        raise CheckpointError(
            f"the adapter of {name} has other layers or another rank than the adapter of "
            f"this run ({wrong[0]}): set lora back to its old values, or begin a new run"
        )
    with torch.no_grad():
        for key, values in kept.items():
            own[key].copy_(values)
