"""Work out what a step of RLOO with LoRA costs on 1, 8 and 64 cards; print the tables of scale.md.

.venv/bin/python scripts/simulate_schedule.py            # print the tables
.venv/bin/python scripts/simulate_schedule.py --write    # put them, and the picture, into docs/

Every second here is computed from the rates below, which are data sheets times an assumed share,
and from lengths drawn from an assumed distribution. None of them was measured.
"""

import argparse
import heapq
import itertools
import math
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGE, PICTURE = DOCS / "explanation" / "scale.md", DOCS / "pictures" / "scale.svg"
CARDS_OF_NODE = 8
# Per weight: four bits, one byte for each 64 of them, and four bytes for each 256 of those
NF4_BYTES = 0.5 + (1 + 4 / 256) / 64
# Per token sent to the other processes: id, log-probability and text, pickled
GATHERED_BYTES = 16
# Simulated steps that a line of the schedule is the mean of
STEPS = 12


@dataclass(frozen=True)
class Model:
    """A dense transformer with grouped-query attention, as its config.json describes it."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool

    @property
    def projections(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of the seven linear layers of a block."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        h, i = self.hidden, self.inner
        return [(h, q), (h, kv), (h, kv), (q, h), (h, i), (h, i), (i, h)]

    @property
    def linear_weights(self) -> int:
        """Weights of all blocks' linear layers: what 4-bit loading quantises."""
        return self.layers * sum(a * b for a, b in self.projections)

    @property
    def embedding_weights(self) -> int:
        """Weights of the embedding, and of the head where it is another matrix."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def weights(self) -> int:
        """All of them but the norms."""
        return self.linear_weights + self.embedding_weights

    def lora_weights(self, rank: int) -> int:
        """Trained weights of an adapter on all seven layers: rank x (inputs + outputs) each."""
        return self.layers * rank * sum(a + b for a, b in self.projections)

    def bytes_in(self, bits: int) -> float:
        """Bytes of the weights, embeddings always in 16 bit; bits is 4 (NF4) or 16."""
        each = NF4_BYTES if bits == 4 else 2
        return self.linear_weights * each + self.embedding_weights * 2

    @property
    def kv_bytes_of_token(self) -> int:
        """Bytes of the KV cache of one token in 16 bit."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    def train_flops(self, tokens: int) -> float:
        """Floating-point operations of a row's training pass, checkpointed, base frozen.

        Forward, forward again, and the gradient of the activations: three times the forward of
        the linear layers; the backward of attention is two forwards, so four times that.
        """
        head = self.vocabulary * self.hidden
        linear = 2 * (self.linear_weights + head) * tokens
        attention = 2 * self.layers * self.heads * self.head_dim * tokens**2
        return 3 * linear + 4 * attention


QWEN3_4B = Model("Qwen3-4B", 36, 2560, 9728, 32, 8, 128, 151936, tied=True)
QWEN3_32B = Model("Qwen3-32B", 64, 5120, 25600, 64, 8, 128, 151936, tied=False)


@dataclass(frozen=True)
class Wire:
    """One direction of a link."""

    name: str
    nominal: float
    """Bytes/s of the data sheet."""
    share: float = 0.8
    """Of that, which a large collective is assumed to reach."""
    latency: float = 2e-5
    """Seconds of one hop."""

    @property
    def speed(self) -> float:
        """Bytes/s that are counted with."""
        return self.nominal * self.share


PCIE = Wire("PCIe 4.0 x16", 31.5e9)
NVLINK = Wire("NVLink 4", 450e9)
ETHERNET = Wire("25 Gbit/s", 25 / 8 * 1e9)


@dataclass(frozen=True)
class Card:
    """Rates of one card: the data sheet's, and the share of them that is assumed to be reached."""

    bandwidth: float = 1008e9 * 0.6
    """Bytes/s of its memory while decoding (24 GB class: 1,008 GB/s)."""
    compute: float = 165e12 * 0.4
    """Floating-point operations/s in 16 bit (165 TFLOP/s with sums in 32 bit)."""
    slots: int = 32
    """Completions that run at once; further ones wait. 32 of about 2,000 tokens are 9.7 GB of KV
    cache, which a 24 GB card has beside the weights and a learner."""
    slots_beside: int = 64
    """Of a card that only samples."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of completions: log-normal, longer for harder prompts, cut at a limit."""

    median: float = 2000
    sigma: float = 0.8
    """Of the logarithm."""
    between: float = 0.5
    """Share of the variance that is the prompt's and not the completion's."""
    limit: int = 8192

    def draw(self, rng: random.Random, prompts: int, group: int) -> list[int]:
        """Return ``prompts x group`` lengths, groups together."""
        of_prompt = self.sigma * math.sqrt(self.between)
        of_row = self.sigma * math.sqrt(1 - self.between)
        found = []
        for _ in range(prompts):
            level = math.log(self.median) + of_prompt * rng.gauss(0, 1)
            drawn = (math.exp(level + of_row * rng.gauss(0, 1)) for _ in range(group))
            found += [max(1, min(self.limit, round(length))) for length in drawn]
        return found


# --- collectives ---------------------------------------------------------------------------------


def all_reduce_bytes(size: float, processes: int) -> float:
    """Bytes that each process sends in a ring: 2 (N - 1) / N of the size.

    Patarasuk & Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
    """
    return 2 * (processes - 1) / processes * size


def all_gather_bytes(size: float, processes: int) -> float:
    """Bytes that each process sends so that all hold ``size`` bytes: (N - 1) / N of them.

    Reduce-scatter sends as much.
    """
    return (processes - 1) / processes * size


def slowest_wire(processes: int, inside: Wire, between: Wire) -> Wire:
    """Return the link that a ring over whole nodes is as fast as."""
    return inside if processes <= CARDS_OF_NODE or inside.speed < between.speed else between


def all_reduce_seconds(size: float, processes: int, wire: Wire) -> float:
    """Seconds of a ring all-reduce of ``size`` bytes; 0 for one process."""
    hops = 2 * (processes - 1)
    return all_reduce_bytes(size, processes) / wire.speed + hops * wire.latency


# --- one step ------------------------------------------------------------------------------------


def sampling_seconds(lengths: Sequence[int], slots: int, rates: tuple[float, ...]) -> float:
    """Seconds of one engine with continuous batching: a row that ends makes room for the next.

    Args:
        lengths: Tokens of each row, in the order they are begun; prompts are left out.
        slots: Rows at once.
        rates: Seconds of an iteration as such (the weights are read), for each running row (their
            arithmetic), and for each token of context of all running rows (the cache is read).
    """
    fixed, per_row, per_token = rates
    waiting = list(reversed(lengths))
    running: list[tuple[int, int]] = []  # (iteration in which it ends, in which it began)
    now, began, seconds = 0, 0, 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            heapq.heappush(running, (now + waiting.pop(), now))
            began += now
        ends = running[0][0]
        count, rows = ends - now, len(running)
        context = rows * now - began  # tokens in the cache before the first of these iterations
        tokens = count * context + rows * count * (count - 1) / 2
        seconds += count * (fixed + per_row * rows) + per_token * tokens
        now = ends
        while running and running[0][0] == now:
            began -= heapq.heappop(running)[1]
    return seconds


def by_rows(lengths: Sequence[int], processes: int) -> list[list[int]]:
    """Return shares of equal numbers of rows, as they come; they differ by one where they must."""
    ends = [len(lengths) * i // processes for i in range(processes + 1)]
    return [list(lengths[a:b]) for a, b in itertools.pairwise(ends)]


def by_tokens(lengths: Sequence[int], processes: int) -> list[list[int]]:
    """Return shares of about equal tokens: the longest left goes to whoever has least."""
    shares: list[list[int]] = [[] for _ in range(processes)]
    loads = [(0, i) for i in range(processes)]
    for length in sorted(lengths, reverse=True):
        load, place = heapq.heappop(loads)
        shares[place].append(length)
        heapq.heappush(loads, (load + length, place))
    return shares


def overlapped(samplings: Sequence[float], learnings: Sequence[float], send: float) -> float:
    """Return the seconds between two steps, one step off: one batch is sampled, one is learned.

    The adapter that samples batch k is of step k - 2; ``send`` is the time to hand it over, in
    which the servers wait.
    """
    sampled, learned = 0.0, [0.0, 0.0]
    for sampling, learning in zip(samplings, learnings, strict=True):
        sampled = max(sampled, learned[-2]) + send + sampling
        learned.append(max(sampled, learned[-1]) + learning)
    return (learned[-1] - learned[2]) / (len(samplings) - 1)


@dataclass(frozen=True)
class Plan:
    """Who does what in a step."""

    cards: int
    rows: int
    """Completions of a step, of the whole training."""
    servers: int = 0
    """Cards that only sample; 0: every card samples and learns in turn."""
    overlap: bool = False
    balanced: bool = True
    """Learning by tokens, else by rows."""
    group: int = 8

    @property
    def name(self) -> str:
        """As the table calls it."""
        if not self.servers:
            return f"in turn, by {'tokens' if self.balanced else 'rows'}"
        return f"{self.servers} beside, {'one step off' if self.overlap else 'synchronous'}"


@dataclass(frozen=True)
class Outcome:
    """Means over steps, seconds."""

    step: float
    sampling: float
    """Until the last engine is done."""
    sampling_mean: float
    """Of an engine's own work."""
    learning: float
    learning_mean: float
    wire: float
    tokens: float

    @property
    def rate(self) -> float:
        """Trained tokens/s of all cards."""
        return self.tokens / self.step


def simulate(
    plan: Plan,
    model: Model = QWEN3_4B,
    card: Card | None = None,
    wires: tuple[Wire, Wire] = (PCIE, ETHERNET),
    lengths: Lengths | None = None,
    steps: int = STEPS,
) -> Outcome:
    """Return what a step of the plan takes: LoRA r=16 on a 4-bit base, beta 0, one pass per row."""
    card, lengths, rng = card or Card(), lengths or Lengths(), random.Random(0)
    engines = plan.servers or plan.cards
    learners = plan.cards - plan.servers
    size = model.bytes_in(4)
    rates = (
        size / card.bandwidth,
        2 * model.weights / card.compute,
        model.kv_bytes_of_token / card.bandwidth,
    )
    cut = by_tokens if plan.balanced else by_rows
    send = 0.0
    if plan.servers:
        adapter = 2 * model.lora_weights(16)
        send = adapter / slowest_wire(plan.cards, *wires).speed
    slots = card.slots_beside if plan.servers else card.slots
    sampling, learning, wire, tokens = [], [], [], []
    for _ in range(steps):
        drawn = lengths.draw(rng, plan.rows // plan.group, plan.group)
        sampling.append([sampling_seconds(s, slots, rates) for s in by_rows(drawn, engines)])
        work = [sum(map(model.train_flops, share)) / card.compute for share in cut(drawn, learners)]
        learning.append(work)
        over = slowest_wire(learners, *wires)
        gathered = all_gather_bytes(GATHERED_BYTES * sum(drawn), learners) / over.speed
        wire.append(all_reduce_seconds(4 * model.lora_weights(16), learners, over) + gathered)
        tokens.append(sum(drawn))
    slowest = [max(s) for s in sampling]
    learned = [max(work) + w for work, w in zip(learning, wire, strict=True)]
    step = statistics.fmean(s + ell + send for s, ell in zip(slowest, learned, strict=True))
    if plan.overlap:
        step = overlapped(slowest, learned, send)
    return Outcome(
        step,
        statistics.fmean(slowest),
        statistics.fmean(map(statistics.fmean, sampling)),
        statistics.fmean(map(max, learning)),
        statistics.fmean(map(statistics.fmean, learning)),
        statistics.fmean(wire) + send,
        statistics.fmean(tokens),
    )


def best_split(cards: int, rows: int) -> Plan:
    """Return the one-step-off plan with as many eighths of the cards serving as make it fastest."""
    each = max(1, cards // CARDS_OF_NODE)
    plans = [Plan(cards, rows, servers=n, overlap=True) for n in range(each, cards, each)]
    return min(plans, key=lambda plan: simulate(plan, steps=4).step)


# --- tables --------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return Markdown, the first column to the left and the others to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def amount(size: float) -> str:
    """Return bytes as people write them, decimal."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"


def sent_in_a_step(model: Model, processes: int, rows: int = 512) -> dict[str, float]:
    """Return the bytes that one process sends in an optimizer step, by what it is for.

    Each process runs ``rows / processes / 4`` passes of four rows, and transformers would sample
    completions of up to 8,192 tokens, all rows at once.
    """
    lora = model.lora_weights(16)
    passes = max(1, rows // processes // 4)
    mean = statistics.fmean(Lengths().draw(random.Random(0), 512, 8))
    base = all_gather_bytes(model.bytes_in(16), processes)
    return {
        "LoRA gradients in 32 bit (also ZeRO-2)": all_reduce_bytes(4 * lora, processes),
        "completions and scores, gathered": all_gather_bytes(
            GATHERED_BYTES * rows * mean, processes
        ),
        "adapter to each vLLM server, 16 bit": 2 * lora,
        "FSDP2, ZeRO-3: 16-bit base, twice a pass": 2 * passes * base,
        "FSDP2, ZeRO-3: sampling without vLLM": base * Lengths().limit,
        "full fine-tuning: 16-bit gradients": all_reduce_bytes(2 * model.weights, processes),
    }


def model_table() -> str:
    """Return what the two models weigh."""
    rows = [
        [
            model.name,
            f"{model.weights / 1e9:.2f} B",
            amount(model.bytes_in(16)),
            amount(model.bytes_in(4)),
            f"{model.lora_weights(16) / 1e6:.1f} M",
            amount(4 * model.lora_weights(16)),
            f"{model.kv_bytes_of_token / 1e3:.0f} kB",
        ]
        for model in (QWEN3_4B, QWEN3_32B)
    ]
    head = ["model", "weights", "16 bit", "NF4", "LoRA r=16", "its gradient, fp32", "KV of a token"]
    return table(head, rows)


def bytes_table() -> str:
    """Return what a card sends in a step, for both models on 8 and 64 cards."""
    columns = {
        f"{model.name}, {processes}": sent_in_a_step(model, processes)
        for model in (QWEN3_4B, QWEN3_32B)
        for processes in (8, 64)
    }
    things = next(iter(columns.values()))
    rows = [[what, *(amount(column[what]) for column in columns.values())] for what in things]
    return table(["sent by one card in a step", *columns], rows)


def plans() -> list[Plan]:
    """Return the lines of the schedule: 512 rows whatever the cards, then 512 for each 8 cards."""
    found = [Plan(1, 512)]
    for cards, rows in ((8, 512), (64, 512), (64, 4096)):
        split = best_split(cards, rows)
        found += [
            Plan(cards, rows, balanced=False),
            Plan(cards, rows),
            replace(split, overlap=False),
            split,
        ]
    return found


def schedule_table(outcomes: Sequence[tuple[Plan, Outcome]]) -> str:
    """Return the schedule; speed is against as many single cards."""
    single = outcomes[0][1].rate
    head = ["cards", "rows", "who samples", "step", "sampling (mean)", "learning (mean)"]
    rows = [
        [
            str(plan.cards),
            f"{plan.rows:,}",
            plan.name,
            f"{out.step:.0f} s",
            f"{out.sampling:.0f} s ({out.sampling_mean:.0f})",
            f"{out.learning:.0f} s ({out.learning_mean:.0f})",
            f"{out.rate:,.0f}",
            f"{out.rate / single / plan.cards:.0%}",
        ]
        for plan, out in outcomes
    ]
    return table([*head, "tokens/s", "of linear"], rows)


def draw(outcomes: Sequence[tuple[Plan, Outcome]], path: Path) -> None:
    """Draw where the time of a step in turn goes, as shares."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"], rcParams["svg.fonttype"] = "scale", "none"
    kept = [(plan, out) for plan, out in outcomes if not plan.servers]
    names = [f"{p.cards} x {p.rows:,} rows,\n{p.name}" for p, _ in kept]
    parts = {
        "sampling": [o.sampling_mean for _, o in kept],
        "waiting for the longest": [o.sampling - o.sampling_mean for _, o in kept],
        "learning": [o.learning_mean for _, o in kept],
        "waiting for the slowest": [o.learning - o.learning_mean for _, o in kept],
        "wire": [o.wire for _, o in kept],
    }
    colours = ["#4c78a8", "#b6cde3", "#f58518", "#fbd0a2", "#54a24b"]
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axis = figure.subplots()
    left = [0.0] * len(kept)
    for (name, values), colour in zip(parts.items(), colours, strict=True):
        shares = [100 * v / out.step for v, (_, out) in zip(values, kept, strict=True)]
        axis.barh(names, shares, left=left, label=name, color=colour)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axis.invert_yaxis()
    axis.set(xlabel="percent of a step (simulated)", xlim=(0, 100))
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(parts), frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def make_tables() -> tuple[dict[str, str], list[tuple[Plan, Outcome]]]:
    """Return the page's tables by the name of their marks, and what the schedule came to."""
    outcomes = [(plan, simulate(plan)) for plan in plans()]
    tables = {
        "models": model_table(),
        "bytes": bytes_table(),
        "schedule": schedule_table(outcomes),
    }
    return tables, outcomes


def main() -> None:
    """Print the tables; with --write put them into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into the page, and its picture")
    write = parser.parse_args().write
    tables, outcomes = make_tables()
    page = PAGE.read_text() if write else ""
    for name, text in tables.items():
        print(f"{name}\n\n{text}\n")
        marks = re.compile(rf"(<!-- {name}:[^\n]*-->\n).*?(<!-- /{name} -->)", re.S)
        page = marks.sub(lambda m, text=text: f"{m[1]}{text}\n{m[2]}", page)
    if write:
        PAGE.write_text(page)
        draw(outcomes, PICTURE)


if __name__ == "__main__":
    main()
