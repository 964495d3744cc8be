"""Group-relative advantages: how much better an episode did than its siblings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

TOLERANCE = 1e-9  # the one `TrajectoryGroup.has_signal` uses
_EPSILON = 1e-6


def group_advantages(
    rewards: Sequence[float | None], scale: Literal["group", "none"] = "group"
) -> np.ndarray:
    """GRPO's advantages of one group, (r - mean) / (std + 1e-6), or r - mean with scale "none".

    The standard deviation is the sample's (ddof 1), as in TRL. TRL adds 1e-4, which shrinks the
    advantages of rewards that differ little; here equal rewards are recognised before the division,
    so that the addend need not hide rounding. Source: DeepSeekMath, arXiv 2402.03300, section 4.1;
    "none" is Dr. GRPO's, arXiv 2503.20783.

    Args:
        rewards: [G]; None or a non-finite number is no member of the group.

    Returns:
        [G] float64. Exactly 0 where there is no reward, in a group whose rewards are equal, and in
        a group of one.
    """
    values = np.array([math.nan if r is None else float(r) for r in rewards], dtype=np.float64)
    scored = np.isfinite(values)
    advantages = np.zeros(len(values))
    members = values[scored]
    if len(members) < 2 or members.max() - members.min() <= TOLERANCE:
        return advantages
    centred = members - members.mean()
    advantages[scored] = centred / (members.std(ddof=1) + _EPSILON) if scale == "group" else centred
    return advantages
