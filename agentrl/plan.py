"""The plan of a run before it starts: who runs where, what a step counts, memory, time limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.config import ConfigError, RunConfig
from agentrl.memory import (
    BF16,
    Machine,
    ModelShape,
    count,
    memory,
    num_alive,
    num_concurrent,
)


@dataclass(slots=True, kw_only=True)
class Plan:
    """Lines to print by heading, and why the run cannot work, if so."""

    sections: dict[str, list[str]] = field(default_factory=dict)
    objections: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        blocks = [
            "\n".join([heading, *(f"  {line}" for line in lines)])
            for heading, lines in self.sections.items()
        ]
        return "\n\n".join(blocks)


def make_plan(
    config: RunConfig,
    machine: Machine,
    shape: ModelShape | str,
    envs: Mapping[str, Any],
) -> Plan:
    """
    Args:
        shape: as a text it says why it is unknown.
        envs: one of each, by name.
    """
    plan = Plan()
    plan.sections["envs"] = list(env_lines(config, envs))
    plan.sections["who runs where"] = list(places(config, machine))
    plan.sections["a step, over all processes"] = list(batch_arithmetic(config))
    if isinstance(shape, str):
        plan.sections["memory"] = [shape]
    else:
        plan.sections["memory"] = list(memory(config, machine, shape, plan.objections))
    plan.sections["time limits"] = [
        f"{name:<26} {seconds:>6g} s  {meaning}"
        for name, seconds, meaning in time_limits(config, machine.engine, tool_limits(envs))
    ]
    return plan


def places(config: RunConfig, machine: Machine) -> Iterator[str]:
    sglang, on_gpu = config.sglang, bool(machine.gpus)
    where = f"{machine.memory_gib:.1f} GiB {'each' if len(machine.gpus) > 1 else ''}".strip()
    num = machine.num_learners
    learner = f"{_gpus(machine.gpus[:num])} of {len(machine.gpus)}" if on_gpu else "CPU"
    shards = f" spread over {machine.num_shards} processes" if machine.num_shards > 1 else ""
    yield (
        f"learner   {learner} ({where}), {count(num, 'process', 'es')}, float32 weights{shards}"
        f"{', bfloat16 forward pass' if machine.bf16 else ''}"
    )
    if config.lora:
        yield (
            f"LoRA      adapters of rank {config.lora.r} are trained, the weights stay; the "
            "reference is the adapter off"
        )
    dtype = "bfloat16" if machine.engine_bytes == BF16 else "float32"
    if machine.engine == "local":
        yield f"engine    local: in the learner's process and on its device, {dtype}"
        return
    shares = "the GPUs are shared: either the learner or the servers work"
    yield f"engine    sglang over HTTP, {dtype}" + (f"; {shares}" if sglang.colocate else "")
    for number, gpus in enumerate(machine.servers):
        place = f"{_gpus(gpus)}, tensor parallel {sglang.tensor_parallel_size}" if gpus else "CPU"
        yield f"server {number}  {place}, started and ended by this run"
    for number, url in enumerate(sglang.urls):
        yield f"server {number}  {url}, connected to; its GPUs are its own"
    if config.sent_adapter:
        yield "weights   learner -> servers: the adapter alone, in a folder that both see"
        return
    yield (
        f"weights   learner -> servers by {machine.weight_sync}, {sglang.bucket_mb} MB on their "
        "way at once"
    )


def batch_arithmetic(config: RunConfig) -> Iterator[str]:
    """Prompts, episodes, optimizer steps and tokens, each with what it counts."""
    rollout, optim = config.rollout, config.optim
    num_episodes = rollout.prompts_per_step * rollout.num_generations
    per_step = num_episodes // optim.num_minibatches
    num_steps = optim.num_minibatches * optim.num_iterations
    yield (
        f"{rollout.prompts_per_step} prompts x {rollout.num_generations} generations = "
        f"{num_episodes} episodes"
    )
    yield (
        f"{count(optim.num_minibatches, 'minibatch', 'es')} of {per_step} episodes x "
        f"{count(optim.num_iterations, 'iteration')} = {count(num_steps, 'optimizer step')}"
    )
    tokens = optim.micro_batch_tokens
    budget = "as many tokens as fit" if tokens == "auto" else f"at most {tokens} tokens"
    yield f"micro-batches of {budget} per process: they change memory, never the result"
    yield (
        f"an episode: at most {count(rollout.max_turns, 'turn')}, {rollout.max_new_tokens} "
        f"sampled tokens a turn, {rollout.max_episode_tokens} in all, "
        f"{rollout.max_context_tokens} with prompt and observations"
    )
    yield (
        f"at most {num_concurrent(config)} requests in the engine at once, "
        f"{rollout.max_concurrent_env_calls} calls of envs"
    )
    stale = rollout.max_staleness
    alive = (stale + 1) * rollout.prompts_per_step
    yield (
        f"at most {alive} groups alive, trained on at most {count(stale, 'version')} late"
        if stale
        else "synchronous: nothing is sampled while the learner trains"
    )


def tool_limits(envs: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Name and time limit, in seconds, of the envs' tools that have one.

    Calls that wait for each other are one more: all that a turn may have of them.
    """
    limits = []
    for env_name, env in envs.items():
        tools = [tool for tool in getattr(env, "tools", ()) if not tool.inline]
        bounds = [(tool.name, tool.timeout_s) for tool in tools]
        calls = getattr(env, "max_calls_per_turn", 1)
        serial = [(tool.timeout_s, tool.name) for tool in tools if tool.serial]
        if serial and calls > 1:
            longest_s, name = max(serial)
            bounds.append((f"{name}, {calls} calls in turn", calls * longest_s))
        limits += [(f"{env_name}/{name}" if env_name else name, bound) for name, bound in bounds]
    return limits


def env_lines(config: RunConfig, envs: Mapping[str, Any]) -> Iterator[str]:
    """Which envs play, and how many of the sandboxes that their episodes need there can be."""
    total = sum(env.weight for env in config.mix.values())
    for name, env in config.mix.items():
        yield f"{name}: {env.id}, {env.weight / total:.0%} of the prompts"
    if config.env:
        yield config.env.id
    needing: dict[Any, list[str]] = {}  # by config: envs of the same one share their sandboxes
    for name, env in envs.items():
        if sandbox := getattr(env, "sandbox_config", None):
            needing.setdefault(sandbox, []).append(name)
    for sandbox, names in needing.items():
        alive, most = num_alive(config), sandbox.max_sandboxes
        who = f" of {', '.join(names)}" if config.mix else ""
        yield (
            f"up to {count(alive, 'episode')}{who} at once, each in a sandbox of its own, of which "
            f"sandbox.max_sandboxes={most} allows "
            + ("enough" if alive <= most else "fewer: the others wait before they begin")
        )


def time_limits(
    config: RunConfig, engine: str, tools: Sequence[tuple[str, float]]
) -> list[tuple[str, float, str]]:
    """All of them, for none may hide: the name, seconds, whom they bound and what happens then."""
    rollout, sglang = config.rollout, config.sglang
    rows = [
        *(
            (f"tool {name}", seconds, "a call: answered with what was wrong")
            for name, seconds in tools
        ),
        ("rollout.generate_timeout_s", rollout.generate_timeout_s, "a request: a fault, retried"),
        ("rollout.env_timeout_s", rollout.env_timeout_s, "a reset or step: a fault, retried"),
        ("rollout.score_timeout_s", rollout.score_timeout_s, "the rewards of an episode: a fault"),
        ("rollout.episode_timeout_s", rollout.episode_timeout_s, "an attempt: a fault, retried"),
        ("rollout.watchdog_s", rollout.watchdog_s, "no progress: a table of what is pending"),
    ]
    if engine == "sglang":
        rows += [
            ("sglang.start_timeout_s", sglang.start_timeout_s, "a server's start: given up"),
            ("sglang.sync_timeout_s", sglang.sync_timeout_s, "an update: its server is taken out"),
        ]
    return rows


def describe(config: RunConfig, engine: str) -> list[str]:
    """The run in a few lines: what is trained, and what is counted."""
    rollout, optim = config.rollout, config.optim
    num_episodes = rollout.prompts_per_step * rollout.num_generations
    num_updates = optim.num_minibatches * optim.num_iterations
    envs = " + ".join(env.id for env in config.envs.values())
    lora = f" · LoRA of rank {config.lora.r}" if config.lora else ""
    return [
        f"{config.model.name_or_path}{lora} · {envs} · {config.loss.loss_type} · "
        f"{config.output_dir}",
        f"a step: {rollout.prompts_per_step} prompts x {rollout.num_generations} episodes = "
        f"{num_episodes} episodes, {num_updates} optimizer step{'s' * (num_updates > 1)}",
        f"engine: {engine} (rollout.engine={rollout.engine})",
    ]


def require_room(config: RunConfig) -> None:
    """The longest episode goes through the learner in one row."""
    rows, episode = config.optim.micro_batch_tokens, config.rollout.max_context_tokens
    if rows != "auto" and rows < episode:
        raise ConfigError(
            f"optim.micro_batch_tokens={rows} is less than one episode may have: "
            f"rollout.max_context_tokens={episode}; raise the one or lower the other"
        )


def require_time(config: RunConfig, tools: Sequence[tuple[str, float]]) -> None:
    """A tool is called within a step of the env: its limit must be the shorter one."""
    step_s = config.rollout.env_timeout_s
    for name, timeout_s in tools:
        if timeout_s >= step_s:
            raise ConfigError(
                f"tool {name} may take {timeout_s:g} s, but rollout.env_timeout_s={step_s:g} ends "
                f"the env's step before; raise it over {timeout_s:g}"
            )


def _gpus(gpus: Sequence[int]) -> str:
    return f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(map(str, gpus))}"
