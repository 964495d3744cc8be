"""The servers of an engine: which of them serve, and which one gets the next request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.protocols import EngineDied
from rollout.engines.sglang_server import SGLangServer

BREAKER_FAILURES = 5  # in a row, after which a server rests
REST_S = 5.0


@dataclass(slots=True, eq=False)
class Member:
    """One server, as this run knows it."""

    server: SGLangServer
    version: int | None = None  # of its verified weights; None: it serves nothing
    alive: bool = False
    starting: bool = False  # again, after it died
    given_up: str = ""  # why it is never asked again
    lent: set[str] = field(default_factory=set)  # memory, by SGLang's tags, that the learner has
    suspect: asyncio.Event = field(default_factory=asyncio.Event)  # a connection to it broke
    requests: set[asyncio.Timeout] = field(default_factory=set)  # in flight
    num_sessions: int = 0
    num_failures: int = 0  # in a row
    rests_until: float = 0.0
    num_running: int = 0  # requests, of other runs too, as it said last
    num_waiting: int = 0

    @property
    def resting(self) -> bool:
        return time.monotonic() < self.rests_until

    @property
    def load(self) -> int:
        return len(self.requests) + self.num_sessions


@dataclass(slots=True, eq=False)
class Session:
    """An episode, at home with the server whose prefix cache holds its turns."""

    member: Member
    num_tokens: int = 0  # that the server has read or sampled for it


class Pool:
    """Gives out servers; whoever finds none that serves waits here.

    Args:
        wait_s: for a server, before the engine counts as dead.
    """

    def __init__(self, members: Sequence[Member], wait_s: float) -> None:
        self.members = list(members)
        self.sessions: dict[str, Session] = {}
        self.failure = ""  # why nobody will ever be served
        self.num_moved = 0  # sessions that went to another server
        self._wait_s = wait_s
        self._num_interrupts = 0
        self._changed = asyncio.Event()

    @property
    def serving(self) -> list[Member]:
        return [member for member in self.members if member.version is not None]

    @property
    def alive(self) -> list[Member]:
        return [member for member in self.members if member.alive]

    async def take(self, name: str, avoid: Sequence[Member]) -> Member | None:
        """The server for the session `name`; None: `interrupt` was called while none served.

        One that is in `avoid`, or rests, comes last.

        Raises:
            EngineDied: none will serve any more.
        """
        self.refuse_if_down()
        session = self.sessions.get(name)
        if session is not None:
            home = session.member
            if home.version is not None and home not in avoid and not home.num_failures:
                return home
        if not self.serving and not await self._wait_for_one():
            return None
        home = session.member if session is not None else None
        member = min(
            self.serving,
            key=lambda m: (avoid.count(m), m.resting, m is not home, m.load),
        )
        if member.num_failures >= BREAKER_FAILURES:
            member.rests_until = time.monotonic() + REST_S  # until this request says how it is
        if session is None:
            self.sessions[name] = Session(member)
            member.num_sessions += 1
        elif member is not home:
            session.member.num_sessions -= 1
            session.member, session.num_tokens = member, 0
            member.num_sessions += 1
            self.num_moved += 1
        return member

    async def _wait_for_one(self) -> bool:
        interrupts = self._num_interrupts
        try:
            async with asyncio.timeout(self._wait_s):
                while not self.serving:
                    await self._changed.wait()
                    self.refuse_if_down()
                    if interrupts != self._num_interrupts:
                        return False
        except TimeoutError:
            raise EngineDied(
                f"no server got weights within sglang.start_timeout_s={self._wait_s:g}"
            ) from None
        return True

    async def pause(self, seconds: float) -> bool:
        """Whether nobody called `interrupt` meanwhile."""
        interrupts = self._num_interrupts
        try:
            async with asyncio.timeout(seconds):
                while interrupts == self._num_interrupts:
                    await self._changed.wait()
        except TimeoutError:
            return True
        return False

    async def wait_until_alive(self) -> None:
        """Return when a server can be given weights; the watcher has the last word on suspects.

        Raises:
            EngineDied: none will be.
        """
        self.refuse_if_down()
        while all(member.suspect.is_set() for member in self.alive):
            await self._changed.wait()
            self.refuse_if_down()

    async def wait_until_started(self) -> None:
        """Return when no server is about to take memory."""
        while any(member.starting for member in self.members):
            await self._changed.wait()

    def release(self, name: str) -> None:
        session = self.sessions.pop(name, None)
        if session is not None:
            session.member.num_sessions -= 1

    def has_other(self, tried: Sequence[Member]) -> bool:
        """Whether a server serves that was not tried and does not rest."""
        return any(m not in tried and not m.resting for m in self.serving)

    def answered(self, member: Member) -> None:
        member.num_failures, member.rests_until = 0, 0.0

    def failed(self, member: Member, retry_after_s: float) -> None:
        member.num_failures += 1
        rest_s = REST_S if member.num_failures >= BREAKER_FAILURES else 0.0
        member.rests_until = time.monotonic() + max(rest_s, retry_after_s)

    def lose(self, member: Member) -> None:
        """It is dead: its requests end, to be sent elsewhere."""
        member.alive, member.version = False, None
        member.lent.clear()
        now = asyncio.get_running_loop().time()
        for clock in member.requests:
            clock.reschedule(now)

    def give_up(self, member: Member, cause: str) -> None:
        member.given_up, member.starting = cause, False
        self.notify()
        if all(m.given_up for m in self.members):
            self.fail("every server is gone: " + "; ".join(m.given_up for m in self.members))

    def fail(self, cause: str) -> None:
        """Nobody is served any more."""
        self.failure = self.failure or cause
        self.notify()

    def refuse_if_down(self) -> None:
        if self.failure:
            raise EngineDied(self.failure)

    def interrupt(self) -> None:
        """Send those away who wait for a server."""
        self._num_interrupts += 1
        self.notify()

    def notify(self) -> None:
        """Wake whoever waits, to look again."""
        self._changed.set()
        self._changed = asyncio.Event()
