"""Client of a vLLM server: adapter-only sync and completions over HTTP.

The server is vLLM's own OpenAI server, started with runtime LoRA loading; ``START`` is the command.
It must see the folder the adapters are written to.
"""

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from rloo_kit.errors import GenerationError
from rloo_kit.sampling.engine import (
    AdapterFolders,
    Generations,
    Sampling,
    active_adapter,
    reserved_rank_of,
)
from rloo_kit.text.redaction import redact
from rloo_kit.text.wording import first_line

START = (
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 python -m vllm.entrypoints.openai.api_server --model MODEL "
    "--enable-lora --max-lora-rank {rank} --max-loras 2 --logprobs-mode processed_logprobs"
)


class VllmServer:
    """A client of one server, such as ``http://127.0.0.1:8000``.

    ``timeout`` is in seconds, for its start and for one answer; ``adapter_dir`` a folder that both
    machines see, None: shared memory, for a server on this one.

    Raises:
        GenerationError: No vLLM server answers there, or it was started without what is needed.
    """

    def __init__(
        self,
        url: str,
        model: Any,
        *,
        max_length: int,
        timeout: float = 240.0,
        adapter_dir: str | Path | None = None,
    ) -> None:
        import httpx
        import torch

        self.name = f"vLLM server {url}"
        self.adapter_dtype = torch.bfloat16
        self.url = url.rstrip("/")
        self.timeout = timeout
        self.sync_seconds = 0.0  # of the last sync
        self._rank = reserved_rank_of(model)
        self._adapter: tuple[str, Path] | None = None
        self._samples: str | None = None  # the name of what samples, on the server
        self._number = 0
        key = os.environ.get("VLLM_API_KEY")
        try:
            self._client = httpx.Client(
                base_url=self.url,
                timeout=httpx.Timeout(timeout, connect=min(5.0, timeout)),
                headers={"Authorization": f"Bearer {key}"} if key else {},
                limits=httpx.Limits(max_connections=None),
                trust_env=False,  # no system proxy for a local server
            )
        except (httpx.InvalidURL, ValueError) as exc:
            raise self._bad_address(exc) from exc
        try:
            self._wait_until_up()
            self._base = self._base_name(max_length)
            self._folders = AdapterFolders(Path(adapter_dir) if adapter_dir else None)
        except BaseException:
            self._client.close()
            raise

    def sync(self, model: Any) -> None:
        """Send the active adapter, if one is, and drop the one before."""
        started = time.perf_counter()
        adapter = None if active_adapter(model) is None else self._send(model)
        self._drop_adapter()
        self._adapter, self._samples = adapter, adapter[0] if adapter else self._base
        self.sync_seconds = time.perf_counter() - started

    def _send(self, model: Any) -> tuple[str, Path]:
        self._number += 1
        name = f"rloo-kit-{os.getpid()}-{self._number}"
        folder = self._folders.write(model, self.adapter_dtype)
        content = {"lora_name": name, "lora_path": str(folder)}
        answer = self._request("POST", "/v1/load_lora_adapter", content, check=False)
        if answer.status_code != 200:
            AdapterFolders.drop(folder)
            raise GenerationError(
                f"the vLLM server at {self.url} does not load the adapter ({answer.status_code} "
                f"{_excerpt(answer)}): it must see the folder {str(folder.parent)!r} "
                f"(trainer.vllm_adapter_dir); start it with `{START.format(rank=self._rank)}`"
            )
        return name, folder

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling, seed: int) -> Generations:
        """See ``Engine.generate``: one request per group of equal prompts, in parallel."""
        if self._samples is None:
            raise GenerationError("no adapter was sent to the vLLM server: call sync first")
        values = sampling.as_vllm()
        values |= {"model": self._samples, "add_special_tokens": False, "return_token_ids": True}
        # equal prompts are siblings: one request computes their prompt once
        requests, row = [], 0
        for ids, same in groupby(prompt_ids):
            number = len(list(same))
            row_seed = (seed + row) % 2**31
            requests.append({**values, "prompt": ids, "n": number, "seed": row_seed})
            row += number
        with ThreadPoolExecutor(max_workers=min(64, len(requests))) as pool:
            answers = list(pool.map(self._complete, requests))
        choices = [choice for answer in answers for choice in answer]
        return Generations([ids for ids, _ in choices], [log_probs for _, log_probs in choices])

    def sleep(self) -> None:
        """Nothing to give back: the server has memory of its own."""

    def close(self) -> None:
        """Remove the adapter from the server if it still answers; close the connections."""
        if self._client.is_closed:
            return
        try:
            self._client.timeout = min(5.0, self.timeout)
            self._drop_adapter()
        except GenerationError:
            pass  # the server is gone
        finally:
            self._client.close()
            self._folders.close()

    # --- requests --------------------------------------------------------------------------------

    def _wait_until_up(self) -> None:
        import httpx

        end = time.monotonic() + self.timeout
        while True:
            try:
                answer = self._client.get("/health", timeout=min(5.0, self.timeout))
                if answer.status_code == 200:
                    return
                reason = f"it answers {answer.status_code} to /health"
            except (httpx.UnsupportedProtocol, httpx.InvalidURL) as exc:
                raise self._bad_address(exc) from exc
            except httpx.HTTPError as exc:
                reason = first_line(exc)
            if time.monotonic() > end:
                raise GenerationError(
                    f"no vLLM server is up at {self.url} after {self.timeout:g} s ({reason}): "
                    f"start one with `{START.format(rank=self._rank)}`, or set "
                    f"trainer.vllm_server_base_url"
                )
            time.sleep(min(1.0, self.timeout / 10))

    def _base_name(self, max_length: int) -> str:
        """Return the name of the base, which must take so many tokens."""
        answer = self._request("GET", "/v1/models")
        try:
            base = next(card for card in answer.json()["data"] if not card.get("parent"))
            name, limit = base["id"], base["max_model_len"]
        except (ValueError, LookupError, TypeError, AttributeError, StopIteration) as exc:
            raise self._not_vllm(f"its /v1/models has no base: {_excerpt(answer)}") from exc
        if limit < max_length:
            raise GenerationError(
                f"the server at {self.url} takes {limit} tokens and the run needs {max_length}: "
                f"start it with --max-model-len {max_length}, or lower model.max_seq_length"
            )
        return name

    def _complete(self, request: dict[str, Any]) -> list[tuple[list[int], list[float]]]:
        answer = self._request("POST", "/v1/completions", request)
        try:
            found = [
                (list(choice["token_ids"]), list(choice["logprobs"]["token_logprobs"]))
                for choice in sorted(answer.json()["choices"], key=lambda choice: choice["index"])
            ]
            whole = all(ids and len(ids) == len(log_probs) for ids, log_probs in found)
            finite = all(math.isfinite(p) for _, log_probs in found for p in log_probs)
        except (ValueError, LookupError, TypeError) as exc:
            raise self._not_vllm("its completions have no token ids or log-probabilities") from exc
        if len(found) != request["n"] or not whole or not finite:
            raise self._not_vllm(
                f"it gave other than {request['n']} completions, each with finite log-probabilities"
            )
        return found

    def _drop_adapter(self) -> None:
        if self._adapter is None:
            return
        (name, folder), self._adapter = self._adapter, None
        self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name}, check=False)
        AdapterFolders.drop(folder)

    def _request(self, method: str, path: str, content: Any = None, *, check: bool = True) -> Any:
        """Return the answer; with ``check`` one that is not 200 raises."""
        import httpx

        try:
            answer = self._client.request(method, path, json=content)
        except httpx.TimeoutException as exc:
            raise GenerationError(
                f"the vLLM server at {self.url} gave no answer in {self.timeout:g} s: raise "
                f"trainer.vllm_server_timeout, or look at the server's log"
            ) from exc
        except httpx.HTTPError as exc:
            raise GenerationError(
                f"the vLLM server at {self.url} is away ({first_line(exc)}): start it again; the "
                f"adapter trained so far is kept"
            ) from exc
        if check and answer.status_code != 200:
            raise GenerationError(
                f"the vLLM server at {self.url} refuses {path} with {answer.status_code} "
                f"({_excerpt(answer)}): look at its log"
            )
        return answer

    def _bad_address(self, exc: Exception) -> GenerationError:
        return GenerationError(
            f"vllm_server_base_url {self.url!r} is no address ({exc}): give one such as "
            f"http://127.0.0.1:8000"
        )

    def _not_vllm(self, what: str) -> GenerationError:
        return GenerationError(
            f"what answers at {self.url} is not the vLLM server that is needed ({what}): check "
            f"trainer.vllm_server_base_url"
        )


def _excerpt(answer: Any, limit: int = 200) -> str:
    return " ".join(redact(answer.text).split())[:limit]
