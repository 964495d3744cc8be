"""The config of the learner: advantages, loss and optimizer; docs/estimators.md has formulas."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from agentrl.config_section import Section

TOKEN_ESTIMATORS = ("reinforce_plus_plus", "gae")
"""Those whose advantages differ from token to token, so that a KL may be part of the reward."""

_TRL_LOSS_TYPES = {
    "grpo": "loss_type=ppo with aggregation=seq_mean_token_mean",
    "dr_grpo": "loss_type=ppo with aggregation=seq_mean_token_sum_norm and "
    "advantage.scale_rewards=none",
    "dapo": "loss_type=ppo with aggregation=token_mean (and epsilon_high=0.28)",
    "bnpo": "loss_type=ppo with aggregation=token_mean",
    "gspo": "loss_type=ppo with importance_sampling_level=sequence",
}


def _not_trls(value: Any) -> Any:
    if value in _TRL_LOSS_TYPES:
        raise ValueError(f"what others call {value} is {_TRL_LOSS_TYPES[value]}")
    return value


class AdvantageConfig(Section):
    """How much better an episode, a turn or a token did than was to be expected."""

    estimator: Literal[
        "grpo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "pass_at_k",
        "gae",
    ] = "grpo"
    """gae trains a value head beside the policy; the others compare episodes."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What grpo divides by: the standard deviation of the group's rewards, of the batch's, or
    nothing (Dr. GRPO).
    """
    level: Literal["episode", "turn"] = "episode"
    """turn: each turn is compared by the rewards from it on, discounted by gamma per turn."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """The discount: per turn with level=turn; per sampled token with gae and
    reinforce_plus_plus.
    """
    lam: float = Field(default=0.95, ge=0, le=1)
    """Of gae: 1 trusts rewards alone, 0 the value of the next token alone."""
    whiten_advantages: bool = True
    """Of gae: shift and scale the batch's advantages to mean 0 and standard deviation 1."""
    pass_k: int = Field(default=4, ge=1)
    """Of pass_at_k: the episodes of which the best one counts; less than num_generations."""
    length_penalty: Literal["none", "overlong", "relative"] = "none"
    """overlong: long episodes lose reward near max_episode_tokens (DAPO). relative: the longer ones
    of a group do, and the shorter ones gain where their reward is above its mean (Kimi k1.5).
    """
    length_penalty_weight: float = Field(default=1.0, gt=0)
    """What the penalty is multiplied by."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """Of overlong: the last so many of max_episode_tokens, over which the penalty grows to 1."""

    @model_validator(mode="after")
    def _options_have_a_use(self) -> Self:
        if (self.length_penalty == "overlong") != (self.overlong_buffer_tokens > 0):
            raise ValueError("length_penalty=overlong and overlong_buffer_tokens go together")
        if self.level == "turn" and self.estimator not in ("grpo", "rloo"):
            raise ValueError("level=turn goes with estimator=grpo or rloo")
        gae = self.estimator == "gae"
        discounts = self.level == "turn" or self.estimator in TOKEN_ESTIMATORS
        self.require_use(
            {
                "gamma": (discounts, "level=turn, or estimator=gae or reinforce_plus_plus"),
                "scale_rewards": (self.estimator == "grpo", "estimator=grpo"),
                "pass_k": (self.estimator == "pass_at_k", "estimator=pass_at_k"),
                "lam": (gae, "estimator=gae"),
                "whiten_advantages": (gae, "estimator=gae"),
                "length_penalty_weight": (self.length_penalty != "none", "a length_penalty"),
            }
        )
        return self


class LossConfig(Section):
    """The objective. Names follow TRL's GRPOConfig and PPOConfig."""

    loss_type: Annotated[
        Literal["ppo", "cispo", "sapo", "reinforce"], BeforeValidator(_not_trls)
    ] = "ppo"
    """ppo: clipped where it pays off. cispo: the ratio is clipped, every token keeps its gradient.
    sapo: a soft gate. reinforce: no ratio.
    """
    aggregation: Literal[
        "token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "prompt_mean"
    ] = "token_mean"
    """token_mean: over all tokens of the step. seq_mean_token_mean: over an episode's tokens, then
    over episodes. seq_mean_token_sum_norm: sum over an episode's tokens / `max_episode_tokens`,
    then mean over episodes. prompt_mean: over all tokens of a group, then over groups.
    """
    importance_sampling_level: Literal["token", "turn", "sequence"] = "token"
    """What has a ratio of its own; that of a turn or sequence is the geometric mean of its tokens',
    and wants an epsilon of about 3e-4. With ppo, sequence is GSPO, turn its form for many turns.
    """
    epsilon: float = Field(default=0.2, gt=0)
    """The ratio is clipped below at 1 - epsilon."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """The ratio is clipped above at 1 + epsilon_high (default: epsilon)."""
    delta: float | None = Field(default=None, gt=1)
    """Of ppo: a ratio over it pushes no token of a bad episode further down (dual clip)."""
    sapo_temperature_pos: float = Field(default=1.0, gt=0)
    """How steep the gate of sapo is for good episodes."""
    sapo_temperature_neg: float = Field(default=1.05, gt=0)
    """Likewise for bad ones."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference model. 0: no reference is loaded."""
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] = "k3+"
    """k3+: the value of k3 with the gradient of k2. k1 in the loss pulls nowhere on average."""
    kl_in_reward: bool = False
    """Take the KL off each token's reward instead of adding it to the loss."""
    beta_schedule: Literal["constant", "linear", "adaptive"] = "constant"
    """linear: to beta_end at max_steps. adaptive: towards a KL of kl_target."""
    beta_end: float = Field(default=0.0, ge=0)
    """Of the linear schedule."""
    kl_target: float = Field(default=0.1, gt=0)
    """Of the adaptive schedule, in nats per token."""
    kl_horizon: int = Field(default=100, ge=1)
    """Of the adaptive schedule: batches in which beta changes by about 20 % at most."""
    vf_coef: float = Field(default=0.1, gt=0)
    """Weight of the value head's loss, with advantage.estimator=gae."""
    cliprange_value: float = Field(default=0.2, gt=0)
    """How far a value may move from that before the update, likewise."""
    old_logprobs: Literal["skip", "recompute", "rollout"] = "skip"
    """skip: the current ones, exact with one update per batch. rollout: the engine's, with which
    the ratio itself corrects for the engine. recompute: the learner's, before the first update.
    """
    importance_sampling_mode: Literal[
        "none",
        "token_truncate",
        "token_mask",
        "sequence_truncate",
        "sequence_mask",
        "geometric_mask",
    ] = "token_truncate"
    """How the learner's and the engine's probabilities are reconciled: their ratio weighs, up to
    the cap, or only within [min, cap] (token_mask: IcePop). sequence: the product over a sequence.
    geometric: its mean per token, which wants bounds of about [0.999, 1.001].
    """
    importance_sampling_cap: float = Field(default=2.0, gt=0)
    """The largest weight."""
    importance_sampling_min: float = Field(default=0.0, ge=0)
    """Of the masks: the smallest weight."""
    mask_truncated_completions: bool = False
    """Do not train on episodes that a limit on length or turns cut."""
    max_mismatch: float = Field(default=1.0, gt=0)
    """Mean |learner - engine| logprob, in nats per token, over which the run stops."""
    warn_mismatch: float = Field(default=0.05, gt=0)
    """Likewise, over which it warns; engine and learner in bfloat16 differ by about 0.04."""

    @model_validator(mode="after")
    def _options_have_a_use(self) -> Self:
        if self.importance_sampling_min >= self.importance_sampling_cap:
            raise ValueError("importance_sampling_min must be less than importance_sampling_cap")
        if self.importance_sampling_min and not self.importance_sampling_mode.endswith("mask"):
            raise ValueError(
                "importance_sampling_min needs importance_sampling_mode=token_mask, sequence_mask "
                "or geometric_mask"
            )
        if self.beta == 0 and (self.kl_in_reward or self.beta_schedule != "constant"):
            raise ValueError("kl_in_reward and beta_schedule need beta > 0")
        if self.loss_type == "reinforce" and self.importance_sampling_level != "token":
            raise ValueError("loss_type=reinforce has no ratio: importance_sampling_level=token")
        if self.old_logprobs == "rollout":
            if self.loss_type == "reinforce":
                raise ValueError("loss_type=reinforce has no ratio: old_logprobs=skip or recompute")
            if self.importance_sampling_mode not in ("none", "token_truncate"):
                raise ValueError(
                    f"importance_sampling_mode={self.importance_sampling_mode} needs "
                    "old_logprobs=skip or recompute: with rollout the ratio itself corrects"
                )
        adaptive = self.beta_schedule == "adaptive"
        self.require_use(
            {
                "delta": (self.loss_type == "ppo", "loss_type=ppo"),
                "sapo_temperature_pos": (self.loss_type == "sapo", "loss_type=sapo"),
                "sapo_temperature_neg": (self.loss_type == "sapo", "loss_type=sapo"),
                "kl_estimator": (self.beta > 0, "beta > 0"),
                "beta_end": (self.beta_schedule == "linear", "beta_schedule=linear"),
                "kl_target": (adaptive, "beta_schedule=adaptive"),
                "kl_horizon": (adaptive, "beta_schedule=adaptive"),
            }
        )
        return self


class OptimConfig(Section):
    """AdamW and its schedule, which moves once per optimizer step."""

    learning_rate: float = Field(default=1e-6, gt=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    adam_epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    num_iterations: int = Field(default=1, ge=1)
    """Times a batch is trained on."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per pass over a batch; a divisor of `rollout.prompts_per_step`."""
    micro_batch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = 8192
    """Tokens per forward pass and rank; changes memory, never the result. auto: as many as fit, by
    a trial before the first update.
    """
    share_prefixes: bool = True
    """Compute what the sequences of a row begin with alike once; changes time, never the result."""
    max_bad_steps: int = Field(default=3, ge=1)
    """Steps in a row with non-finite gradients, each skipped, after which the run stops."""
