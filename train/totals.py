"""What the optimizer steps of one update add up to, as metrics."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Totals:
    """What the optimizer steps taken in one update add up to, and how many were skipped."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    max_abs_diff: float = 0.0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    update_ratios: list[float] = field(default_factory=list)
    num_bad_steps: int = 0
    num_empty_steps: int = 0
    num_computed_tokens: int = 0  # on this rank
    num_flops: float = 0.0  # likewise

    def add_step(self, *, loss: float, grad_norm: float, update_ratio: float) -> None:
        self.losses.append(loss)
        self.grad_norms.append(grad_norm)
        self.update_ratios.append(update_ratio)

    def add_sums(self, sums: dict[str, float], max_abs_diff: float) -> None:
        """Over the tokens of a step, on all ranks."""
        self.max_abs_diff = max(self.max_abs_diff, max_abs_diff)
        for name, value in sums.items():
            self.sums[name] += value

    def metrics(self) -> dict[str, float]:
        """Means over steps, and over the tokens of the steps taken."""
        metrics = {
            "train/optimizer_steps": float(len(self.losses)),
            "train/bad_steps": float(self.num_bad_steps),
            "train/empty_steps": float(self.num_empty_steps),
        }
        for name, values in (
            ("loss", self.losses),
            ("grad_norm", self.grad_norms),
            ("train/update_ratio", self.update_ratios),
        ):
            if values:
                metrics[name] = sum(values) / len(values)
        sums = dict(self.sums)
        num_tokens = sums.pop("num_tokens", 0.0)
        if num_tokens:
            weight, squared = sums.pop("importance"), sums.pop("importance_squared")
            metrics["mismatch/ess"] = weight**2 / (num_tokens * squared)
            metrics["mismatch/max"] = self.max_abs_diff
            metrics |= {name: value / num_tokens for name, value in sums.items()}
        return metrics
