"""What a SGLang server answers to `/generate`, checked: no token counts that may be wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.protocols import EngineError
from agentrl.types import Completion, FinishReason


class BadReply(EngineError):
    """An answer that no token of can be trained on."""


class ForeignWeights(BadReply):
    """An answer sampled with other weights than those that the server was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A checked answer to `/generate`. Times count seconds.

    SGLang tells all of them with --enable-metrics, and from a release after 0.5.15 on: there the
    times of the scheduler get lost on the way. None: it does not tell.
    """

    token_ids: list[int]  # [n]
    logprobs: list[float]  # [n]
    finish_reason: FinishReason
    num_prompt_tokens: int | None  # None: aborted while it waited
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    latency_s: float | None  # from its arrival to its end
    queue_s: float | None
    ttft_s: float | None  # from its arrival to the first token: queueing and prefill
    tpot_s: float | None  # per output token after the first

    def completion(self, version: int) -> Completion:
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            versions=[version] * len(self.token_ids),
        )


def check_versions(meta: dict[str, Any], expected: str) -> None:
    """Raises ForeignWeights where any token was sampled with others than `expected`."""
    versions = {meta.get("weight_version")}
    versions |= {span["version"] for span in meta.get("weight_versions") or ()}
    if versions != {expected}:
        found = ", ".join(sorted(map(repr, versions)))
        raise ForeignWeights(f"it sampled with weights {found}, not {expected!r}")


def read_reply(answer: dict[str, Any], weight_version: str) -> Reply:
    """Take tokens and logprobs out of an answer of `/generate`.

    Raises:
        BadReply: they do not fit each other, a stop token is missing, a number is none, or a part
            of the answer is missing.
        ForeignWeights: they come of other weights than `weight_version`.
    """
    try:
        meta = answer["meta_info"]
        finish = meta["finish_reason"]
        reason = finish["type"]
        if reason == "abort":  # maybe of a request that never ran
            meta = {"output_token_logprobs": [], "prompt_tokens": None, "cached_tokens": 0} | meta
        entries = meta["output_token_logprobs"]
        logprobs, token_ids = [entry[0] for entry in entries], [entry[1] for entry in entries]
        num_tokens, output_ids = meta["completion_tokens"], answer["output_ids"]
        num_prompt, num_cached = meta["prompt_tokens"], meta["cached_tokens"]
    except (KeyError, TypeError, IndexError) as error:
        raise BadReply(f"a part of the answer is missing: {error!r} of {answer}"[:500]) from error
    if reason not in ("stop", "length", "abort"):
        raise BadReply(f"finish_reason is {finish!r}")
    if output_ids != token_ids or num_tokens != len(token_ids):
        raise BadReply(
            f"{len(token_ids)} logprobs came with {len(output_ids)} output_ids and "
            f"completion_tokens={num_tokens}, or of other tokens"
        )
    if None in logprobs or not all(map(math.isfinite, logprobs)):
        raise BadReply(f"a logprob is none of {list(zip(token_ids, logprobs, strict=True))}"[:500])
    matched = finish.get("matched")
    if reason == "stop" and (type(matched) is not int or token_ids[-1:] != [matched]):
        raise BadReply(f"it stopped at {matched!r}, which is not its last token: {token_ids[-1:]}")
    check_versions(meta, weight_version)
    begun, prefilled = meta.get("request_received_ts"), meta.get("prefill_finished_time")
    finished, ttft_s, tpot_s = meta.get("request_finished_ts"), None, None
    if begun is not None and prefilled is not None:
        ttft_s = prefilled - begun
        if finished is not None and num_tokens > 1:
            tpot_s = (finished - prefilled) / (num_tokens - 1)
    return Reply(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=reason,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=num_cached,
        latency_s=meta.get("e2e_latency"),
        queue_s=meta.get("queue_time") if "forward_entry_time" in meta else None,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
    )


def read_scores(
    answer: dict[str, Any], token_ids: Sequence[int], weight_version: str
) -> list[float]:
    """The log probabilities of `token_ids` but the first: [n - 1].

    Raises:
        BadReply: there are none, or of other tokens.
        ForeignWeights: they come of other weights than `weight_version`.
    """
    try:
        meta = answer["meta_info"]
        entries = meta["input_token_logprobs"][1:]
        scored, logprobs = [entry[1] for entry in entries], [float(entry[0]) for entry in entries]
    except (KeyError, TypeError, IndexError) as error:
        raise BadReply(f"a part of the answer is missing: {error!r} of {answer}"[:500]) from error
    check_versions(meta, weight_version)
    if scored != list(token_ids[1:]):
        raise BadReply(f"it scored {len(scored)} tokens, others than the {len(token_ids)} given")
    return logprobs
