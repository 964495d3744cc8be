"""What metrics of a step, or their means, say of engine, syncs and off-policy error, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

PARTS = ("generate", "env", "score", "logprob", "update", "sync")  # of a step's time

Metrics = Mapping[str, float]


def mean_metrics(records: Sequence[Metrics]) -> dict[str, float]:
    """Each metric over the records that have it."""
    names = dict.fromkeys(name for record in records for name in record)
    return {
        name: sum(values) / len(values)
        for name in names
        if (values := [record[name] for record in records if name in record])
    }


def time_words(metrics: Metrics) -> str:
    """Seconds of a step, and of its parts."""
    if "step_time" not in metrics:
        return ""
    parts = [f"{part} {metrics[f'time/{part}']:.1f}" for part in PARTS if f"time/{part}" in metrics]
    return f"{metrics['step_time']:.1f} s a step: " + ", ".join(parts)


def speed_words(metrics: Metrics) -> str:
    """Tokens over wall time, the share of the peak of operations per second (model-flops
    utilisation) and what memory the learner used at its fullest.
    """
    forms = (
        ("rollout/tokens_per_second", lambda n: f"rollout {n:,.0f} tok/s"),
        ("train/tokens_per_second", lambda n: f"train {n:,.0f} tok/s"),
        ("train/mfu", lambda f: f"mfu {f:.0%}"),
        ("train/peak_memory_gib", lambda n: f"peak memory {n:.1f} GiB"),
    )
    return _say(metrics, forms)


def engine_words(metrics: Metrics) -> str:
    """Time to the first token, time per token after it, cache hits, and who waits where."""
    forms = (
        ("engine/ttft_s", lambda s: f"first token {s:.2f} s"),
        ("engine/tpot_s", lambda s: f"{1000 * s:.1f} ms a token"),
        ("engine/cache_hit_fraction", lambda f: f"cached {f:.0%}"),
        ("rollout/running_requests", lambda n: f"running {n:.0f}"),
        ("rollout/queued_requests", lambda n: f"queued {n:.0f}"),
        ("engine/waiting", lambda n: f"in servers' queues {n:.0f}"),
    )
    return _say(metrics, forms)


def sync_words(metrics: Metrics) -> str:
    """What the last update of the weights took, moved, and left as a difference."""
    forms = (
        ("sync/seconds", lambda s: f"{s:.2f} s"),
        ("sync/bytes", lambda n: f"{n / 1e6:,.0f} MB"),
        ("sync/num_servers", lambda n: f"{n:.0f} server{'s' * (n != 1)}"),
        ("sync/failed_servers", lambda n: f"{n:.0f} FAILED" if n else ""),
        ("sync/probe_abs_diff", lambda d: f"probe differs by {d:.2g}"),
    )
    return _say(metrics, forms)


def staleness_words(metrics: Metrics) -> str:
    """The fractions of tokens that are 0, 1, … versions old; nothing for a synchronous run."""
    fractions = []
    while (name := f"rollout/staleness_{len(fractions)}") in metrics:
        fractions.append(metrics[name])
    if len(fractions) < 2:
        return ""
    return ", ".join(f"{late} late {fraction:.0%}" for late, fraction in enumerate(fractions))


def mismatch_words(metrics: Metrics) -> str:
    """How far the learner's logprobs are from the engine's, in nats per token."""
    forms = (
        ("mismatch/abs_diff", lambda d: f"mean {d:.2g}"),
        ("mismatch/max", lambda d: f"max {d:.2g}"),
        ("mismatch/kl", lambda d: f"KL {d:.1g}"),
        ("mismatch/k3", lambda d: f"k3 {d:.1g}"),
        ("mismatch/ess", lambda f: f"ESS {f:.3f}"),
        ("mismatch/clip_frac", lambda f: f"clipped {f:.1%}"),
    )
    return _say(metrics, forms)


def _say(metrics: Metrics, forms: Iterable[tuple[str, Callable[[float], str]]]) -> str:
    """Those of the metrics that are there, each in its form."""
    return ", ".join(filter(None, (form(metrics[name]) for name, form in forms if name in metrics)))
