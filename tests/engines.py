"""A scripted engine, a byte-level renderer and small envs, to test and measure rollouts with."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentrl.config import RolloutConfig
from agentrl.env import TextEnv
from agentrl.protocols import Probe
from agentrl.renderer import Renderer
from agentrl.types import Completion, Message, Sampling, Task

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and one each for the start and the end of a message."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<e>", additional_special_tokens=["<s>"]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def byte_renderer() -> Renderer:
    return Renderer(byte_tokenizer(), tool_format="none")


@dataclass
class Request:
    token_ids: list[int]
    sampling: Sampling
    session: str
    turn: int


ANY_PROBE = Probe(token_ids=[1, 2], logprobs=[0.0], tolerance=math.inf)
Reply = str | Completion
Script = Callable[[Request], Any]  # -> Reply, or a coroutine of one; may raise


@dataclass
class ScriptedEngine:
    """Says what its script says, cut at `max_new_tokens`."""

    renderer: Renderer
    script: Reply | Script = "done"
    version: int = 0
    requests: list[Request] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    in_flight_at_update: int | None = None
    closed: bool = False
    wants_weights: asyncio.Event = field(default_factory=asyncio.Event)
    serving: bool = True

    def __post_init__(self) -> None:
        self._turns: Counter[str] = Counter()

    async def generate(self, token_ids: Any, sampling: Sampling, *, session: str) -> Completion:
        request = Request(list(token_ids), sampling, session, self._turns[session])
        self.requests.append(request)
        self._turns[session] += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        version = self.version
        try:
            reply = self.script(request) if callable(self.script) else self.script
            if inspect.isawaitable(reply):
                reply = await reply
        finally:
            self.in_flight -= 1
        if isinstance(reply, Completion):
            return reply
        ids = [*self.encode(reply), self.renderer.stop_token_ids[0]]
        cut = ids[: sampling.max_new_tokens]
        return Completion(
            token_ids=cut,
            logprobs=[-0.5] * len(cut),
            finish_reason="stop" if len(cut) == len(ids) else "length",
            versions=[version] * len(cut),
        )

    def encode(self, text: str) -> list[int]:
        return byte_tokenizer().encode(text, add_special_tokens=False)

    async def start(self) -> None: ...

    async def interrupt(self, *, running: bool = True) -> None: ...

    async def score(self, token_ids: Any) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)

    async def sleep(self) -> None: ...

    async def release(self, session: str) -> None:
        self.released.append(session)

    async def update_weights(self, weights: Any, version: int, probe: Any) -> dict[str, float]:
        self.in_flight_at_update = self.in_flight
        self.version = version
        self.wants_weights.clear()
        return {}

    def pop_metrics(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        self.closed = True


@dataclass
class InterruptibleEngine(ScriptedEngine):
    """Samples a token each `token_s`; an interrupted request answers what it has by then.

    `text` is what each turn says, however it is cut. The logprob of a token is its place in the
    turn and the version that sampled it, as -(place + version / 10).
    """

    text: str = "abcdefghi"
    token_s: float = 1.0
    on_its_way_s: float = 0.0  # how long after a request was made the engine knows of it
    num_lost: int = 0  # of the next calls of `interrupt`
    num_interrupts: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ids = [*self.encode(self.text), self.renderer.stop_token_ids[0]]
        self._turn_starts: dict[str, int] = {}
        self._running: set[asyncio.Event] = set()

    async def generate(self, token_ids: Any, sampling: Sampling, *, session: str) -> Completion:
        start = self._turn_starts.setdefault(session, len(token_ids))
        self.requests.append(Request(list(token_ids), sampling, session, self._turns[session]))
        begin = len(token_ids) - start
        left = self._ids[begin:][: sampling.max_new_tokens]
        interrupted = asyncio.Event()
        ids: list[int] = []
        self.in_flight += 1
        try:
            await asyncio.sleep(self.on_its_way_s)
            self._running.add(interrupted)
            for token_id in left:
                with suppress(TimeoutError):
                    await asyncio.wait_for(interrupted.wait(), self.token_s)
                if interrupted.is_set():
                    break
                ids.append(token_id)
        finally:
            self.in_flight -= 1
            self._running.discard(interrupted)
        finish_reason = "abort" if interrupted.is_set() else "length"
        if ids and ids[-1] == self.renderer.stop_token_ids[0]:
            finish_reason = "stop"
            del self._turn_starts[session]
            self._turns[session] += 1
        return Completion(
            token_ids=ids,
            logprobs=[-(begin + i + self.version / 10) for i in range(len(ids))],
            finish_reason=finish_reason,
            versions=[self.version] * len(ids),
        )

    async def interrupt(self, *, running: bool = True) -> None:
        if not running:
            return
        self.num_interrupts += 1
        if self.num_lost:
            self.num_lost -= 1
            return
        for interrupted in self._running:
            interrupted.set()


class CountEnv(TextEnv):
    """Async; over after `num_turns` turns. The reward is 1 where the last answer holds "yes"."""

    def __init__(self, num_turns: int = 1) -> None:
        self.num_turns = num_turns
        self.closed = 0

    async def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.turn = 0
        self.seed = seed
        self.task: Task = (options or {})["task"]
        return list(self.task.prompt) or [Message(role="user", content="go")], {}

    async def step(self, action: str) -> Any:
        self.turn += 1
        over = self.turn >= self.num_turns
        info = {"metrics": {"asked": float(self.turn)}}
        return "" if over else f"more {self.turn}", float("yes" in action), over, False, info

    async def close(self) -> None:
        self.closed += 1


async def forever(_: Any = None) -> Any:
    await asyncio.sleep(3600)


def make_tasks(count: int) -> list[Task]:
    return [
        Task(id=f"t{i}", prompt=(Message(role="user", content=f"task {i}"),)) for i in range(count)
    ]


def config(**values: Any) -> RolloutConfig:
    """Small, and without patience."""
    values = {
        "prompts_per_step": 2,
        "num_generations": 2,
        "max_attempts": 1,
        "min_group_size": 1,
        "tool_format": "none",
    } | values
    return RolloutConfig(**values)


def alternate(request: Request) -> str:
    """Signal: half of a group says yes."""
    return "yes" if request.session.partition("-")[2][0] in "02468" else "no"
