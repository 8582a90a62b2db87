"""Several processes that train one model: who each is, and what they exchange.

Every process holds the whole model, samples and scores its share of the rows, and knows what the
others drew; the passes are divided by tokens and the gradients summed, so that N processes make the
step that one would (docs/how-to/processes.md). Small things travel as objects over gloo, which
notices at once that a process has ended; gradients travel by the backend of the device.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from rloo_kit.errors import ConfigError, KitError, ProcessLostError

T = TypeVar("T")

LOST = 3
"""Exit code of a process whose only trouble is that another one has ended."""
BUCKET = 2**24
"""Numbers that are summed in one message."""
SHARDING = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}
"""Variables by which ``accelerate launch`` asks for weights that are divided too."""
MARKS_OF_A_LOST_PEER = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")


@dataclass(frozen=True)
class Team:
    """The processes of a training, as one of them sees them."""

    rank: int = 0
    size: int = 1
    group: Any = None
    """Of gloo, for objects; None: torch's default one."""

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return what every process gave, by rank; pickled on the way.

        Raises:
            ProcessLostError: Another process has ended.
        """
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        with raise_if_peer_lost():
            dist.all_gather_object(found, value, group=self.group)
        return found

    def broadcast(self, value: T) -> T:
        """Return what the first process gave.

        Raises:
            ProcessLostError: Another process has ended.
        """
        if self.size == 1:
            return value
        import torch.distributed as dist

        found = [value]
        with raise_if_peer_lost():
            dist.broadcast_object_list(found, src=0, group=self.group)
        return found[0]

    def run_on_first(self, call: Callable[[], T]) -> T:
        """Let the first process call, and return everywhere what it returned.

        Raises:
            KitError: What it raised there.
            ProcessLostError: Another process has ended.
        """
        if self.size == 1:
            return call()
        value, error = None, None
        if self.is_first:
            try:
                value = call()
            except KitError as exc:
                error = exc
        value, error = self.broadcast((value, error))
        if error is not None:
            raise error
        return value

    def all_reduce(self, tensors: list[Any]) -> None:
        """Add up tensors over the processes, in place; shapes and types are alike everywhere.

        Every process ends with the same bits.

        Raises:
            ProcessLostError: Another process has ended.
        """
        if self.size == 1:
            return
        import torch
        import torch.distributed as dist

        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
            with raise_if_peer_lost():
                dist.all_reduce(flat)
            for tensor, values in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.detach().copy_(values.view_as(tensor))

    def broadcast_tensors(self, tensors: list[Any]) -> None:
        """Give every process the first one's values, in place.

        Raises:
            ProcessLostError: Another process has ended.
        """
        if self.size == 1:
            return
        import torch.distributed as dist

        for tensor in tensors:
            with raise_if_peer_lost():
                dist.broadcast(tensor.detach(), src=0)

    def reseed(self, seed: int, step: int) -> None:
        """Give this process random states that seed, step and rank decide.

        Nothing of it needs to be kept in a checkpoint, and any process can write one.

        Args:
            seed: Of the run.
            step: Optimizer steps made.
        """
        import numpy as np
        from accelerate.utils import set_seed

        mixed = np.random.SeedSequence([seed, step, self.rank]).generate_state(1)[0]
        set_seed(int(mixed))


ALONE = Team()
_team: Team | None = None


def join_team(*, on_cpu: bool) -> Team:
    """Join the processes that a launcher started; alone where there is no launcher.

    ``rloo-kit train --processes``, ``torchrun`` and ``accelerate launch`` all set the variables
    that are read here. Each process takes the GPU of its local number.

    Args:
        on_cpu: Whether the model computes on a CPU.

    Raises:
        ConfigError: There are fewer GPUs than processes, or they divide weights in a way that
            cannot train here.
    """
    if launched_size() < 2:
        return ALONE
    _check_sharding(on_cpu=on_cpu)
    if not on_cpu:
        _check_device()
    import torch.distributed as dist
    from accelerate import PartialState

    if not dist.is_initialized():
        PartialState._reset_state()  # whoever made it before did not know of the others
    with raise_if_peer_lost():
        PartialState(cpu=on_cpu, **({"backend": "gloo"} if on_cpu else {}))
    return current_team()


def current_team() -> Team:
    """Return the processes that torch.distributed knows of; alone where it was not started."""
    global _team
    if "torch" not in sys.modules:
        return ALONE
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return ALONE
    if _team is None:
        group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        _team = Team(dist.get_rank(), dist.get_world_size(), group)
    return _team


def launched_rank() -> int:
    """Return the number of this process as its launcher says; 0 without one."""
    return _number("RANK") if launched_size() > 1 else 0


def why_sharded() -> str | None:
    """Return what divides the weights between processes (FSDP, DeepSpeed), or None."""
    return next((name for key, name in SHARDING.items() if _is_on(os.environ.get(key))), None)


def check_resumable() -> None:
    """Refuse to resume where FSDP or DeepSpeed trains, whose checkpoints are transformers' own.

    Raises:
        ConfigError: One of them does.
    """
    if launched_size() > 1 and (name := why_sharded()):
        raise ConfigError(
            f"a run whose weights {name} divides cannot be resumed: begin a new run, or train with "
            f"--processes"
        )


@contextlib.contextmanager
def gathered(parameters: Iterable[Any]) -> Iterator[None]:
    """Hold parameters that DeepSpeed's ZeRO-3 divides whole; all processes enter it.

    Does nothing where they are whole, as long as DeepSpeed has not divided them, too.
    """
    if why_sharded() != "DeepSpeed":
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(parameters)):
        yield


@contextlib.contextmanager
def raise_if_peer_lost() -> Iterator[None]:
    """Say that another process has ended, where a library only knows that its line is dead.

    Raises:
        ProcessLostError: It is.
    """
    try:
        yield
    except RuntimeError as exc:
        if isinstance(exc, KitError) or not is_lost_peer(exc):
            raise
        raise ProcessLostError(
            "another process of this training has ended, so it cannot go on"
        ) from exc


def is_lost_peer(exc: BaseException) -> bool:
    """Return whether an error says that the line to another process is dead."""
    if isinstance(exc, ProcessLostError):
        return True
    text = f"{type(exc).__name__} {exc}".lower()
    return isinstance(exc, RuntimeError) and any(mark in text for mark in MARKS_OF_A_LOST_PEER)


def launched_size() -> int:
    """Return how many processes a launcher says there are; 1 without one."""
    return _number("WORLD_SIZE", 1) if "RANK" in os.environ else 1


def _number(name: str, default: int = 0) -> int:
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        raise ConfigError(
            f"the variable {name} is {os.environ[name]!r}, must be a whole number: start with "
            f"rloo-kit train --processes, or accelerate launch"
        ) from None


def _check_device() -> None:
    import torch

    here, there = _number("LOCAL_RANK"), torch.cuda.device_count()
    if here >= there > 0:
        raise ConfigError(
            f"process {here} of this machine has no GPU of its own, since there are {there}: start "
            f"at most {there} processes"
        )


def _check_sharding(*, on_cpu: bool) -> None:
    if why_sharded() == "FSDP" and on_cpu:  # accelerate 1.15 would train with DDP, and not say it
        raise ConfigError(
            "FSDP needs GPUs, since accelerate divides nothing on a CPU: start with --processes"
        )


def _is_on(value: str | None) -> bool:
    return (value or "").lower() in ("1", "true", "yes", "on", "y", "t")


def _buckets(tensors: list[Any]) -> Iterator[list[Any]]:
    """Yield tensors of one type and device that together hold no more than BUCKET numbers."""
    kinds: dict[Any, list[Any]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        bucket: list[Any] = []
        for tensor in alike:
            if bucket and sum(t.numel() for t in bucket) + tensor.numel() > BUCKET:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket
