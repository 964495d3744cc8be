"""One learner step against the plain way: padded batches, all logits, the loss on every position.

Both sides take the gradient of the same GRPO batch (8 groups of 8 multi-turn trajectories of very
different length) on the same float32 model, each in a process of its own. The plain way takes one
group a time, padded to its longest; the learner packs rows of about a group. Reported: the median
time, the peak of resident memory (and what of it the step added), and how far apart the gradients
are.

    python -m benchmarks.learner_step --layers 4
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from agentrl.attention import register_attention
from agentrl.config_file import make_config
from agentrl.trajectory import Trajectory, TrajectoryGroup
from agentrl.types import Completion, Task
from train.learner import Learner

NUM_GROUPS, GROUP_SIZE, PROMPT_TOKENS, VOCAB = 8, 8, 180, 49_152


def make_groups(seed: int = 0) -> list[TrajectoryGroup]:
    """Prompts of about 180 tokens; 30 to 600 further ones, of which a tool wrote a third."""
    rng = np.random.default_rng(seed)

    def tokens(n: int) -> list[int]:
        return rng.integers(3, VOCAB, n).tolist()

    groups = []
    for index in range(NUM_GROUPS):
        prompt = tokens(PROMPT_TOKENS + int(rng.integers(-30, 30)))
        trajectories = []
        for member in range(GROUP_SIZE):
            trajectory = Trajectory()
            trajectory.observe(prompt)
            left = int(np.clip(rng.lognormal(4.6, 0.8), 30, 600))
            while left > 0:
                sampled = min(left, int(rng.integers(15, 60)))
                trajectory.act(
                    Completion(
                        token_ids=tokens(sampled),
                        logprobs=[-10.8] * sampled,
                        finish_reason="stop",
                        versions=[0] * sampled,
                    )
                )
                left -= sampled
                if left > 0:
                    observed = min(left, sampled // 2)
                    trajectory.observe(tokens(observed))
                    left -= observed
            trajectory.reward = float(member % 2)
            trajectories.append(trajectory)
        groups.append(
            TrajectoryGroup(id=str(index), task=Task(id=str(index)), trajectories=trajectories)
        )
    return groups


def make_model(path: str | None, layers: int, attention: str) -> LlamaForCausalLM:
    """The model at `path`, or a random one of SmolLM2-135M's shape, cut to `layers`."""
    if path is not None:
        options = {"num_hidden_layers": layers, "attn_implementation": attention}
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=layers,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
            attn_implementation=attention,
        )
    )


def make_learner(model: LlamaForCausalLM, budget: int) -> Learner:
    """One that leaves its gradient where it is, and takes no step."""
    config = make_config(
        {
            "model": {"name_or_path": "benchmark"},
            "env": {"id": "none"},
            "loss": {
                "importance_sampling_mode": "none",
                "max_mismatch": 1e9,
                "warn_mismatch": 1e9,
            },
            "optim": {"micro_batch_tokens": budget, "max_grad_norm": 1e9},
        }
    )
    learner = Learner(model, config, Accelerator(cpu=True))
    learner.optimizer.step = learner.optimizer.zero_grad = lambda *_, **__: None
    return learner


def plain_gradient(model: LlamaForCausalLM, groups: list[TrajectoryGroup]) -> None:
    """A group padded to its longest, all logits, cross-entropy everywhere, then the mask."""
    num_tokens = sum(t.num_sampled_tokens for group in groups for t in group.trajectories)
    for group in groups:
        width = max(len(trajectory) for trajectory in group.trajectories)
        ids = torch.zeros(len(group.trajectories), width, dtype=torch.int64)
        attention_mask = torch.zeros_like(ids)
        weights = torch.zeros(ids.shape)
        rewards = np.array(group.rewards, dtype=np.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        for index, trajectory in enumerate(group.trajectories):
            length = len(trajectory)
            ids[index, :length] = torch.tensor(trajectory.token_ids)
            attention_mask[index, :length] = 1
            weights[index, :length] = torch.tensor(trajectory.loss_mask) * float(advantages[index])
        logits = model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
        )
        ((losses * weights[:, 1:]).sum() / num_tokens).backward()


SIDES = ("packed", "plain")


def measure(side: str, path: str | None, layers: int, budget: int, repeats: int, out: Path) -> None:
    attention = register_attention() if side == "packed" else "sdpa"
    model = make_model(path, layers, attention)
    groups = make_groups()
    learner = make_learner(model, budget) if side == "packed" else None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(repeats):
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        if learner:
            learner.update(groups)
        else:
            plain_gradient(model, groups)
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.save(gradients, out / f"{side}.pt")
    result = {
        "seconds": statistics.median(seconds),
        "peak_gib": peak / 2**20,
        "step_gib": (peak - before) / 2**20,
    }
    (out / f"{side}.json").write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder; default: random weights of SmolLM2's shape")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        budget = args.micro_batch_tokens
        measure(args.side, args.model, args.layers, budget, args.repeats, args.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        for side in SIDES:
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.learner_step"]
            command += [*sys.argv[1:], "--side", side, "--out", folder]
            subprocess.run(command, check=True)
        results = {side: json.loads((Path(folder) / f"{side}.json").read_text()) for side in SIDES}
        packed, plain = (torch.load(Path(folder) / f"{side}.pt") for side in SIDES)
    difference = max(float((packed[n] - plain[n]).norm() / plain[n].norm()) for n in plain)
    for side, result in results.items():
        print(
            f"{side:7} {result['seconds']:7.2f} s   peak {result['peak_gib']:.2f} GiB, "
            f"of which the step {result['step_gib']:.2f} GiB"
        )
    ours, theirs = results["packed"], results["plain"]
    faster = theirs["seconds"] / ours["seconds"]
    peak, step = (ours[key] / theirs[key] for key in ("peak_gib", "step_gib"))
    print(
        f"{faster:.2f}x faster, {peak:.2f} of the peak memory ({step:.2f} of the step's), "
        f"gradients within {difference:.1e} relative"
    )


if __name__ == "__main__":
    main()
