"""A session gives back what its body made; what is left is named."""

import gc
import subprocess
import sys

import pytest
import torch

from rloo_kit.machine.cleanup import (
    MIB,
    MemoryUse,
    Released,
    add_to_session,
    measure,
    release,
    session,
)


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
        model = made(torch.nn.Linear(8, 8))
        engine = made(Engine())
        judge = made(Judge())
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
    engine = Engine()
    opened = []

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
        model = made(torch.nn.Linear(4, 4))
        judge = made(Judge())
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


# --- what is said of it --------------------------------------------------------------------------


def test_a_report_of_a_gpu_says_how_much_of_it_tensors_hold():
    before = use(gpu_reserved=9 * 1024 * MIB, gpu_other=MIB)
    after = use(gpu_allocated=8 * MIB, gpu_reserved=20 * MIB, gpu_other=MIB)
    text = str(Released(before, after))
    assert "released 9,196 MiB of GPU memory" in text
    assert "20 MiB left, of which tensors hold 8 MiB, and 1 MiB outside of torch" in text


def test_children_that_are_left_are_named():
    text = str(Released(use(), use(children=("7 vllm", "8 vllm"))))
    assert "child processes left: 7 vllm, 8 vllm" in text


# --- what is measured ----------------------------------------------------------------------------


def test_children_are_measured_while_they_live():
    before = set(measure().children)  # what other tests have started
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    try:
        (found,) = set(measure().children) - before
        assert found.split()[0] == str(child.pid)
    finally:
        child.kill()
        child.wait()
    assert set(measure().children) == before
