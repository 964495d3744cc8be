"""Lets Accelerate shard over CPU processes, which it does over GPUs alone.

accelerate launch … -m tests.fsdp_on_cpu train.py --config …   runs `train.py` so.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

import accelerate
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def shard(**options: Any) -> None:
    """From now on `accelerate.Accelerator` shards; options are those of Accelerate's plugin."""
    defaults: dict[str, Any] = {
        "fsdp_version": 2,
        "auto_wrap_policy": "transformer_based_wrap",
        "cpu_ram_efficient_loading": False,
        "reshard_after_forward": True,
    }

    class Accelerator(accelerate.Accelerator):
        def __init__(self, **more: Any) -> None:
            super().__init__(**more)
            plugin = FullyShardedDataParallelPlugin(**(defaults | options))
            if self.mixed_precision != "no":
                plugin.set_mixed_precision(self.mixed_precision)
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.state.distributed_type = DistributedType.FSDP
            self.state.fsdp_plugin = plugin

    accelerate.Accelerator = Accelerator


if __name__ == "__main__":
    shard()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.getcwd())
    runpy.run_path(sys.argv[0], run_name="__main__")
