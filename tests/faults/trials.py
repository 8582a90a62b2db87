"""A small training in which something goes wrong, and what must be left of it."""

import json
import os

from kill_and_resume import checkpoint_parts, differences, newest_checkpoint, write_run_file
from lives import begin

STEPS = 4
# Optimizer steps that are finished when the reward's fault happens.
FAULT_AT = 2
# Seconds that a slow reward takes.
SLOW = 10
SETTINGS = {
    "rewards": ["reward.py:right"],
    "trainer.max_steps": STEPS,
    "trainer.save_steps": 10,
    "trainer.beta": 0.02,
}
# Of a run file's folder; its faults come from outside.
REWARD = f'''\
import os
import time


def right(completions, answer, trainer_state=None, **_):
    """1 for the right answer; what FAULT names happens once, at the third step."""
    scores = [float(c[-1]["content"].endswith(str(a))) for c, a in zip(completions, answer)]
    if trainer_state is None or trainer_state.global_step != {FAULT_AT}:
        return scores
    fault = os.environ.get("FAULT", "")
    if fault == "raises":
        raise ZeroDivisionError("no answer to divide by")
    if fault == "ends":
        raise SystemExit(3)
    if fault == "marks":
        os.environ["FAULT_NOW"] = "yes"
    if fault == "slow":
        time.sleep({SLOW})
    if fault == "calls":
        os.system(os.environ["FAULT_COMMAND"])
    while fault == "hangs":
        time.sleep(0.01)
    return scores[:-1] if fault == "short" else scores
'''


class Trial:
    """One training in a new folder, and the lives it had.

    ``reference`` is the run of an uninterrupted one; ``settings`` are beside SETTINGS.
    """

    def __init__(self, folder, reference=None, settings=None):
        self.folder = folder
        self.run = folder / "run"
        self.reference = reference
        self.file = write_run_file(folder, SETTINGS | (settings or {}))
        (folder / "reward.py").write_text(REWARD)
        self.lives = 0

    def begin(self, *more, before=bool, **variables):
        """Start ``rloo-kit train RUN.yaml MORE``, with variables in its environment."""

        def prepare():
            os.environ.update(variables)
            before()

        self.lives += 1
        output = self.folder / f"output-{self.lives}.txt"
        return begin(["train", self.file, *more], output, prepare)

    def fail(self, *more, **others):
        """Train until the fault ends it; return the life, which must have ended with code 2."""
        life = self.begin(*more, **others)
        assert life.finish() == 2, life.text
        assert "Traceback" not in life.text, life.text
        return life

    def finish(self, *more, **others):
        """Train to the end; return the life."""
        life = self.begin(*more, **others)
        assert life.finish() == 0, life.text
        return life

    def resume(self):
        """Resume, now that the cause is gone; return the life, which must have finished."""
        return self.finish("--resume")

    @property
    def saved(self):
        """Step of the newest checkpoint."""
        return newest_checkpoint(self.run)

    @property
    def ended(self):
        return json.loads((self.run / "end.json").read_text())

    def is_whole(self):
        """Return whether nothing half written lies in the run's folder."""
        from rloo_kit.checkpoints.store import read_checkpoint

        names = checkpoint_parts(self.run)
        for name in names:
            read_checkpoint(self.run / name)
        return not any(name.startswith(".") for name in names)

    def differs(self):
        """Return what the finished run has that the uninterrupted one does not."""
        return differences(self.reference, self.run)

    def keeps_all(self, step=FAULT_AT):
        """Assert that the last finished step is saved and that a resumed run is the same run."""
        assert self.saved == step
        assert self.is_whole()
        resumed = self.resume()
        assert f"step {step}/" not in resumed.text  # it was not trained twice
        assert self.differs() == []
