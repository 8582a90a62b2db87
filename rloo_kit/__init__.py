"""rloo-kit: RLOO fine-tuning of thinking models on one consumer GPU.

Importing it imports nothing heavy and changes nothing; the names below load what they need when
they are first used. The trainer's two names call ``setup()`` first, so that Unsloth comes before
TRL.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "DiskError": "errors",
    "DivergedError": "errors",
    "GenerationError": "errors",
    "StalePolicyError": "errors",
    "DataError": "errors",
    "Evaluation": "evaluation",
    "KitError": "errors",
    "LeaveOneOutConfig": "trainer",
    "LeaveOneOutTrainer": "trainer",
    "ModelError": "errors",
    "RewardError": "errors",
    "RunConfig": "config",
    "attach_lora": "models",
    "check_rewards": "reward_lab",
    "diagnose": "run_findings",
    "evaluate": "evaluation",
    "evaluate_models": "eval_table",
    "export_model": "export",
    "gated": "composition",
    "judge_models": "win_rate",
    "leave_one_out_advantages": "advantages",
    "load_model": "models",
    "load_prompts": "data",
    "load_rewards": "reward_loading",
    "plan": "planning",
    "read_run_file": "config",
    "release": "memory",
    "rescaled": "composition",
    "routed": "composition",
    "session": "memory",
    "start_engine": "engines",
    "save_adapter": "models",
    "setup": "environment",
    "shutdown_kernel": "memory",
    "train": "run",
    "train_reward_model": "reward_training",
    "write_report": "report",
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rloo_kit' has no attribute {name!r}")
    if _HOMES[name] == "trainer":
        from rloo_kit.environment import setup

        setup()
    value = getattr(importlib.import_module(f"rloo_kit.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the lazy names too."""
    return sorted({*globals(), *_HOMES})
