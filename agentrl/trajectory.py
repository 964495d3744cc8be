"""The tape: an append-only record of one episode's tokens, of which the policy sampled some."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from agentrl.types import Completion, FinishReason, Message, StopReason, Task


class AlignmentError(ValueError):
    """Tokens, logprobs or versions that do not belong together."""


class TrajectoryFileError(ValueError):
    """A file of trajectories that cannot be read, by its line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The tokens `[start, end)` of the tape that one request sampled."""

    start: int
    end: int
    finish_reason: FinishReason
    reward: float = 0.0  # what the env gave for it


class Trajectory:
    """One episode.

    `token_ids`, `loss_mask`, `logprobs` and `versions` are columns of one length T, and index t
    speaks of token t. They are written through two doors only: `observe` masks, `act` trains. Where
    a chat template rewrites history, the next request is no extension of this one; `observe(...,
    new_segment=True)` then starts a segment, and the columns hold the segments one after another.

    Example:
        tape = Trajectory(id="g0-0")
        tape.observe([1, 2, 3])                        # the prompt
        tape.act(Completion(token_ids=[7, 2], ...))    # a sampled turn
        tape.observe([9, 4, 5])                        # glue, tool result, next header
        tape.loss_mask  ->  [F, F, F, T, T, F, F, F]
    """

    __slots__ = (
        "error",
        "id",
        "logprobs",
        "loss_mask",
        "messages",
        "metrics",
        "reward",
        "rewards",
        "segment_starts",
        "stop_reason",
        "timings",
        "token_ids",
        "turns",
        "versions",
    )

    def __init__(self, id: str = "") -> None:
        self.id = id
        self.token_ids: list[int] = []  # [T]
        self.loss_mask: list[bool] = []  # [T] True: the engine sampled this token
        self.logprobs: list[float] = []  # [T] of the sampled token; 0.0 where the mask is False
        self.versions: list[int] = []  # [T] of the weights that sampled it; -1 where not sampled
        self.segment_starts: list[int] = [0]
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self.reward: float | None = None  # None: not scored, and so not trained on
        self.rewards: dict[str, float] = {}
        self.stop_reason: StopReason | None = None
        self.error: str = ""  # the cause, where `stop_reason` is a fault
        self.metrics: dict[str, float] = {}
        self.timings: dict[str, float] = {}  # seconds

    def observe(self, token_ids: Sequence[int], *, new_segment: bool = False) -> None:
        """Append tokens that the policy did not sample."""
        if new_segment and self.token_ids:
            self.segment_starts.append(len(self.token_ids))
        self._append(token_ids, False, [0.0] * len(token_ids), [-1] * len(token_ids))

    def act(self, completion: Completion) -> None:
        """Append tokens that the policy sampled in one request.

        Where the request before was aborted and nothing was observed since, its turn goes on.

        Raises:
            AlignmentError: not as many logprobs or versions as tokens, a logprob that is none, or
                nothing was observed before.
        """
        ids, logprobs = completion.token_ids, completion.logprobs
        for name, column in (("logprobs", logprobs), ("versions", completion.versions)):
            if len(column) != len(ids):
                raise AlignmentError(f"{len(ids)} sampled tokens came with {len(column)} {name}")
        if not self.token_ids:
            raise AlignmentError("the first token of an episode must be observed, not sampled")
        for index, logprob in enumerate(logprobs):
            if not (math.isfinite(logprob) and logprob <= 1e-4):
                raise AlignmentError(f"token {index} ({ids[index]}) came with logprob {logprob}")
        start = len(self.token_ids)
        self._append(ids, True, logprobs, completion.versions)
        last = self.turns[-1] if self.turns else None
        if last and last.finish_reason == "abort" and last.end == start:
            start = self.turns.pop().start
        self.turns.append(Turn(start=start, end=len(self), finish_reason=completion.finish_reason))

    def _append(
        self,
        ids: Sequence[int],
        sampled: bool,
        logprobs: Sequence[float],
        versions: Sequence[int],
    ) -> None:
        self.token_ids.extend(ids)
        self.loss_mask.extend([sampled] * len(ids))
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def context(self) -> list[int]:
        """What the next request sends: the tokens of the newest segment, verbatim."""
        return self.token_ids[self.segment_starts[-1] :]

    @property
    def num_sampled_tokens(self) -> int:
        return sum(turn.end - turn.start for turn in self.turns)

    @property
    def oldest_version(self) -> int:
        """Of the weights that sampled a token of this episode; -1 if none was sampled."""
        return min((version for version in self.versions if version >= 0), default=-1)

    @property
    def is_cut(self) -> bool:
        """Whether a limit on length or turns ended it."""
        return self.stop_reason is not None and self.stop_reason.is_cut

    def segments(self) -> list[slice]:
        """The parts that are one sequence each for the learner, up to their last sampled token."""
        bounds = [*self.segment_starts, len(self)]
        ends = [turn.end for turn in self.turns if turn.end > turn.start]
        slices = []
        for start, stop in pairwise(bounds):
            last = max((end for end in ends if start < end <= stop), default=start)
            if last > start:
                slices.append(slice(start, last))
        return slices

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record of everything."""
        return {
            "id": self.id,
            "reward": self.reward,
            "rewards": self.rewards,
            "stop_reason": self.stop_reason,
            "error": self.error,
            "messages": [message.to_dict() for message in self.messages],
            "metrics": self.metrics,
            "timings": self.timings,
            "turns": [[t.start, t.end, t.finish_reason, t.reward] for t in self.turns],
            "segment_starts": self.segment_starts,
            "token_ids": self.token_ids,
            "loss_mask": [int(sampled) for sampled in self.loss_mask],
            "logprobs": self.logprobs,
            "versions": self.versions,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            AlignmentError: the columns do not belong together.
            KeyError: a field is missing.
        """
        tape = cls(record["id"])
        tape.token_ids, tape.logprobs = record["token_ids"], record["logprobs"]
        tape.loss_mask = [bool(sampled) for sampled in record["loss_mask"]]
        tape.versions, tape.segment_starts = record["versions"], record["segment_starts"]
        # Records of older versions have turns without a reward.
        names = ("start", "end", "finish_reason", "reward")
        tape.turns = [Turn(**dict(zip(names, turn, strict=False))) for turn in record["turns"]]
        tape.messages = [Message.from_dict(message) for message in record["messages"]]
        tape.reward, tape.rewards = record["reward"], record["rewards"]
        reason = record["stop_reason"]
        tape.stop_reason = None if reason is None else StopReason(reason)
        tape.error = record["error"]
        tape.metrics, tape.timings = record["metrics"], record["timings"]
        tape._require_alignment()
        return tape

    def _require_alignment(self) -> None:
        sampled = [t for turn in self.turns for t in range(turn.start, turn.end)]
        if sampled != [t for t, trained in enumerate(self.loss_mask) if trained]:
            raise AlignmentError("the loss mask is not that of the turns")
        for name in ("loss_mask", "logprobs", "versions"):
            if (length := len(getattr(self, name))) != len(self):
                raise AlignmentError(f"{len(self)} tokens came with {length} {name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """G episodes of one task and one env seed, which differ in their sampling seeds alone."""

    id: str
    task: Task
    trajectories: list[Trajectory] = field(default_factory=list)

    @property
    def rewards(self) -> list[float | None]:
        """[G], None where an episode was not scored."""
        return [trajectory.reward for trajectory in self.trajectories]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record of everything but the task's `prompt` and `info`."""
        return {
            "id": self.id,
            "task": self.task.id,
            "env": self.task.env,
            "answer": self.task.answer,
            "trajectories": [trajectory.to_dict() for trajectory in self.trajectories],
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; the task is what it holds of it: id, env and answer.

        Raises:
            AlignmentError, KeyError: see `Trajectory.from_dict`.
        """
        return cls(
            id=record["id"],
            task=Task(id=record["task"], env=record["env"], answer=record["answer"]),
            trajectories=[Trajectory.from_dict(each) for each in record["trajectories"]],
        )

    @property
    def has_signal(self) -> bool:
        """Whether the scored rewards differ, so that an advantage can be other than zero."""
        scored = [reward for reward in self.rewards if reward is not None]
        return len(scored) > 1 and max(scored) - min(scored) > 1e-9


def write_groups(path: Path, groups: Sequence[TrajectoryGroup]) -> None:
    """A JSON line per group, tokens included."""
    # A lone surrogate in what an env said has no encoding; its backslash form is JSON's own.
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for group in groups:
            file.write(json.dumps(group.to_dict(), ensure_ascii=False, default=str) + "\n")


def read_groups(path: Path) -> list[TrajectoryGroup]:
    """The inverse of `write_groups`: all that `TrajectoryGroup.to_dict` says, to the last bit.

    Raises:
        TrajectoryFileError: a line holds no group, or the file cannot be read.
    """
    groups = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    groups.append(TrajectoryGroup.from_dict(json.loads(line)))
                except (ValueError, KeyError, TypeError) as error:
                    cause = f"{type(error).__name__}: {error}"
                    raise TrajectoryFileError(
                        f"{path}, line {number}: no group, {cause}"
                    ) from error
    except OSError as error:
        raise TrajectoryFileError(f"{path}: {error.strerror}") from error
    return groups
