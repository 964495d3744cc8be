"""The embedded engine against `model.generate`: tokens a second at 32 concurrent requests.

Both sides get the same weights (a random model of SmolLM2-135M's shape, or `--model`), the same
prompts (groups of 8 that share one, as in training), the same number of new tokens for each request
(20 to 200, drawn once) and the same dtype, and sample at temperature 1. `generate` takes 32
requests a batch and computes until the longest of them is done; the engine fills a place as soon as
it is free. Bar: 3x. A second part counts what a 3-turn episode prefills: no token twice.

    python -m benchmarks.engine_throughput [--model PATH] [--layers 30] [--repeats 3]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as train.py runs

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from agentrl.attention import register_attention
from agentrl.types import Sampling
from rollout.engines.local import LocalEngine
from rollout.engines.local_load import use_all_cores

CONCURRENT = 32
NUM_REQUESTS = 64
GROUP = 8
PROMPT_TOKENS = 512  # about a two-shot GSM8K prompt in JSON format
SHORTEST, LONGEST = 20, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder or hub id; default: random weights")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    use_all_cores()
    torch.manual_seed(0)
    model = make_model(options.model, options.layers)
    random = np.random.default_rng(0)
    prompts = [
        prompt
        for _ in range(NUM_REQUESTS // GROUP)
        for prompt in [random.integers(10, model.config.vocab_size, PROMPT_TOKENS).tolist()] * GROUP
    ]
    lengths = random.integers(SHORTEST, LONGEST + 1, NUM_REQUESTS).tolist()

    seconds: dict[str, list[float]] = {"generate": [], "engine": []}
    for _ in range(options.repeats):
        seconds["generate"].append(generate(model, prompts, lengths))
        seconds["engine"].append(asyncio.run(engine(model, prompts, lengths)))
    for name, values in seconds.items():
        rates = ", ".join(f"{sum(lengths) / value:.0f}" for value in values)
        print(f"{name:>8}: {rates} tokens/s")
    ratio = statistics.median(
        plain / ours for plain, ours in zip(seconds["generate"], seconds["engine"], strict=True)
    )
    print(f"the engine makes {ratio:.2f}x the tokens of model.generate (bar: 3x)")
    asyncio.run(count_prefill(model))


def make_model(name: str | None, num_layers: int) -> LlamaForCausalLM:
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, attn_implementation=register_attention()
        )
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        attn_implementation=register_attention(),
    )
    return LlamaForCausalLM(config)


@torch.inference_mode()
def generate(model: LlamaForCausalLM, prompts: list[list[int]], lengths: list[int]) -> float:
    """Seconds that transformers takes."""
    model.set_attn_implementation("sdpa")
    started = time.perf_counter()
    for start in range(0, len(prompts), CONCURRENT):
        batch = torch.tensor(prompts[start : start + CONCURRENT])
        longest = max(lengths[start : start + CONCURRENT])
        output = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            do_sample=True,
            top_k=0,
            max_new_tokens=longest,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert output.shape[1] == PROMPT_TOKENS + longest
    return time.perf_counter() - started


async def engine(model: LlamaForCausalLM, prompts: list[list[int]], lengths: list[int]) -> float:
    """Seconds that the embedded engine takes."""
    model.set_attn_implementation(register_attention())
    local = LocalEngine(
        model, num_slots=CONCURRENT, max_context_tokens=PROMPT_TOKENS + LONGEST, share_weights=True
    )
    places = asyncio.Semaphore(CONCURRENT)

    async def request(index: int) -> None:
        async with places:
            session = str(index)
            sampling = Sampling(max_new_tokens=lengths[index], seed=index)
            completion = await local.generate(prompts[index], sampling, session=session)
            await local.release(session)
        assert len(completion.token_ids) == lengths[index]

    started = time.perf_counter()
    await asyncio.gather(*(request(index) for index in range(len(prompts))))
    seconds = time.perf_counter() - started
    await local.close()
    return seconds


async def count_prefill(model: LlamaForCausalLM) -> None:
    """Play one episode of three turns and count the tokens that each request computes."""
    local = LocalEngine(model, num_slots=1, max_context_tokens=512)
    tape = list(range(10, 110))
    for turn, num_env_tokens in enumerate((12, 15, 0), start=1):
        before = len(tape)
        completion = await local.generate(
            tape, Sampling(max_new_tokens=20, seed=turn), session="episode"
        )
        counts = local.pop_metrics()
        print(
            f"turn {turn}: context {before}, prefilled {counts['engine/prefilled_tokens']:.0f}, "
            f"kept {counts['engine/cached_tokens']:.0f}"
        )
        tape = [*tape, *completion.token_ids, *range(200, 200 + num_env_tokens)]
    await local.close()


if __name__ == "__main__":
    main()
