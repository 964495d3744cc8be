"""LoRA: adapters move and nothing else, and what they add to the weights is what engines get."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import json
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from agentrl.config import ConfigError, LoraConfig, ModelConfig
from agentrl.config_file import make_config
from agentrl.models import ModelError
from agentrl.protocols import Probe, SyncError
from parts import choose_engine, make_engine
from tests.rank_processes import run_ranks, values
from tests.runs import save_model
from tests.test_distributed import Outcome, assert_near, begin, train_batches, whole
from tests.test_learner import random_groups
from train.learner import Learner
from train.model import adapter_config, load_model
from train.policy import adapters_off
from train.ranks import Ranks
from train.weights import adapter_weights, clean_name, full_weights, merged_weights

TEMPERATURE = 0.9

pytestmark = [
    pytest.mark.filterwarnings("ignore:learner and engine differ"),  # the logprobs are invented
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler"),  # the step is intercepted
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("lora") / "model")


def make_learner(folder, ranks=None, **changes):
    """`changes` are `section__key` values; adapters that add something from the start."""
    sections = {
        "model": {"name_or_path": str(folder), "mixed_precision": "no"},
        "lora": {"r": 4, "alpha": 8},
        "env": {"id": "none"},
        "rollout": {"temperature": TEMPERATURE, "engine_dtype": "float32", "engine": "local"},
        "loss": {"max_mismatch": 1e9, "importance_sampling_mode": "none"},
        "optim": {"learning_rate": 1e-2, "max_grad_norm": 1e9, "adam_epsilon": 1e-3},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        sections.setdefault(section, {})[key] = value
    config = make_config(sections)
    model, _ = load_model(config.model, config.lora)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return Learner(model, config, accelerate.Accelerator(cpu=True), ranks)


def plain_logprobs(model, token_ids):
    """[n - 1], by transformers and peft alone."""
    logits = model(input_ids=torch.tensor([token_ids])).logits[0, :-1] / TEMPERATURE
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]


def as_transformers_runs_it(model):
    model = copy.deepcopy(model).eval()
    model.set_attn_implementation("eager")
    return model


def test_only_adapters_are_trained_and_the_base_stays_bit_for_bit(folder):
    learner = make_learner(folder)
    before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    for seed in range(2):
        learner.update(random_groups(seed))
    moved = {n for n, t in learner.model.state_dict().items() if not torch.equal(t, before[n])}
    adapters = {name for name in before if "lora_" in name}
    assert moved == adapters and len(adapters) == 2 * 7 * 2
    trained = {n for n, p in learner.model.named_parameters() if p.requires_grad}
    assert trained == adapters
    assert len(learner.optimizer.state_dict()["state"]) == len(adapters)


def test_fresh_adapters_change_nothing_and_follow_from_the_seed(folder):
    config = ModelConfig(name_or_path=str(folder)), LoraConfig(r=4)
    (one, _), (same, _), (other, _) = (load_model(*config, seed=seed) for seed in (0, 0, 1))
    states = [dict(adapter_weights(model)) for model in (one, same, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0])
    assert {tensor.dtype for tensor in states[0].values()} == {torch.float32}
    base = dict(full_weights(load_model(config[0])[0]))
    merged = dict(merged_weights(one))
    assert base.keys() == merged.keys()
    assert all(torch.equal(base[name], merged[name]) for name in base)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_plain_peft_model(folder, checkpointing):
    learner = make_learner(folder, model__gradient_checkpointing=checkpointing)
    groups = random_groups()
    plain = as_transformers_runs_it(learner.model)
    num_tokens = sum(t.num_sampled_tokens for group in groups for t in group.trajectories)
    loss = torch.zeros(())
    for group in groups:
        rewards = np.array(group.rewards)
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            log_p = plain_logprobs(plain, list(trajectory.token_ids))
            mask = torch.tensor(trajectory.loss_mask)[1:]
            ratio = (log_p - log_p.detach()).exp()
            loss = loss - advantage * ratio[mask].sum() / num_tokens
    loss.backward()
    caught = {}
    learner.optimizer.step = lambda *_, **__: caught.update(
        (n, p.grad.clone()) for n, p in learner.model.named_parameters() if p.requires_grad
    )
    learner.update(groups)
    expected = {n: p.grad for n, p in plain.named_parameters() if p.requires_grad}
    assert caught.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(caught[name], gradient, rtol=1e-4, atol=1e-6)
    assert all(gradient.abs().max() > 0 for gradient in expected.values())


def test_the_reference_is_the_model_without_its_adapter(folder):
    """`kl` of k1 is the mean of logprob - reference's, over the sampled tokens."""
    learner = make_learner(folder, loss__beta=0.1, loss__kl_estimator="k1")
    policy = as_transformers_runs_it(learner.model)
    base = as_transformers_runs_it(load_model(learner.config.model)[0])
    groups, difference, num_tokens = random_groups(), 0.0, 0
    for group in groups:
        for trajectory in group.trajectories:
            ids, mask = list(trajectory.token_ids), torch.tensor(trajectory.loss_mask)[1:]
            with torch.no_grad():
                both = plain_logprobs(policy, ids) - plain_logprobs(base, ids)
            difference += float(both[mask].sum())
            num_tokens += int(mask.sum())
    metrics = learner.update(groups)
    assert metrics["kl"] == pytest.approx(difference / num_tokens, rel=1e-3)
    assert abs(metrics["kl"]) > 1e-3


def local(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def train_adapters(ranks: Ranks, folder: str) -> tuple[Outcome, dict[str, Any], bool]:
    """Two batches; what servers would be sent as an adapter; whether the base is as it was."""
    learner = make_learner(folder, ranks, loss__beta=0.1)
    base = {n: local(t) for n, t in learner.model.state_dict().items() if "lora_" not in n}
    outcome = train_batches(learner, [random_groups(seed) for seed in range(2)])
    for _ in range(10):
        for _ in learner.weights():
            pass
    after = learner.model.state_dict()
    intact = all(torch.equal(tensor, local(after[name])) for name, tensor in base.items())
    return outcome, {n: whole(t) for n, t in adapter_weights(learner.model)}, intact


def train_adapters_on(kind: str, folder: str) -> tuple[Outcome, dict[str, Any], bool]:
    return train_adapters(begin(kind), folder)


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_two_processes_train_and_merge_adapters_as_one_does(kind, folder):
    """F075: shards, too, are as they were before after every merge."""
    expected, expected_adapter, intact = train_adapters(Ranks(), str(folder))
    assert intact
    for outcome, adapter, intact in values(run_ranks(train_adapters_on, 2, kind, str(folder))):
        assert_near(outcome, expected)
        assert intact and adapter.keys() == expected_adapter.keys()
        for name, tensor in adapter.items():
            np.testing.assert_allclose(tensor, expected_adapter[name], atol=1e-5)


def test_an_embedded_engine_gets_what_the_adapter_adds(folder, tmp_path):
    """Of its own: the learner's base must not change under it."""
    learner, ids = make_learner(folder), list(range(3, 40, 3))
    base = dict(full_weights(load_model(learner.config.model)[0]))
    probe = Probe(token_ids=ids, logprobs=learner.logprobs(ids), tolerance=1e-5)

    async def sync():
        engine = make_engine(learner.config, learner, None, tmp_path)
        try:
            with pytest.raises(SyncError):  # without them it says something else
                await engine.update_weights(base.items(), 0, probe)
            await engine.update_weights(learner.weights(), 1, probe)
        finally:
            await engine.close()

    asyncio.run(sync())
    state = learner.model.state_dict()
    assert all(torch.equal(base[clean_name(n)], t) for n, t in state.items() if "base_layer" in n)


def test_layers_that_the_model_lacks_are_named_with_those_it_has(folder):
    with pytest.raises(ConfigError, match=r"(?s)lora.target_modules.* wq .*has down_proj, gate_"):
        load_model(ModelConfig(name_or_path=str(folder)), LoraConfig(target_modules=["wq"]))


def test_a_head_takes_no_adapter(folder):
    """Learner and engine multiply by its weight themselves."""
    lora = LoraConfig(target_modules=["q_proj", "lm_head"])
    with pytest.raises(ConfigError, match="no linear layers lm_head before its head"):
        load_model(ModelConfig(name_or_path=str(folder)), lora)


def test_without_peft_it_says_what_to_install(folder, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "train.model.importlib.util.find_spec",
        lambda name: None if name == "peft" else find_spec(name),
    )
    with pytest.raises(ModelError, match=r"pip install -e '\.\[lora\]'"):
        load_model(ModelConfig(name_or_path=str(folder)), LoraConfig())


def test_frozen_embeddings_and_adapters_go_together(folder):
    config = ModelConfig(name_or_path=str(folder), freeze_embeddings=True)
    model, _ = load_model(config, LoraConfig(target_modules=["v_proj"]))
    assert {n.rsplit(".", 3)[1] for n, p in model.named_parameters() if p.requires_grad} == {
        "lora_A",
        "lora_B",
    }


def test_servers_read_the_adapter_under_the_names_that_peft_gives_it(folder):
    model, _ = load_model(ModelConfig(name_or_path=str(folder)), LoraConfig(r=4, alpha=8))
    config = json.loads(adapter_config(model))
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
    assert config["target_modules"] == sorted(config["target_modules"])
    for name, tensor in adapter_weights(model):
        assert name.startswith("base_model.model.model.layers.")
        assert name.endswith((".lora_A.weight", ".lora_B.weight")) and 4 in tensor.shape


def lora_run(**rollout):
    values = {"model": {"name_or_path": "m"}, "env": {"id": "e"}, "lora": {"sync": "adapter"}}
    return values | {"rollout": rollout}


@pytest.mark.parametrize(("engine", "num_gpus"), [("local", 1), ("auto", 0), ("sglang", 0)])
def test_an_adapter_alone_is_for_servers_on_gpus(engine, num_gpus):
    """SGLang 0.5.15 pins memory for it, and does not start without a GPU."""
    config = make_config(lora_run(engine=engine))
    with pytest.raises(ConfigError, match=rf"lora.sync=adapter.*rollout.engine={engine}"):
        choose_engine(config, num_gpus)
    assert choose_engine(make_config(lora_run(engine="auto")), 1) == "sglang"


@pytest.mark.parametrize(
    ("targets", "missing"),
    [
        (["q_proj"], "v_proj"),
        (["k_proj"], "q_proj and v_proj"),
        (["up_proj", "down_proj"], "gate_proj"),
        (["q_proj", "v_proj", "gate_proj", "o_proj"], None),
        ("all-linear", None),
    ],
)
def test_servers_need_the_adapters_of_layers_that_they_stack(targets, missing):
    config = make_config(lora_run() | {"lora": {"sync": "adapter", "target_modules": targets}})
    if missing is None:
        assert choose_engine(config, 1) == "sglang"
    else:
        with pytest.raises(ConfigError, match=f"lora.target_modules.*add {missing}, or"):
            choose_engine(config, 1)


def test_an_adapter_goes_its_own_way_to_servers():
    with pytest.raises(ConfigError, match=r"sglang.weight_sync=disk.*lora.sync=adapter"):
        make_config(lora_run() | {"sglang": {"weight_sync": "disk"}})


def test_servers_that_give_up_their_weights_need_more_than_an_adapter():
    with pytest.raises(ConfigError, match=r"sglang.colocate=true.*lora.sync=adapter"):
        make_config(lora_run() | {"sglang": {"colocate": True}})


def test_a_reference_pass_leaves_what_is_trained_as_it_is(folder):
    """peft's own switch would freeze shards, which stand for other tensors meanwhile."""
    policy = make_learner(folder).policy
    trained = [p.requires_grad for p in policy.parameters()]
    assert any(trained)
    with adapters_off(policy.model):
        assert [p.requires_grad for p in policy.parameters()] == trained
    assert [p.requires_grad for p in policy.parameters()] == trained
