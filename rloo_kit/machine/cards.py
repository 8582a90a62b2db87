"""Graphics cards by name: their memory, and their CUDA compute capability."""

import difflib
import re
from dataclasses import dataclass

from rloo_kit.errors import ConfigError
from rloo_kit.machine.hardware import GIB
from rloo_kit.text.wording import format_value

# Share of a card's memory that its driver leaves: torch says 23.65 of 24 GiB, 11.76 of 12.
USABLE = 0.98
# Compute capability by the start of a card's name; the first that fits
CAPABILITIES = {
    "RTX 20": (7, 5), "RTX 30": (8, 6), "RTX 40": (8, 9), "RTX 50": (12, 0), "T4": (7, 5),
    "L4": (8, 9), "A100": (8, 0), "A10": (8, 6), "RTX A": (8, 6), "H100": (9, 0), "H200": (9, 0),
}  # fmt: skip
MEMORY = {
    "RTX 2060": 6, "RTX 2070": 8, "RTX 2080": 8, "RTX 2080 Ti": 11, "RTX 3050": 8, "RTX 3060": 12,
    "RTX 3060 Ti": 8, "RTX 3070": 8, "RTX 3070 Ti": 8, "RTX 3080": 10, "RTX 3080 Ti": 12,
    "RTX 3090": 24, "RTX 3090 Ti": 24, "RTX 4060": 8, "RTX 4060 Ti": 8, "RTX 4060 Ti 16GB": 16,
    "RTX 4070": 12, "RTX 4070 Super": 12, "RTX 4070 Ti": 12, "RTX 4070 Ti Super": 16,
    "RTX 4080": 16, "RTX 4080 Super": 16, "RTX 4090": 24, "RTX 5060": 8, "RTX 5060 Ti": 8,
    "RTX 5060 Ti 16GB": 16, "RTX 5070": 12, "RTX 5070 Ti": 16, "RTX 5080": 16, "RTX 5090": 32,
    "T4": 16, "L4": 24, "RTX A4000": 16, "RTX A5000": 24, "RTX A6000": 48, "L40S": 48, "A10": 24,
    "A100 40GB": 40, "A100 80GB": 80, "H100": 80, "H200": 141,
}  # fmt: skip
"""GiB of each card, by its data sheet."""
SMALLEST, LARGEST = 1, 1024
"""GiB that a card without a name may have."""


@dataclass(frozen=True)
class Card:
    """What limits a training on one card."""

    name: str
    memory: int  # bytes, as on the box
    bf16: bool = True  # whether it computes bfloat16 natively

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA's compute capability; None where only the memory of the card is known."""
        short = re.sub(r"NVIDIA |GeForce |Tesla ", "", self.name)
        return next((v for name, v in CAPABILITIES.items() if short.startswith(name)), None)

    @property
    def usable(self) -> int:
        """Bytes that a process can have when nothing else runs on the card."""
        return int(self.memory * USABLE)


CARDS = tuple(
    Card(name, gib * GIB, bf16=not name.startswith(("RTX 20", "T4")))
    for name, gib in MEMORY.items()
)


def find_card(text: str) -> Card:
    """Return a card by its name in any spelling (``rtx4070``), or by its memory (``12GB``).

    >>> find_card("rtx4070").name, find_card("NVIDIA GeForce RTX 4070").memory == 12 * GIB
    ('RTX 4070', True)

    Raises:
        ConfigError: The card is unknown.
    """
    size = re.fullmatch(r"\s*([0-9]{1,4}(?:\.[0-9]+)?)\s*Gi?B?\s*", text, re.IGNORECASE)
    if size:
        gib = float(size[1])
        if SMALLEST <= gib <= LARGEST:
            return Card(f"a card of {gib:g} GB", int(gib * GIB))
        raise ConfigError(
            f"--gpu {format_value(text)} is no size of a card: give between {SMALLEST}GB and "
            f"{LARGEST}GB"
        )
    known = {_plain(card.name): card for card in CARDS}
    wanted = _plain(text)
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
    names = ", ".join(known[name].name for name in near) or "RTX 4070, RTX 3090, L4"
    raise ConfigError(
        f"--gpu {format_value(text)} is not a known card: give its memory, such as 12GB, "
        f"or a name, such as {names}"
    )


def card_of(name: str) -> Card | None:
    """Return the card with a driver's name (``NVIDIA GeForce RTX 4070``), or None."""
    return {_plain(card.name): card for card in CARDS}.get(_plain(name))


def _plain(text: str) -> str:
    """Return a name without spaces, case, its maker and the words that vary."""
    words = re.sub(r"nvidia|geforce|laptop|gpu|graphics|sxm|pcie", " ", text.lower())
    plain = re.sub(r"[^a-z0-9]", "", words)
    return f"rtx{plain}" if re.fullmatch(r"[2-5]0[5-9]0.*", plain) else plain
