"""What a run leaves in its folder: config, metrics, episodes, checkpoints and a learning curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from agentrl.config import RunConfig
from agentrl.config_file import dump_config
from agentrl.metrics import MetricLog, load_metrics
from agentrl.trajectory import TrajectoryGroup, write_groups
from train.checkpoint import Checkpoint, latest_checkpoint, save_checkpoint
from train.curve import draw_curve
from train.learner import Learner
from train.performance import (
    engine_words,
    mean_metrics,
    mismatch_words,
    speed_words,
    staleness_words,
    sync_words,
    time_words,
)


class RunRecord:
    """Writes into `folder`, on rank 0; checkpoints are written by all ranks together:

    config.yaml                      as resolved
    metrics.jsonl                    a line a step
    trajectories/step-000012.jsonl   a line a group, tokens included
    trajectories/eval-000012.jsonl
    checkpoints/checkpoint-000012    what `from_pretrained` loads and `--resume` goes on from
    curve.png
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        accelerator: Accelerator,
        tokenizer: Any,
        resumed: Checkpoint | None,
    ) -> None:
        self.folder = folder
        self.last_checkpoint_step = resumed.step if resumed else 0
        self.evaluations: dict[int, dict[str, float]] = (  # by step
            resumed.metrics["evaluations"] if resumed else {}
        )
        self._config, self._accelerator, self._tokenizer = config, accelerator, tokenizer
        self._episodes = folder / "trajectories"
        self._log: MetricLog | None = None
        if accelerator.is_main_process:
            self._episodes.mkdir(exist_ok=True)
            (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
            self._log = MetricLog(folder / "metrics.jsonl")

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def step(
        self, step: int, metrics: Mapping[str, float], groups: Sequence[TrajectoryGroup]
    ) -> None:
        self._write(step, metrics)
        if self._log and self._config.save_trajectories:
            write_groups(self._episodes / f"step-{step:06d}.jsonl", groups)

    def evaluation(
        self, step: int, metrics: dict[str, float], groups: Sequence[TrajectoryGroup]
    ) -> None:
        self.evaluations[step] = metrics
        self._write(step, metrics)
        if self._log:
            write_groups(self._episodes / f"eval-{step:06d}.jsonl", groups)

    def checkpoint(self, step: int, learner: Learner, rollouts_state: dict[str, Any]) -> None:
        """Raises CheckpointError where the disk refuses; earlier checkpoints stay."""
        save_checkpoint(
            self.checkpoints,
            step,
            learner,
            rollouts_state,
            {"evaluations": self.evaluations},
            self._tokenizer,
            dump_config(self._config),
        )
        self.last_checkpoint_step = step

    def summary(self) -> list[str]:
        """Draw the curve; say what came of the run, and where it lies."""
        metrics = self.folder / "metrics.jsonl"
        draw_curve(metrics, self.folder / "curve.png")
        lines = [
            f"the run: {self.folder}  (curve.png, metrics.jsonl, trajectories)",
            f"the model: {latest_checkpoint(self.checkpoints)}",
        ]
        steps = [r for r in load_metrics(metrics) if "step_time" in r]
        means = mean_metrics(steps)
        for label, words in (
            ("time", time_words(means)),
            ("speed", speed_words(means)),
            ("engine", engine_words(means)),
            ("staleness", staleness_words(means)),
            ("syncs", sync_words(means)),
            ("learner - engine", mismatch_words(means)),
        ):
            if words:
                lines.append(f"{label}: {words}")
        if changes := held_out_changes(self.evaluations, self._config):
            words = (f"{name} {old:.3f} -> {new:.3f}" for name, (old, new) in changes.items())
            lines.insert(0, "held-out, before -> after: " + ", ".join(words))
        return lines

    def how_to_resume(self) -> str:
        """What to do after the run was cut short."""
        if self.last_checkpoint_step == 0:
            return "no step was finished, so there is nothing to resume"
        return (
            f"the same command with --resume output_dir={self.folder} goes on after step "
            f"{self.last_checkpoint_step}"
        )

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._log:
            self._log.write(step, metrics)
        self._accelerator.log(dict(metrics), step=step)


def held_out_changes(
    evaluations: Mapping[int, Mapping[str, float]], config: RunConfig
) -> dict[str, tuple[float, float]]:
    """What the first and the last evaluation say: of a mix the rewards, else how much is correct.

    Args:
        evaluations: their metrics by step.
    """
    if not evaluations:
        return {}
    before, after = (evaluations[at(evaluations)] for at in (min, max))
    names = [name for name in after if name.startswith("eval/correct")] or ["eval/reward"]
    if config.mix:
        names = ["eval/reward", *(f"eval/{env}/reward" for env in config.mix)]
    return {
        name.removeprefix("eval/"): (before[name], after[name])
        for name in sorted(names)
        if name in before and name in after
    }
