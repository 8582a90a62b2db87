"""Data-parallel training: rank and size of a process, gather, broadcast, all-reduce.

Every process holds the whole model, samples and scores its share of the rows, and gets the others'
completions; the passes are divided by tokens and the gradients summed, so that N processes make the
step that one would (docs/how-to/processes.md). Objects are sent over gloo, which notices at once
that a process has ended; gradients by the backend of the device.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from rloo_kit.errors import ConfigError, KitError, ProcessLostError

T = TypeVar("T")

# Exit code of a process that stops because another one has ended
LOST = 3
# Variables by which `accelerate launch` asks for sharded weights
SHARDING = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}
LOST_PEER = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")


@dataclass(frozen=True)
class Team:
    """The processes of a training, as one of them sees them.

    Every method raises ProcessLostError where another process has ended.
    """

    rank: int = 0
    size: int = 1
    # Of gloo, for objects; None: torch's default one
    group: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes and prints."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return the value of every process, by rank; pickled for the transfer."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        with raise_if_peer_lost():
            dist.all_gather_object(found, value, group=self.group)
        return found

    def broadcast(self, value: T) -> T:
        """Return rank 0's value."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        found = [value]
        with raise_if_peer_lost():
            dist.broadcast_object_list(found, src=0, group=self.group)
        return found[0]

    def run_on_first(self, call: Callable[[], T]) -> T:
        """Run on rank 0 and broadcast the result, or the KitError that it raised."""
        if self.size == 1:
            return call()
        outcome: Any = None
        if self.is_first:
            try:
                outcome = (call(), None)
            except KitError as exc:
                outcome = (None, exc)
        value, error = self.broadcast(outcome)
        if error is not None:
            raise error
        return value

    def all_reduce(self, tensors: list[Any]) -> None:
        """Add up tensors over the processes, in place and to the same bits everywhere."""
        if self.size == 1:
            return
        import torch.distributed as dist

        with raise_if_peer_lost():
            for tensor in tensors:
                dist.all_reduce(tensor.detach())

    def broadcast_tensors(self, tensors: list[Any]) -> None:
        """Give every process rank 0's values, in place."""
        if self.size == 1:
            return
        import torch.distributed as dist

        with raise_if_peer_lost():
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    def reseed(self, seed: int, step: int) -> None:
        """Set the random states by seed, step and rank, so that no checkpoint needs them."""
        import numpy as np
        from accelerate.utils import set_seed

        mixed = np.random.SeedSequence([seed, step, self.rank]).generate_state(1)[0]
        set_seed(int(mixed))


ALONE = Team()
_team: Team | None = None


def join_team(*, on_cpu: bool) -> Team:
    """Join the processes that a launcher started; alone where there is no launcher.

    ``rloo-kit train --processes``, ``torchrun`` and ``accelerate launch`` set the variables that
    are read here. Each process takes the GPU of its local rank.

    Raises:
        ConfigError: There are fewer GPUs than processes, or the weights would be sharded.
    """
    if launched_size() < 2:
        return ALONE
    _refuse_sharding()
    if not on_cpu:
        _check_devices()
    import torch.distributed as dist
    from accelerate import PartialState

    if not dist.is_initialized():
        # Made before the others were known
        PartialState._reset_state()
    with raise_if_peer_lost():
        PartialState(cpu=on_cpu, **({"backend": "gloo"} if on_cpu else {}))
    return current_team()


def current_team() -> Team:
    """Return the processes of torch.distributed; alone where it was not started."""
    global _team
    if "torch" not in sys.modules:
        return ALONE
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return ALONE
    _refuse_sharding()
    if _team is None:
        group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        _team = Team(dist.get_rank(), dist.get_world_size(), group)
    return _team


def launched_rank() -> int:
    """Return the rank that a launcher gave this process; 0 without one."""
    return int(os.environ["RANK"]) if launched_size() > 1 else 0


def _refuse_sharding() -> None:
    """Raise ConfigError where accelerate would shard the weights."""
    for variable, name in SHARDING.items():
        if os.environ.get(variable, "").lower() in ("1", "true", "yes", "on", "y", "t"):
            raise ConfigError(
                f"{name} shards the weights, which the kit does not train: start with "
                f"rloo-kit train --processes, where each process holds the whole model"
            )


@contextlib.contextmanager
def raise_if_peer_lost() -> Iterator[None]:
    """Translate communication errors of torch.distributed into ProcessLostError."""
    try:
        yield
    except RuntimeError as exc:
        text = f"{type(exc).__name__} {exc}".lower()
        if isinstance(exc, KitError) or not any(mark in text for mark in LOST_PEER):
            raise
        raise ProcessLostError(
            "another process of this training has ended, so this one stops"
        ) from exc


def launched_size() -> int:
    """Return the number of processes that a launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def _check_devices() -> None:
    import torch

    here, there = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if here >= there > 0:
        raise ConfigError(
            f"process {here} of this machine has no GPU of its own, since there are {there}: start "
            f"at most {there} processes"
        )
