"""Every method of TRL and transformers that the trainer overrides keeps its signature."""

import inspect

import pytest
from trl import RLOOTrainer

from rloo_kit.training.trainer import LeaveOneOutTrainer

# A hook that is added, removed or moves upstream must be looked at before this table follows
EXPECTED = {
    "_generate": "self, prompts",
    "_generate_and_score_completions": "self, inputs",
    "_generate_single_turn": "self, prompt_ids, images, multimodal_fields",
    "_get_train_sampler": "self, dataset=None",
    "_load_from_checkpoint": "self, resume_from_checkpoint, model=None",
    "_load_optimizer_and_scheduler": "self, checkpoint",
    "_load_rng_state": "self, checkpoint",
    "_maybe_log_save_evaluate": "self, tr_loss, grad_norm, model, trial, epoch, "
    "ignore_keys_for_eval, start_time, learning_rate=None",
    "_run_epoch": "self, model, epoch, train_dataloader, steps_in_epoch, "
    "num_update_steps_per_epoch, trial, ignore_keys_for_eval, start_time, "
    "resume_from_checkpoint, epochs_trained, steps_trained_in_current_epoch",
    "_save_checkpoint": "self, model, trial",
    "log": "self, logs, start_time=None",
    "train": "self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None",
    "training_step": "self, model, inputs, num_items_in_batch",
}
# Overrides that hand all arguments on
WRAPPED = {"_maybe_log_save_evaluate", "_run_epoch"}


def parameters(function):
    """Names, kinds and defaults, without annotations."""
    found = inspect.signature(inspect.unwrap(function)).parameters.values()
    return [p.replace(annotation=inspect.Parameter.empty) for p in found]


def written(function):
    return ", ".join(map(str, parameters(function)))


def test_the_overrides_are_these():
    kit = [one for one in LeaveOneOutTrainer.__mro__ if one.__module__.startswith("rloo_kit.")]
    own = {n for one in kit for n, value in vars(one).items() if inspect.isfunction(value)}
    assert own & set(dir(RLOOTrainer)) - {"__init__"} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_override_has_the_signature_of_its_hook(name):
    hook = getattr(RLOOTrainer, name)
    assert written(hook) == EXPECTED[name], "moved upstream"
    override = getattr(LeaveOneOutTrainer, name)
    if name in WRAPPED:
        assert written(override) == "self, *args, **keywords"
    else:
        assert parameters(override) == parameters(hook)
