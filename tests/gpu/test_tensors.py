"""LM head, CUDA graphs and memory that ``release`` returns; needs torch and nothing else."""

import pytest

pytestmark = pytest.mark.gpu


def test_log_probs_by_chunks_are_those_of_all_logits(device, record_property):
    import torch

    from rloo_kit.machine.lm_head import PlainTorchLogProb

    tokens, hidden_size, vocabulary = (6000, 64, 20_000) if device == "cuda" else (600, 64, 2000)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(device).requires_grad_()
    weight = (torch.randn(vocabulary, hidden_size, generator=generator) * 0.2).to(device)
    targets = torch.randint(vocabulary, (tokens,), generator=generator).to(device)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    how = (2.0, 256, None, 1.0, ("log_probs", "entropy"))  # a temperature of 2
    log_probs, entropies, *_ = PlainTorchLogProb.apply(hidden, weight, None, targets, *how)
    log_probs.sum().backward()
    if device == "cuda":
        extra = torch.cuda.max_memory_allocated() - before
        record_property("peak_mib", round(extra / 2**20))
        assert extra < tokens * vocabulary * 4 / 2  # half of the logits in float32

    exact = hidden.detach().double().requires_grad_()
    every = (exact @ weight.double().T * 0.5).log_softmax(-1)
    expected = every.gather(1, targets.unsqueeze(1)).squeeze(1)
    expected.sum().backward()
    torch.testing.assert_close(log_probs.double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(hidden.grad.double(), exact.grad, atol=1e-4, rtol=1e-3)
    entropy = -(every.exp() * every).sum(-1)
    torch.testing.assert_close(entropies.double(), entropy, atol=1e-3, rtol=1e-3)


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
