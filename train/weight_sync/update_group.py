"""A process group of its own between the learner (rank 0) and the ranks of servers."""

from __future__ import annotations

import ipaddress
import itertools
import socket
import threading
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from agentrl.protocols import Server, SyncError


def rank_groups(num_ranks: Sequence[int]) -> list[list[int]]:
    """The ranks of each server, after rank 0, the learner's.

    Example:
        rank_groups([1, 2])  # [[1], [2, 3]]
    """
    ends = itertools.accumulate(num_ranks, initial=1)
    return [list(range(start, end)) for start, end in itertools.pairwise(ends)]


def own_address(urls: Sequence[str]) -> str:
    """The address of this machine that the servers at `urls` can reach."""
    addresses = []
    for url in urls:
        parts = urlsplit(url)
        family, _, _, _, peer = socket.getaddrinfo(
            parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(peer)  # sends nothing: it only chooses the route
            addresses.append(probe.getsockname()[0])
    far = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    return (far or addresses)[0]  # servers beside the learner reach the other address too


class UpdateGroup:
    """Forms with the servers that were told of it at the same time, by `invitation`.

    It is built beside PyTorch's default group, which Accelerate may own, and shares nothing with
    it. SGLang builds the same on its side, so the prefixes of the store are SGLang's.
    """

    def __init__(self, servers: Sequence[Server], device: torch.device, timeout_s: float) -> None:
        self.name = f"agentrl-{uuid.uuid4().hex[:12]}"
        self.servers = tuple(servers)
        self._lives = [server.life for server in servers]
        self._ranks = rank_groups([server.num_ranks for server in servers])
        self._size = 1 + sum(len(ranks) for ranks in self._ranks)
        self._device = device
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._address = own_address([server.url for server in servers])
        self._timeout = timedelta(seconds=timeout_s)
        self._store = TCPStore(
            self._address, 0, self._size, True, timeout=self._timeout, wait_for_workers=False
        )
        self._group: Any = None  # of gloo or NCCL

    def holds(self, servers: Sequence[Server]) -> bool:
        """Whether it is the group of just these, none of which was started again since."""
        return self.servers == tuple(servers) and self._lives == [s.life for s in servers]

    def invitation(self, server: Server) -> dict[str, object]:
        """The body of `/init_weights_update_group`."""
        return {
            "master_address": self._address,
            "master_port": self._store.port,
            "rank_offset": self._ranks[self.servers.index(server)][0],
            "world_size": self._size,
            "group_name": self.name,
            "backend": self._backend,
        }

    def form(self, timeout_s: float) -> None:
        """Wait for all ranks. NCCL meets at the first broadcast only.

        Raises:
            SyncError: they are not there in time.
        """
        forming = timedelta(seconds=timeout_s)
        self._store.set_timeout(forming)
        store = PrefixStore(f"{self.name}/", PrefixStore(self.name, self._store))
        try:
            if self._backend == "nccl":
                store = PrefixStore("cuda/", store)
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                self._group = dist.ProcessGroupNCCL(store, 0, self._size, options)
            else:
                store = PrefixStore("cpu/", store)
                self._group = dist.ProcessGroupGloo(store, 0, self._size, forming)
                self._group._set_default_timeout(self._timeout)
        except RuntimeError as error:
            raise SyncError(f"{self} did not form within {timeout_s:g} s: {error}") from error

    def broadcast(self, tensor: torch.Tensor) -> dist.Work:
        """Begin to send; NCCL's first waits for the others to do the same."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        return self._group.broadcast([tensor], options)

    def abort(self) -> None:
        """Leave at once, whatever is in flight."""
        left, self._group = [self._group], None
        if self._backend == "nccl" and left[0] is not None:
            left[0].abort()
        # Gloo's destructor waits for a broadcast until a server leaves, or for its time-out.
        threading.Thread(target=left.clear, daemon=True).start()

    def __str__(self) -> str:
        urls = ", ".join(server.url for server in self.servers)
        return (
            f"process group {self.name} (rank 0 of {self._size}, {self._backend}, at "
            f"{self._address}:{self._store.port}) with {urls}"
        )
