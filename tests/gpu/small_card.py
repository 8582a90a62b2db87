"""A consumer card made of a large one: its size as every library sees it, and its true peak.

torch's allocator gets the smaller size as a limit. What this process takes in all, vLLM's own
allocations included, is read from the driver (NVML) all the time, so a peak over the card's size is
seen even where no limit is enforced.
"""

import os
import threading
import time

GIB = 2**30
# Share of a card's memory that torch reports (23.65 of 24 GiB).
REPORTED = 0.98


class Usage:
    """Memory of the card that this process holds, by the driver's count; else the whole card's."""

    def __init__(self):
        import pynvml
        import torch

        torch.zeros(1, device="cuda")  # the context
        pynvml.nvmlInit()
        self._nvml = pynvml
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.by_process = self._mine() is not None

    def _mine(self):
        """Bytes of this process, None where the driver does not tell them."""
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return process.usedGpuMemory
        return None

    def read(self):
        """Bytes held now, the CUDA context included."""
        if self.by_process:
            return self._mine() or 0
        return self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used


class Watch:
    """The driver's count every 5 ms; ``take_peak`` gives the most since its last call."""

    def __init__(self):
        import torch

        self.usage = Usage()
        self.context = self.usage.read() - torch.cuda.memory_reserved()
        self.total = torch.cuda.get_device_properties(0).total_memory
        self.peak = self.usage.read()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self):
        while True:
            self.peak = max(self.peak, self.usage.read())
            time.sleep(0.005)

    def take_peak(self):
        peak = self.peak
        self.peak = self.usage.read()
        return peak


class SmallCard(Watch):
    """Makes this process see and use a card of ``gb`` GB; ``limited``: torch cannot take more."""

    def __init__(self, gb, *, limited=True):
        super().__init__()
        import torch

        real = self.total
        self.total = int(gb * GIB * REPORTED)
        torch.cuda.mem_get_info = torch.accelerator.get_memory_info = self._info
        properties = torch.cuda.get_device_properties
        total = self.total

        class Properties:
            def __init__(self, of):
                self._of = of

            def __getattr__(self, name):
                return total if name == "total_memory" else getattr(self._of, name)

        torch.cuda.get_device_properties = lambda *a, **k: Properties(properties(*a, **k))
        self._real = real
        if limited:
            self.limit()
            torch.cuda.get_per_process_memory_fraction = lambda device=None: 1.0
            self._follow_engine()

    def _info(self, device=None):
        return max(0, self.total - self.usage.read()), self.total

    def limit(self):
        """Limit torch's allocator, which also counts what vLLM has unmapped while it sleeps."""
        import torch

        hidden = max(0, torch.cuda.memory_reserved() + self.context - self.usage.read())
        share = (self.total - self.context + hidden) / self._real
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))

    def _follow_engine(self):
        """Set the limit again whenever an engine falls asleep, wakes up or ends."""
        from rloo_kit.sampling.vllm_inprocess import VllmEngine

        def then_limit(method):
            def limited(*arguments):
                try:
                    return method(*arguments)
                finally:
                    self.limit()

            return limited

        for name in ("sleep", "_wake", "close"):
            setattr(VllmEngine, name, then_limit(getattr(VllmEngine, name)))


def card_here(gb):
    """Watch a card of ``gb`` GB: this one where it has that size, else a limited one.

    Returns None on a CPU.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    if torch.cuda.get_device_properties(0).total_memory <= 1.05 * gb * GIB:
        return Watch()
    return SmallCard(gb)
