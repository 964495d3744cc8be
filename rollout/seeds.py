"""Seeds as functions of what they are for: a replay draws the same ones, whatever the timing."""

from __future__ import annotations

from hashlib import blake2b


def derive_seed(*parts: int | str, bits: int = 63) -> int:
    """A seed in [0, 2**bits) for what `parts` name; other parts give another, independent seed.

    Example:
        derive_seed(run_seed, "group", 12, member, attempt)
    """
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - bits)
