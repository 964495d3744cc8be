"""The endless, resumable order in which tasks are drawn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from agentrl.types import Task
from rollout.seeds import derive_seed


class Draw(NamedTuple):
    """The task of one group. `number` counts draws from 0 and is all that a replay needs."""

    number: int
    task: Task
    env_seed: int  # [0, 2**31)


class TaskStream:
    """Tasks in a new order every epoch, each draw a function of `(seed, number)` alone.

    With `tasks=None` every draw is a task of its own: an env seed without a prompt.

    Example:
        stream = TaskStream(env.tasks("train"), seed=0)
        number, task, env_seed = next(stream)

    Raises:
        ValueError: `tasks` is empty.
    """

    def __init__(self, tasks: Sequence[Task] | None, seed: int) -> None:
        if tasks is not None and not tasks:
            raise ValueError("the env has no tasks in this split: its list is empty")
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

    def draw(self, number: int) -> Draw:
        """The draw of that number, without moving on."""
        env_seed = derive_seed(self.seed, "env", number, bits=31)
        if self.tasks is None:
            return Draw(number, Task(id=f"seed-{env_seed}"), env_seed)
        epoch, index = divmod(number, len(self.tasks))
        return Draw(number, self.tasks[self._order(epoch)[index]], env_seed)

    def require(self, num_tasks: int, wanted_by: str) -> None:
        """Refuse a split that is smaller than what one batch of it takes.

        Raises:
            ValueError: with both numbers and what to do.
        """
        if self.tasks is not None and len(self.tasks) < num_tasks:
            raise ValueError(
                f"the env has {len(self.tasks)} tasks, fewer than {wanted_by}={num_tasks}; "
                f"lower {wanted_by} or give the env more tasks"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "num_tasks": self._num_tasks, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the other stream stood.

        Raises:
            ValueError: it had other tasks or another seed: its position means nothing here.
        """
        if state["seed"] != self.seed:
            raise ValueError(
                f"the checkpoint was made with seed={state['seed']}, not {self.seed}: the order of "
                f"its tasks is another one; resume with seed={state['seed']}"
            )
        if state["num_tasks"] != self._num_tasks:
            raise ValueError(
                f"the checkpoint was made with {state['num_tasks']} tasks, the env now has "
                f"{self._num_tasks}; resume with the same tasks"
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
