"""What sandboxes cost: a call of warm Python, many trajectories at once, and the start of a pool.

    python benchmarks/sandbox.py [--levels docker bubblewrap process] [--image IMAGE]

Pure compute is the same work in as many sandboxes of the level as there are cores, in one call
each; others that use the machine make the many look better than they are.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agentrl.shutdown import shut_down
from tools.sandbox.levels import resolve
from tools.sandbox.pool import Lease
from tools.sandbox.protocol import Sandbox, SandboxConfig, SandboxUnavailable

NUM_CALLS, NUM_TRAJECTORIES, CALLS_PER_TRAJECTORY, NUM_STARTS = 300, 64, 4, 32
MAX_OVER_IN_PROCESS_MS = {"docker": 3.0, "bubblewrap": 10.0}
MAX_OVER_COMPUTE, MAX_START_S = 1.3, 8.0
CALL = "x = 20\nx * 2 + 2"
WORK = "sum(i * i for i in range({num_steps}))"
CALL_S = 0.1  # of compute in each call of a trajectory


async def lease(config: SandboxConfig, number: int) -> list[Lease]:
    leases = [Lease(config) for _ in range(number)]
    await asyncio.gather(*(one.acquire() for one in leases))
    return leases


async def release(leases: list[Lease]) -> None:
    await asyncio.gather(*(one.release() for one in leases))


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    start = time.perf_counter()
    await work()
    return time.perf_counter() - start


def in_process_ms() -> float:
    code, times = CALL.replace("\n", "\ny = "), []
    for _ in range(NUM_CALLS):
        start = time.perf_counter()
        exec(compile(code, "cell", "exec"), {})
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


async def call_ms(sandbox: Sandbox) -> float:
    async def call() -> None:
        assert (await sandbox.python(CALL)).stdout == "42\n"

    return statistics.median([await timed(call) for _ in range(NUM_CALLS)]) * 1e3


async def work_of(sandbox: Sandbox) -> str:
    """Code that takes `CALL_S`, of this sandbox's interpreter on an idle core."""
    steps = 1_000_000
    seconds = min(
        [await timed(lambda: sandbox.python(WORK.format(num_steps=steps))) for _ in "123"]
    )
    return WORK.format(num_steps=int(steps * CALL_S / seconds))


async def trajectories_s(leases: list[Lease], work: str) -> float:
    async def play(one: Lease) -> None:
        for _ in range(CALLS_PER_TRAJECTORY):
            assert (await one.sandbox.python(work, timeout=300)).exit_code == 0

    return await timed(lambda: asyncio.gather(*map(play, leases)))


async def compute_s(leases: list[Lease], work: str) -> float:
    cores = len(os.sched_getaffinity(0))
    each = NUM_TRAJECTORIES * CALLS_PER_TRAJECTORY // cores
    code = f"for _ in range({each}): {work}"
    calls = [one.sandbox.python(code, timeout=300) for one in leases[:cores]]
    return await timed(lambda: asyncio.gather(*calls))


async def measure(level: str, image: str) -> None:
    base = SandboxConfig.model_validate(
        {"level": level, "image": image, "warm": 0, "memory_mb": 128, "starts_per_second": 1000}
    )
    try:
        print(resolve(base)[1])
    except SandboxUnavailable as error:
        print(f"{level}: not here: {error}\n")
        return
    start = time.perf_counter()
    leases = await lease(base, NUM_STARTS)
    start_s = time.perf_counter() - start
    plain = in_process_ms()
    over = await call_ms(leases[0].sandbox) - plain
    leases += await lease(base, NUM_TRAJECTORIES - NUM_STARTS)
    work = await work_of(leases[0].sandbox)
    before = await compute_s(leases, work)
    wall = await trajectories_s(leases, work)
    pure = (before + await compute_s(leases, work)) / 2
    end_s = await timed(lambda: release(leases))
    await shut_down()
    bar = MAX_OVER_IN_PROCESS_MS.get(level)
    print(
        f"{over:8.2f} ms for a warm Python call (p50), over {plain:.3f} ms in this process"
        f"{f' (bar: at most {bar:g})' if bar else ''}\n"
        f"{wall / pure:8.2f} x the pure compute: {NUM_TRAJECTORIES} trajectories of "
        f"{CALLS_PER_TRAJECTORY} calls in {wall:.1f} s, which took {pure:.1f} s alone "
        f"(bar: at most {MAX_OVER_COMPUTE:g})\n"
        f"{start_s:8.2f} s to start a pool of {NUM_STARTS} (bar: at most {MAX_START_S:g})\n"
        f"{end_s:8.2f} s to end {NUM_TRAJECTORIES}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--levels", nargs="+", default=["docker", "bubblewrap", "process"])
    parser.add_argument("--image", default="agentrl-sandbox:test")
    options = parser.parse_args()
    for level in options.levels:
        asyncio.run(measure(level, options.image))


if __name__ == "__main__":
    main()
