"""Process whose memory a test measures from outside.

    python held_memory.py bare            # libraries and, on a GPU, their context
    python held_memory.py transformers    # loads, trains two steps, releases
    python held_memory.py vllm            # the same, sampled by vLLM in this process

When it has finished, it prints a line of JSON and waits for the end of its input.
"""

import json
import sys

from release_rounds import rk, train

import torch  # isort: skip

what = sys.argv[1]
answer = {}
if what == "bare":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = torch.ones(256, 256, device=device)
    answer["sum"] = float((matrix @ matrix).sum())  # with cuBLAS, as every process has it
    if "vllm" in sys.argv[2:]:
        import vllm

        answer["vllm"] = vllm.__version__
    del matrix
    rk.release()
else:
    with rk.session() as session:
        answer["steps"] = train(what)
    answer["released"] = str(session.released)
print(json.dumps(answer), flush=True)
sys.stdin.read()
