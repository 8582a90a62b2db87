"""Find all tensors of this process, and free their memory even if objects still refer to them."""

import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import Any

from rloo_kit.errors import ModelError
from rloo_kit.types import Model


def live_tensors() -> Iterator[Any]:
    """Yield every tensor of this process that has memory.

    Tensors that were frozen by ``gc.freeze`` are not found. vLLM calls ``gc.freeze`` when it
    starts, so call ``gc.unfreeze`` first.
    """
    import torch

    for item in gc.get_objects():
        kind = type(item)
        if not issubclass(kind, torch.Tensor) or kind.__name__ == "FakeTensor" or item.is_meta:
            continue
        with contextlib.suppress(Exception):  # some subclasses have no storage
            item.untyped_storage().data_ptr()
            yield item


def empty_model(model: Model) -> None:
    """Free the memory of a model's parameters, buffers, gradients and quantisation states.

    The modules themselves stay. Tensors that are plain attributes of a module are freed too,
    because Unsloth keeps the keys and values of the last generation there, and vLLM keeps its LoRA
    buffers and its KV cache there. From then on a forward pass raises ``ModelError``.
    """
    for module in model.modules():
        if not _is_released(module):
            module.register_forward_pre_hook(check_not_released)
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        for tensor in tensors:
            tensor.grad = None
        for holder in (module, *tensors):
            for name in ("quant_state", "bnb_quant_state"):  # of bitsandbytes, of vLLM's plug-in
                if getattr(holder, name, None) is not None:
                    setattr(holder, name, None)
        empty_tensors([*tensors, *vars(module).values()])


def check_not_released(model: Any, *_: Any) -> None:
    """Check that ``empty_model`` has not freed the memory of a model.

    Args:
        model: The model. A value that is not a model passes the check.
        *_: Ignored. torch passes arguments here when it calls this function as a forward hook.

    Raises:
        ModelError: The memory was freed.
    """
    if _is_released(model):
        raise ModelError(
            "the memory of this model was released: load it again with load_model, and give the "
            "new model to attach_lora and to a new trainer"
        )


def _is_released(model: Any) -> bool:
    return check_not_released in getattr(model, "_forward_pre_hooks", {}).values()


def empty_tensors(values: Iterable[Any]) -> None:
    """Free the memory of tensors, including those inside lists and tuples, by emptying them.

    An emptied tensor keeps its dtype and has the shape ``(0,)``. If a tensor is a view, its base is
    emptied too. Values that are not tensors are ignored.
    """
    import torch

    for value in values:
        if isinstance(value, list | tuple):
            empty_tensors(value)
        elif isinstance(value, torch.Tensor):
            for tensor in (value, value._base):  # a view keeps its base
                if tensor is not None:
                    tensor.data = torch.empty(0, dtype=tensor.dtype)
