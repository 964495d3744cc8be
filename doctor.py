"""What can be said of a run before it starts: its plan, and whether all that it needs works here.

`train.py` asks; what it tries is built by `parts.py`, as a run's is.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch

from agentrl.checklist import Checklist
from agentrl.config import ConfigError, EnvConfig, RunConfig
from agentrl.env import EnvNotFound, make_env, tasks_of, to_messages
from agentrl.memory import (
    BF16,
    FP32,
    GIB,
    Machine,
    ModelShape,
    gib,
    num_concurrent,
    read_shape,
)
from agentrl.models import ModelError, adapted_layers
from agentrl.plan import make_plan, tool_limits
from agentrl.protocols import Engine, EngineError, Probe
from agentrl.renderer import Renderer, RendererError
from agentrl.shutdown import shut_down
from agentrl.threads import run_in_thread
from agentrl.tool import Unavailable
from agentrl.types import Message, Sampling
from parts import (
    EngineKind,
    choose_engine,
    make_engine,
    make_probe,
    make_servers,
    num_shards,
    probe_tokens,
)
from rollout.engines.local_load import fast_dtype
from rollout.engines.sglang_server import OLDEST, SGLangServer, open_http, release
from rollout.launch import (
    CPU_KV_TOKENS,
    HOST,
    Launch,
    assign_gpus,
    context_length,
    find_interpreter,
    hold_port,
    launch_command,
)
from rollout.server import Fleet
from rollout.setups import make_renderers, preflight
from train.ranks import Ranks, num_local_ranks
from train.setup import make_accelerator, make_learner
from train.weight_sync.transports import choose_transport

NEWEST_KNOWN = (0, 5, 23)  # release of SGLang whose sources were read
ASK_VERSION = "from importlib.metadata import version; print(version('sglang'))"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """Those of this machine, or those that a dry run shall assume."""

    count: int
    memory_gib: float  # of each
    assumed: bool = False

    @classmethod
    def here(cls) -> Gpus:
        count = torch.cuda.device_count()
        sizes = [torch.cuda.get_device_properties(gpu).total_memory for gpu in range(count)]
        return cls(count=count, memory_gib=min(sizes, default=0) / GIB)

    @classmethod
    def parse(cls, text: str) -> Gpus:
        """Of a text such as 8x139. Raises ArgumentTypeError for others."""
        found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", text)
        if found is None:
            raise ArgumentTypeError(f"{text!r} is no number of GPUs and GiB of each, as 8x139 is")
        return cls(count=int(found[1]), memory_gib=float(found[2]), assumed=True)


def describe_machine(config: RunConfig, engine: EngineKind, gpus: Gpus) -> Machine:
    """Raises ConfigError where the GPUs do not suffice."""
    indices = range(gpus.count)
    spawns = engine == "sglang" and config.sglang.mode == "spawn"
    bf16 = gpus.assumed or fast_dtype() is torch.bfloat16
    chosen = config.rollout.engine_dtype
    precision = config.model.mixed_precision
    return Machine(
        engine=engine,
        engine_bytes=BF16 if chosen == "bfloat16" or (chosen == "auto" and bf16) else FP32,
        bf16=precision == "bf16" or (precision == "auto" and bf16),
        memory_gib=gpus.memory_gib if gpus.count else psutil.virtual_memory().total / GIB,
        gpus=indices,
        num_learners=num_local_ranks(),
        num_shards=num_shards(),
        servers=assign_gpus(config.sglang, indices, num_learner_gpus=num_local_ranks())
        if spawns
        else (),
        cpu_kv_tokens=CPU_KV_TOKENS,
        weight_sync=choose_transport(config.sglang),
    )


def dry_run(config: RunConfig, envs: Mapping[str, Any], engine: EngineKind, gpus: Gpus) -> None:
    """Print the plan; of several processes that were launched, the first one does.

    Raises:
        ConfigError: what it plans cannot work.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    machine = describe_machine(config, engine, gpus)
    name = config.model.name_or_path
    try:
        shape = read_shape(name)
    except ModelError as error:
        if not HUB_ID.fullmatch(name):
            raise
        shape = str(error)
    plan = make_plan(config, machine, shape, envs)
    plan.sections["envs"] += look(config, envs)
    if gpus.count > 1 and "WORLD_SIZE" not in os.environ:
        plan.sections["who runs where"].append(
            "a learner of several processes is planned by its own launcher: accelerate launch "
            "--config_file configs/accelerate/….yaml train.py --dry-run …"
        )
    if engine == "sglang" and config.sglang.urls:
        plan.sections["start these servers, each on its machine"] = launch_commands(
            config, machine, None if isinstance(shape, str) else shape
        )
    elif engine == "sglang" and not gpus.assumed:
        find_interpreter(config.sglang.python)
    print(plan)
    if plan.objections:
        raise ConfigError("this cannot run: " + "\n".join(plan.objections))


def look(config: RunConfig, envs: Mapping[str, Any]) -> list[str]:
    """What the envs need and find here; a plan may be for another machine."""
    lines = []
    for name, env in envs.items():
        try:
            lines += preflight({name: env}, config.rollout.env_timeout_s)
        except EnvNotFound as error:
            lines.append(f"{name}: not to be had here: {error}".removeprefix(": "))
    return lines


def launch_commands(config: RunConfig, machine: Machine, shape: ModelShape | None) -> list[str]:
    """What starts the servers that `sglang.urls` names, counting GPUs anew on each machine."""
    max_positions = shape.max_positions if shape else sys.maxsize
    lora, targets = config.sent_adapter, list[str]()
    if lora:
        targets = adapted_layers(lora, shape.linear_sizes) if shape else ["all"]
    launch = Launch(
        model_path=config.model.name_or_path,
        dtype="bfloat16" if machine.engine_bytes == BF16 else "float32",
        context_tokens=context_length(config.rollout.max_context_tokens, max_positions),
        max_requests=num_concurrent(config),
        log_folder=Path(),
        gpus=[0],
        lora_rank=lora.r if lora else 0,
        lora_targets=targets,
    )
    commands, started = [], dict[str, int]()
    for url in config.sglang.urls:
        parts = urlsplit(url)
        host = parts.hostname or ""
        command = launch_command(
            config.sglang, launch, python="python", port=parts.port or 80, nccl_port=0
        )
        first_gpu = started.get(host, 0)
        started[host] = first_gpu + config.sglang.tensor_parallel_size
        own = [a for a in command if not a.startswith(("--nccl-port", f"--host={HOST}"))]
        where = ["--host=0.0.0.0", f"--base-gpu-id={first_gpu}"]
        commands.append(f"{host}: {' '.join([*own, *where])}")
    return commands


def examine(config: RunConfig, envs: Mapping[str, Any]) -> bool:
    """Try everything that the run needs, once; leave nothing behind. Whether all of it works.

    A check that fails stops only those that need its result.

    Raises:
        ConfigError: several processes were launched.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("--doctor tries things in one process: python train.py --doctor …")
    checklist = Checklist(
        ConfigError, EngineError, ModelError, EnvNotFound, RendererError, Unavailable
    )
    kind = choose_engine(config)
    gpus = Gpus.here()
    with checklist.check("versions") as say:
        packages = ("torch", "transformers", "accelerate", "gymnasium")
        say(
            f"python {platform.python_version()}, "
            + ", ".join(f"{p} {version(p)}" for p in packages)
        )
    with checklist.check("GPUs") as say:
        machine = describe_machine(config, kind, gpus)
        say(f"{gpus.count} of {gpus.memory_gib:.0f} GiB" if gpus.count else "none: CPU")
        say(f"engine {kind}" + (f", servers on {machine.servers}" if any(machine.servers) else ""))
    if kind == "sglang" and config.sglang.mode == "spawn":
        with checklist.check("SGLang") as say:
            say(_sglang_version(find_interpreter(config.sglang.python)))
        with checklist.check("ports") as say:
            holders = [hold_port(), hold_port()]
            say(", ".join(str(h.getsockname()[1]) for h in holders) + f" of {HOST} can be had")
            for holder in holders:
                holder.close()
    prompts: dict[str, list[Message]] = {}
    for name, env in envs.items():
        with checklist.check(f"env {name}".strip()) as say:
            limit = config.rollout.env_timeout_s
            for line in preflight({"": env}, limit):
                say(line)
            prompts[name] = asyncio.run(_reset(config.envs[name], env, config.seed, limit))
            tools = [f"{tool} {seconds:g} s" for tool, seconds in tool_limits({"": env})]
            say(f"reset gives {len(prompts[name])} messages within {limit:g} s")
            say("time limits of tools: " + (", ".join(tools) or "none needs one"))
    with tempfile.TemporaryDirectory(prefix="agentrl-doctor-") as folder:
        _examine_model(checklist, config, envs, prompts, Path(folder))
    checklist.finish()
    return not checklist.num_failed


async def _reset(config: EnvConfig, env: Any, seed: int, limit_s: float) -> list[Message]:
    """What an env of its own says first, of the first task; what it took is given back."""
    task = next(iter(tasks_of(env, "train") or ()), None)
    own: Any = make_env(config.id, **config.kwargs)
    options = {"task": task}
    try:
        if hasattr(own.unwrapped, "acquire"):
            await asyncio.wait_for(own.unwrapped.acquire(), limit_s)
        if inspect.iscoroutinefunction(own.unwrapped.reset):
            reset = own.unwrapped.reset(seed=seed, options=options)
            observation, _ = await asyncio.wait_for(reset, limit_s)
        else:
            observation, _ = await run_in_thread(
                lambda: own.reset(seed=seed, options=options), timeout_s=limit_s
            )
        return to_messages(observation)
    finally:
        closing = own.close()
        if inspect.isawaitable(closing):
            await closing
        await shut_down()


def _sglang_version(python: str) -> str:
    """Raises ConfigError where it has none, or one that is too old."""
    asked = subprocess.run(
        [python, "-P", "-c", ASK_VERSION], capture_output=True, text=True, timeout=60
    )
    if asked.returncode:
        last = asked.stderr.strip().splitlines()[-1:]
        raise ConfigError(f"{python} has no SGLang ({' '.join(last)}): see docs/sglang.md")
    found = asked.stdout.strip()
    if release(found) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(f"{python} has SGLang {found}; {oldest} is the oldest that works")
    newer = ", newer than any that agentrl knows" if release(found) > NEWEST_KNOWN else ""
    return f"{found} in {python}{newer}"


def _examine_model(
    checklist: Checklist,
    config: RunConfig,
    envs: Mapping[str, Any],
    prompts: Mapping[str, list[Message]],
    folder: Path,
) -> None:
    learner = engine = fleet = None
    renderers: dict[str, Renderer] = {}
    with checklist.check("model") as say:
        learner, tokenizer = make_learner(config, make_accelerator(config), Ranks())
        size = sum(p.numel() for p in learner.model.parameters())
        device = learner.accelerator.device
        say(f"{config.model.name_or_path}: {size / 1e9:.3g} billion parameters on {device}")
        renderers = make_renderers(config, envs, tokenizer)
    if learner is None or not renderers:
        for name in ("template", "disk", "engine"):
            checklist.skip(name, "needs the model")
        return
    prompt: list[int] = []
    with checklist.check("template") as say:
        for name, renderer in renderers.items():
            say(f"{name}: {renderer.probe()}".removeprefix(": "))
            if name in prompts:
                prompt = renderer.prompt(prompts[name])
                say(f"the prompt of env {name}".strip() + f" has {len(prompt)} tokens")
    with checklist.check("disk") as say:
        say(_room_on_disk(config, learner.model))
    with checklist.check("engine") as say:
        fleet = make_servers(config, learner, folder)
        engine = make_engine(config, learner, fleet, folder)
        say(type(engine).__name__)
    if engine is None:
        checklist.skip("start", "needs the engine")
        return
    renderer = next(iter(renderers.values()))
    probe = make_probe(config, learner, probe_tokens(config, renderer))
    asyncio.run(_examine_engine(checklist, config, engine, fleet, learner, renderer, probe, prompt))


def _room_on_disk(config: RunConfig, model: Any) -> str:
    """Raises ConfigError where checkpoints will not fit."""
    place = Path(config.output_dir).absolute()
    while not place.exists():
        place = place.parent
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights = trained if config.lora else sum(p.numel() for p in model.parameters())
    one = (weights + 2 * trained) * FP32  # with two moments
    needed, free = one * (config.checkpoint.save_total_limit + 1), shutil.disk_usage(place).free
    text = f"{gib(free)} free at {place}, {gib(needed)} for checkpoints, one being written included"
    if needed > free:
        raise ConfigError(f"{text}; lower checkpoint.save_total_limit or change output_dir")
    return text


async def _examine_engine(
    checklist: Checklist,
    config: RunConfig,
    engine: Engine,
    fleet: Fleet | None,
    learner: Any,
    renderer: Any,
    probe: Probe,
    prompt: list[int],
) -> None:
    started = synced = False
    try:
        with checklist.check("start") as say:
            began = time.monotonic()
            await engine.start()
            started = True
            say(f"ready in {time.monotonic() - began:.0f} s")
            say(", ".join(fleet.urls) if fleet else "in this process")
        if started and fleet:
            with checklist.check("KV cache") as say:
                say(await _kv_rooms(config, fleet))
        if started:
            with checklist.check("weights") as say:
                if config.sglang.colocate:
                    await engine.sleep()
                metrics = await engine.update_weights(learner.weights(), learner.version, probe)
                synced = True
                say(", ".join(f"{name} {value:.3g}" for name, value in metrics.items()))
        if synced and prompt:
            with checklist.check("one turn") as say:
                say(await _one_turn(config, engine, renderer, prompt))
        else:
            checklist.skip("one turn", "needs weights and the env's prompt")
    finally:
        await engine.close()


async def _kv_rooms(config: RunConfig, fleet: Fleet) -> str:
    """What the servers' caches hold, and what the config may need at most."""
    http, _ = open_http(len(fleet.urls))
    async with http:
        infos = [await SGLangServer(url, http).describe() for url in fleet.urls]
    tokens = sum(info.kv_tokens for info in infos)
    wanted = num_concurrent(config) * config.rollout.max_context_tokens
    fits = "" if wanted <= tokens else ": more than that, so some will wait"
    kinds = ", ".join(sorted({f"SGLang {info.sglang} in {info.dtype}" for info in infos}))
    return (
        f"{tokens} tokens in {len(infos)} of {kinds}; {num_concurrent(config)} requests of "
        f"rollout.max_context_tokens={config.rollout.max_context_tokens} are {wanted}{fits}"
    )


async def _one_turn(config: RunConfig, engine: Engine, renderer: Any, prompt: list[int]) -> str:
    sampling = Sampling(
        max_new_tokens=min(16, config.rollout.max_new_tokens),
        temperature=config.rollout.temperature,
        stop_token_ids=renderer.stop_token_ids,
    )
    began = time.monotonic()
    async with asyncio.timeout(config.rollout.generate_timeout_s):
        turn = await engine.generate(prompt, sampling, session="doctor")
    await engine.release("doctor")
    seconds = time.monotonic() - began
    text = renderer.decode(turn.token_ids)
    return f"{len(turn.token_ids)} tokens in {seconds:.2f} s, by {turn.finish_reason}: {text!r}"
