"""Error classes of the kit. Each message says what is wrong and what to do.

The tree shows the base class of each error, the built-in error that it also inherits from (in
brackets), and its cause.

KitError
├── ConfigError (ValueError)          a wrong run file, flag, or field of LeaveOneOutConfig
├── DataError (ValueError)            a wrong dataset file or row
├── RewardError
│   ├── RewardLoadError (ImportError) a reward that cannot be found or imported
│   └── RewardContractError (TypeError) a reward that failed, or did not return scores
├── ModelError (RuntimeError)         a model, tokenizer or adapter that cannot be loaded or saved
├── CheckpointError (RuntimeError)    a checkpoint that is damaged, or belongs to another run
├── DiskError (RuntimeError)          a disk that is full or cannot be written to
├── DivergedError (RuntimeError)      NaN or Inf in weights or gradients
└── SetupError                        a problem with this machine or this process
    ├── ImportOrderError (ImportError)   trl, transformers or peft was imported before unsloth
    ├── BackendError (RuntimeError)      the requested backend cannot start
    ├── MemoryRanOutError (RuntimeError) even the smallest possible batch does not fit into memory
    ├── ProcessEndedError (RuntimeError) another process of the same training has ended
    └── GenerationError (RuntimeError)   the sampling engine cannot start, or its result is wrong
        └── StalePolicyError             the sampling engine did not use the current policy

The command line prints the message of a KitError on one line, and exits with code 2.
"""


class KitError(Exception):
    """Base class of all errors that the kit raises on purpose; the message says what to change."""


class ConfigError(KitError, ValueError):
    """A setting is unknown or out of range, or conflicts with another setting."""


class DataError(KitError, ValueError):
    """A dataset is missing, empty, or has a bad line or column."""


class RewardError(KitError):
    """Base class of errors in reward functions."""


class RewardLoadError(RewardError, ImportError):
    """A reward function cannot be found or imported."""


class RewardContractError(RewardError, TypeError):
    """A reward function raised an error, or did not return a float or None for each completion."""


class ModelError(KitError, RuntimeError):
    """A model, tokenizer or adapter cannot be loaded or saved."""


class CheckpointError(KitError, RuntimeError):
    """A checkpoint is damaged, cannot be read or written, or belongs to another run."""


class DiskError(KitError, RuntimeError):
    """The disk is full, or cannot be written to."""


class DivergedError(KitError, RuntimeError):
    """Weights or gradients contain NaN or Inf."""


class SetupError(KitError):
    """Base class of errors whose cause is this machine or this process, not the user's input."""


class ImportOrderError(SetupError, ImportError):
    """A library that Unsloth patches was imported before Unsloth."""


class BackendError(SetupError, RuntimeError):
    """The backend that was requested by name cannot start on this machine."""


class MemoryRanOutError(SetupError, RuntimeError):
    """Memory ran out, and the work cannot be divided into smaller parts."""


class ProcessEndedError(SetupError, RuntimeError):
    """Another process of the same training has ended."""


class GenerationError(SetupError, RuntimeError):
    """The sampling engine cannot start, is unreachable, or returned an invalid result."""


class StalePolicyError(GenerationError):
    """The sampling engine did not sample from the policy that is being trained."""
