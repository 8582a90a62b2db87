"""The judge of a reward dies in the middle of a run."""

import pytest
from servers import Server
from trials import FAULT_AT, Trial


@pytest.fixture
def judge():
    server = Server()
    yield server
    server.kill()


def uninterrupted(folder, settings):
    one = Trial(folder, settings=settings)
    life = one.begin()
    assert life.finish() == 0, life.text
    return one.run


def judged_by(server, **more):
    reward = {"name": "judge", "model": "m", "base_url": f"{server.url}/v1", "max_retries": 2}
    return {
        "rewards": ["reward.py:right", {**reward, **more}],
        "trainer.save_steps": 1,
    }


@pytest.mark.fault(
    "the judge's server dies",
    "the run retries, then stops and names the server; the last finished step is saved",
)
def test_the_judge_dies(judge, tmp_path):
    settings = judged_by(judge)
    one = Trial(tmp_path / "trial", uninterrupted(tmp_path / "first", settings), settings)
    life = one.begin(FAULT="waits", FAULT_FILE=str(tmp_path / "gone"))
    assert life.wait_for_text(f"step {FAULT_AT}/"), life.text
    judge.kill()
    (tmp_path / "gone").touch()
    assert life.finish() == 2, life.text
    assert "Traceback" not in life.text
    assert "judge" in life.text
    assert one.is_whole()
    judge.start()
    one.keeps_all()
