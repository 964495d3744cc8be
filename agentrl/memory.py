"""What memory a run takes, by its config and its model's shape; "about" marks an estimate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentrl.config import LoraConfig, RunConfig
from agentrl.models import ModelError, adapted_layers, linear_sizes, locate_model

GIB = 2**30
FP32, BF16 = 4, 2  # bytes
SERVER_FRACTION = 0.9  # what SGLang chooses on a large GPU, about
SERVER_WORK_GIB = 6.0  # per GPU, beside that fraction: activations and graphs, about
SERVER_ASLEEP_GIB = 2.0  # per GPU: CUDA context and graphs stay, about
PROCESS_GIB = 1.0  # of a process on a CPU: interpreter and libraries, about


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a model's memory follows from, and how long its sequences may be.

    Example:
        shape.kv_bytes_per_token(BF16)  ->  131072, with 32 layers of 8 KV heads of 128
    """

    num_parameters: int  # tied ones once
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    max_positions: int  # tokens of the longest sequence
    linear_sizes: Mapping[str, int] = field(default_factory=dict)  # see agentrl.models

    def kv_bytes_per_token(self, num_bytes: int, num_gpus: int = 1) -> int:
        """Over all GPUs; with more of them than KV heads, each holds one."""
        heads = math.ceil(self.num_kv_heads / num_gpus) * num_gpus
        return 2 * self.num_layers * heads * self.head_dim * num_bytes

    def num_adapter_parameters(self, lora: LoraConfig) -> int:
        """Raises ConfigError where it has no such layers."""
        names = adapted_layers(lora, self.linear_sizes)
        return lora.r * sum(self.linear_sizes[name] for name in names)

    def activation_bytes(self, num_tokens: int, *, checkpointing: bool) -> int:
        """Of a forward pass that is kept for the backward pass, about."""
        layer = 24 * self.hidden_size + 8 * self.intermediate_size
        if not checkpointing:
            return num_tokens * self.num_layers * layer
        return num_tokens * (self.num_layers * FP32 * self.hidden_size + layer)


def read_shape(name_or_path: str) -> ModelShape:
    """The shape of a folder's or a cached model; no weights are read, nothing is fetched.

    Raises:
        ModelError: it is not on this machine.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    place = locate_model(name_or_path)
    try:
        config: Any = AutoConfig.from_pretrained(place, local_files_only=True)
        with init_empty_weights():
            model: Any = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        if Path(place).is_dir():
            raise ModelError(f"{name_or_path} has no config that can be read: {error}") from error
        raise ModelError(
            f"the shape of {name_or_path} is not known on this machine, which has no config.json "
            f"of it: run `hf download {name_or_path} config.json`, or write a folder into "
            "model.name_or_path"
        ) from error
    text, tied = config.get_text_config(), set(model.all_tied_weights_keys)
    heads = text.num_attention_heads
    return ModelShape(
        num_parameters=sum(p.numel() for name, p in model.named_parameters() if name not in tied),
        num_layers=text.num_hidden_layers,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        max_positions=text.max_position_embeddings,
        linear_sizes=linear_sizes(model),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where a run is to run, and what it chose there."""

    engine: Literal["sglang", "local"]
    engine_bytes: int  # of a value of its weights and keys: 2 in bfloat16, 4 in float32
    bf16: bool  # the learner's forward pass
    memory_gib: float  # of one GPU, or of the machine where there is none
    gpus: Sequence[int] = ()
    num_learners: int = 1  # processes on this machine; on a GPU each
    num_shards: int = 1  # processes of all machines that the learner's weights are spread over
    servers: Sequence[Sequence[int]] = ()  # the GPUs of each that is spawned here
    cpu_kv_tokens: int = 0  # of a server without a GPU
    weight_sync: str = ""  # how weights get to the servers


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """One memory, and what shall lie in it at the same time."""

    name: str
    capacity: float  # bytes
    needs: Sequence[tuple[str, float]]  # what, and its bytes

    @property
    def total(self) -> float:
        return sum(size for _, size in self.needs)

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity

    def lines(self) -> Iterator[str]:
        yield f"{self.name}:"
        for what, size in self.needs:
            yield f"  {gib(size):>11}  {what}"
        verdict = "fits" if self.fits else "DOES NOT FIT"
        yield f"  {gib(self.total):>11}  of {gib(self.capacity)}: {verdict}"


def num_alive(config: RunConfig) -> int:
    """Episodes in play at once."""
    rollout = config.rollout
    groups = max(
        (rollout.max_staleness + 1) * rollout.prompts_per_step,
        math.ceil(rollout.prompts_per_step * rollout.oversampling),
    )
    return max(
        groups * rollout.num_generations, config.eval.num_tasks * config.eval.num_generations
    )


def num_concurrent(config: RunConfig) -> int:
    """Requests in the engine at once: as the limit says, or as many episodes as there are."""
    return min(config.rollout.max_concurrent_generations, num_alive(config))


def memory(
    config: RunConfig, machine: Machine, shape: ModelShape, objections: list[str]
) -> Iterator[str]:
    """Of the model, the engine and the learner; what cannot work goes to `objections`."""
    per_token = shape.kv_bytes_per_token(machine.engine_bytes)
    yield (
        f"model: {shape.num_parameters / 1e9:.3g} billion parameters; a token's keys and values: "
        f"2 x {shape.num_layers} layers x {shape.num_kv_heads} KV heads x {shape.head_dim} x "
        f"{machine.engine_bytes} bytes = {per_token / 1024:g} KiB"
    )
    longest = config.rollout.max_context_tokens * per_token
    yield (
        f"an episode of rollout.max_context_tokens={config.rollout.max_context_tokens}: "
        f"{gib(longest)}; {num_concurrent(config)} at once: {gib(longest * num_concurrent(config))}"
    )
    for room in rooms(config, machine, shape):
        yield from room.lines()
        if not room.fits:
            objections.append(
                f"{room.name} would take {gib(room.total)} of {gib(room.capacity)}; "
                + remedy(config, machine)
            )
    if machine.engine == "sglang":
        yield from server_memory(config, machine, shape, objections)


def rooms(config: RunConfig, machine: Machine, shape: ModelShape) -> Iterator[Room]:
    """The memories that the learner uses, at their fullest."""
    num, sglang, lora = shape.num_parameters, config.sglang, config.lora
    adapters = shape.num_adapter_parameters(lora) if lora else 0
    processes = 1 if machine.gpus else machine.num_learners  # that share this memory
    share = processes / machine.num_shards
    shared = f", spread over {machine.num_shards} processes" if machine.num_shards > 1 else ""
    weights = [(f"the learner's weights, float32{shared}", (num + adapters) * FP32 * share)]
    if config.loss.beta > 0 and lora is None:
        weights.append((f"the reference's weights, float32{shared}", num * FP32 * share))
    trained, of_them = (adapters, " of the adapters") if lora else (num, "")
    tokens = config.optim.micro_batch_tokens
    if tokens == "auto":  # it takes what is left, but no less than the longest episode
        tokens = config.rollout.max_context_tokens
    activations = shape.activation_bytes(tokens, checkpointing=config.model.gradient_checkpointing)
    training = [
        *weights,
        (f"gradients{of_them}{shared}", trained * FP32 * share),
        (f"two moments of Adam{of_them}{shared}", trained * 2 * FP32 * share),
        (f"activations of {tokens} tokens, about", processes * activations),
    ]
    if machine.num_shards > 1:
        # One layer that computes and the one that is gathered ahead.
        layers = 2 * num / shape.num_layers * FP32
        training.append(("the layers that are gathered at a time, about", processes * layers))
    elif machine.bf16:
        training.append(("bfloat16 copies of the weights", processes * num * BF16))
    capacity = machine.memory_gib * GIB
    copy, per_token = num * machine.engine_bytes, shape.kv_bytes_per_token(machine.engine_bytes)
    device = "the learner's GPU" if machine.gpus else "this machine's memory"
    if machine.engine == "local":
        slots = config.rollout.max_concurrent_generations * config.rollout.max_context_tokens
        training.append(("keys and values of the engine's slots", slots * per_token))
        shares = lora is None and machine.num_shards == 1 and machine.engine_bytes == FP32
        if not shares or config.rollout.max_staleness > 0:
            training.append(("the engine's copy of the weights", copy))
        if not machine.gpus:
            training.append(("the engine's packed linear layers, about", copy))
    elif not machine.gpus:
        for number in range(len(machine.servers)):
            kv = max(machine.cpu_kv_tokens, config.rollout.max_context_tokens) * per_token
            training.append((f"server {number}: weights, keys and values", copy + kv))
            training.append((f"server {number}: its processes, about", 2 * PROCESS_GIB * GIB))
    if not machine.gpus:
        name = "the learner's processes, about" if processes > 1 else "the learner's process, about"
        training.append((name, processes * PROCESS_GIB * GIB))
    elif sglang.colocate and machine.engine == "sglang":
        fraction = sglang.mem_fraction or SERVER_FRACTION
        learner = sum(size for _, size in weights)
        server = (f"server: {fraction:g} of what is left", fraction * (capacity - learner))
        overhead = ("server: its working memory, about", SERVER_WORK_GIB * GIB)
        yield Room(
            name=f"{device} while it samples", capacity=capacity, needs=[*weights, server, overhead]
        )
        training.append(("the server asleep, about", SERVER_ASLEEP_GIB * GIB))
    yield Room(name=f"{device} while it trains", capacity=capacity, needs=training)


def remedy(config: RunConfig, machine: Machine) -> str:
    if machine.engine == "local":
        return (
            "lower optim.micro_batch_tokens, rollout.max_concurrent_generations or "
            "rollout.max_context_tokens, or set model.gradient_checkpointing=true"
        )
    text = (
        "lower optim.micro_batch_tokens, set model.gradient_checkpointing=true, spread the weights "
        "over more processes by FSDP2 (configs/accelerate/)"
    )
    if config.sglang.colocate:
        text += ", lower sglang.mem_fraction"
    if config.lora is None:
        text += ", train LoRA adapters (lora.r=16)"
    return text + ", or take a smaller model"


def server_memory(
    config: RunConfig, machine: Machine, shape: ModelShape, objections: list[str]
) -> Iterator[str]:
    """Whether the keys and values of the longest episodes fit into one server."""
    sglang, tokens = config.sglang, config.rollout.max_context_tokens
    num_gpus, num_servers = sglang.tensor_parallel_size, len(machine.servers) or len(sglang.urls)
    requests = math.ceil(num_concurrent(config) / max(num_servers, 1))
    per_token = shape.kv_bytes_per_token(machine.engine_bytes, num_gpus)
    weights, wanted = shape.num_parameters * machine.engine_bytes, requests * tokens * per_token
    yield "each server:"
    yield f"  {gib(weights):>11}  weights, over {count(num_gpus, 'GPU')}"
    yield f"  {gib(wanted):>11}  keys and values of {requests} requests at full length, unshared"
    if not machine.servers:
        yield "  its memory is not known here; it starts only where both fit, or requests wait"
        return
    if not machine.gpus:
        room = max(machine.cpu_kv_tokens, tokens)
        yield f"  {gib(room * per_token):>11}  room for {room} tokens, on the CPU"
    else:
        own = shape.num_parameters * FP32 / GIB / machine.num_shards
        taken = own if sglang.colocate else 0.0
        fraction = sglang.mem_fraction or SERVER_FRACTION
        static = fraction * (machine.memory_gib - taken) * GIB * num_gpus
        room = int((static - weights) // per_token)
        yield (
            f"  {gib(static):>11}  for both: sglang.mem_fraction={fraction:g} of "
            f"{gib((machine.memory_gib - taken) * GIB)} x {count(num_gpus, 'GPU')}"
            + ("" if sglang.mem_fraction else ", as SGLang chooses, about")
        )
    if room < tokens:
        objections.append(
            f"a server has room for the keys and values of {max(room, 0)} tokens, fewer than "
            f"rollout.max_context_tokens={tokens}; raise sglang.mem_fraction or "
            "sglang.tensor_parallel_size, or lower rollout.max_context_tokens"
        )
    elif room >= requests * tokens:
        yield f"  room for {room} tokens: all {requests} requests fit at full length"
    else:
        yield (
            f"  room for {room} tokens: {room // tokens} of {requests} requests fit at full "
            "length, others wait; lower rollout.max_concurrent_generations if many do"
        )


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def count(number: int, noun: str, ending: str = "s") -> str:
    return f"{number} {noun}{ending if number != 1 else ''}"
