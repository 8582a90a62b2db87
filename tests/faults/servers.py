"""A judge on this machine, in a process of its own that can be killed.

python servers.py PORT
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


def judged(content: dict[str, Any]) -> object:
    """Score an answer by its characters."""
    score = sum(map(ord, content["messages"][-1]["content"])) % 11
    return {"choices": [{"message": {"role": "assistant", "content": f'{{"score": {score}}}'}}]}


class Server:
    """The judge in a process, at a port that stays the same when it begins again."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), str(self.port)]
        self._process = subprocess.Popen(command)
        for _ in range(1000):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.02)
        raise TimeoutError("the judge did not begin")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(port: int) -> None:
    """Answer until killed."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1

        def reply(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.dumps(judged(json.loads(self.rfile.read(length)))).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = reply  # noqa: N815

        def log_message(self, *_: object) -> None:
            return

    class Busy(ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

    Busy(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
