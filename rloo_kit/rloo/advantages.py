"""The leave-one-out maths, as pure functions on tensors.

Sources: Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning
from Human Feedback in LLMs" (arXiv 2402.14740), section 3; for the shrinkage Zeng et al. 2025,
"Shrinking the Variance" (arXiv 2511.03710); for the drawing of rows Hartley and Rao 1962,
"Sampling with Unequal Probabilities and without Replacement". P prompts, G generations per prompt.
"""

from collections.abc import Callable

import torch


def leave_one_out_baselines(rewards: torch.Tensor) -> torch.Tensor:
    """Return for each completion the mean reward of its scorable siblings.

    ``b_i = (sum_{j != i} r_j) / (n - 1)`` with n the scorable rewards of the group. The baseline
    does not depend on completion i, so subtracting it leaves the policy gradient unbiased.

    Args:
        rewards: ``(P, G)`` floats; NaN marks a completion that no reward function could score.

    Returns:
        ``(P, G)`` of the same dtype and device; NaN where the completion is unscorable or has no
        scorable sibling.
    """
    num_scorable = (~rewards.isnan()).sum(dim=1, keepdim=True)
    return (rewards.nansum(dim=1, keepdim=True) - rewards) / (num_scorable - 1)


def leave_one_out_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Return ``A_i = r_i - b_i``, with 0 where there is nothing to learn from.

    Equal to ``n / (n - 1) * (r_i - mean(r))`` over the n scorable rewards of the group.

    Args:
        rewards: ``(P, G)`` floats; NaN marks an unscorable completion.

    Returns:
        ``(P, G)`` of the same dtype and device, finite: exactly 0 for an unscorable completion, for
        a group with a single scorable one, and for a group whose rewards are all equal.

    >>> leave_one_out_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    tensor([[ 1.0000, -0.3333, -0.3333, -0.3333]])
    """
    advantages = (rewards - leave_one_out_baselines(rewards)).nan_to_num(nan=0.0)
    lowest = rewards.nan_to_num(nan=torch.inf).amin(dim=1, keepdim=True)
    highest = rewards.nan_to_num(nan=-torch.inf).amax(dim=1, keepdim=True)
    # Rounding of the sum must not turn "all alike" into a tiny signal.
    return advantages.masked_fill(lowest >= highest, 0.0)


def shrinkage_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Return advantages whose baselines are pulled towards the mean of the other prompts.

    ``b_i = (1 - l) * b_i_loo + l * m``, ``l = v / (v + d)`` (James-Stein, two-level leave-one-out),
    all from the K other groups with two scorable rewards at least: m is the mean of their means, v
    their mean variance over the number of siblings (so of ``b_i_loo``), d the squared distance
    from m to expect of a further group's mean, ``(1 + 1 / K) * var(means)``. The authors' code has
    G in place of the siblings, and no ``1 / K``. l and m see nothing of the group, ``b_i_loo`` only
    siblings: no baseline depends on its own reward, so the policy gradient stays unbiased.

    Args:
        rewards: ``(P, G)`` floats; NaN marks an unscorable completion.

    Returns:
        ``(P, G)`` of the same dtype and device, finite: those of ``leave_one_out_advantages`` where
        K is below 2 or the rewards of each other group are equal; 0 where a completion is
        unscorable or has no scorable sibling. Equal rewards in a group can give others than 0.
    """
    advantages = leave_one_out_advantages(rewards)
    known = (~rewards.isnan()).sum(dim=1, keepdim=True)  # (P, 1)
    # from the advantages, because those are exactly 0 where the rewards are equal
    within = advantages.square().sum(dim=1, keepdim=True) * (known - 1) / known**2  # (P, 1)
    hidden = torch.eye(len(rewards), dtype=torch.bool, device=rewards.device) | (known < 2).T
    means = rewards.nanmean(dim=1).masked_fill(hidden, torch.nan)  # (P, P): of the other groups
    mean = means.nanmean(dim=1, keepdim=True)  # (P, 1)
    others = (~hidden).sum(dim=1, keepdim=True)  # (P, 1) K
    distance = (means - mean).square().nansum(dim=1, keepdim=True) / (others - 1) * (1 + 1 / others)
    noise = within.T.masked_fill(hidden, torch.nan).nanmean(dim=1, keepdim=True) / (known - 1)
    pull = noise / (noise + distance) * (leave_one_out_baselines(rewards) - mean)  # (P, G)
    return advantages + pull.nan_to_num(nan=0.0)


# Advantages over a baseline, by the name that the setting `baseline` gives: a new one is a function
# of `(P, G)` rewards and a row here
BASELINES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "leave_one_out": leave_one_out_advantages,
    "shrinkage": shrinkage_advantages,
}


def normalised_sum(
    rewards: torch.Tensor, weights: torch.Tensor, num_generations: int
) -> torch.Tensor:
    """Return weighted sums of rewards, each of which is divided by its own spread first.

    The spread of a reward is the root mean square of its leave-one-out advantages over the batch,
    so a reward of a hundred points counts as much as one of 0 or 1. GDPO (Liu et al. 2026, arXiv
    2601.05242, section 3) divides by the spread in each group, which gives prompts that are nearly
    always or never solved more weight; one number for the batch does not, as leave-one-out itself.

    Args:
        rewards: ``(B, F)`` floats of F functions, groups one after another; NaN is unscorable.
        weights: ``(F,)``.
        num_generations: G, completions of a group.

    Returns:
        ``(B,)`` of the same dtype and device; NaN where every reward is. A reward that differs in
        no group adds nothing.
    """
    grouped = rewards.T.reshape(-1, num_generations)  # (F * P, G)
    advantages = leave_one_out_advantages(grouped).view_as(rewards.T)  # (F, B)
    spread = advantages.square().mean(dim=1).sqrt()  # (F,)
    factors = torch.where(spread > 0, weights.to(rewards) / spread, 0.0)
    return (rewards * factors).nansum(dim=1).masked_fill(rewards.isnan().all(dim=1), torch.nan)


def inclusion_probabilities(sizes: torch.Tensor, wanted: int) -> torch.Tensor:
    """Return ``p_i = min(1, c * size_i)`` with the c at which they sum to ``wanted``.

    Args:
        sizes: ``(N,)`` floats, 0 or more; a row of size 0 is never drawn.
        wanted: How many rows to draw; where no more have a size, each of them gets 1.

    Returns:
        ``(N,)`` float64.
    """
    chances = (sizes > 0).double()
    shared = sizes > 0  # rows whose chance is below 1, as far as known
    while shared.any():
        left = wanted - int((chances == 1).sum()) + int(shared.sum())
        scaled = sizes.double() * left / sizes[shared].double().sum()
        certain = shared & (scaled >= 1)
        if not certain.any():
            return torch.where(shared, scaled, chances)
        shared = shared & ~certain
    return chances


def draw_rows(chances: torch.Tensor, start: float) -> torch.Tensor:
    """Return ``(N,)`` bool: rows drawn without replacement, row i with probability ``chances[i]``.

    Systematic sampling: the rows lie one after another, each as long as its chance, and those under
    the marks ``start``, ``start + 1``, ... are drawn. It draws as many as the chances sum to.

    Args:
        chances: ``(N,)`` in [0, 1].
        start: Uniform in [0, 1).
    """
    ends = (chances.double().cumsum(0) - start).ceil()  # how many marks lie before each end
    return ends.diff(prepend=ends.new_zeros(1)) > 0
