"""The judge of a reward dies in the middle of a run."""

import json
import multiprocessing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from trials import FAULT_AT, Trial


class Judge(BaseHTTPRequestHandler):
    """Scores an answer by its characters."""

    def do_POST(self):
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        score = sum(map(ord, content["messages"][-1]["content"])) % 11
        answer = {"choices": [{"message": {"content": json.dumps({"score": score})}}]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


def begin_judge(port=0):
    """Return a process that judges, and its port."""
    server = ThreadingHTTPServer(("127.0.0.1", port), Judge)
    process = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
    process.start()
    server.socket.close()  # the process has it
    return process, server.server_port


@pytest.mark.fault(
    "the judge's server dies",
    "the run retries, then stops and names the server; the last finished step is saved",
)
def test_the_judge_dies(tmp_path):
    judge, port = begin_judge()
    url = f"http://127.0.0.1:{port}/v1"
    reward = {"name": "judge", "model": "m", "base_url": url, "max_retries": 2}
    one = Trial(tmp_path / "trial", settings={"rewards": ["reward.py:right", reward]})
    gone = tmp_path / "gone"
    life = one.begin(FAULT="calls", FAULT_COMMAND=f"until [ -e {gone} ]; do sleep 0.01; done")
    life.until(f"step {FAULT_AT}/")
    judge.kill()
    judge.join()
    gone.touch()
    assert life.finish() == 2, life.text
    assert "Traceback" not in life.text
    assert f"{url} " in life.text
    assert "3 times; start the server" in life.text
    assert one.saved == FAULT_AT
    assert one.is_whole()
    judge, _ = begin_judge(port)
    assert f"step {FAULT_AT}/" not in one.resume().text
    judge.kill()
