"""A stream of weights cut into buckets: tensors, cast, side by side in one buffer."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from agentrl.protocols import Weights

NewBuffer = Callable[[int], torch.Tensor]
"""Makes a buffer of so many bytes: [num_bytes] uint8."""


@dataclass(slots=True, kw_only=True)
class Bucket:
    """Whole tensors without gaps.

    Example:
        Bucket(flat=<28 bytes>, names=["a", "b"], dtypes=[torch.bfloat16] * 2,
               shapes=[torch.Size([3, 4]), torch.Size([2])], starts=[0, 24])
    """

    flat: torch.Tensor  # [num_bytes] uint8
    names: list[str] = field(default_factory=list)  # of the tensors, as the next three
    dtypes: list[torch.dtype] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # in bytes

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views into the buffer."""
        ends = [*self.starts[1:], len(self.flat)]
        columns = zip(self.names, self.dtypes, self.shapes, self.starts, ends, strict=True)
        for name, dtype, shape, start, end in columns:
            yield name, self.flat[start:end].view(dtype).view(shape)


class BucketReader:
    """Reads weights into two buffers in turn, each of half of `max_bytes`.

    A bucket holds until the next but one is read. A tensor that is larger than a buffer comes
    alone, in a buffer of its size. Beside the buffers one tensor is held, the last one read.

    Args:
        buffers: to use again, here and in later readers, made as needed; None: each bucket gets
            one of its own.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        dtype: torch.dtype,
        max_bytes: int,
        new_buffer: NewBuffer,
        buffers: list[torch.Tensor] | None,
    ) -> None:
        self.num_tensors = 0
        self.num_bytes = 0
        self.seconds: dict[str, float] = defaultdict(float)
        self._weights = iter(weights)
        self._dtype, self._half, self._new_buffer = dtype, max_bytes // 2, new_buffer
        self._buffers, self._turn = buffers, 0
        self._held: tuple[str, torch.Tensor] | None = None

    def next(self) -> Bucket | None:
        """The next tensors; None: there are no more."""
        held, self._held = self._held or self._read(), None
        if held is None:
            return None
        bucket = Bucket(flat=self._buffer(self._num_bytes(held[1])))
        end = 0
        while held is not None:
            name, tensor = held
            dtype, size = self._cast_to(tensor), self._num_bytes(tensor)
            if end + size > len(bucket.flat) or end % dtype.itemsize:
                self._held = held
                break
            start = time.perf_counter()
            bucket.flat[end : end + size].view(dtype).view(tensor.shape).copy_(tensor)
            self.seconds["cast"] += time.perf_counter() - start
            bucket.names.append(name)
            bucket.dtypes.append(dtype)
            bucket.shapes.append(tensor.shape)
            bucket.starts.append(end)
            end += size
            del tensor, held  # the next one is gathered when this one is gone
            held = self._read()
        bucket.flat = bucket.flat[:end]
        self.num_tensors += len(bucket.names)
        self.num_bytes += end
        if bucket.flat.is_cuda:
            torch.cuda.current_stream(bucket.flat.device).synchronize()
        return bucket

    def drain(self) -> None:
        """Read what is left for nobody, since other ranks wait to gather it with this one."""
        self._held = None
        while self._read() is not None:
            pass

    def _read(self) -> tuple[str, torch.Tensor] | None:
        start = time.perf_counter()
        item = next(self._weights, None)
        self.seconds["gather"] += time.perf_counter() - start
        return item

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        size = max(num_bytes, self._half)
        if self._buffers is None:
            return self._new_buffer(size)
        self._turn = 1 - self._turn
        while len(self._buffers) <= self._turn:
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        if len(self._buffers[self._turn]) < size:
            self._buffers[self._turn] = torch.empty(0, dtype=torch.uint8)  # frees the old one
            self._buffers[self._turn] = self._new_buffer(size)
        return self._buffers[self._turn]

    def _cast_to(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if tensor.dtype.is_floating_point else tensor.dtype

    def _num_bytes(self, tensor: torch.Tensor) -> int:
        return tensor.numel() * self._cast_to(tensor).itemsize


async def deliver_each(
    reader: BucketReader,
    deliver: Callable[[Bucket], Awaitable[Any]],
    wanted: Callable[[], bool],
    device: torch.device,
) -> None:
    """Read a bucket while the one before it is delivered; all reading happens in one thread.

    What `deliver` no longer wants is read all the same.
    """

    def use_device() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, "weights", initializer=use_device) as thread:
        ahead = loop.run_in_executor(thread, reader.next)
        try:
            while wanted() and (bucket := await asyncio.shield(ahead)) is not None:
                ahead = loop.run_in_executor(thread, reader.next)
                start = time.perf_counter()
                await deliver(bucket)
                reader.seconds["send"] += time.perf_counter() - start
        finally:
            # Also after an error: other ranks read with this one. The thread ends before the block
            # does, which would wait for it on the event loop.
            await asyncio.wait([ahead])
            drained = loop.run_in_executor(thread, reader.drain)
            await asyncio.wait([drained])
        for reading in (ahead, drained):
            reading.result()  # raises what went wrong while nobody waited for it
