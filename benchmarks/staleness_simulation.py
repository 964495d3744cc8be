"""What asynchronous rollouts gain and cost: the project's own scheduling code on a virtual clock.

Slots, gate, groups and episodes are the real ones; servers, tools, tokens and learner are made up.
`docs/staleness.md` has the table, what follows from it, and what was assumed. `--bound 100000`
plays so many small groups instead, and fails if a token is ever too old.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import heapq
import itertools
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from agentrl.config import RolloutConfig
from agentrl.env import TextEnv
from agentrl.metrics import MeanMetrics
from agentrl.trajectory import TrajectoryGroup
from agentrl.types import Action, Completion, Message, Sampling, Task
from rollout.faults import FaultBudget
from rollout.gate import Gate, Turnstile
from rollout.group import GroupPlayer
from rollout.slots import Slots
from rollout.stage import PromptMemo, Stage
from rollout.tasks import TaskStream
from tests.virtual_time import run_virtual

MAX_RUNNING = 256  # requests of one server
DECODE_S, DECODE_S_PER_REQUEST = 6e-3, 3e-5  # of a decoding step
PREFILL_S_PER_TOKEN = 2e-5
PROMPT_TOKENS, OBSERVATION_TOKENS = 200, 50
SYNC_S = 2.0
TOOL_S = ((0.90, 0.05, 0.5), (0.09, 2.0, 0.5), (0.01, 30.0, 0.0))  # share, median, sigma
MORE = 1 << 40  # added to the last token of a turn that calls a tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Lengths of turns are lognormal, hard tasks have long ones, and most turns call a tool."""

    median_tokens: float = 120
    sigma_turn: float = 0.7
    sigma_task: float = 0.5
    max_tokens: int = 1024
    call_again: float = 0.6  # the chance that a turn calls a tool
    max_turns: int = 8

    def turns(self, session: str) -> list[tuple[int, float | None]]:
        """Of an episode: how many tokens, and the seconds that its tool takes."""
        of_task = random.Random(session.partition("-")[0])
        median = self.median_tokens * of_task.lognormvariate(0, self.sigma_task)
        drawn, turns = random.Random(session), []
        while True:
            tokens = median * drawn.lognormvariate(0, self.sigma_turn)
            again = drawn.random() < self.call_again and len(turns) + 1 < self.max_turns
            seconds = tool_seconds(drawn) if again else None
            turns.append((math.ceil(min(tokens, self.max_tokens)), seconds))
            if not again:
                return turns


def tool_seconds(drawn: random.Random) -> float:
    (_, median, sigma), *_ = drawn.choices(TOOL_S, [share for share, _, _ in TOOL_S])
    return median * drawn.lognormvariate(0, sigma)


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    num_tokens: int
    answer: asyncio.Future[int]
    end: float = 0.0  # of the tokens that the server gives each request that runs


class Server:
    """Continuous batching: all that run get a token a step, a prefill stalls them all."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.running: list[tuple[float, int, Request]] = []
        self.queue: deque[tuple[Request, float]] = deque()
        self.given, self.stall_s, self.busy_s = 0.0, 0.0, 0.0
        self.last = self.loop.time()
        self.timer: asyncio.TimerHandle | None = None
        self.order = itertools.count()

    def __len__(self) -> int:
        return len(self.running) + len(self.queue)

    def submit(self, request: Request, prefill_s: float) -> None:
        self._advance()
        self.queue.append((request, prefill_s))
        self._go_on()

    def remove(self, request: Request) -> None:
        self._advance()
        self.running = [entry for entry in self.running if entry[2] is not request]
        heapq.heapify(self.running)
        self.queue = deque(entry for entry in self.queue if entry[0] is not request)
        self._go_on()

    def interrupt(self) -> None:
        self._advance()
        for end, _, request in self.running:
            left = max(1, math.ceil(end - self.given))
            request.answer.set_result(max(0, request.num_tokens - left))
        for request, _ in self.queue:
            request.answer.set_result(0)
        self.running, self.stall_s = [], 0.0
        self.queue.clear()
        self._go_on()

    @property
    def _token_s(self) -> float:
        return DECODE_S + DECODE_S_PER_REQUEST * len(self.running)

    def _advance(self) -> None:
        elapsed, self.last = self.loop.time() - self.last, self.loop.time()
        if self.running:
            stalled = min(elapsed, self.stall_s)
            self.stall_s -= stalled
            self.busy_s += elapsed
            self.given += (elapsed - stalled) / self._token_s

    def _go_on(self) -> None:
        while self.running and self.running[0][0] <= self.given + 1e-6:
            request = heapq.heappop(self.running)[2]
            request.answer.set_result(request.num_tokens)
        while self.queue and len(self.running) < MAX_RUNNING:
            request, prefill_s = self.queue.popleft()
            request.end = self.given + request.num_tokens
            self.stall_s += prefill_s
            heapq.heappush(self.running, (request.end, next(self.order), request))
        if self.timer:
            self.timer.cancel()
        if self.running:
            wait_s = self.stall_s + (self.running[0][0] - self.given) * self._token_s
            self.timer = self.loop.call_later(wait_s, self._wake)

    def _wake(self) -> None:
        self._advance()
        self._go_on()


@dataclass(slots=True, kw_only=True)
class Session:
    server: Server
    turns: Iterator[tuple[int, float | None]]
    turn: tuple[int, float | None] = (0, None)
    start: int | None = None  # of the turn that is not complete
    cached: tuple[int, int] = (-1, 0)  # the version, and how many tokens


class SimulatedEngine:
    """Implements what episodes use of `agentrl.protocols.Engine`."""

    def __init__(self, num_servers: int, workload: Workload) -> None:
        self.version = 0
        self.wants_weights = asyncio.Event()
        self.serving = True
        self.workload = workload
        self.servers = [Server() for _ in range(num_servers)]
        self.sessions: dict[str, Session] = {}
        self.natural_tokens: dict[str, int] = {}  # of episodes begun, had they all ended

    async def generate(
        self, token_ids: list[int], sampling: Sampling, *, session: str
    ) -> Completion:
        state = self.sessions.get(session)
        if state is None:
            turns = self.workload.turns(session)
            self.natural_tokens[session] = sum(tokens for tokens, _ in turns)
            server = min(self.servers, key=len)
            state = self.sessions[session] = Session(server=server, turns=iter(turns))
        if state.start is None:
            state.start, state.turn = len(token_ids), next(state.turns)
        num_tokens, seconds = state.turn
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        wanted = num_tokens - (len(token_ids) - state.start)
        request = Request(num_tokens=wanted, answer=answer)
        version, cached = state.cached
        to_prefill = len(token_ids) - cached * (version == self.version)
        state.server.submit(request, to_prefill * PREFILL_S_PER_TOKEN)
        try:
            got = await answer
        except asyncio.CancelledError:
            state.server.remove(request)
            raise
        state.cached = self.version, len(token_ids) + got
        ids = [2] * got
        if got == wanted:
            state.start = None
            ids[-1] = 3 if seconds is None else MORE + round(seconds * 1000)
        return Completion(
            token_ids=ids,
            logprobs=[-1.0] * got,
            finish_reason="stop" if got == wanted else "abort",
            versions=[self.version] * got,
        )

    async def interrupt(self) -> None:
        for server in self.servers:
            server.interrupt()

    async def release(self, session: str) -> None:
        self.sessions.pop(session, None)


class ToolEnv(TextEnv):
    """Takes as long as the model's call says."""

    async def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return "task", {}

    async def step(self, action: str) -> Any:
        if not action:
            return "", 1.0, True, False, {}
        await asyncio.sleep(float(action))
        return "result", 0.0, False, False, {}


@dataclass(frozen=True, slots=True)
class Delta:
    token_ids: list[int]
    new_segment: bool = False


class NumberRenderer:
    """Tokens without text; a turn's last token says whether, and for how long, a tool is called."""

    stop_token_ids = (3,)

    def prompt(self, messages: list[Message]) -> list[int]:
        return [1] * PROMPT_TOKENS

    def observation(self, messages: Any, new: Any, *, context: Any) -> Delta:
        return Delta([1] * OBSERVATION_TOKENS)

    def parse(self, token_ids: list[int], finish_reason: Any) -> Action:
        last = token_ids[-1]
        return Action(f"{(last - MORE) / 1000}" if last >= MORE else "")


class DroppingSlots(Slots):
    """What the project does not do: batches of those complete first; the too old are dropped."""

    def _ripe(self) -> Any:
        self._settle()
        done = [task for task in self._slots if task.done()]
        if len(done) < self.batch_size and len(done) < len(self._slots):
            return None
        return {task: self._slots[task] for task in done[: self.batch_size]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    name: str
    max_staleness: int = 0
    on_update: str = "keep"
    oversampling: float = 1.0
    drop_stale: bool = False
    colocated: bool = False  # all servers' and as many learner's GPUs serve both, in turns

    def config(self, prompts_per_step: int, num_generations: int) -> RolloutConfig:
        return RolloutConfig(
            prompts_per_step=prompts_per_step,
            num_generations=num_generations,
            max_staleness=self.max_staleness,
            on_update=self.on_update,  # pyright: ignore[reportArgumentType]
            oversampling=self.oversampling,
            max_new_tokens=2048,
            max_episode_tokens=10**6,
            max_context_tokens=10**6,
            max_concurrent_generations=10**6,
            max_concurrent_env_calls=10**6,
        )


POLICIES = [
    Policy(name="sync"),
    Policy(name="sync, oversampling 1.25", oversampling=1.25),
    Policy(name="sync, colocated", colocated=True),
    Policy(name="staleness 1, finish", max_staleness=1, on_update="finish"),
    Policy(name="staleness 1, drop turns", max_staleness=1, on_update="drop"),
    Policy(name="staleness 1, keep", max_staleness=1),
    Policy(name="staleness 1, drop groups", max_staleness=1, drop_stale=True),
    Policy(name="staleness 2, keep", max_staleness=2),
    Policy(name="staleness 4, keep", max_staleness=4),
]


@dataclass(slots=True, kw_only=True)
class Outcome:
    seconds: float = 0.0
    num_groups: int = 0
    num_tokens: int = 0  # trained
    rollout_s: list[float] = field(default_factory=list)  # waited for each batch
    trained: set[str] = field(default_factory=set)  # episodes
    natural: dict[str, int] = field(default_factory=dict)  # tokens, as the engine keeps them
    idle: float = 0.0  # share of the servers' time
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def goodput(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def wasted(self) -> float:
        wasted = self.metrics["rollout/wasted_tokens"]
        return wasted / (wasted + self.num_tokens)

    @property
    def bias(self) -> float:
        """Mean length of the trained over that of all, of those begun in the first half."""
        begun = dict(itertools.islice(self.natural.items(), len(self.natural) // 2))
        trained = [length for session, length in begun.items() if session in self.trained]
        return statistics.mean(trained) / statistics.mean(begun.values())


async def simulate(
    policy: Policy,
    *,
    num_servers: int,
    num_batches: int,
    learner_s: float,
    prompts_per_step: int,
    num_generations: int,
    sync_s: float = SYNC_S,
    workload: Workload = Workload(),
) -> Outcome:
    """Train `num_batches` batches. The first two fill the pipeline and are not part of the outcome.

    Raises:
        AssertionError: a token was older than `max_staleness` allows when it was trained on.
    """
    config = policy.config(prompts_per_step, num_generations)
    engine: Any = SimulatedEngine(num_servers, workload)
    renderer: Any = NumberRenderer()
    metrics, gate = MeanMetrics(), Gate(config.max_concurrent_generations)
    faults = FaultBudget(config, metrics)
    player = GroupPlayer(
        stages={
            "": Stage(
                engine=engine,
                make_env=ToolEnv,
                renderer=renderer,
                config=config,
                rubric=None,
                generation=gate,
                env_calls=asyncio.Semaphore(config.max_concurrent_env_calls),
                turnstile=Turnstile(),
                prompt=PromptMemo(renderer.prompt),
                metrics=metrics,
            )
        },
        kind="train",
        num_generations=num_generations,
        seed=0,
        pending={},
        on_episode=faults.count,
        on_fault=faults.count_fault,
    )
    slots = (DroppingSlots if policy.drop_stale else Slots)(
        player=player,
        tasks=TaskStream([Task(id="t")], 0),
        config=config,
        engine=engine,
        faults=faults,
        metrics=metrics,
        on_group=lambda group: None,
    )
    loop, outcome = asyncio.get_running_loop(), Outcome()
    interrupt = None if policy.on_update == "finish" else engine.interrupt
    started = loop.time()
    for batch in range(num_batches):
        if batch == min(2, num_batches - 1):
            metrics.pop()
            for server in engine.servers:
                server.busy_s = 0.0
            outcome, started = Outcome(trained=outcome.trained), loop.time()
        asked = loop.time()
        groups = await slots.next_batch(prompts_per_step)
        assert groups is not None and len(groups) == prompts_per_step
        outcome.rollout_s.append(loop.time() - asked)
        take(groups, engine.version, policy.max_staleness, outcome)
        await asyncio.sleep(learner_s)
        async with gate.shut(config.generate_timeout_s, interrupt):
            await asyncio.sleep(sync_s)
            engine.version += 1
        slots.start_more()
    outcome.seconds = loop.time() - started
    outcome.natural = engine.natural_tokens
    busy_s = sum(server.busy_s for server in engine.servers)
    outcome.idle = 1 - busy_s / (num_servers * outcome.seconds)
    outcome.metrics = metrics.pop()
    await slots.cancel()
    return outcome


def take(groups: list[TrajectoryGroup], version: int, max_staleness: int, outcome: Outcome) -> None:
    outcome.num_groups += len(groups)
    for group in groups:
        for tape in group.trajectories:
            assert version - tape.oldest_version <= max_staleness, (tape.id, version)
            outcome.num_tokens += tape.num_sampled_tokens
            outcome.trained.add(tape.id)


def compare(
    num_servers: int, ratio: float, num_episodes: int, prompts_per_step: int, num_generations: int
) -> None:
    """Print a table for one cluster: the learner takes `ratio` of what a batch takes to sample."""
    run = functools.partial(
        simulate, prompts_per_step=prompts_per_step, num_generations=num_generations
    )
    alone = run_virtual(run(POLICIES[0], num_servers=num_servers, num_batches=6, learner_s=0))
    rollout_s = statistics.mean(alone.rollout_s)
    num_batches = 2 + math.ceil(num_episodes / (prompts_per_step * num_generations))
    print(
        f"\n{num_servers} servers, learner {ratio:g} x rollout: batches of {prompts_per_step} x "
        f"{num_generations} take {rollout_s:.0f} s to sample, {ratio * rollout_s:.0f} s to learn "
        f"from, {SYNC_S:g} s to sync"
    )
    print(
        f"{'':<26}{'tokens/s':>9}{'x sync':>8}{'wasted':>8}{'length':>8}{'idle':>7}"
        f"{'turns cut':>11}   staleness of tokens 0, 1, …"
    )
    base = 0.0
    for policy in POLICIES:
        scale = 2 if policy.colocated else 1
        outcome = run_virtual(
            run(
                policy,
                num_servers=num_servers * scale,
                num_batches=num_batches,
                learner_s=ratio * rollout_s / scale,
            )
        )
        base = base or outcome.goodput
        histogram = "  ".join(
            f"{outcome.metrics.get(f'rollout/staleness_{k}', 0):.2f}"
            for k in range(policy.max_staleness + 1)
        )
        print(
            f"{policy.name:<26}{outcome.goodput:>9.0f}{outcome.goodput / base:>8.2f}"
            f"{outcome.wasted:>8.1%}{outcome.bias:>8.2f}{outcome.idle:>7.0%}"
            f"{outcome.metrics.get('rollout/interrupted_turns', 0):>11.0f}   {histogram}",
            flush=True,
        )


def hold_the_bound(num_groups: int) -> None:
    """Play small groups under all policies; a token too old is an AssertionError."""
    workload = Workload(median_tokens=4, sigma_task=1.0, call_again=0.3, max_turns=3)
    policies = [policy for policy in POLICIES if not policy.colocated and not policy.drop_stale]
    began, played, dropped = time.perf_counter(), 0, 0.0
    for policy in policies:
        outcome = run_virtual(
            simulate(
                policy,
                num_servers=2,
                num_batches=2 + math.ceil(num_groups / len(policies) / 8),
                learner_s=0.2,
                sync_s=0.05,
                prompts_per_step=8,
                num_generations=2,
                workload=workload,
            )
        )
        played += outcome.num_groups
        dropped += outcome.metrics.get("rollout/stale_groups", 0)
        print(f"{policy.name:<26} {outcome.num_groups} groups, none too old", flush=True)
    took = time.perf_counter() - began
    print(f"{played} groups in {took:.0f} s: none exceeded its bound, {dropped:.0f} dropped for it")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare policies of when to train on what.")
    parser.add_argument("--servers", type=int, nargs="+", default=[8])
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=[0.5, 1.0], help="learner's time / a batch's"
    )
    parser.add_argument("--episodes", type=int, default=10_000, help="per cell")
    parser.add_argument("--prompts-per-step", type=int, default=64)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--bound", type=int, metavar="GROUPS", help="only check the bound")
    options = parser.parse_args()
    if options.bound:
        hold_the_bound(options.bound)
        return
    for num_servers, ratio in itertools.product(options.servers, options.ratios):
        compare(
            num_servers,
            ratio,
            options.episodes,
            options.prompts_per_step,
            options.num_generations,
        )


if __name__ == "__main__":
    main()
