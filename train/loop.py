"""The algorithm: sample groups, learn from them, hand the new weights to the engine, again.

    groups   <- rollouts.next_groups(n)      episodes with rewards and the engine's logprobs
    metrics  <- learner.update(groups)       advantages, packing, policy loss, optimizer step
    rollouts <- learner.weights(), version   verified by the logprobs of a probe

The weights are handed over before the first batch too, and whenever a part of the engine lost them.
Between two of these lines nothing is half done: a checkpoint holds the state between two batches,
and Ctrl-C ends a run only while it samples. Every rank runs this loop; the episodes are rank 0's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from agentrl.config import RunConfig
from agentrl.protocols import Probe, Rollouts, SyncError
from agentrl.summary import summarize
from train.checkpoint import Checkpoint
from train.display import Display
from train.interrupt import uninterrupted
from train.learner import Learner
from train.record import RunRecord

logger = logging.getLogger("agentrl")


def train(
    config: RunConfig,
    learner: Learner,
    rollouts: Rollouts,
    record: RunRecord,
    display: Display,
    resumed: Checkpoint | None,
    make_probe: Callable[[], Probe],
) -> None:
    """Run the batches that are left of `config.max_steps`; evaluate before, between and after.

    Args:
        resumed: what learner and rollouts were loaded from.
        make_probe: what the learner says of some tokens now, for the engine to agree with.

    Raises:
        KeyboardInterrupt: after a checkpoint was saved.
        SyncError: the engine has other weights than the learner.
    """
    ranks = learner.ranks
    step = resumed.step if resumed else 0
    state, num_updates = rollouts.state_dict(), learner.num_optimizer_steps

    @once_more
    def sync() -> dict[str, float]:
        display.phase("sync")
        return rollouts.update_weights(learner.weights(), learner.version, make_probe())

    def hold_out() -> None:
        evaluate(config, learner, rollouts, record, display, step, sync)

    def save() -> None:
        display.phase("saving")
        record.checkpoint(step, learner, state)

    try:
        with uninterrupted():
            sync()
            if step == 0:
                hold_out()
            while step < config.max_steps:
                started = time.perf_counter()
                display.phase("rollout")
                groups = rollouts.next_groups(config.rollout.prompts_per_step)
                if groups is None:
                    sync()
                    continue
                display.phase("update")
                metrics = rollouts.pop_metrics()
                if config.sglang.colocate:
                    rollouts.sleep()
                metrics |= learner.update(groups)
                step += 1
                state, num_updates = rollouts.state_dict(), learner.num_optimizer_steps
                metrics |= timed("sync", sync)
                metrics["step_time"] = time.perf_counter() - started
                with ranks.together():
                    record.step(step, metrics, groups)
                    display.step(step, metrics, groups)
                last = step == config.max_steps
                if last or is_due(step, config.eval.eval_steps):
                    hold_out()
                if is_due(step, config.checkpoint.save_steps):
                    save()
            if step not in record.evaluations:
                hold_out()
    except BaseException as error:
        # What was trained is never lost, but for a batch that was trained on in part. Ranks that
        # are out of step cannot gather it.
        whole = num_updates == learner.num_optimizer_steps
        if record.last_checkpoint_step < step and whole and ranks.in_step(error):
            with uninterrupted():
                save()
        raise
    if record.last_checkpoint_step < step:
        with uninterrupted():
            save()


def evaluate(
    config: RunConfig,
    learner: Learner,
    rollouts: Rollouts,
    record: RunRecord,
    display: Display,
    step: int,
    sync: Callable[[], Any],
) -> None:
    """Play the held-out tasks and record `eval/…`."""
    if config.eval.num_tasks == 0:
        return
    display.phase("evaluation")
    while (groups := rollouts.evaluate()) is None:
        sync()
        display.phase("evaluation")
    metrics = {f"eval/{name}": value for name, value in summarize(groups).items()}
    with learner.ranks.together():
        record.evaluation(step, metrics, groups)
        display.evaluation(metrics)


def timed(name: str, function: Any, *args: Any) -> dict[str, float]:
    """The metrics that `function` returns, and the seconds it took as `time/<name>`."""
    started = time.perf_counter()
    metrics = function(*args)
    return metrics | {f"time/{name}": time.perf_counter() - started}


def once_more(sync: Callable[[], dict[str, float]]) -> Callable[[], dict[str, float]]:
    """`sync`, again where it fails at all servers: one that died took along those in its group."""

    def try_twice() -> dict[str, float]:
        try:
            return sync()
        except SyncError as error:
            logger.warning("the weights are sent once more: %s", error)
        return sync()

    return try_twice


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
