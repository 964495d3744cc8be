"""An attention implementation for transformers' models that the caller chooses at each forward.

The learner attends within packed sequences, the embedded engine over its KV slots. Both load the
model once, with `attn_implementation=ATTENTION`, and hand their own `attend` to `model(...,
attend=…)`; no weight is copied between them.
"""

from __future__ import annotations

from typing import Any, Protocol

ATTENTION = "agentrl"


class Attend(Protocol):
    def __call__(self, layer: int, query: Any, key: Any, value: Any, scaling: float) -> Any:
        """Attention of one layer.

        Args:
            layer: counted from 0.
            query: [1, query heads, T, head dim], rotary embedding applied.
            key: [1, key/value heads, T, head dim], likewise.
            value: [1, key/value heads, T, head dim].
            scaling: of the scores, before the softmax.

        Returns:
            [1, query heads, T, head dim].
        """
        ...


def register_attention() -> str:
    """Make `ATTENTION` known to transformers; returns its name, for `attn_implementation=`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attend)
    return ATTENTION


def _attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    scaling: float,
    attend: Attend,
    **_: Any,
) -> tuple[Any, None]:
    # transformers wants [1, T, heads, head dim] back.
    return attend(module.layer_idx, query, key, value, scaling).transpose(1, 2), None
