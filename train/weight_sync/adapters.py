"""LoRA adapters alone, from the learner to SGLang servers started with `--enable-lora`."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from agentrl.config import ConfigError, LoraConfig, SGLangConfig
from agentrl.protocols import EngineError, Sent, Server, Weights
from train.weight_sync.recipients import SHARE, Recipients, accepted

logger = logging.getLogger("agentrl")


# SGLang 0.5.15 stacks layers, for which it reads the first's adapter beside the second's; one of
# k_proj or up_proj alone is left out without a word.
STACKED_WITH = {
    "q_proj": {"v_proj"},
    "v_proj": {"q_proj"},
    "k_proj": {"q_proj", "v_proj"},
    "up_proj": {"gate_proj"},
}


def require_loadable(lora: LoraConfig) -> None:
    """
    Raises:
        ConfigError: a server would not load the adapter, or but a part of it.
    """
    if lora.target_modules == "all-linear":
        return
    needed = {name for target in lora.target_modules for name in STACKED_WITH.get(target, ())}
    if missing := sorted(needed - {*lora.target_modules}):
        raise ConfigError(
            "lora.target_modules: SGLang loads adapters of stacked layers together, add "
            f"{' and '.join(missing)}, or write lora.sync=merged"
        )


class AdapterTransport:
    """Each update is a new adapter on the servers; the one before it is unloaded.

    Its name is made of the weights: the same ones sent again, to servers that came back later, get
    the same name, and new ones can never be taken for old ones.

    Args:
        adapter_config: the text of peft's `adapter_config.json`.
        folder: that the servers see.
    """

    adapter: str | None = None
    """What a request to the servers passes as `lora_path`; None before the first update."""

    def __init__(self, config: SGLangConfig, adapter_config: str, folder: str | Path) -> None:
        self._config, self._adapter_config = config, adapter_config
        self._folder = Path(folder).absolute()
        self._files: Path | None = None  # a server may evict an adapter, and read it again
        self._loaded: dict[str, str] = {}  # url -> name

    async def send(self, weights: Weights, servers: Sequence[Server]) -> Sent:
        """Let each server load the adapter of `weights`, named as by `adapter_weights`."""
        start = time.perf_counter()
        to = Recipients(servers, SHARE * self._config.sync_timeout_s)
        name, files, tensors = await asyncio.to_thread(self._write, weights)
        if name == self.adapter and self._files is not None:
            await asyncio.to_thread(shutil.rmtree, files)
            files = self._files  # which other servers may read again
        written = time.perf_counter()
        await asyncio.gather(*[self._load(to, server, name, files) for server in list(to.alive)])
        await asyncio.gather(*[self._unload(to, server, name) for server in list(to.alive)])
        unused = files
        if to.alive:
            self.adapter, unused, self._files = name, self._files, files
        if unused is not None and unused != self._files:
            await asyncio.to_thread(shutil.rmtree, unused)
        return Sent(
            num_tensors=len(tensors),
            num_bytes=sum(tensor.nbytes for tensor in tensors),
            seconds={
                "gather": written - start,
                "send": time.perf_counter() - written,
                "total": time.perf_counter() - start,
            },
            failed=to.failed,
        )

    async def close(self) -> None:
        if self._files is not None:
            await asyncio.to_thread(shutil.rmtree, self._files)
            self._files = None

    def _write(self, weights: Weights) -> tuple[str, Path, list[torch.Tensor]]:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
        self._folder.mkdir(parents=True, exist_ok=True)
        files = Path(tempfile.mkdtemp(prefix="adapter-", dir=self._folder))
        files.chmod(0o755)
        (files / "adapter_config.json").write_text(self._adapter_config, encoding="utf-8")
        save_file(tensors, files / "adapter_model.safetensors")
        with (files / "adapter_model.safetensors").open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return f"agentrl-{digest[:16]}", files, list(tensors.values())

    async def _load(self, to: Recipients, server: Server, name: str, files: Path) -> None:
        body = {"lora_name": name, "lora_path": str(files)}
        try:
            await accepted(server, "/load_lora_adapter", body, to.left_s)
        except EngineError as error:
            if "already loaded" not in str(error):  # the same weights: the name says so
                to.fail(server, str(error))

    async def _unload(self, to: Recipients, server: Server, name: str) -> None:
        before = self._loaded.get(server.url)
        self._loaded[server.url] = name
        if before in (None, name):
            return
        try:
            await accepted(server, "/unload_lora_adapter", {"lora_name": before}, to.left_s)
        except EngineError as error:  # it was restarted without it, or keeps it for nobody
            logger.info("%s", error)
