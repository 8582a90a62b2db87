"""Out of memory and NaN in a pass, made by hooks of the model."""

import functools
import os

import pytest
from kill_and_resume import metrics
from trials import FAULT_AT, STEPS, Trial

MOST_ROWS = 3
# Variable that the reward sets from its third step on.
FAULTY = "FAULT_NOW"


def hooked(hook):
    """Return what puts a hook on the model that is trained, right after it is loaded."""

    def prepare():
        from rloo_kit import job

        real = job.attach_lora

        @functools.wraps(real)
        def attach_lora(*args, **kwargs):
            model = real(*args, **kwargs)
            model.get_base_model().register_forward_pre_hook(hook, with_kwargs=True)
            return model

        job.attach_lora = attach_lora

    return prepare


def runs_out(rows):
    import torch

    if rows > MOST_ROWS:
        os.write(1, f"fault: no memory for {rows} rows\n".encode())
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def rows_of(kwargs):
    return kwargs["input_ids"].size(0)


def in_generation(model, args, kwargs):
    if "labels" not in kwargs:
        runs_out(rows_of(kwargs))


def in_learning(model, args, kwargs):
    """Run out in the log-prob pass, in forward, and in backward of what forward could hold."""
    import torch

    if "labels" not in kwargs:
        return
    rows = rows_of(kwargs)
    if not torch.is_grad_enabled() or rows > MOST_ROWS + 2:
        runs_out(rows)

    def attach(module, inputs, output):
        place.remove()
        # The gradient of the embedded tokens is the last that is computed.
        if output.requires_grad:
            output.register_hook(lambda gradient: runs_out(rows))

    place = model.get_decoder().layers[-1].register_forward_hook(attach)


@pytest.mark.fault(
    "no memory for generation, the log-prob pass, forward or backward",
    "fewer completions run at a time, and the run continues",
)
def test_memory_runs_out(tmp_path, reference):
    wanted = metrics(reference)
    for hook in (in_generation, in_learning):
        one = Trial(tmp_path / hook.__name__, reference)
        life = one.begin("--set", "trainer.max_steps=2", before=hooked(hook))
        assert life.finish() == 0, life.text
        assert "fault: no memory for 8 rows" in life.text
        found = metrics(one.run)
        assert [row["step"] for row in found if "reward" in row] == [1, 2]
        if hook is in_learning:  # fewer rows at a time would draw other completions
            for name in ("reward", "loss", "grad_norm", "kl"):
                assert found[0][name] == pytest.approx(wanted[0][name], rel=1e-3, abs=1e-6)


def spoiled(model, args, kwargs, *, times):
    """Make the gradients of ``times`` passes NaN, from the third step on."""
    import torch

    if FAULTY not in os.environ or "labels" not in kwargs or not torch.is_grad_enabled():
        return
    left = int(os.environ.setdefault("FAULT_LEFT", str(times)))
    if not left:
        return
    os.environ["FAULT_LEFT"] = str(left - 1)

    def attach(module, inputs, output):
        place.remove()
        output.register_hook(lambda gradient: gradient * float("nan"))

    place = model.get_decoder().layers[-1].register_forward_hook(attach)


@pytest.mark.fault(
    "NaN gradients in a step",
    "the step is skipped and counted, and the run continues",
)
def test_one_step_without_numbers(trial):
    life = trial.begin(before=hooked(functools.partial(spoiled, times=1)), FAULT="marks")
    assert life.finish() == 0, life.text
    assert [row.get("step/skipped") for row in metrics(trial.run)[:STEPS]] == [None, None, 1, 1]
    assert trial.saved == STEPS
    assert trial.is_whole()


@pytest.mark.fault(
    "NaN gradients in many steps in a row",
    "the run stops after `max_skipped_steps`; no weight has moved",
)
def test_no_step_with_numbers(trial):
    limit = ["--set", "trainer.max_skipped_steps=2"]
    life = trial.fail(*limit, before=hooked(functools.partial(spoiled, times=99)), FAULT="marks")
    assert "in a row" in life.text
    assert "lower trainer.learning_rate" in life.text
    assert trial.is_whole()
    assert trial.saved >= FAULT_AT
    trial.resume()


def never(model, args, kwargs):
    import torch

    if FAULTY in os.environ and "labels" in kwargs:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def poisoned(model, args, kwargs):
    import torch

    if FAULTY in os.environ and torch.is_grad_enabled():
        parameter = next(p for p in model.parameters() if p.requires_grad)
        parameter.data[0, 0] = float("nan")


def without_numbers(model, args, kwargs):
    if FAULTY in os.environ and "labels" not in kwargs:

        def attach(module, inputs, output):
            place.remove()
            output.logits.fill_(float("nan"))

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

    life = trial.fail(before=hooked(never), FAULT="marks")
    assert "lower trainer.max_completion_length" in life.text
    assert trial.saved == FAULT_AT
    life = trial.fail("--resume", before=hooked(poisoned), FAULT="marks")
    assert "NaN or Inf" in life.text
    for file in trial.run.rglob("*.safetensors"):
        values = [v for v in load_file(file).values() if v.is_floating_point()]
        assert all(bool(v.isfinite().all()) for v in values)
    assert trial.saved == FAULT_AT
    life = trial.fail("--resume", before=hooked(without_numbers), FAULT="marks")
    assert "logits hold NaN" in life.text
    trial.keeps_all(FAULT_AT + 1)
