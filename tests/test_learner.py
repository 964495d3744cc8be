"""The learner on a tiny Llama: exact gradients in every layout, and steps it must not take."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.attention import register_attention
from agentrl.config_file import make_config
from agentrl.trajectory import Trajectory, TrajectoryGroup
from agentrl.types import Completion, StopReason, Task
from train.learner import Learner, TrainingError
from train.packing import SHARED_BLOCK

AGGREGATIONS = ("seq_mean_token_mean", "seq_mean_token_sum_norm", "token_mean", "prompt_mean")
LOSSES = [
    *itertools.product(("ppo", "cispo", "sapo"), ("token", "turn", "sequence")),
    ("reinforce", "token"),
]
CORRECTIONS = (
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_mask",
)
TEMPERATURE = 0.9

pytestmark = [
    pytest.mark.filterwarnings("ignore:learner and engine differ"),  # the logprobs are invented
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler"),  # the step is intercepted
]


def make_model(tied=True):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        attn_implementation=register_attention(),
    )
    return LlamaForCausalLM(config)


def make_learner(model=None, **changes):
    """`changes` are `section__key` values."""
    values = {
        "model": {"name_or_path": "tiny"},
        "env": {"id": "none"},
        "rollout": {"temperature": TEMPERATURE, "max_episode_tokens": 40},
        "advantage": {},
        "loss": {"max_mismatch": 1e9, "importance_sampling_mode": "none"},
        "optim": {"learning_rate": 1e-3, "max_grad_norm": 1e9},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        values[section][key] = value
    config = make_config(values)
    return Learner(model or make_model(), config, Accelerator(cpu=True))


def random_groups(seed=0, num_groups=3, size=4):
    """Two turns each, of very different length, with a tool's tokens between them."""
    rng = np.random.default_rng(seed)
    shown = rng.integers(0, 97, SHARED_BLOCK + 1).tolist()  # to all groups
    return [random_group(rng, size, f"g{index}", shown) for index in range(num_groups)]


def random_group(rng, size, name, shown):
    prompt = shown + rng.integers(0, 97, rng.integers(2, SHARED_BLOCK + 9)).tolist()
    trajectories = []
    for index in range(size):
        trajectory = Trajectory(id=f"{name}-{index}")
        trajectory.observe(prompt)
        for _ in range(2):
            n = int(rng.integers(1, 8))
            trajectory.act(
                Completion(
                    token_ids=rng.integers(0, 97, n).tolist(),
                    logprobs=(-rng.random(n) * 4).tolist(),
                    finish_reason="stop",
                    versions=[0] * n,
                )
            )
            trajectory.observe(rng.integers(0, 97, int(rng.integers(1, 5))).tolist())
        trajectory.reward = float(index % 2) + 0.25 * float(rng.random())
        trajectory.stop_reason = StopReason.DONE
        trajectories.append(trajectory)
    return TrajectoryGroup(id=name, task=Task(id=name), trajectories=trajectories)


def gradient(learner, groups):
    """What `update` hands to the optimizer: name -> tensor."""
    caught = {}

    def step(*_, **__):
        for name, parameter in learner.model.named_parameters():
            if parameter.requires_grad:
                caught[name] = parameter.grad.clone()

    learner.optimizer.step = step
    learner.update(groups)
    return caught


def plain_gradient(model, groups, aggregation, max_episode_tokens=40, scale=1.0):
    """Every trajectory by itself through the whole model, without this project's code."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    members = [t for group in groups for t in group.trajectories]
    num_tokens = sum(sum(t.loss_mask) for t in members)
    loss = torch.zeros(())
    for group in groups:
        rewards = np.array(group.rewards)
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            ids = torch.tensor(trajectory.token_ids)
            mask = torch.tensor(trajectory.loss_mask)[1:]
            log_p = (model(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
            log_p = log_p.gather(1, ids[1:, None])[:, 0]
            weight = {
                "seq_mean_token_mean": 1 / (mask.sum() * len(members)),
                "token_mean": 1 / num_tokens,
                "seq_mean_token_sum_norm": 1 / (max_episode_tokens * len(members)),
                "prompt_mean": 1
                / (sum(sum(t.loss_mask) for t in group.trajectories) * len(groups)),
            }[aggregation]
            loss = loss - float(advantage) * weight * (log_p * mask).sum()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(first, second, tolerance=1e-5):
    assert first.keys() == second.keys()
    for name in first:
        scale = float(second[name].abs().max())
        torch.testing.assert_close(
            first[name], second[name], atol=tolerance * scale, rtol=0, msg=name
        )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_shared_prompts_give_the_gradient_of_separate_sequences(aggregation):
    """F003, F018, F058, F059, F061: against the plain way."""
    groups = random_groups()
    learner = make_learner(loss__aggregation=aggregation)
    expected = plain_gradient(learner.model, groups, aggregation)
    assert_same(gradient(learner, groups), expected)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_no_layout_of_a_batch_changes_its_gradient(aggregation):
    """F057: micro-batch budgets, and the order of groups and members."""
    groups = random_groups()
    whole = gradient(make_learner(loss__aggregation=aggregation), groups)
    for budget in (70, 100, 160):
        learner = make_learner(loss__aggregation=aggregation, optim__micro_batch_tokens=budget)
        assert_same(gradient(learner, groups), whole)
    shuffled = [
        TrajectoryGroup(id=g.id, task=g.task, trajectories=g.trajectories[::-1])
        for g in reversed(groups)
    ]
    assert_same(gradient(make_learner(loss__aggregation=aggregation), shuffled), whole)


@pytest.mark.parametrize("level", ["turn", "sequence"])
def test_no_layout_of_a_batch_changes_the_ratio_of_a_turn_or_a_sequence(level):
    """F057: the tokens that share a ratio stay together."""
    groups = random_groups()
    options = {"loss__importance_sampling_level": level, "loss__old_logprobs": "rollout"}
    whole = gradient(make_learner(**options), groups)
    for layout in ({"optim__micro_batch_tokens": 70}, {"optim__share_prefixes": False}):
        assert_same(gradient(make_learner(**options, **layout), groups), whole)


@pytest.mark.parametrize(
    "options",
    [
        {
            "loss__loss_type": loss_type,
            "loss__importance_sampling_level": level,
            "loss__aggregation": aggregation,
            "loss__old_logprobs": "skip" if loss_type == "reinforce" else "rollout",
        }
        for loss_type, level in LOSSES
        for aggregation in AGGREGATIONS
    ]
    + [{"loss__beta": 0.1, "loss__kl_estimator": k} for k in ("k1", "k2", "k3", "k3+")]
    + [{"loss__importance_sampling_mode": mode} for mode in CORRECTIONS]
    + [{"loss__old_logprobs": "recompute"}, {"loss__entropy_coef": 0.1}],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_env_tokens_carry_no_gradient(options):
    """F006: the logits that predict an env's token get a gradient of exactly 0, and no column
    of a masked position reaches loss or gradient."""
    groups = random_groups(num_groups=1)
    learner = make_learner(make_model(tied=False), **options)
    seen = []

    def keep_gradient(module, args, output):
        if output.requires_grad:
            output.retain_grad()
            seen.append(output)

    learner.model.get_decoder().norm.register_forward_hook(keep_gradient)
    rows = []
    original = learner._loss_inputs
    learner._loss_inputs = lambda row, *rest: rows.append(row) or original(row, *rest)
    first = gradient(learner, groups)
    (micro_batch,) = [row.micro_batch for row in rows]
    predictors = torch.zeros(len(micro_batch.input_ids), dtype=torch.bool)
    predictors[micro_batch.previous[micro_batch.trained]] = True
    hidden_gradient = seen[-1].grad[0]
    assert not hidden_gradient[~predictors].any()
    assert hidden_gradient[predictors].any()
    for trajectory in groups[0].trajectories:
        for index, sampled in enumerate(trajectory.loss_mask):
            if not sampled:
                trajectory.logprobs[index] = -17.0
                trajectory.versions[index] = 99
    second = gradient(make_learner(make_model(tied=False), **options), groups)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_batch_without_signal_leaves_everything_bit_identical():
    """F067, F054: Adam with history and weight decay."""
    learner = make_learner(optim__weight_decay=0.1)
    learner.update(random_groups())
    groups = random_groups(seed=1)
    for trajectory in itertools.chain.from_iterable(g.trajectories for g in groups):
        trajectory.reward = 0.9
    weights = copy.deepcopy(learner.model.state_dict())
    optimizer = copy.deepcopy(learner.optimizer.state_dict())
    metrics = learner.update(groups)
    assert metrics["train/empty_steps"] == 1
    assert metrics["train/optimizer_steps"] == 0
    assert metrics["num_tokens"] > 0
    assert learner.version == 1  # of the weights, which stayed
    assert all(torch.equal(weights[n], t) for n, t in learner.model.state_dict().items())
    assert_equal(optimizer, learner.optimizer.state_dict())


def assert_equal(first, second):
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_equal(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for a, b in zip(first, second, strict=True):
            assert_equal(a, b)
    else:
        assert first == second


def test_groups_without_signal_still_count_in_the_denominator():
    groups = random_groups()
    for trajectory in groups[0].trajectories:
        trajectory.reward = 1.0
    learner = make_learner()
    assert_same(gradient(learner, groups), plain_gradient(learner.model, groups, "token_mean"))


def test_steps_with_non_finite_gradients_are_skipped_and_end_the_run_when_they_persist():
    """F068."""
    learner = make_learner(optim__max_bad_steps=3)
    before = copy.deepcopy(learner.model.state_dict())
    poison = learner.model.model.layers[0].mlp.up_proj.weight.register_hook(
        lambda grad: grad * float("nan")
    )
    for _ in range(2):
        assert learner.update(random_groups())["train/bad_steps"] == 1
    assert all(torch.equal(before[n], t) for n, t in learner.model.state_dict().items())
    poison.remove()
    assert learner.update(random_groups())["train/bad_steps"] == 0
    learner.model.model.layers[0].mlp.up_proj.weight.register_hook(lambda g: g * float("nan"))
    learner.update(random_groups())
    learner.update(random_groups())
    with pytest.raises(TrainingError, match="3 steps in a row"):
        learner.update(random_groups())


def test_a_bad_step_leaves_the_version_and_only_finite_metrics():
    """F068: a skipped step is counted, its NaNs are not logged, the weights keep their version."""
    learner = make_learner()
    with torch.no_grad():
        learner.model.model.norm.weight[0] = torch.nan  # the loss itself is NaN
    metrics = learner.update(random_groups())
    assert learner.version == 0 and metrics["train/bad_steps"] == 1
    assert all(np.isfinite(value) for value in metrics.values())
    assert "loss" not in metrics and "entropy" not in metrics


def test_the_first_update_sees_ratio_one_and_moves_the_weights():
    """F064, F066: float32 weights change even at the rates of RL."""
    metrics = make_learner(optim__learning_rate=1e-6).update(random_groups())
    assert metrics["ratio"] == 1.0
    assert metrics["clip_ratio/region_mean"] == 0.0
    assert metrics["grad_norm"] > 0
    assert metrics["train/update_ratio"] > 0.5
    assert 0 < metrics["entropy"] <= np.log(97)


def test_clipping_uses_the_norm_of_the_whole_gradient():
    """F085."""
    groups = random_groups()
    whole = gradient(make_learner(), groups)
    norm = torch.cat([g.flatten() for g in whole.values()]).norm()
    clipped = gradient(make_learner(optim__max_grad_norm=float(norm) / 4), groups)
    for name in whole:
        torch.testing.assert_close(clipped[name], whole[name] / 4, rtol=1e-4, atol=1e-8)


def test_the_learning_rate_moves_by_optimizer_step():
    learner = make_learner(
        optim__warmup_steps=1, optim__lr_scheduler_type="linear", optim__learning_rate=1.0
    )
    rates = [learner.scheduler.lr_lambdas[0](step) for step in (0, 1, 50, 100)]
    assert rates == pytest.approx([0.5, 1.0, 1 - 49 / 99, 0.0])


def test_several_updates_on_a_batch_clip_against_the_recomputed_logprobs():
    learner = make_learner(
        loss__old_logprobs="recompute", optim__num_iterations=3, optim__num_minibatches=2
    )
    metrics = learner.update(random_groups(num_groups=4))
    assert metrics["train/optimizer_steps"] == 6
    assert metrics["ratio"] != 1.0
    assert learner.version == 1


def test_a_reference_pulls_only_where_beta_is_positive():
    assert make_learner()._reference is None
    learner = make_learner(loss__beta=0.1)
    assert learner.update(random_groups())["kl"] == pytest.approx(0, abs=1e-6)
    assert learner.update(random_groups())["kl"] > 1e-6
    assert not any(p.requires_grad for p in learner._reference.parameters())


def test_an_engine_with_other_weights_stops_the_run():
    """F079: warn over 0.05 nats, stop over the limit, before any weight changes."""
    groups = random_groups()
    learner = make_learner(loss__max_mismatch=1.0)
    for trajectory in itertools.chain.from_iterable(g.trajectories for g in groups):
        expected = make_learner(rollout__temperature=1.0).logprobs(trajectory.token_ids)
        trajectory.logprobs[1:] = expected
    agreeing = make_learner(rollout__temperature=1.0, loss__max_mismatch=1.0)
    assert agreeing.update(groups)["mismatch/abs_diff"] < 1e-5
    for trajectory in itertools.chain.from_iterable(g.trajectories for g in groups):
        trajectory.logprobs = [x - 0.1 for x in trajectory.logprobs]
    with pytest.warns(UserWarning, match="off-policy"):
        make_learner(rollout__temperature=1.0, loss__max_mismatch=1.0).update(groups)
    for trajectory in itertools.chain.from_iterable(g.trajectories for g in groups):
        trajectory.logprobs = [x - 5 for x in trajectory.logprobs]
    before = copy.deepcopy(learner.model.state_dict())
    with pytest.raises(TrainingError, match="other weights"):
        learner.update(groups)
    assert all(torch.equal(before[n], t) for n, t in learner.model.state_dict().items())


def test_masked_truncated_completions_teach_nothing():
    groups = random_groups()
    for group in groups:
        group.trajectories[0].stop_reason = StopReason.TURN_LENGTH
    options = {"loss__mask_truncated_completions": True, "advantage__scale_rewards": "none"}
    first = gradient(make_learner(**options), groups)
    for group in groups:
        group.trajectories[0].reward = -100.0
    second = gradient(make_learner(**options), groups)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_name_a_tied_tensor_once(tied):
    """F073."""
    learner = make_learner(make_model(tied))
    names = [name for name, _ in learner.weights()]
    assert names.count("model.embed_tokens.weight") == 1
    assert ("lm_head.weight" in names) is not tied
    assert len(names) == len(set(names))
    learner.update(random_groups())
    if tied:
        assert learner.model.lm_head.weight is learner.model.model.embed_tokens.weight


def test_frozen_embeddings_stay_and_the_rest_gets_the_same_gradient():
    groups = random_groups()
    free = gradient(make_learner(), groups)
    model = make_model()
    model.get_input_embeddings().weight.requires_grad_(False)
    frozen = gradient(make_learner(model), groups)
    assert "model.embed_tokens.weight" not in frozen
    assert_same(frozen, {name: free[name] for name in frozen})


def test_gradient_checkpointing_changes_no_gradient():
    groups = random_groups()
    model = make_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(gradient(make_learner(model), groups), gradient(make_learner(), groups))


def test_logprobs_are_those_of_temperature_one():
    learner = make_learner()
    ids = [3, 1, 4, 1, 5]
    with torch.no_grad():
        model = copy.deepcopy(learner.model)
        model.set_attn_implementation("eager")
        log_p = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [float(log_p[i, ids[i + 1]]) for i in range(4)]
    assert learner.logprobs(ids) == pytest.approx(expected, abs=1e-5)


def test_a_policy_learns_the_token_that_is_rewarded():
    learner = make_learner(optim__learning_rate=1e-2)
    rng = np.random.default_rng(0)

    def episode(token):
        trajectory = Trajectory()
        trajectory.observe([1, 2, 3])
        logprob = learner.logprobs([1, 2, 3, token])[-1]
        trajectory.act(
            Completion(token_ids=[token], logprobs=[logprob], finish_reason="stop", versions=[0])
        )
        trajectory.reward = float(token == 7)
        return trajectory

    before = learner.logprobs([1, 2, 3, 7])[-1]
    for _ in range(5):
        tokens = [7, 7, *rng.integers(10, 97, 6).tolist()]
        group = TrajectoryGroup(
            id="g", task=Task(id="t"), trajectories=[episode(t) for t in tokens]
        )
        learner.update([group])
    assert learner.logprobs([1, 2, 3, 7])[-1] > before + 1
