"""The endless, resumable order in which tasks are drawn."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from agentrl.trajectory import TrajectoryGroup
from agentrl.types import Task
from rollout.seeds import derive_seed


class Draw(NamedTuple):
    """The task of one group."""

    number: int  # counts the draws of a run, from 0
    task: Task
    env_seed: int  # [0, 2**31)
    ticket: Any  # plain data, and all that it takes to draw the same again


class Tasks(Protocol):
    """Where the groups of a run get their tasks from, without end."""

    def __next__(self) -> Draw: ...

    def draw(self, ticket: Any) -> Draw:
        """What was drawn under that ticket, without moving on."""
        ...

    def require(self, num_tasks: int, wanted_by: str) -> None:
        """Refuse a split that is smaller than what one batch of it takes.

        Raises:
            ValueError: with both numbers and what to do.
        """
        ...

    def learn(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Take groups that ended, in the order of their draws: later draws may depend on them."""
        ...

    def metrics(self) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the other one stood.

        Raises:
            ValueError: it had other tasks or another seed: its position means nothing here.
        """
        ...


class TaskStream:
    """The tasks of one env in a new order every epoch, each draw a function of `(seed, number)`.

    With `tasks=None` every draw is a task of its own: an env seed without a prompt. `env` is the
    name under which the tasks' env plays in a mix.

    Example:
        stream = TaskStream(env.tasks("train"), seed=0)
        draw = next(stream)

    Raises:
        ValueError: `tasks` is empty.
    """

    def __init__(self, tasks: Sequence[Task] | None, seed: int, env: str = "") -> None:
        self._who = f"the env {env}".strip()
        if tasks is not None and not tasks:
            raise ValueError(f"{self._who} has no tasks in this split: its list is empty")
        self.env = env
        self.tasks = tasks
        self.seed = seed
        self.position = 0  # the number of the next draw
        self._orders: dict[int, list[int]] = {}  # by epoch

    def __iter__(self) -> TaskStream:
        return self

    def __next__(self) -> Draw:
        draw = self.draw(self.position)
        self.position += 1
        return draw

    def draw(self, ticket: int) -> Draw:
        """The draw of that number, without moving on."""
        env_seed = derive_seed(self.seed, "env", ticket, bits=31)
        if self.tasks is None:
            task = Task(id=f"seed-{env_seed}", env=self.env)
        else:
            epoch, index = divmod(ticket, len(self.tasks))
            task = replace(self.tasks[self._order(epoch)[index]], env=self.env)
        return Draw(ticket, task, env_seed, ticket)

    def require(self, num_tasks: int, wanted_by: str) -> None:
        if self.tasks is not None and len(self.tasks) < num_tasks:
            raise ValueError(
                f"{self._who} has {len(self.tasks)} tasks, fewer than {wanted_by}={num_tasks}; "
                f"lower {wanted_by} or give the env more tasks"
            )

    def learn(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Nothing: the order is fixed."""

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "num_tasks": self._num_tasks, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "envs" in state:
            raise ValueError("the checkpoint was made with a mix of envs; resume with the same mix")
        if state["seed"] != self.seed:
            raise ValueError(
                f"the checkpoint was made with seed={state['seed']}, not {self.seed}: the order of "
                f"its tasks is another one; resume with seed={state['seed']}"
            )
        if state["num_tasks"] != self._num_tasks:
            raise ValueError(
                f"the checkpoint was made with {state['num_tasks']} tasks, {self._who} now "
                f"has {self._num_tasks}; resume with the same tasks"
            )
        self.position = state["position"]

    @property
    def _num_tasks(self) -> int | None:
        return None if self.tasks is None else len(self.tasks)

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            assert self.tasks is not None
            indices = range(len(self.tasks))
            order = random.Random(f"{self.seed}/{epoch}").sample(indices, len(indices))
            # Groups of the epoch before may still be in flight.
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1} | {
                epoch: order
            }
        return self._orders[epoch]


def held_out(tasks: Mapping[str, Sequence[Task] | None], num_tasks: int) -> list[Draw]:
    """So many tasks in all, of each env in turn, always the same.

    Raises:
        ValueError: an env has none, or fewer than its share.
    """
    streams = [TaskStream(rows, 0, env=name) for name, rows in tasks.items()]
    for place, stream in enumerate(streams):
        share = "its share of " if len(streams) > 1 else ""
        stream.require(len(range(place, num_tasks, len(streams))), f"{share}eval.num_tasks")
    draws = []
    for number in range(num_tasks):
        place, turn = divmod(number, len(streams))
        draws.append(streams[turn].draw(place)._replace(number=number))
    return draws
