"""The size of a training pass, estimated from memory and time, without importing torch."""

GIB = 1024**3
# A pass without gradient keeps no activations, so its micro-batches may be this much larger
NO_GRAD_FACTOR = 4
# Lower and upper limit of the budget in positions, whatever the memory
SMALLEST_BUDGET = 512
LARGEST_BUDGET = 16_384


def default_token_budget(  # noqa: PLR0913
    free_memory: int,
    hidden_size: int,
    num_layers: int,
    *,
    intermediate_size: int,
    bytes_per_value: int,
    checkpointing: bool,
    on_cpu: bool,
) -> int:
    """Return the maximum number of positions of a training pass, between 512 and 16,384.

    Activations may use half of the free memory, which is given in bytes and measured after the
    model is loaded. On a CPU they may use at most 4 GiB. This is enough to train a group in one
    pass, and larger passes are not faster on a CPU.
    """
    # number of values that a layer keeps for the backward pass, per position: inputs of its
    # matrices, norms, attention, gated MLP
    layer = 12 * hidden_size + 5 * intermediate_size
    # with gradient checkpointing only one layer at a time keeps these, and every layer its input
    values = layer + num_layers * hidden_size if checkpointing else num_layers * layer
    room = min(free_memory // 2, 4 * GIB) if on_cpu else free_memory // 2
    return max(SMALLEST_BUDGET, min(room // (values * bytes_per_value), LARGEST_BUDGET))


def pass_overhead(num_layers: int, num_parameters: int, *, on_cpu: bool) -> int:
    """Return the fixed cost of a training pass, converted to a number of positions.

    Launching the operations of one more pass takes time, however few positions it has. The device
    could compute the returned number of positions in the same time.
    """
    # Seconds to start a layer's operations, and operations per second; a position needs about 4
    # operations per parameter. These are constants, so that a run is always cut in the same way.
    seconds, operations = (5e-3, 1.5e11) if on_cpu else (1.5e-3, 3e13)
    return round(num_layers * seconds * operations / (4 * num_parameters))
