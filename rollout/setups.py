"""The envs of a run, as its config names them: opened, asked for their tasks, made for episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from agentrl.config import EnvConfig, RunConfig
from agentrl.env import EnvNotFound, make_env, open_env, tasks_of
from agentrl.renderer import Renderer
from agentrl.rubric import Rubric, load_rewards
from agentrl.threads import FOREIGN_ERRORS, run_in_thread
from rollout.mix import TaskMix
from rollout.stage import EnvSetup
from rollout.tasks import Draw, Tasks, TaskStream, held_out


def open_envs(envs: Mapping[str, EnvConfig]) -> dict[str, Any]:
    """By name, one of each, to ask for its tools and tasks.

    Raises:
        EnvNotFound: as `agentrl.env.open_env` does.
    """
    return {name: open_env(env.id, env.kwargs) for name, env in envs.items()}


def preflight(envs: Mapping[str, Any], timeout_s: float) -> list[str]:
    """What the envs say before a run of all that their episodes need, each within the time.

    Raises:
        EnvNotFound: something is not there, or cannot be looked for.
    """

    async def look() -> list[str]:
        lines = []
        for name, env in envs.items():
            if not hasattr(env, "preflight"):
                continue
            try:
                found = await run_in_thread(env.preflight, timeout_s=timeout_s)
            except EnvNotFound:
                raise
            except FOREIGN_ERRORS as error:
                raise EnvNotFound(
                    f"the preflight of env {name or type(env).__name__} failed: "
                    f"{type(error).__name__}: {error}"
                ) from error
            lines += [f"{name}: {line}" if name else line for line in found]
        return lines

    return asyncio.run(look())


def make_renderers(
    config: RunConfig, envs: Mapping[str, Any], tokenizer: Any
) -> dict[str, Renderer]:
    """Each with the tools of its env."""
    return {
        name: Renderer(
            tokenizer,
            tool_format=config.rollout.tool_format,
            tools=[tool.schema for tool in getattr(env, "tools", ())],
            history=config.rollout.history,
        )
        for name, env in envs.items()
    }


def load_rubrics(config: RunConfig) -> dict[str, Rubric | None]:
    """The rewards of each env beside its own.

    Raises:
        ValueError: as `agentrl.rubric.load_rewards` does.
    """
    return {
        name: load_rewards(env.reward_funcs, env.reward_weights)
        for name, env in config.envs.items()
    }


def make_setups(
    config: RunConfig,
    renderers: Mapping[str, Renderer],
    rubrics: Mapping[str, Rubric | None],
) -> dict[str, EnvSetup]:
    held_out_envs = config.eval_envs
    return {
        name: EnvSetup(
            make_env=partial(make_env, env.id, **env.kwargs),
            eval_make_env=partial(make_env, env.id, **held_out_envs[name].kwargs),
            renderer=renderers[name],
            rubric=rubrics[name],
        )
        for name, env in config.envs.items()
    }


def train_tasks(config: RunConfig, envs: Mapping[str, Any]) -> Tasks:
    """
    Raises:
        ValueError: an env has an empty list of tasks.
    """
    rows = {name: tasks_of(env, "train") for name, env in envs.items()}
    if config.mix:
        weights = {name: env.weight for name, env in config.mix.items()}
        return TaskMix(rows, weights, config.seed, config.curriculum)
    return TaskStream(rows[""], config.seed)


def eval_draws(config: RunConfig, envs: Mapping[str, Any]) -> list[Draw]:
    """
    Args:
        envs: made with the arguments of `config.eval_envs`.

    Raises:
        ValueError: an env has fewer held-out tasks than its share.
    """
    rows = {name: tasks_of(env, "test") for name, env in envs.items()}
    return held_out(rows, config.eval.num_tasks)
