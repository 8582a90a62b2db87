"""The judge of a reward dies in the middle of a run."""

import pytest
from servers import Server
from trials import FAULT_AT, Trial


@pytest.mark.fault(
    "the judge's server dies",
    "the run retries, then stops and names the server; the last finished step is saved",
)
def test_the_judge_dies(tmp_path):
    judge = Server()
    url = f"{judge.url}/v1"
    reward = {"name": "judge", "model": "m", "base_url": url, "max_retries": 2}
    one = Trial(tmp_path / "trial", settings={"rewards": ["reward.py:right", reward]})
    gone = tmp_path / "gone"
    life = one.begin(FAULT="calls", FAULT_COMMAND=f"until [ -e {gone} ]; do sleep 0.01; done")
    life.until(f"step {FAULT_AT}/")
    judge.kill()
    gone.touch()
    assert life.finish() == 2, life.text
    assert "Traceback" not in life.text
    assert f"{url} " in life.text
    assert "3 times; start the server" in life.text
    assert one.saved == FAULT_AT
    assert one.is_whole()
    judge.start()
    assert f"step {FAULT_AT}/" not in one.resume().text
    judge.kill()
