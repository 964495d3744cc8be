"""The processes that train together: what they hand each other, and how all end when one fails.

Tensors are reduced where they are; objects travel over a group of their own, on the CPU. Every
method is a collective: all ranks call it, in the same order. Alone, nothing is sent.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")

_PATIENCE = timedelta(days=7)  # for rank 0 while it plays episodes, which have limits of their own
_FAILED = "failed"
_GRACE_S = 10.0  # for a rank to end by itself after another one failed
_POLL_S = 1.0
_BROKEN = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
_SILENT = "another rank ended without a word, as one does that the system kills"
_MAIN_SILENT = "rank 0 ended without a word"


def num_local_ranks() -> int:
    """Ranks on this machine; on a GPU each."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def cores_of_a_rank() -> Iterator[None]:
    """On a CPU, ranks that work at the same time share its cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // num_local_ranks()))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class RankFailed(RuntimeError):
    """Another rank failed, and this one with it; the message names the rank and its error."""


class Ranks:
    """
    Example:
        ranks = Ranks()                               # after the process group was formed
        with ranks.watched():
            tasks = ranks.lead(read_tasks)            # rank 0 reads, all have them
            mine = ranks.scatter(split(tasks, ranks.size) if ranks.is_main else None)
    """

    def __init__(self) -> None:
        formed = dist.is_initialized()
        self.rank = dist.get_rank() if formed else 0
        self.size = dist.get_world_size() if formed else 1
        self.agreed: BaseException | None = None  # the last error that all ranks raised alike
        self._objects: Any = None
        self._heard: str | None = None  # which rank failed, and why
        if self.size > 1:
            self._objects = dist.new_group(backend="gloo", timeout=_PATIENCE)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The one that objects travel over; None: alone."""
        return self._objects

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def gather(self, value: T) -> list[T]:
        """[size], on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._objects)
        return values

    def scatter(self, values: Sequence[T] | None) -> T:
        """Each rank's own of the values that rank 0 has, which are [size]."""
        if self.size == 1:
            assert values is not None
            return values[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, list(values) if values else None, group=self._objects)
        return mine[0]

    def lead(self, function: Callable[[], T]) -> T:
        """What `function` returns on rank 0, which alone calls it.

        What it raises is raised by all; an error that cannot be sent becomes a RankFailed.
        """
        if self.size == 1:
            return function()
        if not self.is_main:
            value, error = self._from_main(None)
            if error is not None:
                raise self.alike(error)
            return value
        try:
            value = function()
            pickle.dumps(value)  # before the others are told that it went well
        except BaseException as error:
            self._from_main((None, self._sendable(error)))
            self.agreed = error
            raise
        self._from_main((value, None))
        return value

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block without collectives that succeeds on all ranks, or fails on all.

        Raises:
            RankFailed: it failed on another rank, the lowest of which is named.
        """
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
        failures = self.gather(self._tell(error) if error else None)
        failed = [failure for failure in failures if failure is not None]
        if failed:
            raise self.alike(error or RankFailed(failed[0]))

    def alike(self, error: BaseException) -> BaseException:
        """The error, which all ranks are about to raise here: they stay in step."""
        self.agreed = error
        return error

    def in_step(self, error: BaseException) -> bool:
        """Whether all ranks stopped at the same place, so that they can still work together."""
        return self.size == 1 or error is self.agreed

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Tell the others of an error that leaves the block, and end when another rank tells.

        A rank that waits for the others inside a collective cannot be told: a thread then ends the
        whole process, with the first error and exit code 1.
        """
        if self.size == 1:
            yield
            return
        store = self._open_store()
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(store, done), daemon=True)
        watcher.start()
        try:
            yield
            self.gather(None)  # rank 0 keeps the store until all are done
        except BaseException as error:
            if self.in_step(error):
                raise
            first = self._first_failure(store, error)
            if self.is_main:
                time.sleep(2 * _POLL_S)  # the others hear of it before their connections break
            if first.startswith(f"rank {self.rank} "):
                raise
            failed = RankFailed(first)
            for note in getattr(error, "__notes__", ()):
                failed.add_note(note)
            raise failed from error
        finally:
            done.set()
            watcher.join()  # at the end of the process it must not be inside the store

    def _first_failure(self, store: TCPStore, error: BaseException) -> str:
        """What all ranks name; what follows from it is not worth a word."""
        try:
            return self._heard or store.compare_set(_FAILED, "", self._tell(error)).decode()
        except dist.DistNetworkError:
            return self._heard or _MAIN_SILENT

    def _watch(self, store: TCPStore, done: threading.Event) -> None:
        while not done.wait(_POLL_S):
            try:
                if not store.check([_FAILED]):
                    continue
                self._heard = store.get(_FAILED).decode()
            except dist.DistNetworkError:
                self._heard = _MAIN_SILENT
            if not done.wait(_GRACE_S):
                print(f"error: rank {self.rank} ends: {self._heard}", file=sys.stderr, flush=True)
                os._exit(1)

    def _open_store(self) -> TCPStore:
        """Kept by rank 0, and seen by all."""
        host = os.environ["MASTER_ADDR"]
        store = None
        if self.is_main:
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        port = self.lead(lambda: store.port if store else 0)
        return store or TCPStore(host, port, is_master=False)

    def _tell(self, error: BaseException) -> str:
        if isinstance(error, KeyboardInterrupt):
            return f"rank {self.rank} was interrupted"
        if isinstance(error, RankFailed):
            return str(error)
        if any(sign in str(error) for sign in _BROKEN):
            return _SILENT
        return f"rank {self.rank} failed: {type(error).__name__}: {error}"

    def _sendable(self, error: BaseException) -> BaseException:
        try:
            return pickle.loads(pickle.dumps(error))
        except Exception:
            return RankFailed(self._tell(error))

    def _from_main(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, group=self._objects)
        return box[0]

    def _reduce(self, tensor: torch.Tensor, operation: Any) -> torch.Tensor:
        if self.size > 1:
            dist.all_reduce(tensor, operation)
        return tensor
