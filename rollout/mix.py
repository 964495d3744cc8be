"""Tasks of several envs, drawn by weight, and by how often each env is solved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from agentrl.config import CurriculumConfig
from agentrl.trajectory import TrajectoryGroup
from agentrl.types import Task
from rollout.seeds import derive_seed
from rollout.tasks import Draw, TaskStream

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
MEMORY = 20  # groups in the running mean of an env's success


class TaskMix:
    """Implements `rollout.tasks.Tasks`: the tasks of each env in its own order.

    Which env a draw is of follows from `(seed, number)` and from the weights, which a curriculum
    changes between batches.

    Example:
        mix = TaskMix({"sums": sums.tasks("train"), "shop": None}, {"sums": 2.0, "shop": 1.0}, 0)
        next(mix).task.env  ->  "sums", in two of three draws

    Raises:
        ValueError: an env has an empty list of tasks.
    """

    def __init__(
        self,
        tasks: Mapping[str, Sequence[Task] | None],
        weights: Mapping[str, float],
        seed: int,
        curriculum: CurriculumConfig | None = None,
    ) -> None:
        self.seed = seed
        self.position = 0  # the number of the next draw
        self._streams = {
            name: TaskStream(rows, derive_seed(seed, "env", name), env=name)
            for name, rows in tasks.items()
        }
        self._weights = {name: weights[name] for name in self._streams}
        self._curriculum = curriculum
        self._success: dict[str, list[float]] = {}  # by env: the rate, and of how many groups

    def __next__(self) -> Draw:
        env = self._pick(self.position)
        draw = self.draw([self.position, env, self._streams[env].position])
        self._streams[env].position += 1
        self.position += 1
        return draw

    def draw(self, ticket: Any) -> Draw:
        number, env, place = ticket
        draw = self._streams[env].draw(place)
        return draw._replace(number=number, ticket=[number, env, place])

    def require(self, num_tasks: int, wanted_by: str) -> None:
        for name, share in self.shares().items():
            self._streams[name].require(math.ceil(num_tasks * share), f"its share of {wanted_by}")

    def shares(self) -> dict[str, float]:
        """The chance of each env to be the next that is drawn."""
        weights = {name: weight * self._factor(name) for name, weight in self._weights.items()}
        return {name: weight / sum(weights.values()) for name, weight in weights.items()}

    def learn(self, groups: Sequence[TrajectoryGroup]) -> None:
        if self._curriculum is None:
            return
        for group in groups:
            if rewards := [reward for reward in group.rewards if reward is not None]:
                rate = mean(reward >= self._curriculum.success_reward for reward in rewards)
                before, num_groups = self._success.get(group.task.env, [0.0, 0])
                num_groups += 1
                now = before + (rate - before) / min(num_groups, MEMORY)
                self._success[group.task.env] = [now, num_groups]

    def metrics(self) -> dict[str, float]:
        shares = {f"mix/{name}/share": share for name, share in self.shares().items()}
        return shares | {f"mix/{name}/success": rate for name, (rate, _) in self._success.items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "position": self.position,
            "envs": {name: stream.state_dict() for name, stream in self._streams.items()},
            "success": dict(self._success),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("envs", {}).keys() != self._streams.keys():
            before = ", ".join(state.get("envs", ["one of no name"]))
            raise ValueError(
                f"the checkpoint was made with these envs: {before}; now there are: "
                f"{', '.join(self._streams)}; resume with the same ones"
            )
        if state["seed"] != self.seed:
            raise ValueError(
                f"the checkpoint was made with seed={state['seed']}, not {self.seed}: the order of "
                f"its tasks is another one; resume with seed={state['seed']}"
            )
        for name, stream in self._streams.items():
            stream.load_state_dict(state["envs"][name])
        self.position = state["position"]
        self._success = {name: list(of_env) for name, of_env in state["success"].items()}

    def _factor(self, name: str) -> float:
        if self._curriculum is None or name not in self._success:
            return 1.0
        rate, _ = self._success[name]
        return max(self._curriculum.floor, 4 * rate * (1 - rate))

    def _pick(self, number: int) -> str:
        # Steps of the golden ratio fall evenly, so that each batch has nearly its shares.
        start = derive_seed(self.seed, "mix", bits=32) / 2**32
        point, end = (start + number * GOLDEN_RATIO) % 1.0, 0.0
        for name, share in self.shares().items():
            end += share
            if point < end:
                return name
        return name  # shares may sum up to a little less than 1
