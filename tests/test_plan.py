"""The plan of a run: worked numbers, and what it says of configs that cannot work."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from agentrl.config import ConfigError
from agentrl.config_file import make_config
from agentrl.memory import BF16, FP32, GIB, Machine, ModelShape, num_concurrent, read_shape, rooms
from agentrl.models import ModelError
from agentrl.plan import batch_arithmetic, make_plan
from doctor import Gpus, describe_machine, dry_run
from tests.runs import save_model
from tools.sandbox.protocol import SandboxConfig

LLAMA_8B = ModelShape(
    num_parameters=8_030_261_248,
    num_layers=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=14336,
    max_positions=131072,
)
ON_GPU = Machine(
    engine="sglang", engine_bytes=BF16, bf16=True, memory_gib=139, gpus=[0, 1], servers=[[1]]
)


def config(**sections):
    least = {"model": {"name_or_path": "m"}, "env": {"id": "e"}}
    return make_config(
        {key: least.get(key, {}) | sections.get(key, {}) for key in (*least, *sections)}
    )


def test_keys_and_values_of_a_token_take_128_kib():
    """Worked: 32 layers x 8 KV heads x 128 dims x 2 (K and V) x 2 bytes; no query heads."""
    assert LLAMA_8B.kv_bytes_per_token(BF16) == 128 * 1024


@pytest.mark.parametrize(("num_sequences", "expected_gib"), [(1, 1), (20, 20)])
def test_sequences_of_8192_tokens_take_a_gib_each(num_sequences, expected_gib):
    assert num_sequences * 8192 * LLAMA_8B.kv_bytes_per_token(BF16) == expected_gib * GIB


def test_a_kv_head_that_cannot_be_split_is_held_by_every_gpu():
    assert LLAMA_8B.kv_bytes_per_token(BF16, num_gpus=8) == 128 * 1024
    assert LLAMA_8B.kv_bytes_per_token(BF16, num_gpus=16) == 256 * 1024


def test_full_training_takes_16_bytes_a_parameter_before_activations():
    """Worked: 7B in bf16 is 14 GB; weights, gradients and two moments in float32 are 16 bytes."""
    machine = Machine(engine="sglang", engine_bytes=BF16, bf16=False, memory_gib=139, gpus=[0, 1])
    [room] = rooms(config(), machine, LLAMA_8B)
    states = sum(size for what, size in room.needs if "activations" not in what)
    assert states == 16 * LLAMA_8B.num_parameters


def test_checkpointing_keeps_one_tensor_a_layer():
    kept, all_of_it = (LLAMA_8B.activation_bytes(8192, checkpointing=c) for c in (True, False))
    assert kept == 32 * 8192 * 4096 * FP32 + all_of_it / 32, "and recomputes one layer at a time"


def test_a_batch_is_spelled_out_with_what_is_counted():
    """F089: prompts, episodes, optimizer steps and tokens have different names and a scope."""
    lines = list(
        batch_arithmetic(
            config(
                rollout={"prompts_per_step": 8, "num_generations": 4},
                optim={"num_minibatches": 2, "micro_batch_tokens": 8192},
                loss={"old_logprobs": "recompute"},
            )
        )
    )
    assert lines[0] == "8 prompts x 4 generations = 32 episodes"
    assert lines[1] == "2 minibatches of 16 episodes x 1 iteration = 2 optimizer steps"
    assert "8192 tokens per process" in lines[2] and "never the result" in lines[2]


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        ({"prompts_per_step": 2, "num_generations": 4}, 8),
        ({"prompts_per_step": 2, "num_generations": 4, "max_staleness": 1}, 16),
        ({"prompts_per_step": 2, "num_generations": 4, "oversampling": 1.6}, 16),
        ({"prompts_per_step": 64, "max_concurrent_generations": 10}, 10),
    ],
)
def test_requests_at_once_are_bounded_by_the_limit_and_by_the_episodes(rollout, expected):
    assert num_concurrent(config(rollout=rollout)) == expected


def test_a_plan_says_who_runs_where_and_that_it_fits():
    plan = make_plan(config(rollout={"max_concurrent_generations": 20}), ON_GPU, LLAMA_8B, {})
    text = str(plan)
    assert "learner   GPU 0 of 2 (139.0 GiB each), 1 process" in text
    assert "server 0  GPU 1, tensor parallel 1, started and ended by this run" in text
    assert "128 KiB" in text and "20.00 GiB  keys and values of 20 requests" in text
    assert "all 20 requests fit at full length" in text
    assert "rollout.env_timeout_s" in text and "sglang.sync_timeout_s" in text


def test_a_learner_that_does_not_fit_is_refused_with_what_to_change():
    machine = Machine(
        engine="sglang", engine_bytes=BF16, bf16=True, memory_gib=80, gpus=[0, 1], servers=[[1]]
    )
    plan = make_plan(config(), machine, LLAMA_8B, {})
    [objection] = plan.objections
    assert "of 80.00 GiB" in objection and "gradient_checkpointing" in objection
    assert "DOES NOT FIT" in str(plan)


def test_a_server_without_room_for_one_episode_is_refused():
    small = Machine(
        engine="sglang", engine_bytes=BF16, bf16=True, memory_gib=24, gpus=[0], servers=[[0]]
    )
    plan = make_plan(config(rollout={"max_context_tokens": 60000}), small, LLAMA_8B, {})
    assert any("fewer than rollout.max_context_tokens=60000" in line for line in plan.objections)


def test_requests_that_do_not_all_fit_at_full_length_wait_and_it_is_said():
    plan = make_plan(
        config(rollout={"max_concurrent_generations": 400, "prompts_per_step": 64}),
        ON_GPU,
        LLAMA_8B,
        {},
    )
    assert not [line for line in plan.objections if "keys and values" in line]
    assert "of 400 requests fit at full length, others wait" in str(plan)


def test_colocated_memory_is_planned_for_both_phases():
    machine = Machine(
        engine="sglang", engine_bytes=BF16, bf16=True, memory_gib=139, gpus=[0], servers=[[0]]
    )
    colocated = config(sglang={"colocate": True, "mem_fraction": 0.6})
    sampling, training = rooms(colocated, machine, LLAMA_8B)
    assert "while it samples" in sampling.name and "while it trains" in training.name
    learner = FP32 * LLAMA_8B.num_parameters
    assert sampling.needs[0][1] == learner and sampling.fits
    assert sampling.needs[1][1] == pytest.approx(0.6 * (139 * GIB - learner))
    assert not training.fits, "8B parameters with 16 bytes each and bf16 copies are 134 GiB"


def test_an_engine_in_the_process_shares_the_memory_of_the_learner():
    cpu = Machine(engine="local", engine_bytes=FP32, bf16=False, memory_gib=16)
    [room] = rooms(config(rollout={"max_concurrent_generations": 4}), cpu, LLAMA_8B)
    slots = 4 * 8192 * LLAMA_8B.kv_bytes_per_token(FP32)
    assert ("keys and values of the engine's slots", slots) in room.needs
    assert not room.fits


def test_sandboxes_are_counted_against_the_episodes_in_play_at_once():
    """For information: episodes wait for their turn. Envs of one config share their sandboxes."""
    mix = {name: {"id": f"envs:{name}"} for name in ("a", "b", "c")}
    values = {"model": {"name_or_path": "m"}, "mix": mix, "rollout": {"max_staleness": 1}}
    few, many = SandboxConfig(max_sandboxes=64), SandboxConfig(max_sandboxes=128)
    envs = {
        name: SimpleNamespace(sandbox_config=sandbox)
        for name, sandbox in zip("abc", (few, many, few), strict=True)
    }
    plan = make_plan(make_config(values), ON_GPU, LLAMA_8B, envs)
    text = str(plan)
    assert "a: envs:a, 33% of the prompts" in text
    assert "up to 128 episodes of a, c at once" in text
    assert "sandbox.max_sandboxes=64 allows fewer: the others wait" in text
    assert "of b at once" in text and "sandbox.max_sandboxes=128 allows enough" in text
    assert not [objection for objection in plan.objections if "sandbox" in objection]


def test_an_unknown_shape_leaves_the_rest_of_the_plan():
    plan = make_plan(config(), ON_GPU, "the shape is not known", {})
    assert plan.sections["memory"] == ["the shape is not known"] and not plan.objections
    assert "GPU 1" in str(plan)


def test_the_shape_of_a_folder_is_that_of_its_model(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path)
    shape = read_shape(str(folder))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert shape.kv_bytes_per_token(FP32) == 2 * 2 * 1 * 16 * 4


def test_a_tied_head_is_counted_once(tmp_path):
    from transformers import LlamaConfig

    tied, untied = (
        LlamaConfig(vocab_size=100, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                    num_attention_heads=2, tie_word_embeddings=tie)
        for tie in (True, False)
    )  # fmt: skip
    sizes = []
    for name, shape in (("tied", tied), ("untied", untied)):
        shape.save_pretrained(tmp_path / name)
        sizes.append(read_shape(str(tmp_path / name)).num_parameters)
    assert sizes[1] - sizes[0] == 100 * 16


def test_a_model_that_is_not_here_is_said_plainly(monkeypatch):
    with pytest.raises(
        ModelError, match="the shape of nobody/nothing is not known on this machine"
    ):
        read_shape("nobody/nothing")


# Of Llama's layers: 32 x (inputs + outputs).
LINEAR_8B = {"q_proj": 32 * (4096 + 4096), "k_proj": 32 * (4096 + 1024)}
LORA = {"r": 16, "target_modules": ["q_proj", "k_proj"]}


def in_training(sections, machine, shape=LLAMA_8B):
    """What lies in the learner's memory while it trains: name -> GiB."""
    room = list(rooms(config(**sections), machine, shape))[-1]
    return {what: size / GIB for what, size in room.needs}


def test_lora_has_gradients_and_moments_of_its_adapters_alone():
    """Worked: 16 x (262,144 + 163,840) = 6,815,744 adapter parameters of 4 bytes each."""
    shape = replace(LLAMA_8B, linear_sizes=LINEAR_8B)
    needs = in_training({"lora": LORA, "loss": {"beta": 0.1}}, ON_GPU, shape)
    adapters, weights = 6_815_744 * FP32 / GIB, 8_030_261_248 * FP32 / GIB
    assert needs["the learner's weights, float32"] == pytest.approx(weights + adapters)
    assert needs["gradients of the adapters"] == pytest.approx(adapters)
    assert needs["two moments of Adam of the adapters"] == pytest.approx(2 * adapters)
    assert not [what for what in needs if "reference" in what], "it is the adapter off"


def test_lora_layers_that_the_model_lacks_are_found_before_it_is_loaded():
    lora = {"lora": {"target_modules": ["wq"]}}
    with pytest.raises(ConfigError, match=r"lora.target_modules.*wq"):
        list(rooms(config(**lora), ON_GPU, replace(LLAMA_8B, linear_sizes=LINEAR_8B)))


def test_fsdp_spreads_weights_gradients_and_moments_but_not_activations():
    alone = replace(ON_GPU, bf16=False)
    sharded = replace(alone, num_learners=8, num_shards=16)
    one, sixteenth = (in_training({"loss": {"beta": 0.1}}, machine) for machine in (alone, sharded))
    for what in ("the learner's weights, float32", "the reference's weights, float32"):
        assert sixteenth[f"{what}, spread over 16 processes"] == one[what] / 16
    for what in ("gradients", "two moments of Adam"):
        assert sixteenth[f"{what}, spread over 16 processes"] == one[what] / 16
    [activations] = [what for what in one if "activations" in what]
    assert sixteenth[activations] == one[activations]


def test_processes_on_a_cpu_share_its_memory():
    """Two of DDP hold the weights twice; two of FSDP2 once."""
    cpu = Machine(engine="local", engine_bytes=FP32, bf16=False, memory_gib=16, num_learners=2)
    weights = LLAMA_8B.num_parameters * FP32 / GIB
    assert in_training({}, cpu)["the learner's weights, float32"] == 2 * weights
    fsdp = in_training({}, replace(cpu, num_shards=2))
    assert fsdp["the learner's weights, float32, spread over 2 processes"] == weights
    assert fsdp["the engine's copy of the weights"] == weights, "shards are no model to sample from"


def test_an_automatic_budget_needs_room_for_the_longest_episode():
    sections = {"optim": {"micro_batch_tokens": "auto"}, "rollout": {"max_context_tokens": 4096}}
    assert "activations of 4096 tokens, about" in in_training(sections, ON_GPU)
    assert any("as many tokens as fit" in line for line in batch_arithmetic(config(**sections)))


def test_a_plan_says_that_adapters_are_trained_and_how_they_get_to_servers():
    shape = replace(LLAMA_8B, linear_sizes=LINEAR_8B)
    text = str(make_plan(config(lora=LORA | {"sync": "adapter"}), ON_GPU, shape, {}))
    assert "LoRA      adapters of rank 16 are trained" in text
    assert "learner -> servers: the adapter alone" in text


def test_a_launched_dry_run_plans_for_the_processes_that_were_launched(monkeypatch, capsys):
    launched = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "ACCELERATE_USE_FSDP": "true"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    gpus = Gpus(count=8, memory_gib=139, assumed=True)
    machine = describe_machine(config(), "sglang", gpus)
    assert (machine.num_learners, machine.num_shards) == (4, 8)
    assert machine.servers == [[4], [5], [6], [7]]
    monkeypatch.setenv("RANK", "1")
    dry_run(config(), {}, "sglang", gpus)
    assert capsys.readouterr().out == "", "the first process says it for all"
