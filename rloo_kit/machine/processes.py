"""The processes of a training that a launcher started: torchrun, accelerate launch, deepspeed."""

import os
from typing import TypeVar

T = TypeVar("T")


def num_processes() -> int:
    """Return how many processes train together; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def is_first() -> bool:
    """Return whether this process is the one that writes and prints."""
    return num_processes() == 1 or os.environ["RANK"] == "0"


def from_first(value: T) -> T:
    """Return the first process's value; every process calls it.

    The trainer's settings connect the processes, so they must have been made.
    """
    if num_processes() == 1:
        return value
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]


def divided_by_launcher() -> bool:
    """Return whether ``accelerate launch`` divides the training, by DeepSpeed or FSDP."""
    return uses_fsdp() or os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"


def uses_fsdp() -> bool:
    """Return whether ``accelerate launch`` divides the model by FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"


def is_cut_off(exc: BaseException) -> bool:
    """Return whether an error says that another process of the training is gone."""
    from torch.distributed import DistError

    return num_processes() > 1 and (isinstance(exc, DistError) or "gloo" in str(exc))
