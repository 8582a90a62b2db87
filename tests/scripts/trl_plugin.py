"""Pytest plugin that runs TRL's own test files offline, and with the kit's class if asked.

``trl_tests.py`` sets the variables: ``TRL_TESTS_FOLDER`` holds what ``trl_models.py`` made,
``TRL_TESTS_CLASS`` is one of ``trl_tests.CLASSES``.
"""

import functools
import importlib
import os
from pathlib import Path

CLASS = os.environ["TRL_TESTS_CLASS"]
if CLASS != "trl":
    import rloo_kit

    rloo_kit.setup()  # Unsloth, if it trains, comes before TRL and transformers

import datasets
import trl_models

from rloo_kit.machine.lm_head import PlainTorchLogProb

_FOLDER = Path(os.environ["TRL_TESTS_FOLDER"])
_load_dataset = datasets.load_dataset


def load_dataset(path, name=None, **arguments):
    """Load one of TRL's data sets from the files that were made for it."""
    if path.startswith(f"{trl_models.OWNER}/"):
        path = str(_FOLDER / "datasets" / path / name)
    return _load_dataset(path, **arguments)


def pytest_configure():
    """Put data sets and the class under test in place before a test file imports them."""
    datasets.load_dataset = load_dataset
    _forgive_old_names()
    # TRL's own is a Triton kernel, which needs a GPU
    importlib.import_module("trl.trainer.utils")._ChunkedLogProbFunction = PlainTorchLogProb
    if CLASS == "trl":
        return
    import trl

    trl.RLOOTrainer = trl.GRPOTrainer = rloo_kit.LeaveOneOutTrainer
    # the router loss is trained by TRL's step, which has no tools in RLOO
    trl.GRPOConfig = functools.partial(trl.RLOOConfig, router_aux_loss_coef=0.0)
    if CLASS == "kit-config":
        trl.RLOOConfig = rloo_kit.LeaveOneOutConfig
    if CLASS == "kit-trl":
        # TRL's 10: the tests read what the last log holds in addition to the sums of the run
        given = {"step": "trl", "logging_steps": 10}
        trl.RLOOConfig = functools.partial(rloo_kit.LeaveOneOutConfig, **given)


def _forgive_old_names():
    """Let tests of an older TRL ask for a package that the installed one no longer looks for."""

    def missing(name):
        if name.startswith("is_") and name.endswith("_available"):
            return lambda: False
        raise AttributeError(name)

    utils = importlib.import_module("trl.import_utils")
    utils.__getattr__ = missing
    utils.is_jmespath_available = lambda: True  # since transformers 5.13 no test needs it
