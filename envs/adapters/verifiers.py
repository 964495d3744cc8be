"""Tasksets of verifiers (0.4): its tasks, tools and rewards, played by this project's episodes.

What needs its own runtimes, harnesses or model clients is refused before a run.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import yaml

from agentrl.env import EnvNotFound
from agentrl.rubric import Rubric
from agentrl.tool import Tool
from agentrl.trajectory import Trajectory
from agentrl.types import Message, Task
from envs.adapters import library
from envs.rows import require_split
from envs.tool_env import ToolEnv


async def reward(env: Verifiers, trajectory: Trajectory) -> float:
    """The weighted sum of the task's rewards."""
    env.trace = env.as_trace(trajectory.messages)
    await env.row.score(env.trace)
    return env.trace.reward


def signals(env: Verifiers) -> dict[str, float]:
    """Each reward, unweighted, and each metric of the task."""
    rewards = {name: reward.score for name, reward in env.trace.rewards.items() if reward}
    metrics = {name: value for name, value in env.trace.metrics.items() if value is not None}
    return {f"verifiers/{name}": value for name, value in (rewards | metrics).items()}


class Verifiers(ToolEnv):
    """One agent on the tasks of a taskset; every tenth task is of the split "test"."""

    rubric = Rubric([reward, signals], weights=[1.0, 0.0])

    def __init__(self, taskset: str, *, num_tasks: int = 0, **kwargs: Any) -> None:
        """
        Args:
            taskset: An installed package, or a module on the path.
            num_tasks: The first so many; 0: all. A taskset without an end needs it.
            kwargs: Of the taskset's config.
        """
        super().__init__()
        self.trace: Any = None  # the episode's, once it is scored
        self._shared, self._rows = _load(taskset, num_tasks, yaml.safe_dump(kwargs))
        self._taskset_id = taskset
        row = self._rows[0]
        self._toolsets = type(row).toolsets(row.config)
        self.tools = [
            _tool(toolset, function)
            for toolset in self._toolsets
            for function in _vf("utils.decorators").discover_decorated(toolset, "tool")
        ]

    def preflight(self) -> list[str]:
        missing = _unsupported(self._taskset_id, self._rows[0], self._toolsets)
        missing += ["tools that all tasks share"] * bool(self._shared)
        if missing:
            raise EnvNotFound(
                f"verifiers:{self._taskset_id} needs what only verifiers' own runs have: "
                + ", ".join(missing)
            )
        return []

    def tasks(self, split: str) -> Sequence[Task]:
        require_split(split)
        return [
            Task(
                id=f"{self._taskset_id}-{index}",
                prompt=tuple(_prompt(row.data)),
                answer=getattr(row.data, "answer", None),
                info={"index": index},
            )
            for index, row in enumerate(self._rows)
            if (index % 10 == 9) == (split == "test")
        ]

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        observation = await super().reset(seed=seed, options=options)
        self.row = self._rows[self.task.info["index"]]
        self._state = _vf("state").state_cls(type(self.row))()
        for toolset in self._toolsets:
            toolset._inert_state = self._state  # verifiers sends it between processes
            await toolset.setup()
            await toolset.setup_task(self.row.data)
        return observation

    def as_trace(self, messages: Sequence[Message]) -> Any:
        """The episode as verifiers' rewards read it."""
        trace, types, node = _vf("trace"), _vf("types"), _vf("graph").MessageNode
        shape = {
            "system": types.SystemMessage,
            "user": types.UserMessage,
            "assistant": types.AssistantMessage,
            "tool": types.ToolMessage,
        }
        row = self.row
        return trace.Trace(
            task=trace.TraceTask(type=type(row).__name__, data=row.data, key=row.key),
            agent=trace.AgentInfo(config=_vf("configs.agent").AgentConfig()),
            state=self._state,
            nodes=[
                node(
                    message=shape[message.role].model_validate(_as_dict(message)),
                    sampled=message.role == "assistant" and index >= len(self.task.prompt),
                    parent=index - 1 if index else None,
                )
                for index, message in enumerate(messages)
            ],
            is_completed=True,
            ok=True,
        )


def _vf(module: str) -> Any:
    return library("verifiers", f"verifiers.v1.{module}")


@cache
def _load(taskset: str, num_tasks: int, kwargs: str) -> tuple[list[Any], list[Any]]:
    """The tools that all tasks share, and the tasks."""
    loaders = _vf("utils.loaders")
    try:
        config = loaders.taskset_config_type(taskset)(id=taskset, **yaml.safe_load(kwargs))
        found = loaders.load_taskset(config)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise EnvNotFound(f"verifiers:{taskset}: {error}") from error
    if not (num_tasks or found.bounded):
        raise EnvNotFound(f"verifiers:{taskset} has no end; say num_tasks")
    rows = list(found.take(num_tasks) if num_tasks else found)
    if not rows:
        raise EnvNotFound(f"verifiers:{taskset} has no tasks")
    return found.toolsets(found.config), rows


def _prompt(data: Any) -> list[Message]:
    text = _vf("types").content_text
    system = [Message(role="system", content=data.system_prompt)] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, Message(role="user", content=data.prompt)]
    return [*system, *(Message(role=m.role, content=text(m.content)) for m in data.prompt or ())]


def _as_dict(message: Message) -> dict[str, Any]:
    shaped = message.to_dict()
    if "tool_calls" in shaped:
        function = [call["function"] for call in shaped["tool_calls"]]
        shaped["tool_calls"] = [
            {"id": call.id, "name": f["name"], "arguments": json.dumps(f["arguments"])}
            for call, f in zip(message.tool_calls, function, strict=True)
        ]
    return shaped


def _tool(toolset: Any, function: Any) -> Tool:
    named = Tool(function)
    name = getattr(function, "tool_name", None) or function.__name__
    prefix = f"{toolset.server_name}_" if toolset.server_name else ""
    named.name = named.schema["function"]["name"] = prefix + name
    return named


def _unsupported(taskset_id: str, row: Any, toolsets: Sequence[Any]) -> list[str]:
    base = _vf("task").Task
    single = _vf("envs.single_agent").SingleAgentEnv
    scores = [*row.hooks("reward"), *row.hooks("metric")]
    needs = {
        "an env of its own": _vf("utils.loaders").environment_class(taskset_id) is not single,
        "a container": row.NEEDS_CONTAINER,
        "setup or finalize in a runtime": type(row).setup is not base.setup
        or type(row).finalize is not base.finalize,
        "judges": bool(row.config.judges),
        "hooks that stop or intercept": any(
            _vf("utils.decorators").discover_decorated(row, kind) for kind in ("stop", "intercept")
        ),
        "rewards that ask the runtime": any(
            "runtime" in inspect.signature(score).parameters for score in scores
        ),
        "toolsets at a url": any(getattr(tools.config, "url", None) for tools in toolsets),
        "a prompt by its user": row.data.prompt is None,
    }
    return [need for need, is_so in needs.items() if is_so]
