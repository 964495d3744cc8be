"""The last resort, which is no wall: processes of this machine with limits, in a folder."""

from __future__ import annotations

import os

from tools.sandbox.bubblewrap import ENV, interpreter
from tools.sandbox.protocol import Level
from tools.sandbox.spawned import Ended, Recipe, SpawnedBackend, Spawner


class Process(SpawnedBackend):
    """Limits on what one sandbox uses, and an end for all of its processes; no more than that."""

    level: Level = "process"

    def recipe(self, spawner: Spawner) -> Recipe:
        return Recipe(
            argv=[interpreter()[0]],
            env=ENV,
            limits=self.limits(spawner),
        )

    def describe(self, spawner: Spawner) -> str:
        held = (
            f"memory, processes and CPU limited by cgroup v{spawner.cgroup}"
            if spawner.cgroup
            else "memory limited per process only, processes "
            + ("too" if spawner.root else "roughly")
        )
        uid = "a uid of its own" if spawner.root else f"your uid ({os.getuid()})"
        return (
            f"process: NOT ISOLATED: code of the model runs on this machine as {uid}; it can use "
            f"the network, read every file that this uid may read, and fill the disk; {held}"
        )

    def blame(self, ended: Ended) -> str | None:
        """Nothing keeps code from ending its worker, where the two have one uid."""
        if ended.code is not None and ended.code < 0:
            return super().blame(ended) or f"its code ended it by signal {-ended.code}"
        return None
