"""The chunked head against the plain way."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train.logprobs
from train.logprobs import head_logprobs


def plain(hidden, head, targets, temperature):
    log_p = (hidden @ head.T / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_the_plain_way(monkeypatch, frozen, temperature):
    monkeypatch.setattr(train.logprobs, "_CHUNK_ELEMENTS", 3 * 101)  # chunks of 3, 3 and 1
    torch.manual_seed(0)
    hidden, head = torch.randn(7, 16), torch.randn(101, 16)
    targets, weights = torch.randint(101, (7,)), torch.randn(7)
    results = []
    for function in (plain, head_logprobs):
        h = hidden.clone().requires_grad_()
        w = head.clone().requires_grad_(not frozen)
        logprobs, entropies = function(h, w, targets, temperature)
        (logprobs * weights).sum().backward()
        results.append((logprobs.detach(), entropies.detach(), h.grad, w.grad))
    for expected, actual in zip(*results, strict=True):
        if expected is None:
            assert actual is None
        else:
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_the_temperature_divides_the_logits():
    """F061: logits 2 and 0."""
    hidden, head = torch.tensor([[1.0]]), torch.tensor([[2.0], [0.0]])
    target = torch.tensor([0])
    assert head_logprobs(hidden, head, target, 0.5)[0].item() == pytest.approx(-0.018150, abs=1e-6)
    assert head_logprobs(hidden, head, target, 1.0)[0].item() == pytest.approx(-0.126928, abs=1e-6)


def test_entropy_of_a_coin_and_of_certainty():
    """F069."""
    hidden, head = torch.tensor([[0.0], [1.0]]), torch.tensor([[99.0], [-99.0]])
    _, entropies = head_logprobs(hidden, head, torch.tensor([0, 0]), 1.0)
    assert entropies.tolist() == pytest.approx([math.log(2), 0.0], abs=1e-6)
    assert not entropies.requires_grad


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def test_no_tensor_of_all_logits_ever_lives(monkeypatch):
    monkeypatch.setattr(train.logprobs, "_CHUNK_ELEMENTS", 8 * 1000)
    hidden, head = torch.randn(64, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    with LargestTensor() as seen:
        head_logprobs(hidden, head, torch.zeros(64, dtype=torch.int64), 1.0)[0].sum().backward()
    assert seen.largest == 8 * 1000


def test_no_rows_give_no_logprobs_but_a_zero_gradient():
    """F080: a rank without tokens still runs its backward pass."""
    hidden, head = torch.randn(3, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    rows = hidden.index_select(0, torch.zeros(0, dtype=torch.int64))
    logprobs, _ = head_logprobs(rows, head, torch.zeros(0, dtype=torch.int64), 1.0)
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert not hidden.grad.any()
    assert not head.grad.any()


def test_under_bfloat16_autocast_the_softmax_stays_float32():
    torch.manual_seed(0)
    hidden, head = torch.randn(5, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    targets = torch.arange(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, _ = head_logprobs(hidden, head, targets, 1.0)
    logprobs.sum().backward()
    rounded = hidden.detach().bfloat16().float(), head.detach().bfloat16().float()
    expected, _ = plain(*rounded, targets, 1.0)
    assert logprobs.dtype == hidden.grad.dtype == head.grad.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, atol=0.1, rtol=0)


def test_gradients_are_not_computed_where_none_is_wanted():
    hidden, head = torch.randn(2, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    with torch.no_grad():
        logprobs, _ = head_logprobs(hidden, head, torch.tensor([1, 2]), 1.0)
    assert not logprobs.requires_grad
