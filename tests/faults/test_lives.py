"""The processes of these tests are as sound as any other."""

import threading

import lives


def compute_in_threads():
    import torch

    gate, failures = threading.Barrier(4), []

    def compute():
        gate.wait()
        try:
            torch.ones(100_000).to(torch.bfloat16)
        except RuntimeError as exc:
            failures.append(exc)

    threads = [threading.Thread(target=compute) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    lives._leave(0)


def test_threads_in_a_fork_share_its_pool(tmp_path):
    for attempt in range(10):
        life = lives.begin([], tmp_path / f"output-{attempt}", compute_in_threads)
        assert life.finish(60) == 0, life.text
