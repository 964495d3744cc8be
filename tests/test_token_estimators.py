"""Estimators that see tokens, through the whole learner: gae and its value head, KL in rewards."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import train.preparation
from agentrl.types import StopReason
from tests.test_learner import gradient, make_learner, make_model, random_groups
from train.packing import single_sequence

pytestmark = [
    pytest.mark.filterwarnings("ignore:learner and engine differ"),  # the logprobs are invented
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler"),  # the step is intercepted
]

GAE = {"advantage__estimator": "gae"}
KL_IN_REWARD = {"loss__beta": 0.5, "loss__kl_in_reward": True, "loss__kl_estimator": "k1"}


def groups_of(*rewards):
    """One group per list of rewards."""
    groups = random_groups(num_groups=len(rewards), size=len(rewards[0]))
    for group, own in zip(groups, rewards, strict=True):
        for trajectory, reward in zip(group.trajectories, own, strict=True):
            trajectory.reward = reward
    return groups


def seen_by_the_estimator(monkeypatch):
    """Inputs and advantages of each call, as the learner makes it."""
    calls = []
    estimate = train.preparation.estimate

    def spy(inputs, config):
        calls.append((inputs, estimate(inputs, config)))
        return calls[-1][1]

    monkeypatch.setattr(train.preparation, "estimate", spy)
    return calls


def test_the_value_head_learns_what_the_episodes_are_worth():
    """Better than any constant, the best of which is 0.5 with a loss of 1/8."""
    learner = make_learner(**GAE, loss__vf_coef=1.0, optim__learning_rate=5e-3)
    groups = groups_of([1.0, 1.0, 0.0, 0.0])
    losses = [learner.update(groups)["value_loss"] for _ in range(24)]
    assert losses[0] > 1 / 8 > 2 * losses[-1]


def test_gae_of_a_head_that_knows_nothing_yet_is_the_reward():
    """Values are 0 at first, so that with lam 1 each token's advantage is its episode's reward.

    Where rewards are 1 and -1 that is what grpo without scaling gives; the rows in which the tokens
    are laid out differ from their order, which would show.
    """
    groups = groups_of([1.0, -1.0, 1.0, -1.0], [-1.0, -1.0, 1.0, 1.0])
    model = make_model()
    plain = make_learner(make_model(), advantage__scale_rewards="none")
    options = {"advantage__lam": 1.0, "advantage__whiten_advantages": False}
    with_values = make_learner(model, **GAE, **options, optim__micro_batch_tokens=200)
    expected, found = gradient(plain, groups), gradient(with_values, groups)
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6)


def test_gae_reads_the_values_of_each_token_where_it_stands(monkeypatch):
    """Every token's value, computed for its episode alone."""
    learner = make_learner(**GAE, optim__micro_batch_tokens=200)
    head = learner.policy.value_head
    torch.nn.init.normal_(head.weight)
    groups = random_groups(num_groups=2)
    calls = seen_by_the_estimator(monkeypatch)
    expected = []
    for trajectory in (t for group in groups for t in group.trajectories):
        ids = torch.tensor([trajectory.token_ids])
        hidden = learner.model.model(ids, attend=causal, use_cache=False).last_hidden_state[0]
        values = head(hidden)[:-1, 0].detach()
        expected += values[torch.tensor(trajectory.loss_mask)[1:]].tolist()
    learner.update(groups)
    ((inputs, _),) = calls
    np.testing.assert_allclose(inputs.values, expected, rtol=1e-4, atol=1e-4)


def causal(layer, query, key, value, scaling):
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )


def test_the_kl_to_the_reference_is_taken_off_the_reward_of_each_token(monkeypatch):
    learner = make_learner(
        **KL_IN_REWARD, advantage__estimator="reinforce_plus_plus", optim__micro_batch_tokens=200
    )
    calls = seen_by_the_estimator(monkeypatch)
    groups = random_groups(num_groups=2)
    ids = [t.token_ids for group in groups for t in group.trajectories]
    masks = [np.array(t.loss_mask)[1:] for group in groups for t in group.trajectories]

    def logprobs():
        # At the temperature of sampling, which `Learner.logprobs` leaves out.
        return np.concatenate(
            [sampled_logprobs(learner, each)[mask] for each, mask in zip(ids, masks, strict=True)]
        )

    reference = logprobs()
    learner.update(groups)
    moved = logprobs()
    metrics = learner.update(groups)
    (first, _), (second, _) = calls
    np.testing.assert_allclose(first.kl, 0, atol=1e-6)
    np.testing.assert_allclose(second.kl, moved - reference, atol=1e-5)
    assert np.abs(second.kl).max() > 1e-3 and second.beta == 0.5
    assert metrics["kl"] == pytest.approx(np.mean(moved - reference), abs=1e-5)


def sampled_logprobs(learner, token_ids):
    micro_batch = single_sequence(token_ids)
    with torch.no_grad():
        return learner.policy(micro_batch, learner.config.rollout.temperature).logprobs.numpy()


def test_a_kl_in_the_reward_is_not_in_the_loss_too():
    """Against its own copy the KL is 0, but a penalty in the loss would have a gradient."""
    options = {"advantage__estimator": "reinforce_plus_plus"}
    groups = random_groups(num_groups=2)
    without = gradient(make_learner(make_model(), **options), groups)
    with_kl = gradient(make_learner(make_model(), **options, **KL_IN_REWARD), groups)
    for name, grad in with_kl.items():
        torch.testing.assert_close(grad, without[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_a_batch_of_masked_episodes_alone_moves_nothing(estimator):
    learner = make_learner(
        **KL_IN_REWARD, advantage__estimator=estimator, loss__mask_truncated_completions=True
    )
    groups = random_groups(num_groups=1)
    for trajectory in groups[0].trajectories:
        trajectory.stop_reason = StopReason.TURN_LENGTH
    metrics = learner.update(groups)
    assert metrics["train/empty_steps"] == 1 and learner.version == 0
