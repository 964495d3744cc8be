"""The trained model as one module: a packed row in, what the loss reads of its tokens out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from train.logprobs import head_logprobs
from train.packing import MicroBatch, PackedAttention


class PolicyOutput(NamedTuple):
    """Of the N trained tokens of a row, float32."""

    logprobs: torch.Tensor  # [N]
    entropies: torch.Tensor  # [N] nats, of the distribution that the token was drawn from
    values: torch.Tensor | None  # [N] what the value head expects before the token is drawn


class Policy(nn.Module):
    """A causal language model that answers a micro-batch with log probabilities.

    A module, so that data parallelism can wrap the whole forward pass, head included.

    Args:
        model: a transformers model loaded with `attn_implementation=ATTENTION`, with or without
            LoRA adapters.
        value_head: whether to predict values from the last hidden states too; at first they are 0.
    """

    def __init__(self, model: Any, *, value_head: bool = False) -> None:
        super().__init__()
        self.model = model
        self._no_split_modules = layer_classes(model)  # where Accelerate looks for them
        self.value_head: nn.Linear | None = None
        if value_head:
            self.value_head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
            nn.init.zeros_(self.value_head.weight)

    def forward(
        self,
        micro_batch: MicroBatch,
        temperature: float,
        *,
        entropy_gradient: bool = False,
        without_adapter: bool = False,
    ) -> PolicyOutput:
        """Log probabilities of the trained tokens under softmax(logits / temperature).

        Only the positions that predict a trained token reach the heads; the shift from a token to
        the position that predicts it is made here, and nowhere else.
        """
        with adapters_off(self.model) if without_adapter else nullcontext():
            hidden = self.model.get_decoder()(
                input_ids=micro_batch.input_ids[None],
                position_ids=micro_batch.position_ids[None],
                use_cache=False,
                attend=PackedAttention(micro_batch.layout, micro_batch.input_ids.device),
            ).last_hidden_state[0]
            trained = micro_batch.trained
            predictors = hidden.index_select(0, micro_batch.previous[trained])
            logprobs, entropies = head_logprobs(
                predictors,
                self.model.get_output_embeddings().weight,
                micro_batch.input_ids[trained],
                temperature,
                entropy_gradient=entropy_gradient,
            )
        values = None
        if self.value_head is not None:
            # A product of elements, which no mixed precision rounds: values are regressed.
            values = (predictors.float() * self.value_head.weight.float()).sum(1)
        return PolicyOutput(logprobs, entropies, values)


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """The model that adapters were added to.

    peft's own `disable_adapter` also turns gradients off and on again, on whichever tensors stand
    for the parameters then; of a sharded model these are not the ones that are trained.
    """
    layers = [layer for layer in model.modules() if hasattr(layer, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def decoder_layers(model: Any) -> nn.ModuleList:
    lists = [
        (name.count("."), module)
        for name, module in model.get_decoder().named_modules()
        if isinstance(module, nn.ModuleList)
    ]
    _, layers = min(lists, key=lambda found: found[0])  # experts, too, are lists, further in
    return layers


def layer_classes(model: Any) -> list[str]:
    """Names of the classes of a model's layers, each of which is sharded as one."""
    return sorted({type(layer).__name__ for layer in decoder_layers(model)})
