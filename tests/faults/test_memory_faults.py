"""Out of memory and NaN in a pass, made by hooks of the model."""

import os

import pytest
from kill_and_resume import metrics
from trials import FAULT_AT

# Variable that the reward sets from its third step on.
FAULTY = "FAULT_NOW"


def hooked(hook):
    """Return what lets ``hook(model, keywords)`` see each pass of the model that is trained."""

    def prepare():
        from rloo_kit import job

        real = job.attach_lora

        def attach_lora(*args, **kwargs):
            model = real(*args, **kwargs)
            model.get_base_model().register_forward_pre_hook(
                lambda module, _, keywords: hook(module, keywords), with_kwargs=True
            )
            return model

        job.attach_lora = attach_lora

    return prepare


def out_of_memory():
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def three_rows_at_most(model, keywords):
    if len(keywords["input_ids"]) > 3:
        os.write(1, b"learning\n" if "labels" in keywords else b"sampling\n")
        out_of_memory()


@pytest.mark.fault(
    "no memory for generation, the log-prob pass, forward or backward",
    "fewer completions run at a time, and the run continues",
)
def test_memory_runs_out(trial):
    """Backward, and the numbers: tests/checkpoints/test_training_faults.py."""
    life = trial.finish("--set", "trainer.max_steps=2", before=hooked(three_rows_at_most))
    assert {"sampling", "learning"} <= {*life.text.splitlines()}
    assert [row["step"] for row in metrics(trial.run) if "reward" in row] == [1, 2]


def gradients_of_nan(model, keywords):
    import torch

    def attach(module, inputs, output):
        place.remove()
        output.register_hook(lambda gradient: gradient * float("nan"))

    if FAULTY in os.environ and "labels" in keywords and torch.is_grad_enabled():
        place = model.get_decoder().layers[-1].register_forward_hook(attach)


@pytest.mark.fault(
    "NaN gradients in a step",
    "the step is skipped and counted, and the run continues",
)
@pytest.mark.fault(
    "NaN gradients in many steps in a row",
    "the run stops after `max_skipped_steps`; no weight has moved",
)
def test_steps_without_numbers(trial):
    limit = ["--set", "trainer.max_skipped_steps=2"]
    life = trial.fail(*limit, before=hooked(gradients_of_nan), FAULT="marks")
    assert "in a row" in life.text
    assert "lower trainer.learning_rate" in life.text
    assert [row.get("step/skipped") for row in metrics(trial.run)] == [None, None, 1]
    assert trial.is_whole()
    assert trial.saved >= FAULT_AT
    trial.resume()


def no_memory_to_learn(model, keywords):
    if FAULTY in os.environ and "labels" in keywords:
        out_of_memory()


def a_weight_of_nan(model, keywords):
    import torch

    if FAULTY in os.environ and torch.is_grad_enabled():
        parameter = next(p for p in model.parameters() if p.requires_grad)
        parameter.data[0, 0] = float("nan")


def logits_of_nan(model, keywords):
    def attach(module, inputs, output):
        place.remove()
        output.logits.fill_(float("nan"))

    if FAULTY in os.environ and "labels" not in keywords:
        place = model.register_forward_hook(attach)


@pytest.mark.fault(
    "no memory for a single completion",
    "the run stops; the last finished step is saved",
)
@pytest.mark.fault(
    "NaN weights",
    "the run stops and saves none of them",
)
@pytest.mark.fault(
    "NaN logits while the model samples",
    "the run stops; the last finished step is saved",
)
def test_what_cannot_continue_stops_the_run(trial):
    """Each fault meets the same run, resumed after the one before."""
    from safetensors.torch import load_file

    life = trial.fail(before=hooked(no_memory_to_learn), FAULT="marks")
    assert "lower trainer.max_completion_length" in life.text
    assert trial.saved == FAULT_AT
    life = trial.fail("--resume", before=hooked(a_weight_of_nan), FAULT="marks")
    assert "NaN or Inf" in life.text
    for file in trial.run.rglob("*.safetensors"):
        values = [v for v in load_file(file).values() if v.is_floating_point()]
        assert all(bool(v.isfinite().all()) for v in values)
    assert trial.saved == FAULT_AT
    life = trial.fail("--resume", before=hooked(logits_of_nan), FAULT="marks")
    assert "logits hold NaN" in life.text
    trial.keeps_all(FAULT_AT + 1)
