"""What the rollout manager costs: 1,024 concurrent 4-turn episodes on an engine that takes no time.

Prints turns per second on one core and how late the event loop wakes. `--tokenizer DIR` renders
with that tokenizer instead of a byte-level one.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

from agentrl.renderer import Renderer
from agentrl.types import Completion
from rollout.manager import RolloutManager
from rollout.stage import EnvSetup
from rollout.tasks import TaskStream
from tests.engines import CountEnv, ScriptedEngine, byte_renderer, config, make_tasks

NUM_GROUPS, GROUP_SIZE, NUM_TURNS = 128, 8, 4
MIN_TURNS_PER_SECOND, MAX_LAG_P99_MS = 3_000, 50


class Instant(ScriptedEngine):
    async def generate(self, token_ids, sampling, *, session):
        stop = self.renderer.stop_token_ids[0]
        return Completion(
            token_ids=[40] * 31 + [stop],
            logprobs=[-0.5] * 32,
            finish_reason="stop",
            versions=[self.version] * 32,
        )


async def measure_lag(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + 0.005
        await asyncio.sleep(0.005)
        lags.append(time.perf_counter() - due)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", help="a folder that AutoTokenizer.from_pretrained loads")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    renderer = byte_renderer()
    if arguments.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
        renderer = Renderer(tokenizer, tool_format="none")
    manager = RolloutManager(
        engine=Instant(renderer),
        envs={"": EnvSetup(make_env=lambda: CountEnv(NUM_TURNS), renderer=renderer)},
        config=config(
            prompts_per_step=NUM_GROUPS,
            num_generations=GROUP_SIZE,
            max_concurrent_generations=NUM_GROUPS * GROUP_SIZE,
            max_concurrent_env_calls=NUM_GROUPS * GROUP_SIZE,
        ),
        tasks=TaskStream(make_tasks(1000), 0),
    )
    lags: list[float] = []
    rates, cpu_rates = [], []
    with manager:
        asyncio.run_coroutine_threadsafe(measure_lag(lags), manager._loop)
        manager.next_groups(8)
        for _ in range(arguments.rounds):
            start, cpu_start = time.perf_counter(), time.process_time()
            groups = manager.next_groups(NUM_GROUPS)
            wall, cpu = time.perf_counter() - start, time.process_time() - cpu_start
            turns = sum(len(tape.turns) for group in groups for tape in group.trajectories)
            assert turns == NUM_GROUPS * GROUP_SIZE * NUM_TURNS
            rates.append(turns / wall)
            cpu_rates.append(turns / cpu)
    percentiles = statistics.quantiles(lags, n=100)
    rate = statistics.median(rates)
    print(f"turns/s                {rate:8.0f}   (bar: at least {MIN_TURNS_PER_SECOND})")
    print(f"turns per CPU second   {statistics.median(cpu_rates):8.0f}")
    print(f"event-loop lag p50     {percentiles[49] * 1e3:8.1f} ms")
    print(f"event-loop lag p99     {percentiles[98] * 1e3:8.1f} ms (bar: below {MAX_LAG_P99_MS})")
    print(f"event-loop lag max     {max(lags) * 1e3:8.1f} ms")


if __name__ == "__main__":
    main()
