"""The fake card itself: torch, vLLM, Unsloth and the kit see the same one."""

import pytest

from rloo_kit.machine.hardware import detect_hardware
from rloo_kit.models.shape import TINY_THINKER

GIB = 2**30
pytestmark = pytest.mark.gpu_contract


def test_every_package_sees_the_card(card):
    import torch
    from unsloth_zoo.vllm_utils import get_mem_info

    card(12, used_gib=3.6, capability=(8, 6))
    free, total = int(8.4 * GIB), 12 * GIB
    assert get_mem_info()[1] == torch.cuda.mem_get_info()[1] == total
    assert detect_hardware().free_memory == pytest.approx(free, abs=1)
    assert (detect_hardware().device, detect_hardware().bf16) == ("cuda", True)
    from vllm import platforms

    assert platforms.current_platform.get_device_total_memory() == total
    assert platforms.current_platform.get_device_capability().to_int() == 86
    assert platforms.current_platform.is_cuda()


def test_vllm_builds_its_configuration_for_cuda(card, engine_config):
    made = card(8, used_gib=1)
    config = engine_config(
        model=str(TINY_THINKER),
        skip_tokenizer_init=True,
        max_model_len=256,
        gpu_memory_utilization=0.5,
    )
    assert config.device_config.device_type == "cuda"
    assert made.start(config) == 4 * GIB
    made.used = 5 * GIB
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        made.start(config)
