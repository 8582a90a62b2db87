"""CUDA graphs and the memory that ``release`` returns; needs torch and nothing else."""

import pytest

pytestmark = pytest.mark.gpu


def test_a_cuda_graph_replays_after_unused_memory_was_returned(device):
    import torch

    from rloo_kit.machine.cleanup import return_to_system

    if device == "cpu":
        pytest.skip("CUDA graphs exist on a GPU only")
    # few rows and a long inner dimension: cuBLAS splits it and adds the parts in its workspace,
    # whose address the graph keeps. Warm-up and capture use one stream, as in vLLM.
    rows = torch.randn(16, 16_384, device=device, dtype=torch.bfloat16)
    weight = torch.randn(16_384, 256, device=device, dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            rows @ weight
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        product = rows @ weight
    return_to_system()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(product, rows @ weight)
