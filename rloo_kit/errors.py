"""Errors of the kit: one class per boundary, each with a remedy in its message.

KitError
├── ConfigError (ValueError)          a run file, a flag, a field of LeaveOneOutConfig
├── DataError (ValueError)            a dataset file or its rows
├── RewardError
│   ├── RewardLoadError (ImportError) a reward that cannot be found or imported
│   └── RewardContractError (TypeError) a reward that returned something else than scores
├── ModelError (RuntimeError)         a model, tokenizer or adapter that cannot be loaded
├── CheckpointError (RuntimeError)    a checkpoint that is broken, or belongs to another run
├── DiskError (RuntimeError)          a disk that is full or refuses to be written
├── DivergedError (RuntimeError)      NaN or Inf in weights or gradients
└── SetupError                        this machine or this process
    ├── ImportOrderError (ImportError)   trl, transformers or peft before unsloth
    ├── BackendError (RuntimeError)      a backend that was asked for and cannot start
    ├── MemoryRanOutError (RuntimeError) not even the smallest piece of work fits
    └── GenerationError (RuntimeError)   an engine that cannot start, or answers wrongly
        └── StalePolicyError             an engine that samples from another policy

The command line prints the message in one line and exits with 2.
"""


class KitError(Exception):
    """Base of every error the kit raises on purpose; its text says what to change."""


class ConfigError(KitError, ValueError):
    """A setting is unknown, out of range, or conflicts with another one."""


class DataError(KitError, ValueError):
    """A dataset is missing, empty, or has a bad line or column."""


class RewardError(KitError):
    """Base of the two ways a reward function can be wrong."""


class RewardLoadError(RewardError, ImportError):
    """A reward function cannot be found or imported."""


class RewardContractError(RewardError, TypeError):
    """A reward function raised, or did not return one float or None per completion."""


class ModelError(KitError, RuntimeError):
    """A model, tokenizer or adapter cannot be loaded or saved."""


class CheckpointError(KitError, RuntimeError):
    """A checkpoint is broken, cannot be read, or belongs to another run."""


class DiskError(KitError, RuntimeError):
    """The disk is full, or refuses to be written."""


class DivergedError(KitError, RuntimeError):
    """Weights or gradients contain NaN or Inf."""


class SetupError(KitError):
    """Base of faults of this machine or this process."""


class ImportOrderError(SetupError, ImportError):
    """A library that Unsloth patches was imported before Unsloth."""


class BackendError(SetupError, RuntimeError):
    """A backend was requested by name and cannot start here."""


class MemoryRanOutError(SetupError, RuntimeError):
    """Memory ran out, and the work cannot be cut into smaller parts."""


class ProcessEndedError(SetupError, RuntimeError):
    """Another process of the same training has ended."""


class GenerationError(SetupError, RuntimeError):
    """The sampling engine cannot start, is unreachable, or returned an invalid result."""


class StalePolicyError(GenerationError):
    """The policy that sampled is not the policy that is trained."""
