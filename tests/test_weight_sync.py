"""Weights to servers: what arrives, what is held meanwhile, and what is said when it fails."""

from __future__ import annotations

import asyncio
import json
import time
import weakref
from pathlib import Path

import pytest
import torch

import train.weight_sync.shared_bucket
import train.weight_sync.transports
from agentrl.config import SGLangConfig
from agentrl.protocols import SyncError
from tests.weight_receiver import Receiver, receiving
from train.weight_sync.adapters import AdapterTransport
from train.weight_sync.buckets import BucketReader, deliver_each
from train.weight_sync.shared_bucket import SHARED_MEMORY
from train.weight_sync.transports import (
    DiskTransport,
    DistributedTransport,
    TensorTransport,
    common_dtype,
    is_local,
    make_transport,
)
from train.weight_sync.update_group import own_address, rank_groups

KINDS = ["tensor", "distributed", "disk"]
CPU = torch.device("cpu")


def make_weights(seed=0):
    """About 6 MB in float32 over 12 tensors of several shapes, and one of integers."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(512, 256), (3,), (64, 64), (1, 7, 5)] * 3
    weights = {f"w{i}": torch.randn(s, generator=generator) for i, s in enumerate(shapes)}
    weights["count"] = torch.arange(5)
    return weights


def make(kind, tmp_path, weights=None, **changes):
    config = SGLangConfig(**{"bucket_mb": 1, "sync_timeout_s": 20.0} | changes)
    expected = {name: list(t.shape) for name, t in (weights or make_weights()).items()}
    if kind == "disk":
        return DiskTransport(config, expected, tmp_path)
    return {"tensor": TensorTransport, "distributed": DistributedTransport}[kind](
        config, expected, CPU
    )


def same(received, weights, dtype=torch.bfloat16):
    assert received.keys() == weights.keys()
    return all(
        torch.equal(received[name], tensor.to(dtype) if tensor.is_floating_point() else tensor)
        for name, tensor in weights.items()
    )


def shared_files():
    return {path.name for path in SHARED_MEMORY.iterdir()}


def run(transport, test, *receivers):
    async def main():
        async with receiving(*receivers) as servers:
            try:
                await test(servers)
            finally:
                await transport.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_server_gets_every_tensor_in_its_dtype(kind, dtype, tmp_path):
    receivers = [Receiver(dtype=dtype), Receiver(dtype=dtype)]
    transport = make(kind, tmp_path)

    async def test(servers):
        for seed in range(3):
            weights = make_weights(seed)
            sent = await transport.send(iter(weights.items()), servers)
            assert sent.failed == {} and sent.num_tensors == len(weights)
            floats = sum(t.numel() for t in weights.values() if t.is_floating_point())
            assert sent.num_bytes == floats * getattr(torch, dtype).itemsize + 5 * 8
            for receiver in receivers:
                assert same(receiver.weights[0], weights, getattr(torch, dtype))

    run(transport, test, *receivers)
    assert all(body.get("flush_cache", False) is False for body in receivers[0].bodies)


@pytest.mark.parametrize("kind", KINDS)
def test_servers_of_several_ranks_and_dtypes_are_served_at_once(kind, tmp_path):
    """F078."""
    receivers = [Receiver(), Receiver(num_ranks=2, dtype="float32")]
    transport = make(kind, tmp_path)
    weights = make_weights()

    async def test(servers):
        assert (await transport.send(weights.items(), servers)).failed == {}

    run(transport, test, *receivers)
    for receiver in receivers:
        for received in receiver.weights:
            assert same(received, weights, torch.float32)


@pytest.mark.parametrize("kind", ["tensor", "distributed"])
def test_updates_are_put_between_begin_and_end_where_the_server_has_them(kind, tmp_path):
    receiver = Receiver(begin_end=True)
    transport = make(kind, tmp_path)

    async def test(servers):
        assert (await transport.send(make_weights().items(), servers)).failed == {}
        # A trainer that was killed in between leaves a session open.
        receiver.in_session = True
        assert (await transport.send(make_weights(1).items(), servers)).failed == {}

    run(transport, test, receiver)
    assert receiver.calls.count("/begin_weight_update") == 3
    assert not receiver.in_session
    assert same(receiver.weights[0], make_weights(1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begin_end", [False, True])
def test_weights_that_fail_half_way_raise_and_leave_the_server_ready(kind, begin_end, tmp_path):
    """F072."""
    receiver = Receiver(begin_end=begin_end)
    transport = make(kind, tmp_path)

    def broken():
        for index, item in enumerate(make_weights().items()):
            if index == 6:
                raise ValueError("the gather failed")
            yield item

    async def test(servers):
        with pytest.raises(ValueError, match="the gather failed"):
            await transport.send(broken(), servers)
        assert not receiver.in_session
        assert (await transport.send(make_weights(2).items(), servers)).failed == {}

    run(transport, test, receiver)
    assert same(receiver.weights[0], make_weights(2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["tensor", "disk"])
def test_a_server_that_says_no_in_the_body_is_out_and_the_others_go_on(kind, tmp_path):
    """F072: status 200, nothing loaded."""
    receivers = [Receiver(), Receiver()]
    path = {"tensor": "/update_weights_from_tensor", "disk": "/update_weights_from_disk"}[kind]
    receivers[0].spoil[path] = lambda: {"success": False, "message": "m"}
    transport = make(kind, tmp_path)

    async def test(servers):
        sent = await transport.send(make_weights().items(), servers)
        assert list(sent.failed) == [servers[0].url] and sent.failed[servers[0].url].endswith("m")

    run(transport, test, *receivers)
    assert same(receivers[1].weights[0], make_weights())
    assert receivers[0].calls.count(path) == 1


def test_a_bucket_that_fails_in_the_middle_is_never_reported_as_sent(tmp_path):
    """F072: bucket 2 of several fails, later ones would not."""
    receiver = Receiver(begin_end=True)
    answers = iter([None, {"success": False, "message": "out of memory"}, None])
    receiver.spoil["/update_weights_from_tensor"] = lambda: next(answers, None)
    transport = make("tensor", tmp_path)

    async def test(servers):
        sent = await transport.send(make_weights().items(), servers)
        assert "out of memory" in sent.failed[servers[0].url]

    run(transport, test, receiver)
    assert receiver.calls.count("/update_weights_from_tensor") == 2
    assert receiver.calls[-1] == "/end_weight_update"


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_read_to_the_end_when_no_server_wants_them(kind, tmp_path):
    """Other ranks of a sharded model wait in the gather of each tensor."""
    receiver = Receiver()
    no = {"success": False, "message": "no"}
    for name in ("tensor", "distributed", "disk"):
        receiver.spoil[f"/update_weights_from_{name}"] = lambda: no
    transport = make(kind, tmp_path)
    read = []

    def weights():
        for name, tensor in make_weights().items():
            yield name, tensor
            read.append(name)

    async def test(servers):
        assert (await transport.send(weights(), servers)).failed.keys() == {servers[0].url}
        assert read == list(make_weights())
        read.clear()
        assert (await transport.send(weights(), [])).failed == {}
        assert read == list(make_weights())

    run(transport, test, receiver)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_another_model_are_refused(kind, tmp_path):
    """F074."""
    transport = make(kind, tmp_path)
    weights = make_weights() | {"other.base_layer.weight": torch.zeros(2)}

    async def test(servers):
        with pytest.raises(SyncError, match=r"other\.base_layer\.weight"):
            await transport.send(weights.items(), servers)
        del weights["other.base_layer.weight"], weights["w5"]
        with pytest.raises(SyncError, match="w5"):
            await transport.send(weights.items(), servers)

    run(transport, test, Receiver())


def test_a_server_that_hangs_is_named_before_the_time_of_the_update_is_over(tmp_path):
    receivers = [Receiver(), Receiver()]
    receivers[0].spoil["/update_weights_from_tensor"] = lambda: asyncio.sleep(60)
    transport = make("tensor", tmp_path, sync_timeout_s=1.5)

    async def test(servers):
        start = time.monotonic()
        sent = await transport.send(make_weights().items(), servers)
        assert time.monotonic() - start < 1.5
        assert sent.failed.keys() == {servers[0].url}

    run(transport, test, *receivers)


@pytest.mark.parametrize("hangs", [False, True])
def test_one_server_that_fails_in_a_broadcast_breaks_the_group_and_the_next_update_works(
    hangs, tmp_path
):
    receivers = [Receiver(), Receiver(num_ranks=2)]
    no = {"success": False, "message": "out of memory"}
    receivers[0].spoil["/update_weights_from_distributed"] = lambda: (
        asyncio.sleep(60) if hangs else no
    )
    transport = make("distributed", tmp_path, sync_timeout_s=3.0 if hangs else 20.0)

    async def test(servers):
        start = time.monotonic()
        sent = await transport.send(make_weights().items(), servers)
        assert time.monotonic() - start < 5
        assert sent.failed.keys() == {server.url for server in servers}
        assert hangs or "out of memory" in sent.failed[servers[0].url]
        assert hangs or "broke" in sent.failed[servers[1].url]
        receivers[0].spoil.clear()
        assert (await transport.send(make_weights(1).items(), servers)).failed == {}

    run(transport, test, *receivers)
    for receiver in receivers:
        assert all(same(received, make_weights(1)) for received in receiver.weights)


def test_a_group_whose_peer_never_comes_says_so_in_time(tmp_path):
    """F076."""
    receiver = Receiver()
    receiver.spoil["/init_weights_update_group"] = lambda: {"success": True, "message": "a lie"}
    transport = make("distributed", tmp_path, sync_timeout_s=3.0)

    async def test(servers):
        start = time.monotonic()
        sent = await transport.send(make_weights().items(), servers)
        assert time.monotonic() - start < 5
        message = sent.failed[servers[0].url]
        assert "process group agentrl-" in message and "rank 0 of 2" in message
        assert "gloo, at 127.0.0.1:" in message and servers[0].url in message

    run(transport, test, receiver)


def test_a_group_is_formed_once_for_the_same_servers_and_anew_when_they_change(tmp_path):
    receivers = [Receiver(), Receiver()]
    transport = make("distributed", tmp_path)

    async def test(servers):
        async def send(seed, chosen):
            assert (await transport.send(make_weights(seed).items(), chosen)).failed == {}
            return [receiver.calls.count("/init_weights_update_group") for receiver in receivers]

        assert await send(0, servers) == [1, 1]
        assert await send(1, servers) == [1, 1]
        assert await send(2, servers[:1]) == [2, 1]
        assert receivers[1].groups == {}  # it was told that the old one is over
        # The server died and was started again at the same url: it knows of no group.
        receivers[0].groups.clear()
        servers[0].life += 1
        assert await send(3, servers[:1]) == [3, 1]
        assert len(receivers[0].groups) == 1

    run(transport, test, *receivers)
    assert same(receivers[0].weights[0], make_weights(3))
    assert same(receivers[1].weights[0], make_weights(1))
    assert receivers[0].groups == {}


def test_ranks_follow_from_the_servers_own_counts():
    """F078."""
    assert rank_groups([1, 2]) == [[1], [2, 3]]
    assert rank_groups([4, 1, 2]) == [[1, 2, 3, 4], [5], [6, 7]]


def test_the_learner_gives_an_address_that_servers_reach():
    assert own_address(["http://127.0.0.1:30000"]) == "127.0.0.1"
    assert own_address(["http://[::1]:30000"]) == "::1"


def reader_of(weights, max_bytes, dtype=torch.float32):
    return BucketReader(
        weights,
        dtype=dtype,
        max_bytes=max_bytes,
        new_buffer=lambda n: torch.empty(n, dtype=torch.uint8),
        buffers=[],
    )


def test_weights_that_fail_while_no_server_wants_them_raise_all_the_same():
    def weights():
        yield "a", torch.zeros(4)
        yield "b", torch.zeros(4)
        raise LookupError("a shard is gone")

    async def deliver(_):
        raise AssertionError("nobody wants it")

    with pytest.raises(LookupError, match="a shard is gone"):
        asyncio.run(deliver_each(reader_of(weights(), 32), deliver, lambda: False, CPU))


def test_weights_are_read_to_the_end_where_a_delivery_fails():
    read = []

    def weights():
        for name in "abcd":
            yield name, torch.zeros(4)
            read.append(name)

    async def deliver(_):
        raise LookupError("no way there")

    with pytest.raises(LookupError, match="no way there"):
        asyncio.run(deliver_each(reader_of(weights(), 32), deliver, lambda: True, CPU))
    assert read == ["a", "b", "c", "d"]


def test_buckets_and_one_tensor_are_all_that_is_held():
    """F077: 10 tensors of 1 MB, buckets of 2 MB, at most 3 MB."""
    alive, peak = 0, 0

    def freed():
        nonlocal alive
        alive -= 1

    def gathered():
        nonlocal alive, peak
        for index in range(10):
            tensor = torch.full((250_000,), float(index))
            alive += 1
            weakref.finalize(tensor, freed)
            peak = max(peak, alive * 10**6 + sum(map(len, reader._buffers)))
            yield str(index), tensor
            del tensor

    reader = reader_of(gathered(), 2 * 10**6)
    before, read = None, []
    while (bucket := reader.next()) is not None:
        for kept in (before, bucket):  # one is sent while the next is read
            for name, tensor in kept.tensors() if kept else ():
                assert torch.equal(tensor, torch.full((250_000,), float(name)))
        read += bucket.names
        before = bucket
    assert read == [str(index) for index in range(10)]
    assert 2 * 10**6 <= peak <= 3 * 10**6


def test_a_tensor_larger_than_a_bucket_comes_alone():
    sizes = {"a": 10, "b": 1000, "c": 20, "d": 20}
    reader = reader_of([(name, torch.randn(n)) for name, n in sizes.items()], 400)
    buckets = []
    while (bucket := reader.next()) is not None:
        buckets.append(bucket.names)
    assert buckets == [["a"], ["b"], ["c", "d"]]


def test_tensors_of_another_width_never_lie_across_their_alignment():
    weights = [("a", torch.zeros(3)), ("n", torch.arange(4)), ("b", torch.ones(2))]
    reader = reader_of(weights, 1000, torch.bfloat16)
    read = {}
    while (bucket := reader.next()) is not None:
        read |= {name: tensor.clone() for name, tensor in bucket.tensors()}
        assert all(
            start % d.itemsize == 0 for start, d in zip(bucket.starts, bucket.dtypes, strict=True)
        )
    assert read["n"].tolist() == [0, 1, 2, 3] and read["b"].tolist() == [1, 1]


def test_a_buffer_is_not_written_while_a_server_reads_it(tmp_path):
    receiver = Receiver()
    transport = make("tensor", tmp_path)
    reading = []

    async def slow():
        reading.append(time.monotonic())
        await asyncio.sleep(0.1)

    receiver.spoil["/update_weights_from_tensor"] = slow

    async def test(servers):
        weights = make_weights()
        await transport.send(weights.items(), servers)
        assert len(reading) >= 3 and same(receiver.weights[0], weights)

    run(transport, test, receiver)


def test_nothing_is_left_in_shared_memory(tmp_path):
    before = shared_files()
    for kind in KINDS:
        transport = make(kind, tmp_path)

        async def test(servers, transport=transport):
            await transport.send(make_weights().items(), servers)

        run(transport, test, Receiver())
    assert shared_files() <= before and list(tmp_path.iterdir()) == []


def test_too_little_shared_memory_is_an_error_and_not_the_end_of_the_process(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(train.weight_sync.shared_bucket.shutil, "disk_usage", lambda _: usage)
    transport = make("tensor", tmp_path)

    async def test(servers):
        with pytest.raises(SyncError, match="--shm-size"):
            await transport.send(make_weights().items(), servers)

    run(transport, test, Receiver())


def test_the_disk_is_used_where_shared_memory_has_no_room(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(train.weight_sync.transports.shutil, "disk_usage", lambda _: usage)
    receiver = Receiver()
    transport = make("disk", tmp_path / "weights")

    async def test(servers):
        assert (await transport.send(make_weights().items(), servers)).failed == {}

    run(transport, test, receiver)
    assert Path(receiver.bodies[-1]["model_path"]).parent == tmp_path / "weights"
    assert list((tmp_path / "weights").iterdir()) == []


def test_the_transport_follows_from_where_servers_are(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")

    def chosen(**changes):
        config = SGLangConfig(**changes)
        return type(
            make_transport(config, device=CPU, model_path=str(tmp_path), tied=[], folder=tmp_path)
        )

    def at(url):
        return chosen(mode="connect", urls=[url])

    assert chosen() is TensorTransport
    assert at("http://127.0.0.1:1") is TensorTransport
    assert at("http://192.0.2.7:30000") is DistributedTransport
    assert chosen(weight_sync="disk") is DiskTransport
    assert chosen(weight_sync="distributed") is DistributedTransport
    assert is_local("http://localhost:5") and not is_local("http://192.0.2.7:5")


def test_servers_of_different_dtypes_get_float32():
    class Server:
        def __init__(self, dtype):
            self.dtype = dtype

    assert common_dtype([Server("bfloat16"), Server("bfloat16")]) is torch.bfloat16
    assert common_dtype([Server("bfloat16"), Server("float16")]) is torch.float32


def test_an_adapter_is_loaded_under_a_name_of_its_own_and_the_one_before_is_unloaded(tmp_path):
    receivers = [Receiver(), Receiver()]
    transport = AdapterTransport(SGLangConfig(), json.dumps({"r": 4}), tmp_path)

    def adapter(seed):
        generator = torch.Generator().manual_seed(seed)
        return {f"q.lora_{side}.weight": torch.randn(4, 4, generator=generator) for side in "AB"}

    async def test(servers):
        names = []
        for seed in range(3):
            sent = await transport.send(adapter(seed).items(), servers)
            assert sent.failed == {} and sent.num_tensors == 2
            names.append(transport.adapter)
            for receiver in receivers:
                assert list(receiver.adapters) == [transport.adapter]
                assert same(receiver.adapters[transport.adapter], adapter(seed), torch.float32)
        assert len(set(names)) == 3
        # One server comes back without it and gets the present one, under its present name.
        receivers[1].adapters.clear()
        assert (await transport.send(adapter(2).items(), servers[1:])).failed == {}
        assert transport.adapter == names[-1] and list(receivers[1].adapters) == [names[-1]]
        loaded = [r.bodies[-1] if n else r.bodies[-2] for n, r in enumerate(receivers)]
        assert all(Path(body["lora_path"]).is_dir() for body in loaded), "to be read once more"
        # The same weights again are no error.
        assert (await transport.send(adapter(2).items(), servers)).failed == {}
        receivers[0].spoil["/load_lora_adapter"] = lambda: {
            "success": False,
            "error_message": "rank too high",
        }
        sent = await transport.send(adapter(3).items(), servers)
        assert "rank too high" in sent.failed[servers[0].url] and len(sent.failed) == 1
        assert list(receivers[1].adapters) == [transport.adapter]

    run(transport, test, *receivers)
    assert list(tmp_path.iterdir()) == []
