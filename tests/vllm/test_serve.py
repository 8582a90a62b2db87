"""``rloo-kit serve``: vLLM's own server answers with the adapter and without."""

import httpx
import pytest

import rloo_kit as rk

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def served(tmp_path_factory, adapted_model):
    """An adapter that changes what is said; greedy answers with it, and without."""
    folder = tmp_path_factory.mktemp("served") / "polite"
    with rk.session():
        model, tokenizer = adapted_model()
        rk.save_adapter(model, tokenizer, folder)
        prompts = rk.load_prompts("arithmetic", split="held_out", num_prompts=8)
        settings = {"max_completion_length": 48, "temperature": 0.0}
        ours = rk.evaluate(model, tokenizer, prompts, [], **settings)
        with model.disable_adapter():
            base = rk.evaluate(model, tokenizer, prompts, [], **settings)
    return folder, ours.samples, base.samples


def test_serve_answers_as_adapter_and_base(start_server, served):
    server = start_server("rloo_kit", "serve", str(served[0])).wait()
    client = httpx.Client(base_url=server.url, timeout=60)
    for name, samples in (("polite", served[1]), ("base", served[2])):
        texts = []
        for sample in samples:
            asked = {
                "model": name, "messages": sample["prompt"], "temperature": 0, "max_tokens": 48
            }  # fmt: skip
            answer = client.post("/v1/chat/completions", json=asked)
            assert answer.status_code == 200, answer.text
            texts.append(answer.json()["choices"][0]["message"]["content"])
        wanted = [sample["completion"] for sample in samples]
        same = sum(a.split() == b.split() for a, b in zip(texts, wanted, strict=True))
        assert same >= len(wanted) - 1, list(zip(texts, wanted, strict=True))  # bf16 may turn one
    assert [s["completion"] for s in served[1]] != [s["completion"] for s in served[2]]
