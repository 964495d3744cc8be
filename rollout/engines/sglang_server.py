"""One SGLang server over HTTP: each reply is checked, nothing is retried."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from agentrl.protocols import EngineError
from agentrl.types import Completion, FinishReason, Sampling

OLDEST = (0, 5, 15)
RETRIED = {408, 425, 429, 500, 502, 503, 504}


class Unavailable(EngineError):
    """The server did not answer; another, or this one later, may answer the same request."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Refused(EngineError):
    """The server answered that it will not; it would say the same again."""


class ContextOverflow(Refused):
    """More tokens than the server's context holds."""


class BadReply(EngineError):
    """An answer that no token of can be trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A checked answer to `/generate`."""

    token_ids: list[int]  # [n]
    logprobs: list[float]  # [n]
    finish_reason: FinishReason
    weight_version: str
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a server says of itself."""

    sglang: tuple[int, ...]  # its version
    model_path: str
    dtype: str
    tp_size: int
    context_tokens: int
    kv_tokens: int  # what its cache holds
    routes: frozenset[str]
    weight_version: str


class SGLangServer:
    """Requests to one server. `http` is shared, and bounds the sockets of all."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url.rstrip("/")
        self._http = http

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, rid: str, weight_version: str
    ) -> Reply:
        """Sample a turn with weights of `weight_version`.

        Raises:
            Unavailable, Refused, ContextOverflow, BadReply.
        """
        body = {
            "rid": rid,
            "input_ids": list(token_ids),
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
        reply = read_reply(await self.post("/generate", body))
        if len(reply.token_ids) > sampling.max_new_tokens:
            raise BadReply(
                f"{self.url} sampled {len(reply.token_ids)} tokens, more than the "
                f"{sampling.max_new_tokens} it was asked for"
            )
        if reply.num_prompt_tokens != len(token_ids):
            raise BadReply(
                f"{self.url} read {reply.num_prompt_tokens} prompt tokens of {len(token_ids)}"
            )
        if reply.weight_version != weight_version:
            raise BadReply(
                f"{self.url} sampled with weights {reply.weight_version!r}, not {weight_version!r}"
            )
        return reply

    async def score(self, token_ids: Sequence[int], *, rid: str) -> list[float]:
        """The log probability, at temperature 1, of each token but the first: [n - 1]."""
        body = {
            "rid": rid,
            "input_ids": list(token_ids),
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        }
        meta = (await self.post("/generate", body))["meta_info"]
        entries = meta["input_token_logprobs"][1:]
        if [entry[1] for entry in entries] != list(token_ids[1:]):
            raise BadReply(f"{self.url} scored other tokens than it was given")
        return [float(entry[0]) for entry in entries]

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all."""
        await self.post("/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    async def num_requests(self) -> int:
        """Running and waiting."""
        loads = (await self.get("/v1/loads"))["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    async def flush_cache(self) -> bool:
        """Forget all keys and values; False while a request still uses them."""
        try:
            await self.post("/flush_cache", {})
        except Refused:
            return False
        return True

    async def describe(self) -> ServerInfo:
        """Raises Refused where the server is older than what is supported."""
        info, model = await self.get("/server_info"), await self.get("/model_info")
        version = tuple(int(part) for part in re.findall(r"\d+", info["version"])[:3])
        if version < OLDEST:
            raise Refused(
                f"{self.url} runs SGLang {info['version']}; {'.'.join(map(str, OLDEST))} is the "
                "oldest that works"
            )
        routes = (await self.get("/openapi.json"))["paths"]
        return ServerInfo(
            sglang=version,
            model_path=model["model_path"],
            dtype=info["dtype"],
            tp_size=info["tp_size"],
            context_tokens=info["context_length"] or 0,
            kv_tokens=info["max_total_num_tokens"],
            routes=frozenset(routes),
            weight_version=model["weight_version"],
        )

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float | None = None) -> Any:
        return await self._request("POST", path, json=body, timeout_s=timeout_s)

    async def get(self, path: str) -> Any:
        return await self._request("GET", path, timeout_s=10.0)

    async def _request(
        self, method: str, path: str, *, timeout_s: float | None, **more: Any
    ) -> Any:
        # Who calls has a deadline; None here is no time limit of the client's own beside it.
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5.0)
        try:
            async with self._http.request(method, self.url + path, timeout=timeout, **more) as got:
                if got.status == 200:
                    return await (
                        got.json() if got.content_type == "application/json" else got.text()
                    )
                text = (await got.text())[:500]
                retry_after_s = got.headers.get("Retry-After", "")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        message = f"{self.url}{path} answered {got.status}: {text}"
        if "context length" in text:
            raise ContextOverflow(message)
        if got.status in RETRIED:
            seconds = float(retry_after_s) if retry_after_s.isdigit() else 0.0
            raise Unavailable(message, seconds)
        raise Refused(message)


def read_reply(reply: dict[str, Any]) -> Reply:
    """Take tokens and logprobs out of an answer of `/generate`.

    Raises:
        BadReply: they do not fit each other, a stop token is missing, or a number is none.
    """
    meta = reply["meta_info"]
    entries = meta.get("output_token_logprobs") or []
    token_ids = [entry[1] for entry in entries]
    logprobs = [entry[0] for entry in entries]
    if "output_ids" in reply and reply["output_ids"] != token_ids:
        raise BadReply(f"{len(reply['output_ids'])} tokens came with logprobs of {len(token_ids)}")
    if meta["completion_tokens"] != len(token_ids):
        raise BadReply(
            f"completion_tokens is {meta['completion_tokens']}, but {len(token_ids)} tokens came"
        )
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        if logprob is None or not math.isfinite(logprob):
            raise BadReply(f"token {token_id} came with logprob {logprob}")
    finish = meta["finish_reason"]
    matched = finish.get("matched")
    if finish["type"] == "stop" and token_ids[-1:] != [matched]:
        raise BadReply(f"it stopped at {matched!r}, which is not its last token: {token_ids[-1:]}")
    if finish["type"] not in ("stop", "length", "abort"):
        raise BadReply(f"finish_reason is {finish!r}")
    return Reply(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=finish["type"],
        weight_version=str(meta.get("weight_version")),
        num_prompt_tokens=meta["prompt_tokens"],
        num_cached_tokens=meta["cached_tokens"],
    )
