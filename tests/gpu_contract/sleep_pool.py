"""Fill vLLM's sleep allocator, trim it and free it, as an engine's life does; print what is left.

    LD_LIBRARY_PATH=FOLDER python sleep_pool.py FOLDER

FOLDER holds fake_driver.c, compiled. The allocator is vLLM's own, its C code included. The kit
unmaps the pools before torch frees their blocks. Prints MiB of memory: of the allocator and of the
driver while the engine lives, then of both after its end.
"""

import contextlib
import ctypes
import sys
from pathlib import Path

MIB = 2**20
driver = ctypes.PyDLL(str(Path(sys.argv[1]) / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
driver.physical.restype = ctypes.c_long

import torch  # noqa: E402  # the driver comes before torch
from vllm.device_allocator import cumem  # noqa: E402

from rloo_kit.machine import engines  # noqa: E402

torch.cuda.synchronize = lambda *_: None
allocator = cumem.CuMemAllocator.get_instance()
cumem.init_module(allocator.python_malloc_callback, allocator.python_free_callback)
library = ctypes.PyDLL(cumem.find_loaded_library("cumem_allocator"))
library.my_malloc.restype = ctypes.c_void_p
library.my_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]


def say():
    print(allocator.get_current_usage() // MIB, driver.physical() // MIB)  # noqa: T201


class Pool:
    """The part of ``torch.cuda.MemPool`` that vLLM asks for unused blocks."""

    def snapshot(self):
        return [{"address": blocks[1][0], "allocated_size": 0}]


blocks = [(library.my_malloc(size, 0, None), size) for size in (20 * MIB, 2 * MIB, 2000 * MIB)]
allocator._trim(Pool())  # vLLM frees a block that torch keeps in its list
say()
engines._unmap_pools()
numbers = ctypes.c_ulonglong * len(blocks)
addresses, sizes = (numbers(*row) for row in zip(*blocks, strict=True))
with contextlib.suppress(KeyError, TypeError, SystemError):  # as a MemPool's destructor does
    driver.free_all(library.my_free, addresses, sizes, len(blocks))
say()
