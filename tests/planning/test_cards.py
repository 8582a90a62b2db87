"""Ways to train on several cards: what is divided, which of them fit, the command, the docs."""

from dataclasses import replace

import pytest
from jobs import USUAL
from transformers import LlamaConfig

from rloo_kit.cli import main
from rloo_kit.config.run_file import EXAMPLES, PROJECTIONS, read_run_file
from rloo_kit.machine.hardware import GIB
from rloo_kit.models.shape import shape_of_config
from rloo_kit.planning.cards import find_ways
from rloo_kit.planning.memory import CONTEXT, LEARN, LOAD, SAMPLE, Job, plan_memory, planned_engine
from rloo_kit.planning.planner import make_plan


@pytest.fixture(scope="module")
def seventy_billion():
    """Return the job of a 70B with Llama's shape: 70,553,706,496 parameters."""
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128_256,
    )
    return Job(
        shape=shape_of_config(config, "70B"),
        on_gpu=True,
        room=24 * GIB,
        card=24 * GIB,
        targets=PROJECTIONS,
        adapted_layers=80,
        **USUAL | {"budget": 1024},
    )


def test_base_adapter_and_optimizer_are_divided_by_the_cards(seventy_billion):
    alone = replace(seventy_billion, in_4bit=False)
    eight = replace(alone, cards=8)
    one = plan_memory(alone).parts
    divided = plan_memory(eight).parts
    assert one["weights"][LEARN] == 141_107_412_992  # 2 bytes a parameter
    assert divided["weights"][LEARN] == 17_638_426_624
    # 16 for each of the rows and columns of 7 layers: q, k, v, o, gate, up, down
    trained = 80 * 16 * (4 * 8192 + 2 * 8192 + 2 * 1024 + 3 * (8192 + 28672))
    assert one["LoRA adapter, float32"][LEARN] == 4 * trained
    assert divided["LoRA adapter, float32"][LEARN] == trained // 2
    assert divided["gradients, float32"][LEARN] == one["gradients, float32"][LEARN] // 8
    assert divided["optimizer states, adamw_torch"][LEARN] == trained
    for name in ("activations", "keys and values", "log-prob chunk"):
        assert divided[name] == one[name]


def test_two_layers_and_what_is_outside_of_them_are_gathered(seventy_billion):
    assert not any(plan_memory(seventy_billion).parts["weights, gathered"].values())
    parts = plan_memory(replace(seventy_billion, in_4bit=False, cards=2)).parts
    # queries and output, keys and values, the MLP
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    outside = 2 * 128_256 * 8192 + (2 * 80 + 1) * 8192  # embeddings, LM head, norms
    assert parts["weights, gathered"][SAMPLE] == 2 * (2 * layer + outside)
    assert LOAD not in parts["weights, gathered"]


def test_a_server_takes_the_engine_off_the_card_that_trains(seventy_billion):
    small = replace(seventy_billion, room=100 * GIB, card=100 * GIB, engine="vllm")
    trained = plan_memory(replace(small, engine="server"))
    size = planned_engine(small).size
    served = CONTEXT + size.weights + size.working + size.graphs + 128 * 2**20
    served += 2 * 2 * 80 * 1024 * 1024  # keys and values of a row: 80 layers, 1,024 wide and long
    ways = find_ways(small, 2)
    peak = ways["vLLM's server on 1, training on 1"]
    assert peak == max(served, trained.peak_bytes) < plan_memory(small).peak_bytes


def test_a_run_in_16_bit_has_no_4_bit_way(seventy_billion):
    names = list(find_ways(replace(seventy_billion, in_4bit=False), 2))
    assert len(names) == 4
    assert not any(name.startswith("4-bit") for name in names)


# --- the plan and the command --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--gpu", "12GB", "--cards", "4"], 0, "fits  4-bit base divided"),
        (["--gpu", "12GB", "--cards", "2"], 1, "no    a copy of the base on each card"),
        (["--gpu", "12GB"], 1, "use a smaller model, or 4 cards (--cards 4)"),
        (["--gpu", "24GB", "--cards", "0"], 2, "--cards is 0"),
    ],
)
def test_command_says_what_fits_on_several_cards(capsys, arguments, code, text):
    assert main(["plan", "qwen3-14b-24gb", *arguments]) == code
    printed = capsys.readouterr()
    assert text in printed.out + printed.err


def test_one_card_has_no_lines_on_several():
    config = read_run_file("qwen3-8b-16gb")
    assert "cards" not in str(make_plan(config, "16GB", base=EXAMPLES))
    assert "on 2 such cards" in str(make_plan(config, 16, base=EXAMPLES, cards=2))


def test_docs_hold_the_planners_figures():
    from write_card_ways import PAGE, written

    page = PAGE.read_text()
    assert written(page) == page, "run scripts/write_card_ways.py"
