"""Servers on this machine, each a process of its own that can be killed: a judge, and vLLM's.

python servers.py KIND PORT
"""

import contextlib
import json
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

# Token that ends a completion.
STOP = 1


class Judge:
    """Scores an answer by the digits in it."""

    def answer(self, path: str, content: dict[str, Any]) -> object:
        asked = content["messages"][-1]["content"]
        score = sum(map(ord, asked)) % 11
        return {"choices": [{"message": {"role": "assistant", "content": f'{{"score": {score}}}'}}]}


class Vllm:
    """The few endpoints of vLLM's server; what it samples depends on prompt and seed alone."""

    def answer(self, path: str, content: dict[str, Any] | None) -> object:
        if path == "/v1/models":
            return {"data": [{"id": "base", "max_model_len": 4096, "parent": None}]}
        if path != "/v1/completions":
            return {}
        choices = []
        for index in range(content["n"]):
            start = content["seed"] + sum(content["prompt"]) + index
            ids = [3 + (start + place) % 40 for place in range(12)]
            log_probs = {"token_logprobs": [-0.5] * 13}
            choices.append({"index": index, "token_ids": [*ids, STOP], "logprobs": log_probs})
        return {"choices": choices}


KINDS = {"judge": Judge, "vllm": Vllm}


class Server:
    """One of them in a process, at a port that stays the same when it begins again."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), self.kind, str(self.port)]
        self._process = subprocess.Popen(command)
        for _ in range(1000):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.02)
        raise TimeoutError(f"the {self.kind} did not begin")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(kind: str, port: int) -> None:
    """Answer until killed."""
    server = KINDS[kind]()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1

        def reply(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            content = json.loads(self.rfile.read(length)) if length else None
            body = json.dumps(server.answer(self.path, content)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = reply  # noqa: N815

        def log_message(self, *_: object) -> None:
            return

    class Busy(ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

    Busy(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
