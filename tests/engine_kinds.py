"""The engines that a contract is asked of: local, a fake SGLang, and a real one."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from agentrl.attention import register_attention
from agentrl.config import SGLangConfig
from agentrl.models import SMOLLM2, locate_model
from agentrl.protocols import Engine, Probe
from agentrl.types import Completion
from rollout.engines.local import LocalEngine
from rollout.engines.sglang import SGLangEngine
from rollout.server import ConnectedFleet
from tests.fake_fleet import FakeFleet, FakeTransport
from tests.fake_sglang import FakeSGLang, log_softmax, logits_of, read
from train.weight_sync.transports import TensorTransport
from train.weights import checkpoint_shapes

Logits = Callable[[str, Sequence[int]], list[list[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of engine, and two sets of weights for it, "old" and "new"."""

    make: Callable[[], Any]  # -> an async context manager of an engine
    weights: Callable[[str], Any]
    logits: Logits  # by the model itself, after each token
    tolerance: float
    stop: int
    repeats: bool  # with one seed
    refuses_overflow: bool = False
    transport: Callable[[], Any] = FakeTransport

    def logprobs(self, name: str, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Of each token but the first."""
        rows = self.logits(name, ids)
        return [
            log_softmax([x / temperature for x in row])[token]
            for row, token in zip(rows, ids[1:], strict=False)
        ]

    def probe(self, name: str) -> Probe:
        ids = [5, 7, 11, 3, 9, 6]
        return Probe(token_ids=ids, logprobs=self.logprobs(name, ids), tolerance=self.tolerance)

    async def sync(self, engine: Engine, version: int, name: str = "old") -> dict[str, float]:
        return await engine.update_weights(self.weights(name), version, self.probe(name))

    def play(self, test: Callable[[Engine], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            async with asyncio.timeout(240), self.make() as engine:
                await engine.start()
                await self.sync(engine, 0)
                return await test(engine)

        return asyncio.run(run())

    def check(
        self,
        completion: Completion,
        context: list[int],
        name: str = "old",
        temperature: float = 1.0,
    ) -> None:
        """The logprobs are the model's own, without any cache."""
        expected = self.logprobs(name, context + completion.token_ids, temperature)
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.logprobs == pytest.approx(
            expected[len(context) - 1 :], abs=self.tolerance
        )


def of_models(models: dict[str, Any]) -> Logits:
    def logits(name: str, ids: Sequence[int]) -> list[list[float]]:
        with torch.no_grad():
            return models[name](torch.tensor([list(ids)])).logits[0].double().tolist()

    return logits


@torch.no_grad()
def two(model: Any) -> dict[str, Any]:
    """The model, and another with the same shapes."""
    other = copy.deepcopy(model)
    for layer in other.model.layers:
        layer.input_layernorm.weight.mul_(1.2)
    return {"old": model, "new": other}


def local_kind() -> Kind:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        tie_word_embeddings=True,
        attn_implementation=register_attention(),
    )
    models = two(LlamaForCausalLM(config).float())
    references = {name: copy.deepcopy(model) for name, model in models.items()}
    for reference in references.values():
        reference.set_attn_implementation("eager")

    @asynccontextmanager
    async def make() -> AsyncIterator[Engine]:
        engine = LocalEngine(
            models["old"], num_slots=8, max_context_tokens=128, share_weights=False
        )
        try:
            yield engine
        finally:
            await engine.close()

    return Kind(
        make=make,
        weights=lambda name: models[name].named_parameters(),
        logits=of_models(references),
        tolerance=1e-4,
        stop=2,
        repeats=True,
        refuses_overflow=True,
    )


def fake_kind() -> Kind:
    weights = {"old": {"a": 0.3, "b": 0.1}, "new": {"a": 0.2, "b": 0.5}}

    def logits(name: str, ids: Sequence[int]) -> list[list[float]]:
        state, rows = 0.0, []
        for token in ids:
            state = read(state, token, sum(weights[name].values()))
            rows.append(logits_of(state))
        return rows

    @asynccontextmanager
    async def make() -> AsyncIterator[Engine]:
        server = await FakeSGLang(context_length=128, token_s=0.002).start()
        engine = sglang_engine(FakeFleet([server]), FakeTransport(), context=120)
        try:
            yield engine
        finally:
            await engine.close()

    return Kind(
        make=make,
        weights=lambda name: weights[name].items(),
        logits=logits,
        tolerance=1e-9,
        stop=2,
        repeats=True,
    )


def sglang_kind(url: str) -> Kind:
    path = locate_model(SMOLLM2)
    models = two(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    config = SGLangConfig(mode="connect", urls=[url], sync_timeout_s=60.0)
    shapes = checkpoint_shapes(path, {"lm_head.weight"})

    def weights(name: str) -> Iterator[tuple[str, torch.Tensor]]:
        for key, tensor in models[name].state_dict().items():
            if key != "lm_head.weight":
                yield key, tensor

    def transport() -> TensorTransport:
        return TensorTransport(config, shapes, torch.device("cpu"))

    @asynccontextmanager
    async def make() -> AsyncIterator[Engine]:
        engine = sglang_engine(ConnectedFleet(config), transport(), context=2048)
        try:
            yield engine
        finally:
            await engine.close()

    return Kind(
        make=make,
        weights=weights,
        logits=of_models(models),
        tolerance=1e-3,
        stop=2,
        repeats=False,
        transport=transport,
    )


def sglang_engine(fleet: Any, transport: Any, context: int) -> SGLangEngine:
    return SGLangEngine(
        fleet,
        transport,
        SGLangConfig(mode="connect", urls=fleet.urls, start_timeout_s=30.0, sync_timeout_s=60.0),
        run_id="contract",
        max_context_tokens=context,
        max_concurrent=16,
        architecture="LlamaForCausalLM",
    )
