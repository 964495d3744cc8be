"""A taskset of verifiers: doubling numbers."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Doubles"]


class Double(vf.TaskData):
    answer: str = ""


class DoubleTask(vf.Task[Double, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))


class Doubles(vf.Taskset[DoubleTask, vf.TasksetConfig]):
    def load(self) -> Iterator[DoubleTask]:
        for number in range(1, 101):
            question = f"What is {number} + {number}?"
            yield DoubleTask(Double(prompt=question, answer=str(2 * number)), self.config.task)
