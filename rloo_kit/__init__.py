"""rloo-kit: RLOO fine-tuning of thinking models on one consumer GPU.

``import rloo_kit`` imports no heavy library and changes nothing. Each public name imports its
module when it is first used. The first use of ``LeaveOneOutConfig`` or ``LeaveOneOutTrainer`` also
calls ``setup()``, so that Unsloth is imported before TRL.
"""

import importlib
from typing import Any

__version__ = "0.2.0"

_HOMES = {
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "DiskError": "errors",
    "DivergedError": "errors",
    "GenerationError": "errors",
    "StalePolicyError": "errors",
    "DataError": "errors",
    "Evaluation": "evaluation.evaluator",
    "KitError": "errors",
    "LeaveOneOutConfig": "training.arguments",
    "LeaveOneOutTrainer": "training.trainer",
    "ModelError": "errors",
    "OpenEnv": "tools.openenv",
    "RewardError": "errors",
    "RunConfig": "config.run_file",
    "attach_lora": "models.loading",
    "calibrate": "runs.calibrate",
    "check_rewards": "reward_lab.lab",
    "diagnose": "diagnosis.run_rules",
    "evaluate": "evaluation.evaluator",
    "evaluate_models": "evaluation.table",
    "export_model": "export.exporter",
    "form": "notebook_form",
    "gated": "scoring.composition",
    "judge_models": "evaluation.win_rate",
    "leave_one_out_advantages": "rloo.advantages",
    "load_model": "models.loading",
    "load_prompts": "data.prompts",
    "load_rewards": "scoring.specs",
    "plan": "planning.planner",
    "read_run_file": "config.run_file",
    "release": "machine.cleanup",
    "rescaled": "scoring.composition",
    "routed": "scoring.composition",
    "session": "machine.cleanup",
    "start_engine": "sampling.choice",
    "save_adapter": "models.loading",
    "setup": "machine.environment",
    "shutdown_kernel": "machine.cleanup",
    "train": "runs.train",
    "train_reward_model": "reward_lab.reward_model",
    "warm_up": "runs.warm_up",
    "write_report": "report.page",
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    """Import and return a public name when it is first used (PEP 562).

    Raises:
        AttributeError: The package has no public name ``name``.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'rloo_kit' has no attribute {name!r}")
    if _HOMES[name].startswith("training."):
        from rloo_kit.machine.environment import setup

        setup()
    value = getattr(importlib.import_module(f"rloo_kit.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return all names of the package, including those that are not imported yet."""
    return sorted({*globals(), *_HOMES})
