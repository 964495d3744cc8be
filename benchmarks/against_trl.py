"""One step of the learner against one of TRL's GRPOTrainer, on the same recorded episodes.

    python -m benchmarks.against_trl --sets recorded
    python -m benchmarks.against_trl --sets equal

Both train SmolLM2-135M in float32 on this CPU, each in a process of its own, by turns: full
fine-tuning, AdamW, DAPO's loss without KL, no activation checkpointing. The episodes are those of a
calculator on GSM8K (`benchmarks/data/`): prompts with two demonstrations, 8 episodes each, those
with the most turns of the 16 prompts recorded. TRL runs its own `train()` and gets them from a
`rollout_func`; its time is that of its optimizer step, without collation and scoring, the learner's
that of `update`, with both. Tables: the episodes as recorded, and cut or repeated until all prompts
are of one length, and all completions, so that no padding is left that packing could save. The
learner runs with and without the computation of shared prompts once.

Reported, as the median of the steps after the first: seconds, trained and computed tokens per
second, the peak of resident memory and what of it is over the loaded model; and how far the
gradients of the first step are apart. As most of these episodes fail alike, they get rewards by
turns instead: neither side may leave one out for having no advantage. TRL adds 1e-4 to the standard
deviation where the learner adds 1e-6, so gradients are compared by their directions.

The episodes were recorded by

    python -m rollout.collect --output runs/recorded model.name_or_path=smollm2-135m-instruct \\
        env.id=agentrl/GSM8K-v0 rollout.engine=local rollout.engine_dtype=float32 \\
        rollout.tool_format=llama3 rollout.temperature=0.8 rollout.prompts_per_step=16 \\
        rollout.num_generations=8 rollout.max_turns=5 rollout.max_new_tokens=96 \\
        rollout.max_episode_tokens=400 rollout.max_context_tokens=1600
    gzip -9 -n < runs/recorded/trajectories/step-000001.jsonl > benchmarks/data/gsm8k.jsonl.gz
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers

from agentrl.config_file import make_config
from agentrl.models import SMOLLM2, locate_model
from agentrl.trajectory import Trajectory, TrajectoryGroup, read_groups
from agentrl.types import Completion

EPISODES = Path(__file__).parent / "data" / "gsm8k.jsonl.gz"
TEMPERATURE = 0.8  # of the recording
SETS = ("recorded", "equal")
SIDES = ("learner", "learner, prompts not shared", "TRL")


def recorded_groups(num_groups: int) -> list[TrajectoryGroup]:
    """Those with the most turns."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(gzip.decompress(EPISODES.read_bytes()))
        file.flush()
        groups = read_groups(Path(file.name))

    def num_turns(group: TrajectoryGroup) -> int:
        return sum(len(tape.turns) for tape in group.trajectories)

    groups = sorted(groups, key=num_turns, reverse=True)[:num_groups]
    for group in groups:
        for index, tape in enumerate(group.trajectories):
            tape.reward = float(index % 2)
    return groups


def split(tape: Trajectory) -> tuple[list[int], list[int], list[bool], list[float]]:
    """Prompt, and the columns of what follows it up to the last sampled token."""
    start, after = tape.turns[0].start, slice(tape.turns[0].start, tape.turns[-1].end)
    ids = tape.token_ids
    return ids[:start], ids[after], tape.loss_mask[after], tape.logprobs[after]


def of_equal_length(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """Prompts cut to the shortest; completions cut to the median, or repeated until they are."""
    tapes = [tape for group in groups for tape in group.trajectories]
    num_prompt = min(len(split(tape)[0]) for tape in tapes)
    num_completion = int(statistics.median(len(split(tape)[1]) for tape in tapes))

    def resized(tape: Trajectory) -> Trajectory:
        prompt, *columns = split(tape)
        rows = list(zip(*columns, strict=True))
        rows = (rows * (num_completion // len(rows) + 1))[:num_completion]
        rows[-1] = (rows[-1][0], True, rows[-1][2])  # a sequence ends with a sampled token
        result = Trajectory(id=tape.id)
        result.observe(prompt[-num_prompt:])
        for sampled, part in groupby(rows, key=lambda row: row[1]):
            ids, _, logprobs = map(list, zip(*part, strict=True))
            if sampled:
                versions = [0] * len(ids)
                result.act(
                    Completion(
                        token_ids=ids, logprobs=logprobs, finish_reason="stop", versions=versions
                    )
                )
            else:
                result.observe(ids)
        result.reward = tape.reward
        return result

    return [
        TrajectoryGroup(
            id=group.id, task=group.task, trajectories=[resized(t) for t in group.trajectories]
        )
        for group in groups
    ]


def run_learner(
    groups: list[TrajectoryGroup], options: argparse.Namespace, share_prefixes: bool
) -> dict[str, Any]:
    from accelerate import Accelerator

    from train.learner import Learner
    from train.model import load_model

    config = make_config(
        {
            "model": {"name_or_path": locate_model(SMOLLM2), "mixed_precision": "no"},
            "env": {"id": "agentrl/GSM8K-v0"},
            "rollout": {
                "prompts_per_step": len(groups),
                "temperature": TEMPERATURE,
                "max_context_tokens": options.micro_batch_tokens,
            },
            # A step trains on episodes of other weights than recorded them: TRL does not mind.
            "loss": {
                "importance_sampling_mode": "none",
                "max_mismatch": 1e9,
                "warn_mismatch": 1e9,
            },
            "optim": {
                "micro_batch_tokens": options.micro_batch_tokens,
                "share_prefixes": share_prefixes,
            },
        }
    )
    model, _ = load_model(config.model)
    if options.layers:
        del model.model.layers[options.layers :]
    learner = Learner(model, config, Accelerator(cpu=True))
    loaded = resident_peak()
    step, seconds = learner.optimizer.step, []

    def save_gradients_and_step() -> None:
        if not seconds:
            save_gradients(learner.model, options.out)
        step()

    learner.optimizer.step = save_gradients_and_step
    metrics = {}
    for _ in range(options.steps):
        started = time.perf_counter()
        metrics = learner.update(groups)
        seconds.append(time.perf_counter() - started)
    return {
        "seconds": seconds,
        "trained": metrics["num_tokens"],
        "computed": metrics["train/computed_tokens"],
        "loaded_gib": loaded,
    }


def run_trl(groups: list[TrajectoryGroup], options: argparse.Namespace) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    path = locate_model(SMOLLM2)
    group_size = len(groups[0].trajectories)
    tapes = [tape for group in groups for tape in group.trajectories]
    parts = [split(tape) for tape in tapes]
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if options.layers:
        del model.model.layers[options.layers :]

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """Prompts are the numbers of groups, each as often as it has episodes."""
        assert [int(prompt) for prompt in prompts] == [
            index for index in range(len(groups)) for _ in range(group_size)
        ]
        prompt_ids, completion_ids, masks, logprobs = map(list, zip(*parts, strict=True))
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "env_mask": [list(map(int, mask)) for mask in masks],
            "logprobs": logprobs,
            "recorded_reward": [tape.reward for tape in tapes],
        }

    def reward(recorded_reward: list[float], **_: Any) -> list[float]:
        return recorded_reward

    class Timed(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.started = self.scored = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started, self.scored = time.perf_counter(), 0.0

        def on_pre_optimizer_step(self, *_: Any, **more: Any) -> None:
            if not self.seconds:
                save_gradients(more["model"], options.out)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.started - self.scored)

    timed = Timed()

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            started = time.perf_counter()
            batch = super()._generate_and_score_completions(inputs)
            timed.scored += time.perf_counter() - started
            return batch

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
            reward_funcs=reward,
            rollout_func=rollout,
            train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(len(groups))]}),
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=options.trl_batch,
                gradient_accumulation_steps=len(tapes) // options.trl_batch,
                num_generations=group_size,
                max_completion_length=max(len(ids) for _, ids, _, _ in parts),
                temperature=TEMPERATURE,
                loss_type="dapo",
                beta=0.0,
                learning_rate=1e-6,
                lr_scheduler_type="constant",
                max_steps=options.steps,
                shuffle_dataset=False,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                logging_steps=10**6,
            ),
            callbacks=[timed],
        )
        loaded = resident_peak()
        trainer.train()
    width = max(len(prompt) for prompt, *_ in parts) + max(len(ids) for _, ids, *_ in parts)
    return {
        "seconds": timed.seconds,
        "trained": sum(sum(mask) for _, _, mask, _ in parts),
        "computed": len(tapes) * width,
        "loaded_gib": loaded,
    }


def save_gradients(model: Any, folder: Path) -> None:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.save(gradients, folder / "gradients.pt")


def resident_peak() -> float:
    """GiB of this process so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 2**20
    raise OSError("/proc/self/status has no VmHWM: this is no Linux")


def measure(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    groups = recorded_groups(options.groups)
    if options.set == "equal":
        groups = of_equal_length(groups)
    if options.side == "TRL":
        result = run_trl(groups, options)
    else:
        result = run_learner(groups, options, share_prefixes=options.side == SIDES[0])
    result["peak_gib"] = resident_peak()
    (options.out / "result.json").write_text(json.dumps(result))


def apart(ours: Path, theirs: Path) -> float:
    """How far the directions of two gradients are apart, relative to their length."""
    a, b = (torch.load(folder / "gradients.pt", mmap=True) for folder in (ours, theirs))
    norms = [sum(float(g.double().pow(2).sum()) for g in x.values()) ** 0.5 for x in (a, b)]
    return sum(float((a[n] / norms[0] - b[n] / norms[1]).double().pow(2).sum()) for n in b) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=1, help="of 8 episodes each; 16 at most")
    parser.add_argument("--steps", type=int, default=2, help="the first is not timed")
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0: all 30")
    parser.add_argument("--micro-batch-tokens", type=int, default=2048, help="of the learner")
    parser.add_argument("--trl-batch", type=int, default=8, help="sequences per forward pass")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--set", choices=SETS, help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        measure(options)
        return
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.sets:
            folders = {side: Path(temporary) / name / str(i) for i, side in enumerate(SIDES)}
            for side, folder in folders.items():
                folder.mkdir(parents=True)
                command = [sys.executable, "-W", "ignore", "-m", "benchmarks.against_trl"]
                command += [*sys.argv[1:], "--set", name, "--side", side, "--out", str(folder)]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            report(name, folders)


def report(name: str, folders: dict[str, Path]) -> None:
    results = {
        side: json.loads((folder / "result.json").read_text()) for side, folder in folders.items()
    }
    trl = results["TRL"]
    print(f"\n{name}: {trl['trained']:.0f} trained tokens a step")
    for side, result in results.items():
        seconds = [statistics.median(r["seconds"][1:] or r["seconds"]) for r in (result, trl)]
        trained, computed = (result[key] / seconds[0] for key in ("trained", "computed"))
        step_gib = result["peak_gib"] - result["loaded_gib"]
        line = (
            f"{side:28} {seconds[0]:7.2f} s  {trained:6.0f} trained, {computed:6.0f} computed "
            f"tokens/s  peak {result['peak_gib']:5.2f} GiB, {step_gib:5.2f} over the model"
        )
        if side != "TRL":
            line += (
                f"  {seconds[1] / seconds[0]:.2f}x the speed, "
                f"{result['peak_gib'] / trl['peak_gib']:.2f} of the peak, "
                f"gradient within {apart(folders[side], folders['TRL']):.1e}"
            )
        print(line, flush=True)


if __name__ == "__main__":
    main()
