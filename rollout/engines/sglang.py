"""SGLang servers as one engine: routing, retries, and weights that are verified.

An episode stays with one server, whose prefix cache holds its turns; a new one goes to the server
with the fewest requests of this run. Retries happen here and nowhere else: a request that a server
did not answer moves on to another. A server serves as long as it is known to hold the weights of
`version`; one that died comes back with none, and waits for the next `update_weights`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from agentrl.config import EngineConfig
from agentrl.metrics import MeanMetrics
from agentrl.protocols import EngineDied, EngineError, Fleet, Probe, Transport, Weights
from agentrl.types import Completion, Sampling
from rollout.engines.sglang_server import (
    BadReply,
    ContextOverflow,
    ServerInfo,
    SGLangServer,
    Unavailable,
)

logger = logging.getLogger("agentrl")

BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 5.0
ABORT_S = 5.0  # what an abort that nobody waits for may take


@dataclass(slots=True, eq=False)
class _Member:
    server: SGLangServer
    info: ServerInfo
    version: int | None = None  # of its verified weights; None: it serves nothing
    num_requests: int = 0
    num_failures: int = 0  # in a row
    rests_until: float = 0.0  # the breaker: after failures, others come first


@dataclass(slots=True, eq=False)
class _Interrupts:
    """Wakes whoever waits for a server, to say that it should not."""

    count: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class SGLangEngine:
    """Implements `agentrl.protocols.Engine`.

    Args:
        fleet: where the servers are, and what brings back one that ended.
        transport: how weights get from the learner to a server.
        run_id: servers that hold weights of another run are refused.
    """

    def __init__(
        self, fleet: Fleet, transport: Transport, config: EngineConfig, *, run_id: str
    ) -> None:
        self.version = 0
        self._fleet, self._transport, self._config, self._run_id = fleet, transport, config, run_id
        self._members: list[_Member] = []
        self._homes: dict[str, _Member] = {}  # session -> the server of its turns
        self._numbers = itertools.count()
        self._background: set[asyncio.Task[None]] = set()
        self._metrics = MeanMetrics()
