"""The stream of weights: names, ties, shards and merged adapters."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.protocols import SyncError
from train.weights import (
    adapter_weights,
    checkpoint_shapes,
    clean_name,
    full_weights,
    merged_weights,
    require_names,
)


def tiny(tied=True, seed=0):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
        )
    )


def with_adapter(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()
    return model


@pytest.mark.parametrize(
    "wrapped",
    [
        "model.layers.0.q_proj.weight",
        "module.model.layers.0.q_proj.weight",
        "_orig_mod.model.layers.0._checkpoint_wrapped_module.q_proj.weight",
        "base_model.model.model.layers.0.q_proj.base_layer.weight",
    ],
)
def test_names_lose_what_wrappers_add(wrapped):
    """F074."""
    assert clean_name(wrapped) == "model.layers.0.q_proj.weight"


def test_a_name_that_only_looks_like_a_wrapper_stays():
    assert clean_name("vision_module.base_layers.weight") == "vision_module.base_layers.weight"


def test_a_tied_tensor_comes_once_under_the_name_of_its_source():
    """F073."""
    names = [name for name, _ in full_weights(tiny(tied=True))]
    assert names.count("model.embed_tokens.weight") == 1 and "lm_head.weight" not in names


def test_a_head_of_its_own_comes_too():
    weights = dict(full_weights(tiny(tied=False)))
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


def test_names_of_a_checkpoint_are_those_of_the_model_it_was_saved_from(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path)
    expected = checkpoint_shapes(tmp_path, model.all_tied_weights_keys)
    assert expected == {name: list(tensor.shape) for name, tensor in full_weights(model)}


def test_a_checkpoint_may_hold_a_copy_of_a_tied_tensor(tmp_path):
    """F073."""
    save_file({"embed": torch.zeros(3, 2), "head": torch.zeros(3, 2)}, tmp_path / "m.safetensors")
    assert checkpoint_shapes(tmp_path, {"head": "embed"}) == {"embed": [3, 2]}


def test_a_folder_without_safetensors_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no"):
        checkpoint_shapes(tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "b", "c"], "no tensor 'c'"),
        (["a", "a"], "no tensor 'a'"),
        (["a"], r"did not come: \['b'\]"),
    ],
)
def test_names_must_match_exactly(names, message):
    """F074: a server skips a name that it does not know, and keeps what it is not sent."""
    weights = ((name, torch.zeros(2)) for name in names)
    with pytest.raises(SyncError, match=message):
        list(require_names(weights, {"a": [2], "b": [2]}))


def test_a_wrong_shape_is_refused_before_a_server_sees_it():
    """F074: SGLang 0.5.15 dies of it."""
    with pytest.raises(SyncError, match=r"'a' has shape \[2, 1\]"):
        list(require_names([("a", torch.zeros(2, 1))], {"a": [2]}))


def test_merged_weights_are_those_that_peft_merges():
    """F074: merged once, under the names of the base model."""
    model = with_adapter(tiny())
    merged = dict(merged_weights(model))
    expected = dict(full_weights(copy.deepcopy(model).merge_and_unload()))
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor)
    base = dict(full_weights(tiny()))
    assert not torch.equal(
        base["model.layers.1.mlp.down_proj.weight"], merged["model.layers.1.mlp.down_proj.weight"]
    )


def test_merging_leaves_the_model_bit_by_bit_as_it_was():
    """F075: 100 updates, every third of which stops half-way."""
    model = with_adapter(tiny().to(torch.bfloat16))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for update in range(100):
        for index, _ in enumerate(merged_weights(model)):
            if update % 3 == 0 and index == 7:
                break
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_an_adapter_is_named_as_peft_saves_it(tmp_path):
    """F074."""
    model = with_adapter(tiny())
    model.save_pretrained(tmp_path)
    expected = checkpoint_shapes(tmp_path)
    assert {name: list(tensor.shape) for name, tensor in adapter_weights(model)} == expected


SHARDED = """
    import json, weakref
    from collections import OrderedDict
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from train.weights import full_weights

    def tiny():
        torch.manual_seed(0)
        model = nn.Sequential(OrderedDict(
            embed=nn.Embedding(33, 16),
            layers=nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)]),
            head=nn.Linear(16, 33, bias=False),
        ))
        model.head.weight = model.embed.weight
        model.all_tied_weights_keys = {"head.weight": "embed.weight"}
        return model

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (2,))
    model, expected = tiny(), dict(full_weights(tiny()))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    names, equal, most, alive = [], True, 0, []
    for name, tensor in full_weights(model):
        names.append(name)
        equal &= not isinstance(tensor, DTensor) and torch.equal(tensor, expected[name])
        alive = [ref for ref in alive if ref() is not None] + [weakref.ref(tensor)]
        most = max(most, len(alive))
        del tensor
    sharded = all(isinstance(parameter, DTensor) for parameter in model.parameters())
    result = dict(names=names, equal=equal, sharded=sharded, most=most)
    print("RESULT " + json.dumps(result), flush=True)
    dist.destroy_process_group()
"""


def test_a_model_sharded_over_two_processes_streams_the_weights_of_the_whole(tmp_path):
    """F077: both ranks gather in the same order; one that keeps nothing holds one tensor."""
    (tmp_path / "sharded.py").write_text(textwrap.dedent(SHARDED))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parents[1]
    processes = [
        subprocess.Popen(
            [sys.executable, tmp_path / "sharded.py"],
            env=os.environ
            | {
                "PYTHONPATH": str(root),
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    results = []
    for output in outputs:
        lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
        assert lines, output[-3000:]
        results.append(json.loads(lines[0].removeprefix("RESULT ")))
    layers = [f"layers.{i}.{part}" for i in range(3) for part in ("weight", "bias")]
    for result in results:
        assert result["sharded"] and result["equal"]
        assert result["names"] == ["embed.weight", *layers]
        assert result["most"] == 1
