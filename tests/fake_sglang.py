"""A server that speaks SGLang's protocol and fails on demand; its model is one number.

The model reads tokens into a state, `state = 0.7 * state + weight * (token % 7 + 1)`, and speaks of
the next token by `logits[v] = 3 sin(state * (v + 1) + v)`. States of prefixes are kept, as the KV
cache keeps keys and values: without a flush they are those of older weights. With one seed it
samples the same, as SGLang does in deterministic inference.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from aiohttp import web

from agentrl.protocols import Probe

VOCAB = 32
EOS = 2

Reply = dict[str, Any]
Spoiler = Callable[[web.Request, Reply], Awaitable[web.StreamResponse]]


def log_softmax(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    total = top + math.log(sum(math.exp(x - top) for x in logits))
    return [x - total for x in logits]


def read(state: float, token: int, weight: float) -> float:
    return 0.7 * state + weight * (token % 7 + 1)


def logits_of(state: float) -> list[float]:
    return [3 * math.sin(state * (v + 1) + v) for v in range(VOCAB)]


def score(weights: dict[str, float], token_ids: Sequence[int]) -> list[float]:
    """What a learner with `weights` says of each token but the first, without any cache."""
    state, logprobs = 0.0, []
    for token, following in pairwise(token_ids):
        state = read(state, token, sum(weights.values()))
        logprobs.append(log_softmax(logits_of(state))[following])
    return logprobs


def probe_of(weights: dict[str, float]) -> Probe:
    ids = [5, 7, 11, 3, 9]
    return Probe(token_ids=ids, logprobs=score(weights, ids), tolerance=1e-6)


@dataclass(slots=True)
class _Node:
    """A prefix in the cache."""

    state: float = 0.0
    children: dict[int, _Node] = field(default_factory=dict)


@dataclass(eq=False)
class FakeSGLang:
    """One server on this event loop; `start` it, then speak to it at `url`."""

    version: str = "0.5.15.post1"
    token_s: float = 0.0  # per sampled token
    begin_end: bool = False  # updates need /begin_weight_update, as from 0.5.22 on
    context_length: int = 4096
    dtype: str = "float32"
    spoilers: deque[Spoiler] = field(default_factory=deque)  # one per request to /generate
    answers: dict[str, Callable[[], web.Response | None]] = field(default_factory=dict)
    """By path: what to answer instead of what is right; None: what is right."""
    missing_routes: set[str] = field(default_factory=set)
    hung: bool = False  # nothing is answered
    slow: dict[str, float] = field(default_factory=dict)  # by path: seconds until it is answered
    lose_aborts: int = 0  # so many are answered and not heard
    lose_buckets: int = 0  # so many are answered and not applied
    stale_flushes: bool = False  # a flush is answered and does nothing
    weights: dict[str, float] = field(default_factory=lambda: {"a": 0.1, "b": 0.2})
    weight_version: str = "default"
    counts: dict[str, int] = field(default_factory=dict)  # requests by path
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of /generate
    running_at_update: int = 0  # the most requests there were while weights came
    most_running: int = 0
    most_connections: int = 0
    released: set[str] = field(default_factory=set)
    port: int = 0

    def __post_init__(self) -> None:
        self.running: dict[str, asyncio.Event] = {}  # request id -> whether it is aborted
        self._root = _Node()
        self._updating = False
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> FakeSGLang:
        app = web.Application(client_max_size=2**30, middlewares=[self._middleware])
        for method, path, handler in (
            ("GET", "/model_info", self._model_info),
            ("GET", "/server_info", self._server_info),
            ("GET", "/openapi.json", self._openapi),
            ("GET", "/v1/loads", self._loads),
            ("POST", "/generate", self._generate),
            ("POST", "/abort_request", self._abort),
            ("POST", "/flush_cache", self._flush),
            ("POST", "/update_weight_version", self._set_version),
            ("POST", "/update_weights_from_tensor", self._update),
            ("POST", "/begin_weight_update", self._begin),
            ("POST", "/end_weight_update", self._end),
            ("POST", "/release_memory_occupation", self._release),
            ("POST", "/resume_memory_occupation", self._resume),
        ):
            if path not in self.missing_routes:
                app.router.add_route(method, path, handler)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True, backlog=4096)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def die(self) -> None:
        """As by kill -9: all connections are reset, and the port is closed."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        assert runner.server is not None
        for site in list(runner.sites):
            await site.stop()
        for connection in list(runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()
        self.running.clear()

    async def restart(self) -> None:
        """At the same port, with the weights that it was made with."""
        await self.die()
        self._root, self.weight_version = _Node(), "default"
        self.weights, self.released, self.hung = {"a": 0.1, "b": 0.2}, set(), False
        await self.start()

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        path = request.path
        self.counts[path] = self.counts.get(path, 0) + 1
        if self._runner is not None and self._runner.server is not None:
            connections = len(self._runner.server.connections)
            self.most_connections = max(self.most_connections, connections)
        if self.hung:
            await asyncio.sleep(3600)
        if path in self.slow:
            await asyncio.sleep(self.slow[path])
        answer = self.answers[path]() if path in self.answers else None
        return answer if answer is not None else await handler(request)

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": "fake",
                "tokenizer_path": "fake",
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self.weight_version,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
            }
        )

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": self.version,
                "dtype": self.dtype,
                "tp_size": 1,
                "context_length": self.context_length,
                "max_total_num_tokens": 100_000,
                "max_req_input_len": self.context_length - 6,
            }
        )

    async def _openapi(self, _: web.Request) -> web.Response:
        assert self._runner is not None
        paths = {r.resource.canonical for r in self._runner.app.router.routes() if r.resource}
        return web.json_response({"paths": {path: {} for path in paths}})

    async def _loads(self, _: web.Request) -> web.Response:
        load = {"dp_rank": 0, "num_running_reqs": len(self.running), "num_waiting_reqs": 0}
        return web.json_response({"version": self.version, "loads": [load]})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.lose_aborts:
            self.lose_aborts -= 1
        else:
            for rid, aborted in self.running.items():
                if body.get("abort_all") or rid.startswith(body["rid"]):
                    aborted.set()
        return web.Response()

    async def _flush(self, _: web.Request) -> web.Response:
        if self.running:
            return web.Response(status=400, text="Flush cache failed.\n")
        if not self.stale_flushes:
            self._root = _Node()
        return web.Response(text="Cache flushed.\n")

    async def _set_version(self, request: web.Request) -> web.Response:
        self.weight_version = (await request.json())["new_version"]
        return web.json_response({"success": True, "message": "", "new_version": ""})

    async def _begin(self, _: web.Request) -> web.Response:
        self._updating = True
        return web.json_response({"success": True, "message": ""})

    async def _end(self, _: web.Request) -> web.Response:
        self._updating = False
        return web.json_response({"success": True, "message": ""})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.running_at_update = max(self.running_at_update, len(self.running))
        if self.begin_end and not self._updating:
            message = "begin_weight_update comes first"
            return web.json_response({"success": False, "message": message}, status=400)
        bucket = json.loads(base64.b64decode(body["serialized_named_tensors"][0]))
        if unknown := bucket.keys() - self.weights.keys():
            message = f"unknown {sorted(unknown)}"
            return web.json_response({"success": False, "message": message}, status=400)
        if self.lose_buckets:
            self.lose_buckets -= 1
        else:
            self.weights |= bucket
        return web.json_response({"success": True, "message": "Success"})

    async def _release(self, request: web.Request) -> web.Response:
        if self.running:
            await self.die()  # an assertion kills the real one
        self.released |= set((await request.json())["tags"])
        self._root = _Node()
        self.weights = dict.fromkeys(self.weights, random.random())
        return web.json_response(None)

    async def _resume(self, request: web.Request) -> web.Response:
        tags = set((await request.json())["tags"])
        if not tags <= self.released:
            await self.die()  # so does the real one
        self.released -= tags
        return web.json_response(None)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        rid, ids, sampling = body["rid"], body["input_ids"], body["sampling_params"]
        if rid in self.running:
            return _refuse(f"Duplicate request ID detected: {rid}")
        if len(ids) + sampling["max_new_tokens"] > self.context_length:
            return _refuse("Requested token count exceeds the model's maximum context length")
        if len(ids) >= self.context_length - 6:
            return _refuse(f"Input length ({len(ids)} tokens) exceeds the maximum allowed length")
        aborted = self.running[rid] = asyncio.Event()
        self.most_running = max(self.most_running, len(self.running))
        try:
            reply = await self._reply(body, aborted)
        finally:
            self.running.pop(rid, None)
        if self.spoilers:
            return await self.spoilers.popleft()(request, reply)
        return web.json_response(reply)

    async def _reply(self, body: dict[str, Any], aborted: asyncio.Event) -> Reply:
        ids, sampling = body["input_ids"], body["sampling_params"]
        node, weight, num_cached = self._root, sum(self.weights.values()), 0
        entries: list[Any] = []
        for index, token in enumerate(ids):
            if "logprob_start_len" in body:
                entry = log_softmax(logits_of(node.state))[token] if index else None
                entries.append([entry, token, None])
            node, num_cached = self._read(node, token, weight, index, num_cached)
        limit = min(sampling["max_new_tokens"], self.context_length - 2 - len(ids))
        temperature = sampling["temperature"]
        stops = {EOS, *sampling.get("stop_token_ids", [])}
        random_ = random.Random(sampling.get("sampling_seed"))
        finish: dict[str, Any] = {"type": "length", "length": limit}
        sampled: list[list[Any]] = []
        while len(sampled) < limit:
            if self.token_s:
                with suppress(TimeoutError):
                    await asyncio.wait_for(aborted.wait(), self.token_s)
            if aborted.is_set():
                finish = {"type": "abort", "message": "Aborted", "status_code": None}
                break
            logits = logits_of(node.state)
            logprobs = log_softmax([x / (temperature or 1.0) for x in logits])
            if temperature:
                token = random_.choices(range(VOCAB), [math.exp(x) for x in logprobs])[0]
            else:
                token = max(range(VOCAB), key=logprobs.__getitem__)
            sampled.append([logprobs[token], token, None])
            node, _ = self._read(node, token, weight, 0, 0)
            if token in stops:
                finish = {"type": "stop", "matched": token}
                break
        meta = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(ids),
            "weight_version": self.weight_version,
            "num_retractions": 0,
            "input_token_logprobs": entries,
            "output_token_logprobs": sampled,
            "output_token_logprobs_length": len(sampled),
            "reasoning_tokens": 0,
            "completion_tokens": len(sampled),
            "cached_tokens": num_cached,
            "cached_tokens_details": None,
            "dp_rank": None,
            "e2e_latency": self.token_s * len(sampled),
            "response_sent_to_client_ts": 0.0,
        }
        return {"text": "", "output_ids": [entry[1] for entry in sampled], "meta_info": meta}

    def _read(
        self, node: _Node, token: int, weight: float, index: int, num_cached: int
    ) -> tuple[_Node, int]:
        """The node after `token`, and how many tokens of the prompt were found in the cache."""
        child = node.children.get(token)
        if child is not None:
            return child, num_cached + (num_cached == index)
        child = node.children[token] = _Node(read(node.state, token, weight))
        return child, num_cached


def _refuse(message: str, status: int = 400) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


# Spoilers.


def status(code: int, text: str = "no", **headers: str) -> Spoiler:
    async def spoil(_: web.Request, reply: Reply) -> web.StreamResponse:
        return web.json_response({"error": {"message": text}}, status=code, headers=headers)

    return spoil


def change(edit: Callable[[Reply], Any]) -> Spoiler:
    async def spoil(_: web.Request, reply: Reply) -> web.StreamResponse:
        edit(reply)
        return web.json_response(reply)

    return spoil


async def cut(request: web.Request, reply: Reply) -> web.StreamResponse:
    """The connection breaks in the middle of the answer."""
    text = json.dumps(reply).encode()
    response = web.StreamResponse(headers={"Content-Length": str(len(text))})
    response.content_type = "application/json"
    await response.prepare(request)
    await response.write(text[: len(text) // 2])
    assert request.transport is not None
    request.transport.abort()
    return response


async def hang(request: web.Request, reply: Reply) -> web.StreamResponse:
    await asyncio.sleep(3600)
    raise AssertionError


async def right(_: web.Request, reply: Reply) -> web.StreamResponse:
    return web.json_response(reply)
