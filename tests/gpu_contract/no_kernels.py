"""An executor for vLLM's real engine where no kernel can run.

Engine core, scheduler, KV cache manager and processors are vLLM's own. This answers in place of the
GPU worker: every call is bound to the signature of the installed worker, and every answer is of the
type that the worker's method returns.
"""

import inspect
from concurrent.futures import Future

import numpy as np
import torch
from vllm.lora import request as lora  # Unsloth replaces the class in it
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as ModelRunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as ModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase, WorkerWrapperBase

# Of every completion, before its stop token
TOKENS = 3


def worker_with(model, config):
    """Return vLLM's wrapper, worker and model runner of the installed classes, around a model."""
    wrapper = WorkerWrapperBase()
    wrapper.worker = object.__new__(Worker)
    wrapper.worker.model_runner = object.__new__(
        ModelRunnerV2 if config.use_v2_model_runner else ModelRunner
    )
    wrapper.worker.model_runner.model = model
    wrapper.worker.model_runner.kv_caches = [torch.zeros(16)]
    return wrapper


class NoKernels(Executor):
    """What ``llm.llm_engine.model_executor`` is; ``calls`` holds (method, arguments) in order."""

    # Whose memory is asked for; set by the fixture
    card = None

    def _init_executor(self):
        self.calls = []
        self.loras = {}
        self.requests = {}
        self.driver_worker = worker_with(torch.nn.Linear(8, 8), self.vllm_config)
        # as the worker's init_device does
        self.requested = self.card.request_memory(self.cache_config)

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
        bound = inspect.signature(getattr(Worker, method)).bind(self, *args, **(kwargs or {}))
        self.calls.append((method, bound.args[1:]))
        answer = [getattr(self, f"on_{method}", lambda *_: None)(*bound.args[1:])]
        if not non_block:
            return answer
        future = Future()
        future.set_result(answer)
        return future

    def execute_model(self, scheduler_output, non_block=False):
        return self._first(super().execute_model, scheduler_output, non_block)

    def sample_tokens(self, grammar_output, non_block=False):
        return self._first(super().sample_tokens, grammar_output, non_block)

    def _first(self, call, argument, non_block):
        if not non_block:
            return call(argument)
        future = Future()
        future.set_result(call(argument))
        return future

    @classmethod
    def supports_async_scheduling(cls):
        return True  # as the executor of one process does

    def check_health(self):
        pass

    # --- what the worker answers -----------------------------------------------------------------

    def on_get_kv_cache_spec(self):
        config = self.model_config
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=config.get_num_kv_heads(self.parallel_config),
            head_size=config.get_head_size(),
            dtype=config.dtype,
        )
        layers = range(config.get_num_layers(self.parallel_config))
        return {f"model.layers.{layer}.self_attn.attn": spec for layer in layers}

    def on_get_supported_kv_cache_layouts(self):
        return WorkerBase.get_supported_kv_cache_layouts(self)

    def on_set_kv_cache_layout(self, layout):
        WorkerBase.set_kv_cache_layout(self, layout)

    def on_determine_available_memory(self):
        return self.cache_config.kv_cache_memory_bytes or self.requested // 2

    def on_compile_or_warm_up_model(self):
        return CompilationTimes(0.0, 0.0)

    def on_apply_model(self, function):
        return function(self.driver_worker.worker.model_runner.model)

    def on_get_supported_tasks(self):
        return ("generate",)

    def on_add_lora(self, request):
        assert isinstance(request, lora.LoRARequest)
        assert request.lora_int_id not in self.loras
        self.loras[request.lora_int_id] = request
        return True

    def on_remove_lora(self, number):
        return self.loras.pop(number, None) is not None

    def on_list_loras(self):
        return set(self.loras)

    def on_execute_model(self, scheduled):
        if not scheduled.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        for request in scheduled.scheduled_new_reqs:
            adapter = request.lora_request
            assert adapter is None or isinstance(adapter, lora.LoRARequest)
            self.requests[request.req_id] = [
                len(request.prompt_token_ids) - request.num_computed_tokens,
                max(request.sampling_params.stop_token_ids),
                0,
            ]
        self.scheduled = scheduled.num_scheduled_tokens
        return None

    def on_sample_tokens(self, grammar):
        names = list(self.scheduled)
        drawn = []
        for name in names:
            request = self.requests[name]
            request[0] -= self.scheduled[name]
            if request[0] > 0:  # the prompt is not read to its end
                drawn.append([])
                continue
            request[2] += 1
            drawn.append([request[1] if request[2] > TOKENS else 1])
        tokens = np.array([row or [0] for row in drawn])
        log_probs = LogprobsLists(tokens, np.full(tokens.shape, -0.5), np.ones(len(names), int))
        places = {name: place for place, name in enumerate(names)}
        return ModelRunnerOutput(names, places, drawn, logprobs=log_probs)
