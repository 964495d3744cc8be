"""One episode: reset, then sample a turn and step the env until it is over, then score and close.

It ends in a `StopReason`, whatever happens. A fault leaves its cause in `trajectory.error` and its
traceback in the log.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from dataclasses import replace
from operator import itemgetter
from typing import Any

import gymnasium

from agentrl.env import TextEnv, call_env, to_messages
from agentrl.rubric import RewardError, Rubric
from agentrl.threads import FOREIGN_ERRORS
from agentrl.trajectory import Trajectory
from agentrl.types import Action, Message, Sampling, StopReason
from rollout.guards import Fault, faults, spend, stopped, work
from rollout.seeds import derive_seed
from rollout.stage import Episode, Stage

logger = logging.getLogger("agentrl")


async def play(episode: Episode, stage: Stage) -> Trajectory:
    """Play `episode` to its end, also where everything fails.

    `reward` is None after a fault, and as long as a rubric is still to score the whole group.

    Raises:
        EngineDied: there is no engine left to play with.
    """
    tape = episode.tape
    try:
        async with asyncio.timeout(stage.config.episode_timeout_s) as episode.clock:
            reason = await _turns(episode, stage)
            await _score(episode, stage)
            tape.stop_reason = reason
    except Fault as fault:
        tape.reward, tape.stop_reason, tape.error = None, fault.reason, str(fault)
        logger.warning(
            "episode %s: %s: %s", episode.id, fault.reason, fault, exc_info=fault.__cause__
        )
    except TimeoutError:
        limit = stage.config.episode_timeout_s
        tape.reward, tape.stop_reason = None, StopReason.EPISODE_TIMEOUT
        tape.error = f"TimeoutError: no end within {limit:g} s, at last in {episode.phase}"
        logger.warning("episode %s: %s", episode.id, tape.error)
    finally:
        await _close(episode, stage)
    return tape


async def _turns(episode: Episode, stage: Stage) -> StopReason:
    """Engine and env take turns until one of them, or a limit, ends the episode."""
    tape, config = episode.tape, stage.config
    info = await _reset(episode, stage)
    while True:
        max_new_tokens, limit = min(
            (config.max_new_tokens, StopReason.TURN_LENGTH),
            (config.max_episode_tokens - tape.num_sampled_tokens, StopReason.EPISODE_LENGTH),
            (config.max_context_tokens - len(tape.context), StopReason.CONTEXT_LENGTH),
            key=itemgetter(0),
        )
        if max_new_tokens <= 0:
            return _end(tape, info, limit)
        action = await _generate(episode, stage, max_new_tokens)
        if action.finish_reason == "length":
            return _end(tape, info, limit)
        info, reason = await _step(episode, stage, action)
        if reason is not None:
            return _end(tape, info, reason)


async def _reset(episode: Episode, stage: Stage) -> dict[str, Any]:
    """Make the env and put its prompt on the tape, which it must leave room to answer."""
    tape, config = episode.tape, stage.config
    await stage.turnstile.pass_through()
    with faults(StopReason.ENV_ERROR, StopReason.ENV_TIMEOUT):
        episode.env = env = stage.make_env()
        await _acquire(episode)
        async with work(episode, "reset", "env", stage.env_calls, config.env_timeout_s):
            options = {"task": episode.task}
            observation, info = await call_env(env, "reset", seed=episode.env_seed, options=options)
        tape.messages += to_messages(observation)
        tape.observe(stage.prompt(tape.messages))
    if len(tape) >= config.max_context_tokens:
        raise Fault(
            StopReason.PROMPT_TOO_LONG,
            f"the prompt has {len(tape)} tokens, max_context_tokens={config.max_context_tokens}",
        )
    return info


async def _acquire(episode: Episode) -> None:
    """Wait for what the env must have to itself, however long: no slot is held meanwhile."""
    assert episode.env is not None
    env = episode.env.unwrapped
    if getattr(type(env), "acquire", TextEnv.acquire) is TextEnv.acquire:
        return
    episode.enter("acquire")
    began = time.perf_counter()
    with faults(StopReason.ENV_ERROR, StopReason.ENV_ERROR), stopped(episode.clock):
        await env.acquire()  # type: ignore[attr-defined]
    spend(episode, "queue", time.perf_counter() - began)


async def _generate(episode: Episode, stage: Stage, max_new_tokens: int) -> Action:
    """Let the engine sample a turn, put it on the tape, and read it.

    New weights may interrupt it, more than once; each part keeps its own logprobs and versions.
    """
    tape, config, renderer = episode.tape, stage.config, stage.renderer
    engine, gate = stage.engine, stage.generation
    turn, start = len(tape.turns), len(tape)
    with faults(StopReason.ENGINE_ERROR, StopReason.ENGINE_TIMEOUT):
        for part in itertools.count():
            sampling = Sampling(
                max_new_tokens=max_new_tokens - (len(tape) - start),
                temperature=config.temperature,
                seed=derive_seed(episode.seed, turn, *[part] * (part > 0)),
                stop_token_ids=renderer.stop_token_ids,
            )
            try:
                async with work(episode, "generate", "generate", gate, config.generate_timeout_s):
                    times_shut = gate.times_shut
                    completion = await engine.generate(tape.context, sampling, session=episode.id)
                    interrupted = gate.times_shut > times_shut
            except TimeoutError:
                if engine.serving:
                    raise
                continue  # a server may take longer to start than a request to be answered
            if completion.finish_reason == "abort" and interrupted:
                if part == 0:
                    stage.metrics.count("rollout/interrupted_turns")
                if config.on_update == "drop":
                    stage.metrics.count("rollout/wasted_tokens", len(completion.token_ids))
                    continue
                if len(completion.token_ids) == sampling.max_new_tokens:
                    completion = replace(completion, finish_reason="length")
            tape.act(completion)
            if completion.finish_reason != "abort" or not interrupted:
                break
    await stage.turnstile.pass_through()
    if completion.finish_reason == "abort":
        raise Fault(StopReason.ABORTED, f"the engine aborted turn {len(tape.turns)}")
    with faults(StopReason.ENV_ERROR, StopReason.ENV_TIMEOUT):
        action = renderer.parse(tape.token_ids[start:], completion.finish_reason)
        tape.messages.append(action.to_message())
    return action


async def _step(
    episode: Episode, stage: Stage, action: Action
) -> tuple[dict[str, Any], StopReason | None]:
    """Step the env; where the episode goes on, put what it said on the tape."""
    tape, config, env = episode.tape, stage.config, episode.env
    with faults(StopReason.ENV_ERROR, StopReason.ENV_TIMEOUT):
        async with work(episode, "step", "env", stage.env_calls, config.env_timeout_s):
            observation, reward, terminated, truncated, info = await call_env(env, "step", action)
        new = to_messages(observation)
        _add_step_reward(tape, reward)
        reason = (
            StopReason(info["stop_reason"]) if "stop_reason" in info
            else StopReason.DONE if terminated
            else StopReason.TRUNCATED if truncated
            else StopReason.MAX_TURNS if len(tape.turns) >= config.max_turns
            else None
        )  # fmt: skip
        if reason is not None:
            tape.messages += new
            return info, reason
        new = _clip_results(new, tape, stage)
        delta = stage.renderer.observation(tape.messages, new, context=tape.context)
        tape.messages += new
    kept = 0 if delta.new_segment else len(tape) - tape.segment_starts[-1]
    if kept + len(delta.token_ids) >= config.max_context_tokens:
        return info, StopReason.CONTEXT_LENGTH
    tape.observe(delta.token_ids, new_segment=delta.new_segment)
    return info, None


def _clip_results(new: list[Message], tape: Trajectory, stage: Stage) -> list[Message]:
    """Leave out the middle of tool results that are too long."""
    clipped = []
    for message in new:
        if message.role == "tool":
            content = stage.renderer.clip(message.content, stage.config.max_tool_tokens)
            is_shorter = content is not message.content
            tape.metrics["tool/clipped"] = tape.metrics.get("tool/clipped", 0.0) + is_shorter
            message = replace(message, content=content) if is_shorter else message
        clipped.append(message)
    return clipped


def _end(tape: Trajectory, info: dict[str, Any], reason: StopReason) -> StopReason:
    with faults(StopReason.ENV_ERROR, StopReason.ENV_TIMEOUT):
        for name, value in info.get("metrics", {}).items():
            if not math.isfinite(value):
                raise ValueError(f"the env's metric {name!r} is {value}")
            tape.metrics[name] = float(value)
    return reason


def _add_step_reward(tape: Trajectory, reward: Any) -> None:
    with faults(StopReason.REWARD_ERROR, StopReason.REWARD_ERROR):
        reward = float(reward)
        if not math.isfinite(reward):
            raise RewardError(f"step {len(tape.turns)} of the env gave the reward {reward}")
        tape.rewards["env"] = tape.rewards.get("env", 0.0) + reward
        tape.turns[-1] = replace(tape.turns[-1], reward=reward)


async def _score(episode: Episode, stage: Stage) -> None:
    tape, env = episode.tape, episode.env
    assert env is not None
    rubrics = episode.rubrics(stage)
    with faults(StopReason.REWARD_ERROR, StopReason.REWARD_ERROR):
        for rubric in rubrics:
            async with work(
                episode, "score", "score", stage.env_calls, stage.config.score_timeout_s
            ):
                rewards = await rubric.score(task=episode.task, trajectory=tape, env=env.unwrapped)
            add_rewards(tape, rewards)
        if not any(rubric.scores_groups for rubric in rubrics):
            tape.reward = total_reward(tape, rubrics)


def add_rewards(tape: Trajectory, rewards: dict[str, float]) -> None:
    """Raises RewardError where a name is taken, for one of the two would be lost."""
    if twice := rewards.keys() & tape.rewards.keys():
        raise RewardError(f"two rewards are named {', '.join(sorted(twice))}")
    tape.rewards |= rewards


def total_reward(tape: Trajectory, rubrics: list[Rubric]) -> float:
    """The env's rewards and the weighted ones together."""
    return tape.rewards.get("env", 0.0) + sum(rubric.total(tape.rewards) for rubric in rubrics)


async def _close(episode: Episode, stage: Stage) -> None:
    """An error here is counted and logged; what was played stays valid."""
    env, config, tape = episode.env, stage.config, episode.tape
    try:
        if env is not None:
            async with stage.env_calls, asyncio.timeout(config.env_timeout_s):
                episode.enter("close")
                if type(env.unwrapped).close is gymnasium.Env.close:
                    env.close()  # nothing of its own to close: not worth a thread
                else:
                    await call_env(env, "close")
    except FOREIGN_ERRORS:
        tape.metrics["env/close_errors"] = 1.0
        logger.exception("episode %s: closing the env failed", episode.id)
    finally:
        try:
            async with asyncio.timeout(config.generate_timeout_s):
                await stage.engine.release(episode.id)
        except Exception:
            tape.metrics["engine/release_errors"] = 1.0
            logger.exception("episode %s: releasing its session failed", episode.id)
