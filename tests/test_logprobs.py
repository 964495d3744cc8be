"""The chunked head against the plain way."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import train.logprobs
from tests.rank_processes import run_ranks, values
from train.logprobs import head_logprobs

TILE_SIDE = train.logprobs._TILE_SIDE


def plain(hidden, head, targets, temperature):
    log_p = (hidden @ head.T / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def gradients(function, hidden, head, targets, temperature, frozen=False, of_entropies=0.0, **more):
    """Outputs, and gradients of a loss in which every row has a weight of its own."""
    hidden = hidden.clone().requires_grad_()
    head = head.clone().requires_grad_(not frozen)
    logprobs, entropies = function(hidden, head, targets, temperature, **more)
    weights = torch.linspace(-1, 2, len(hidden), dtype=logprobs.dtype)
    loss = (weights * logprobs).sum() + of_entropies * (weights.flip(0) * entropies).sum()
    loss.backward()
    return SimpleNamespace(
        logprobs=logprobs.detach(), entropies=entropies.detach(), hidden=hidden.grad, head=head.grad
    )


def assert_close(actual, expected, atol):
    for name, value in vars(expected).items():
        found = getattr(actual, name)
        if value is None:
            assert found is None
        else:
            torch.testing.assert_close(found, value.to(found.dtype), atol=atol, rtol=1e-5)


@settings(deadline=None, max_examples=60)
@given(
    shape=st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(1, 40)),
    side=st.integers(1, 20),
    temperature=st.sampled_from([1.0, 0.7, 3.0]),
    scale=st.sampled_from([0.1, 1.0, 50.0]),
    frozen=st.booleans(),
    of_entropies=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_equal_the_plain_way(
    shape, side, temperature, scale, frozen, of_entropies, seed
):
    num_rows, width, vocab_size = shape
    torch.manual_seed(seed)
    hidden = torch.randn(num_rows, width, dtype=torch.float64) * scale
    head = torch.randn(vocab_size, width, dtype=torch.float64)
    arguments = (hidden, head, torch.randint(vocab_size, (num_rows,)), temperature, frozen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TILE_SIDE, "cpu", side)
        actual = gradients(
            head_logprobs, *arguments, of_entropies, entropy_gradient=of_entropies > 0
        )
    assert_close(actual, gradients(plain, *arguments, of_entropies), atol=1e-9)


@pytest.mark.parametrize("side", [3, 1000])
def test_derivatives_equal_differences(monkeypatch, side):
    monkeypatch.setitem(TILE_SIDE, "cpu", side)
    torch.manual_seed(0)
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    head = torch.randn(11, 3, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 10, 3, 3, 7])

    def both(hidden, head):
        return head_logprobs(hidden, head, targets, 0.7, entropy_gradient=True)

    assert torch.autograd.gradcheck(both, (hidden, head))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_in_a_short_dtype_are_summed_up_in_float32(monkeypatch, dtype):
    """As under FSDP2, which casts hidden states and head."""
    monkeypatch.setitem(TILE_SIDE, "cpu", 8)
    torch.manual_seed(0)
    hidden, head = torch.randn(20, 16).to(dtype), torch.randn(99, 16).to(dtype)
    targets = torch.randint(99, (20,))
    actual = gradients(head_logprobs, hidden, head, targets, 0.7, False, 0.3, entropy_gradient=True)
    expected = gradients(plain, hidden.float(), head.float(), targets, 0.7, False, 0.3)
    assert actual.logprobs.dtype == actual.entropies.dtype == torch.float32
    assert actual.hidden.dtype == actual.head.dtype == dtype
    assert_close(actual, expected, atol=40 * torch.finfo(dtype).eps)


def test_logits_that_exponentials_overflow_at_are_no_trouble(monkeypatch):
    """Also where a tile's are small, and those of the next are large."""
    monkeypatch.setitem(TILE_SIDE, "cpu", 2)
    hidden, targets = torch.tensor([[1.0], [-1.0]]), torch.tensor([0, 0])
    head = torch.tensor([[-300.0], [0.0], [0.0], [500.0], [499.0], [-500.0]])
    expected = plain(hidden.double(), head.double(), targets, 1.0)
    for actual, value in zip(head_logprobs(hidden, head, targets, 1.0), expected, strict=True):
        torch.testing.assert_close(actual, value.float(), atol=1e-5, rtol=1e-6)


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


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_no_tensor_of_all_logits_or_of_all_of_a_rows_ever_lives(monkeypatch, entropy_gradient):
    monkeypatch.setitem(TILE_SIDE, "cpu", 40)
    hidden, head = torch.randn(90, 4, requires_grad=True), torch.randn(500, 4, requires_grad=True)
    targets = torch.zeros(90, dtype=torch.int64)
    with LargestTensor() as seen:
        outputs = head_logprobs(hidden, head, targets, 1.0, entropy_gradient=entropy_gradient)
        sum(output.sum() for output in outputs).backward()
    assert seen.largest == max(40 * 40, 500 * 4)  # a tile, and the gradient of the head


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_kept_for_the_backward_pass_is_a_row_for_a_row(frozen):
    hidden, head = torch.randn(30, 4, requires_grad=True), torch.randn(900, 4)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        head_logprobs(hidden, head.requires_grad_(not frozen), torch.arange(30), 1.0)
    sizes = sorted(tensor.numel() for tensor in kept)
    assert sizes == ([120] if frozen else [30, 30, 30, 120, 120, 3600])


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


class Head(nn.Module):
    """What of the policy concerns its head: a weight that the forward pass reads by itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, 99, bias=False)

    def forward(self, inputs, targets):
        hidden = self.layer(inputs)
        return head_logprobs(hidden, self.head.weight, targets, 0.7, entropy_gradient=True)


def head_gradients(rank, model):
    """Of two passes, one after the other."""
    torch.manual_seed(1 + rank)
    for _ in range(2):
        inputs, targets = torch.randn(20, 16), torch.randint(99, (20,))
        logprobs, entropies = model(inputs, targets)
        (logprobs.sum() + 0.3 * entropies.sum()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def sharded_head_gradients(dtypes):
    init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    all_found = []
    for dtype in dtypes:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        model = Head()
        for module in (model.layer, model):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        found = head_gradients(mesh.get_rank(), model)
        all_found.append({name: g.full_tensor().numpy() for name, g in found.items()})
    return all_found


def test_a_sharded_heads_gradient_is_that_of_a_whole_one():
    """Its memory is freed between the passes, and filled again for the backward one."""
    whole = [head_gradients(rank, Head()) for rank in range(2)]
    tolerances = {torch.float32: 1e-6, torch.bfloat16: 2e-2}
    for found in values(run_ranks(sharded_head_gradients, 2, list(tolerances))):
        for gradients_of_dtype, tolerance in zip(found, tolerances.values(), strict=True):
            for name, gradient in gradients_of_dtype.items():
                expected = (whole[0][name] + whole[1][name]) / 2
                atol = tolerance * float(expected.abs().max())
                torch.testing.assert_close(torch.as_tensor(gradient), expected, atol=atol, rtol=0)


def test_entropies_are_summed_in_float32_under_autocast():
    torch.manual_seed(0)
    hidden, head = torch.randn(6, 32), torch.randn(500, 32)
    targets = torch.zeros(6, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, entropies = head_logprobs(hidden, head, targets, 1.0)
    logits = (hidden.bfloat16() @ head.bfloat16().T).float()
    log_p = logits.log_softmax(1)
    expected = -(log_p.exp() * log_p).sum(1)
    torch.testing.assert_close(entropies, expected, atol=1e-4, rtol=0)
