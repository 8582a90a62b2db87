"""A session gives back what its body made; what is left is named."""

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch

from rloo_kit.machine.memory import (
    MIB,
    SHARED_MEMORY,
    Held,
    MemoryUse,
    Released,
    add_to_session,
    held_tensors,
    measure,
    release,
    session,
)

LARGE = 5 * MIB // 4
"""Floats of a tensor that is worth naming."""


class Engine:
    """Something that samples, noting in ``order`` when it is closed."""

    def __init__(self, name="engine", order=None):
        self.name = name
        self.order = [] if order is None else order

    def sync(self, model):
        raise NotImplementedError

    def close(self):
        self.order.append(self.name)


class Judge:
    """A reward model."""

    def __init__(self):
        self.released = 0

    def release(self):
        self.released += 1


def made(thing):
    """Make it, as a loader would."""
    add_to_session(thing)
    return thing


def use(**values):
    return MemoryUse(**{"resident": 0, **values})


@pytest.fixture(autouse=True)
def small_heap():
    """Whatever was there before is not looked at: a collection then takes no time."""
    gc.freeze()
    yield
    gc.unfreeze()


# --- session -------------------------------------------------------------------------------------


def test_what_the_body_made_is_released_at_the_end():
    with session() as opened:
        model, engine, judge = made(torch.nn.Linear(8, 8)), made(Engine()), made(Judge())
        assert opened.released is None
        assert model.weight.numel() == 64
        assert engine.order == []
    assert sum(parameter.numel() for parameter in model.parameters()) == 0
    assert engine.order == ["engine"]
    assert judge.released == 1
    assert "left in the process" in str(opened.released)
    assert opened.things == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_what_the_body_made_is_released_when_it_raises(error):
    engine, opened = Engine(), []

    def body():
        with session() as own:
            opened.append(own)
            add_to_session(engine)
            raise error

    with pytest.raises(error):
        body()
    assert engine.order == ["engine"]
    assert isinstance(opened[0].released, Released)


def test_a_thing_belongs_to_the_innermost_session():
    with session() as outer:
        first = made(Engine())
        with session() as inner:
            second = made(Engine())
        assert (first.order, second.order) == ([], ["engine"])
        third = made(Engine())
        assert inner.released is not None
        assert outer.released is None
    assert first.order == second.order == third.order == ["engine"]


def test_what_was_released_by_hand_may_be_released_again():
    with session():
        model, judge = made(torch.nn.Linear(4, 4)), made(Judge())
        release(model, judge)
    assert judge.released == 2
    assert model.weight.numel() == 0


def test_what_cannot_be_released_does_not_keep_the_rest():
    class Broken(Engine):
        def close(self):
            raise ConnectionError("away")

    first = Engine()

    def body():
        with session():
            add_to_session(first)
            add_to_session(Broken())

    with pytest.raises(ConnectionError):
        body()
    assert first.order == ["engine"]


# --- held tensors --------------------------------------------------------------------------------


class Keeper:
    """An object of a notebook that keeps tensors."""


@pytest.fixture
def notebook(small_heap, monkeypatch):
    """Variables of the notebook or script."""
    kept = Keeper()
    monkeypatch.setattr(sys.modules["__main__"], "kept", kept, raising=False)
    return kept


def held_by(name, released=None):
    found = held_tensors() if released is None else released.held
    return [held for held in found if name in held.holder]


def test_tensors_of_a_variable_are_named(notebook):
    notebook.history = [{"logits": torch.zeros(LARGE)} for _ in range(3)]
    (held,) = held_by("kept")
    assert (held.bytes, held.num_tensors) == (12 * LARGE, 3)


def test_tensors_of_a_live_model_are_named_by_its_class():
    model = made(torch.nn.Linear(2048, 1024))
    (held,) = held_by("Linear")
    assert held.bytes >= 4 * 2048 * 1024
    del model
    assert held_by("Linear") == []


def test_tensors_that_share_their_memory_are_counted_once(notebook):
    notebook.whole = torch.zeros(LARGE)
    notebook.half = notebook.whole[: LARGE // 2]
    (held,) = held_by("kept")
    assert (held.bytes, held.num_tensors) == (4 * LARGE, 1)


def test_holders_are_sorted_and_small_ones_left_out(notebook):
    notebook.large = torch.zeros(2 * LARGE)
    other = torch.zeros(LARGE)
    local = torch.zeros(8)
    sizes = [held.bytes for held in held_tensors()]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] >= 8 * LARGE
    more = [held.bytes for held in held_tensors(smallest=9 * LARGE)]
    assert all(size >= 9 * LARGE for size in more)
    assert (local.numel(), other.numel()) == (8, LARGE)


def test_a_release_names_what_something_else_still_holds(notebook):
    model = torch.nn.Linear(2048, 1024)
    notebook.weight = model.weight.detach()
    released = release(model)
    (held,) = held_by("kept", released)
    assert held.bytes == 4 * 2048 * 1024
    assert str(held) in str(released)


# --- what is said of it --------------------------------------------------------------------------


def test_a_report_of_a_gpu_says_how_much_of_it_tensors_hold():
    before = use(gpu_reserved=9 * 1024 * MIB, gpu_other=MIB)
    after = use(gpu_allocated=8 * MIB, gpu_reserved=20 * MIB, gpu_other=MIB)
    text = str(Released(before, after))
    assert "released 9,196 MiB of GPU memory" in text
    assert "20 MiB left, of which tensors hold 8 MiB" in text


def test_what_is_left_behind_is_named():
    before = use(threads=("old", "pool"))
    after = use(
        threads=("old", "pool", "pool"), children=("7 vllm", "8 vllm"), shared_files=("sem.x",)
    )
    text = str(Released(before, after, (Held(5 * MIB, 2, "a list"),)))
    assert "child processes left: 7 vllm, 8 vllm" in text
    assert "shared-memory files left: sem.x" in text
    assert "new threads left: pool" in text
    assert "old" not in text
    assert text.endswith("5 MiB in 2 tensors held by a list")


# --- what is measured ----------------------------------------------------------------------------


def test_threads_are_measured_by_name_while_they_live():
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="a patient one")
    thread.start()
    try:
        assert "a patient one" in measure().threads
        assert threading.main_thread().name not in measure().threads
    finally:
        end.set()
        thread.join()
    assert "a patient one" not in measure().threads


def test_children_are_measured_while_they_live():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    try:
        assert [text.split()[0] for text in measure().children] == [str(child.pid)]
    finally:
        child.kill()
        child.wait()
    assert measure().children == ()


@pytest.mark.skipif(not os.access(SHARED_MEMORY, os.W_OK), reason="no shared memory here")
def test_shared_memory_files_are_found_by_process_number():
    own = SHARED_MEMORY / f"rloo-kit-{os.getpid()}-test"
    other = SHARED_MEMORY / f"rloo-kit-{os.getpid()}0-test"
    try:
        own.touch()
        other.touch()
        assert own.name in measure().shared_files
        assert other.name not in measure().shared_files
    finally:
        own.unlink()
        other.unlink()
    assert own.name not in measure().shared_files
