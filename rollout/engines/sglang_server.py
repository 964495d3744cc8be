"""One SGLang server over HTTP: each reply is checked, nothing is retried."""

from __future__ import annotations

import logging
import math
import re
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from pydantic_core import from_json, to_json

from agentrl.protocols import EngineDied, EngineError
from agentrl.types import Sampling
from rollout.engines.sglang_reply import BadReply, Reply, read_reply, read_scores
from rollout.gate import Turnstile

OLDEST = (0, 5, 15)
ROUTES = frozenset(
    {
        "/abort_request",
        "/flush_cache",
        "/generate",
        "/model_info",
        "/server_info",
        "/update_weight_version",
        "/v1/loads",
    }
)
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
CONTROL_S = 10.0  # what a request that samples nothing may take
WARM_UP_S = 120.0  # what the first may take that the scheduler answers: it may be compiling
UNUSED_CONTEXT = 2  # tokens at the end of a server's context that it never samples
JSON = {"Content-Type": "application/json"}
CONNECT = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
CONTROL_SOCKETS = 16  # beside those of requests that sample
KEEP_ALIVE_S = 2.0  # less than SGLang's 5: a connection must not close under a request

logger = logging.getLogger("agentrl")


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version such as 0.5.15.post1: (0, 5, 15)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


class Unavailable(EngineError):
    """The server did not answer; another, or this one later, may answer the same request."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Lost(Unavailable):
    """The connection broke, or never was: the request may still run, the server may be dead."""


class Refused(EngineError):
    """The server answered that it will not; it would say the same again."""


class ContextOverflow(Refused):
    """More tokens than the server's context holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a server says of itself."""

    sglang: str  # its version
    model_path: str
    architectures: tuple[str, ...]  # such as LlamaForCausalLM
    dtype: str
    tensor_parallel_size: int
    context_tokens: int  # of the longest request
    kv_tokens: int  # what its cache holds
    routes: frozenset[str]
    weight_version: str

    def objection(
        self, *, run_id: str, max_context_tokens: int, architecture: str | None, take_over: bool
    ) -> str | None:
        """Why this server cannot serve the run, and what to do; None: it can."""
        oldest = ".".join(map(str, OLDEST))
        if release(self.sglang) < OLDEST:
            return f"it runs SGLang {self.sglang}, and {oldest} is the oldest that works"
        if missing := ROUTES - self.routes:
            return f"it does not serve {', '.join(sorted(missing))}, as SGLang {oldest} does"
        if architecture and architecture not in self.architectures:
            return (
                f"its model {self.model_path} is a {', '.join(self.architectures)}, the learner's "
                f"a {architecture}"
            )
        if self.dtype == "auto":
            return "it does not say the dtype of its weights; start it with --dtype bfloat16"
        room = min(self.context_tokens, self.kv_tokens)
        if room < max_context_tokens:
            return (
                f"it takes {room} tokens (context {self.context_tokens}, KV cache "
                f"{self.kv_tokens}), fewer than rollout.max_context_tokens={max_context_tokens}"
            )
        owner = self.weight_version.rpartition("/")[0]
        if owner not in ("", run_id) and not take_over:
            return (
                f"it holds weights {self.weight_version!r} of another run; stop that run, or set "
                "sglang.take_over=true"
            )
        return None


class SGLangServer:
    """Implements `agentrl.protocols.Server`; `describe` fills in what the server says of itself.

    `http` is shared with other servers, and bounds the sockets of all; so is `turnstile`, which
    keeps the event loop from writing, or reading, many long requests at a stretch.
    """

    def __init__(
        self, url: str, http: aiohttp.ClientSession, turnstile: Turnstile | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.life = 0
        self.num_ranks = 1
        self.dtype = ""
        self.routes: frozenset[str] = frozenset()
        self._http, self._turnstile = http, turnstile or Turnstile()
        self._max_length = math.inf  # tokens of prompt and turn, where the server cuts a turn

    async def describe(self) -> ServerInfo:
        """Raises EngineError where it does not answer as an SGLang server does."""
        try:
            model = await self.get("/model_info")
            info = await self.get("/server_info", timeout_s=WARM_UP_S)
            described = ServerInfo(
                sglang=info["version"],
                model_path=model["model_path"],
                architectures=tuple(model.get("architectures") or ()),
                dtype=info["dtype"],
                tensor_parallel_size=info["tp_size"],
                context_tokens=info["context_length"] or info["max_req_input_len"] + 6,
                kv_tokens=info["max_total_num_tokens"],
                routes=frozenset((await self.get("/openapi.json"))["paths"]),
                weight_version=model["weight_version"],
            )
        except (Refused, KeyError, TypeError) as error:
            oldest = ".".join(map(str, OLDEST))
            raise Refused(
                f"{self.url} does not answer as SGLang {oldest} or newer does: "
                f"{type(error).__name__}: {error}"
            ) from error
        self.life += 1
        self.num_ranks = described.tensor_parallel_size
        self.dtype, self.routes = described.dtype, described.routes
        self._max_length = min(described.context_tokens, described.kv_tokens) - UNUSED_CONTEXT
        return described

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        rid: str,
        weight_version: str,
        adapter: str | None = None,
    ) -> Reply:
        """Sample a turn with weights of `weight_version`.

        No `rid` may begin with another one: SGLang aborts by prefix.

        Raises:
            Unavailable, Refused, ContextOverflow, BadReply.
        """
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": token_ids if isinstance(token_ids, list) else list(token_ids),
            "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "stop_token_ids": list(sampling.stop_token_ids),
                "sampling_seed": sampling.seed % 2**31,
                "skip_special_tokens": False,
                "no_stop_trim": True,
            },
        }
        if adapter is not None:
            body["lora_path"] = adapter
        with _named(self.url):
            reply = read_reply(await self.post("/generate", body), weight_version)
        num_tokens, num_prompt = len(reply.token_ids), len(token_ids)
        if reply.num_prompt_tokens not in (None, num_prompt):
            raise BadReply(
                f"{self.url} read {reply.num_prompt_tokens} prompt tokens of {num_prompt}"
            )
        if num_tokens > sampling.max_new_tokens or (
            reply.finish_reason == "length"
            and num_tokens < min(sampling.max_new_tokens, self._max_length - num_prompt)
        ):
            raise BadReply(
                f"{self.url} was asked for {sampling.max_new_tokens} tokens and ended "
                f"at {num_tokens}, by {reply.finish_reason}"
            )
        return reply

    async def score(
        self,
        token_ids: Sequence[int],
        *,
        rid: str,
        weight_version: str,
        adapter: str | None = None,
    ) -> list[float]:
        """The log probability, at temperature 1, of each token but the first: [n - 1]."""
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": list(token_ids),
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        }
        if adapter is not None:
            body["lora_path"] = adapter
        with _named(self.url):
            return read_scores(await self.post("/generate", body), token_ids, weight_version)

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all."""
        body = {"abort_all": True} if rid is None else {"rid": rid}
        await self.post("/abort_request", body, timeout_s=CONTROL_S)

    async def loads(self, *, timeout_s: float | None = None) -> tuple[int, int]:
        """Requests that run, and requests that wait."""
        loads = (await self.get("/v1/loads", timeout_s=timeout_s))["loads"]
        return (
            sum(load["num_running_reqs"] for load in loads),
            sum(load["num_waiting_reqs"] for load in loads),
        )

    async def weight_version(self) -> str:
        return (await self.get("/model_info"))["weight_version"]

    async def flush_cache(self) -> bool:
        """Forget all keys and values; False while a request still uses them."""
        try:
            await self.post("/flush_cache", {}, timeout_s=CONTROL_S)
        except Refused:
            return False
        return True

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float | None = None) -> Any:
        return await self._request("POST", path, body, timeout_s)

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        return await self._request("GET", path, None, timeout_s or CONTROL_S)

    async def _request(self, method: str, path: str, body: Any, timeout_s: float | None) -> Any:
        # Who calls has a deadline; None is no time limit of the client's own beside it.
        timeout = CONNECT if timeout_s is None else aiohttp.ClientTimeout(timeout_s)
        where = self.url + path
        await self._turnstile.pass_through()
        data = None if body is None else to_json(body)
        try:
            async with self._http.request(
                method, where, data=data, headers=JSON, timeout=timeout
            ) as got:
                content = await got.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Lost(f"{where}: {type(error).__name__}: {error}") from error
        await self._turnstile.pass_through()
        if got.status == 200:
            if got.content_type != "application/json":
                return content.decode(errors="replace")
            try:
                return from_json(content)
            except ValueError as error:
                raise BadReply(f"{where} answered what is no JSON: {error}") from error
        text = content.decode(errors="replace")[:500]
        message = f"{where} answered {got.status}: {text}"
        if got.status in RETRIED:
            seconds = got.headers.get("Retry-After", "")
            raise Unavailable(message, float(seconds) if seconds.isdigit() else 0.0)
        if got.status in (401, 403):
            raise EngineDied(message)
        if "context length" in text or "maximum allowed length" in text:
            raise ContextOverflow(message)
        raise Refused(message)


@contextmanager
def _named(url: str) -> Iterator[None]:
    """Put `url` in front of what is wrong with its reply."""
    try:
        yield
    except BadReply as error:
        raise type(error)(f"{url}: {error}") from error


def open_http(max_concurrent: int) -> tuple[aiohttp.ClientSession, int]:
    """A session for all servers, and the requests that may sample at once.

    They use at most half of the files that this process may have open: tools and envs need some.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_requests = min(max_concurrent, max(limit // 2 - CONTROL_SOCKETS, 1))
    if num_requests < max_concurrent:
        logger.warning(
            "%d requests at once need more open files than `ulimit -n` allows (%d): %d at once",
            max_concurrent,
            limit,
            num_requests,
        )
    connector = aiohttp.TCPConnector(
        limit=num_requests + CONTROL_SOCKETS, keepalive_timeout=KEEP_ALIVE_S
    )
    http = aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar(), timeout=CONNECT
    )
    return http, num_requests
