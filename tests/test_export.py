"""Export: a checkpoint as a folder that anything loads, and on the hub."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
import requests
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import train.export
from agentrl.config import SGLangConfig
from agentrl.config_file import dump_config, load_config
from agentrl.models import SMOLLM2, locate_model
from rollout.server import SpawnedFleet
from tests.runs import save_model, write_config
from train.checkpoint import save_checkpoint
from train.learner import Learner
from train.model import load_model

EVALUATIONS = {0: {"eval/reward": 0.1}, 7: {"eval/reward": 0.75}}
TOKENS = torch.arange(20)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("base"))
    GenerationConfig(temperature=0.5, do_sample=True).save_pretrained(folder)
    return folder


def make_checkpoint(folder, base, noise=0.1, **changes):
    """Of weights that are not those of the base, and the learner that has them."""
    config = load_config(write_config(folder, base, **changes))
    model, tokenizer = load_model(config.model, config.lora)
    learner = Learner(model, config, Accelerator(cpu=True))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in learner.policy.parameters():
            if parameter.requires_grad:
                parameter += noise * torch.randn(parameter.shape, generator=generator)
    texts = {"evaluations": EVALUATIONS}, tokenizer, dump_config(config)
    return save_checkpoint(folder / "checkpoints", 7, learner, {}, *texts), learner


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, base):
    return make_checkpoint(tmp_path_factory.mktemp("run"), base)[0]


@pytest.fixture
def hub(monkeypatch):
    """A hub on this machine: what was asked of it, and the files that it was given."""
    asked, files = [], {}

    class Hub(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.path, body))
            answer = {"url": f"{url}/user/agent"}
            if self.path.endswith("/preupload/main"):
                paths = [file["path"] for file in json.loads(body)["files"]]
                how = {"uploadMode": "regular", "shouldIgnore": False}
                answer = {"files": [{"path": path, **how} for path in paths]}
            elif self.path.endswith("/commit/main"):
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                answer = {"commitUrl": f"{url}/user/agent/commit/1", "commitOid": "1"}
            text = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_): ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield asked, files
        server.shutdown()


def export(*arguments, code=0):
    assert train.export.main([str(argument) for argument in arguments]) == code


def refused(capsys, *arguments, code=2):
    """The one line that it ends with."""
    export(*arguments, code=code)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


def test_an_export_is_what_was_trained(tmp_path, base, checkpoint, capsys):
    export(checkpoint, tmp_path / "agent")
    assert f"the model: {tmp_path}/agent" in capsys.readouterr().out
    models = [AutoModelForCausalLM.from_pretrained(f) for f in (tmp_path / "agent", checkpoint)]
    for one, two in zip(*(model.parameters() for model in models), strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, two)
    assert GenerationConfig.from_pretrained(tmp_path / "agent").temperature == 0.5
    templates = [
        AutoTokenizer.from_pretrained(folder).chat_template for folder in (base, tmp_path / "agent")
    ]
    assert templates[0] == templates[1] is not None
    assert [path.name for path in tmp_path.iterdir()] == ["agent"]


def test_weights_in_bfloat16_are_those_that_were_trained_rounded(tmp_path, checkpoint):
    export(checkpoint, tmp_path / "agent", "--dtype", "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "agent")
    trained = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    for one, two in zip(model.parameters(), trained.parameters(), strict=True):
        assert one.dtype == torch.bfloat16 and torch.equal(one, two)
    assert json.loads((tmp_path / "agent/config.json").read_text())["dtype"] == "bfloat16"


def test_an_adapter_is_merged_into_its_base(tmp_path, base):
    """F074. The checkpoint holds the adapter alone."""
    checkpoint, learner = make_checkpoint(tmp_path, base, lora__r=4)
    names = {path.name for path in checkpoint.glob("*.safetensors")}
    assert names == {"adapter_model.safetensors"}
    export(checkpoint, tmp_path / "agent")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "agent")
    found = torch.log_softmax(merged(TOKENS).logits[0, :-1].double(), -1)
    found = found.gather(1, TOKENS[0, 1:, None])[:, 0].float()
    expected = torch.tensor(learner.logprobs(TOKENS[0].tolist()))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    start = AutoModelForCausalLM.from_pretrained(base)
    assert (start(TOKENS).logits - merged(TOKENS).logits).abs().max() > 0.01


def test_a_card_says_what_it_was_trained_from_on_and_with(tmp_path, base, checkpoint):
    export(checkpoint, tmp_path / "agent")
    card = huggingface_hub.ModelCard.load(tmp_path / "agent/README.md")
    assert card.data.library_name == "transformers" and card.data.base_model is None
    assert "# agent" in card.text and "after 7 steps" in card.text
    assert "`tests.runs:Tiny`" in card.text and "| reward | 0.100 | 0.750 |" in card.text
    assert "learning_rate: 0.01" in card.text
    assert str(base.parent) not in card.text, "folders of this machine are nobody's business"


def test_a_base_from_the_hub_is_linked(tmp_path, base, checkpoint):
    config = load_config(checkpoint / "config.yaml", ["model.name_or_path=org/base"])
    card = train.export.model_card("agent", config, train.export.read_checkpoint(checkpoint))
    assert card.data.base_model == "org/base"


def test_what_is_no_complete_checkpoint_is_refused(tmp_path, checkpoint, capsys):
    said = refused(capsys, tmp_path, tmp_path / "agent")
    assert "no complete checkpoint" in said
    run = checkpoint.parent.parent
    assert f"the newest one in it is {checkpoint}" in refused(capsys, run, tmp_path / "agent")
    assert not list(tmp_path.iterdir())


def test_broken_weights_are_said_in_one_line(tmp_path, base, capsys):
    checkpoint, _ = make_checkpoint(tmp_path, base)
    (checkpoint / "model.safetensors").write_bytes(b"half a file")
    assert f"{checkpoint} cannot be loaded" in refused(capsys, checkpoint, tmp_path / "agent")
    assert not (tmp_path / "agent").exists()


def test_a_folder_that_exists_is_never_written_to(tmp_path, checkpoint, capsys):
    (tmp_path / "agent").mkdir()
    assert "exists already" in refused(capsys, checkpoint, tmp_path / "agent")
    assert not list((tmp_path / "agent").iterdir())


@pytest.mark.parametrize("name", ["agent", "user/a/b", "user/a b"])
def test_a_name_that_the_hub_does_not_take_is_refused_first(tmp_path, checkpoint, capsys, name):
    said = refused(capsys, checkpoint, tmp_path / "agent", "--push-to-hub", name)
    assert name in said and not (tmp_path / "agent").exists()


def test_a_push_brings_every_file_to_the_hub(tmp_path, checkpoint, hub, capsys):
    asked, files = hub
    export(checkpoint, tmp_path / "agent", "--push-to-hub", "user/agent", "--private")
    assert "on the hub: http://127.0.0.1" in capsys.readouterr().out
    path, body = asked[0]
    assert path == "/api/repos/create"
    created = json.loads(body)
    assert (created["organization"], created["name"]) == ("user", "agent")
    assert created.get("private") or created.get("visibility") == "private"
    local = {file.name: file.read_bytes() for file in (tmp_path / "agent").iterdir()}
    assert files == local and {"README.md", "model.safetensors", "config.json"} <= files.keys()


def test_a_hub_that_cannot_be_reached_leaves_the_folder(tmp_path, checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    said = refused(capsys, checkpoint, tmp_path / "agent", "--push-to-hub", "user/agent", code=1)
    assert "user/agent was not pushed" in said and "hf_secret" not in said
    AutoModelForCausalLM.from_pretrained(tmp_path / "agent")


@pytest.mark.slow
@pytest.mark.sglang
def test_sglang_serves_an_export(tmp_path, sglang_python):
    """Of SmolLM2, whose head is tied; its logprobs are those of transformers."""
    checkpoint, _ = make_checkpoint(tmp_path, locate_model(SMOLLM2), noise=0.01)
    export(checkpoint, tmp_path / "agent")
    fleet = SpawnedFleet(
        SGLangConfig(python=sglang_python),
        model_path=str(tmp_path / "agent"),
        dtype="float32",
        context_tokens=256,
        max_requests=4,
        log_folder=tmp_path / "logs",
    )
    with asyncio.Runner() as runner:
        runner.run(fleet.start())
        try:
            request = {
                "input_ids": TOKENS[0].tolist(),
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            answer = requests.post(f"{fleet.urls[0]}/generate", json=request, timeout=60).json()
        finally:
            runner.run(fleet.close())
    found = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "agent")
    with torch.no_grad():
        expected = torch.log_softmax(model(TOKENS).logits[0, :-1], -1)
    expected = expected.gather(1, TOKENS[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=1e-3)
