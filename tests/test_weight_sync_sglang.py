"""Weights to a real SGLang, which computes with them what the learner computes."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.config import SGLangConfig
from agentrl.models import SMOLLM2, locate_model
from agentrl.protocols import SyncError
from rollout.engines.sglang_server import SGLangServer, open_http
from tests.real_server import serving
from train.weight_sync.transports import make_transport
from train.weights import full_weights

KINDS = ["tensor", "distributed", "disk"]
CPU = torch.device("cpu")
TEXT = (  # the model's own: bfloat16 rounds the logprobs of unlikely tokens more
    "The capital of France is Paris. It is a city renowned for its historical landmarks, culture, "
    "and the iconic Eiffel Tower."
)
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.06}  # a server that computes in bfloat16 is 0.04 off


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(locate_model(SMOLLM2), dtype=torch.float32)


@pytest.fixture(scope="module")
def own(model):
    """A copy of the weights that servers start with."""
    return {name: tensor.clone() for name, tensor in full_weights(model)}


@pytest.fixture(scope="module")
def probe():
    return AutoTokenizer.from_pretrained(locate_model(SMOLLM2))(TEXT)["input_ids"]


@pytest.fixture(
    scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def served(request, sglang_python, tmp_path_factory):
    """The url and the dtype of a server."""
    if request.param == "float32":
        yield request.getfixturevalue("sglang_server"), "float32"
        return
    with serving(sglang_python, "bfloat16", tmp_path_factory.mktemp("bfloat16")) as url:
        yield url, "bfloat16"


def perturb(model, own, seed):
    """Weights that are far from the model's own, but no nonsense."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in full_weights(model):
            scale = 0.05 * own[name].std() if tensor.ndim > 1 else 0.0
            tensor.copy_(own[name] + scale * torch.randn(tensor.shape, generator=generator))


def logprobs_of(model, token_ids):
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]


def difference(ours, theirs):
    return float((ours - torch.tensor(theirs)).abs().mean())


def with_server(url, test):
    async def main():
        http, _ = open_http(8)
        async with http:
            server = SGLangServer(url, http)
            await server.describe()
            return await test(server)

    return asyncio.run(main())


async def score(server, token_ids, rid, adapter=None):
    version = await server.weight_version()
    assert await server.flush_cache()
    return await server.score(token_ids, rid=rid, weight_version=version, adapter=adapter)


@pytest.mark.parametrize("kind", KINDS)
def test_a_real_server_computes_with_the_weights_it_was_sent(
    kind, served, model, own, probe, tmp_path
):
    """Two updates and one back to the start; logprobs agree after each, and did not before."""
    url, dtype = served
    transport = make_transport(
        SGLangConfig(weight_sync=kind, bucket_mb=128),
        device=CPU,
        model_path=locate_model(SMOLLM2),
        tied=model.all_tied_weights_keys,
        folder=tmp_path,
    )

    async def test(server):
        try:
            before = await score(server, probe, f"{kind}-before")
            for seed in (1, 2, None):
                if seed is None:
                    model.load_state_dict(own, strict=False)
                else:
                    perturb(model, own, seed)
                ours = logprobs_of(model, probe)
                start = time.perf_counter()
                sent = await transport.send(full_weights(model), [server])
                seconds = time.perf_counter() - start
                assert sent.failed == {} and sent.num_tensors == len(own)
                after = await score(server, probe, f"{kind}-{seed}")
                verified = time.perf_counter() - start
                right, wrong = difference(ours, after), difference(ours, before)
                print(
                    f"\n{kind} {dtype}: {sent.num_bytes / 1e6:.0f} MB in {seconds:.2f} s, verified "
                    f"after {verified:.2f} s; logprobs differ by {right:.2g}, before {wrong:.2g}"
                )
                assert right <= TOLERANCE[dtype] and wrong > 4 * TOLERANCE[dtype]
                before = after
        finally:
            await transport.close()

    with_server(url, test)


def test_a_real_server_is_never_sent_a_name_it_would_skip(served, model, own, probe, tmp_path):
    """F074: it would answer that it succeeded."""
    url, _ = served
    transport = make_transport(
        SGLangConfig(weight_sync="tensor"),
        device=CPU,
        model_path=locate_model(SMOLLM2),
        tied=model.all_tied_weights_keys,
        folder=tmp_path,
    )
    weights = {name.replace("q_proj", "query"): tensor for name, tensor in own.items()}

    async def test(server):
        assert (await transport.send(own.items(), [server])).failed == {}
        before = await score(server, probe, "names-before")
        with pytest.raises(SyncError, match="query"):
            await transport.send(weights.items(), [server])
        assert (await transport.send(own.items(), [server])).failed == {}
        await transport.close()
        assert await score(server, probe, "names-after") == pytest.approx(before, abs=1e-3)

    with_server(url, test)
