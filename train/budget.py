"""How many tokens a row of a forward and backward pass may have, by trial."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from agentrl.config import ConfigError
from train.packing import MicroBatch, Node
from train.ranks import cores_of_a_rank, num_local_ranks
from train.weights import own_part

if TYPE_CHECKING:
    from train.learner import Learner

# Of the memory that is free. The rest is for pieces that do not fit; on a CPU also for engine,
# envs and tools, that grow beside the learner, and the system kills whoever takes too much.
_SHARE = {"cpu": 0.5, "cuda": 0.85}
_TRIAL_TOKENS = {"cpu": 1024, "cuda": 4096}


def find_budget(learner: Learner) -> int:
    """The largest `micro_batch_tokens` that fits on every rank; a collective.

    Two short rows show what a token takes, with gradients already there. The trials move no weight,
    no state of the optimizer and no random number.

    Raises:
        ConfigError: not even the longest episode fits.
    """
    ranks, device, rollout = learner.ranks, learner.accelerator.device, learner.config.rollout
    longest = rollout.max_context_tokens
    most = rollout.prompts_per_step * rollout.num_generations * longest
    upper = min(most, max(longest, _TRIAL_TOKENS["cpu"]), _TRIAL_TOKENS[device.type])
    sizes = (upper // 2, upper)
    try:
        _pass(learner, 2)  # gradients get their memory
        peaks = [_peak(learner, size) for size in sizes]
        own = largest_fit(sizes, peaks, _limit(learner), most)
        budget = -int(ranks.max(torch.tensor(-own, device=device)))
        # A rank of many that ran out of memory would leave the others inside a collective.
        if device.type == "cuda" and ranks.size == 1:
            while not _fits(learner, budget):
                if budget <= longest:
                    raise ConfigError(_too_little(budget, longest))
                budget = max(longest, budget // 2)
    except torch.OutOfMemoryError as error:
        raise ConfigError(_too_little(upper, longest)) from error
    finally:
        learner.optimizer.zero_grad(set_to_none=True)
    if budget < longest:
        raise ranks.alike(ConfigError(_too_little(longest, longest)))
    if ranks.is_main:
        print(f"optim.micro_batch_tokens=auto: rows of {budget} tokens fit", flush=True)
    return budget


def largest_fit(sizes: Sequence[int], peaks: Sequence[int], limit: int, most: int) -> int:
    """Where the line through two peaks of memory reaches `limit`, up to `most`.

    No more than eight times what was tried, for a line is not known further on.

    Args:
        sizes: [2] tokens.
        peaks: [2] bytes.
        limit: bytes.
        most: tokens.
    """
    most = min(most, 8 * sizes[1])
    per_token = (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])
    if per_token <= 0:  # too little to be seen
        return most
    return min(most, sizes[1] + int((limit - peaks[1]) // per_token))


def _too_little(tokens: int, longest: int) -> str:
    return (
        f"optim.micro_batch_tokens=auto: a row of {tokens} tokens does not fit the memory, and "
        f"an episode may have rollout.max_context_tokens={longest}. Lower it, set "
        "model.gradient_checkpointing=true, or spread the model over more processes (FSDP)"
    )


def _limit(learner: Learner) -> int:
    """Bytes that this rank's peak may reach."""
    device = learner.accelerator.device
    if device.type == "cuda":
        used = torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - used
    else:
        used = _status("VmRSS")
        free = _free_memory() // num_local_ranks()
    return used + int(_SHARE[device.type] * (free - _moments_to_come(learner)))


def _moments_to_come(learner: Learner) -> int:
    """Bytes of the optimizer's state that this device has yet to hold."""
    device = learner.accelerator.device.type
    moments = 0
    for parameter in learner.policy.parameters():
        own = own_part(parameter)
        if parameter.requires_grad and own.device.type == device:
            moments += 2 * own.nbytes
    here = sum(
        own_part(value).nbytes
        for state in learner.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.device.type == device
    )
    return max(0, moments - here)


def _free_memory() -> int:
    """Bytes of this machine, or of the container that this process is in."""
    free = psutil.virtual_memory().available
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        lines = limit.with_name("memory.stat").read_text().splitlines()
        used = {name: int(value) for name, value in map(str.split, lines)}
        free = min(free, int(most) - used["anon"] - used["shmem"])
    return free


def _peak(learner: Learner, num_tokens: int) -> int:
    """Bytes that this process uses of the device's memory at the fullest."""
    device = learner.accelerator.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        _pass(learner, num_tokens)
        return torch.cuda.max_memory_allocated(device)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is kept for reuse would hide what is needed
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is used
    _pass(learner, num_tokens)
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def _fits(learner: Learner, num_tokens: int) -> bool:
    try:
        _pass(learner, num_tokens)
    except torch.OutOfMemoryError:
        return False
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    return True


def _pass(learner: Learner, num_tokens: int) -> None:
    """Forward and backward, as an update does, to gradients that nobody uses."""
    config = learner.config
    row = _full_row(num_tokens, config.rollout.max_context_tokens)
    with cores_of_a_rank():
        output = learner.policy(
            row.to(learner.accelerator.device),
            config.rollout.temperature,
            entropy_gradient=config.loss.entropy_coef > 0,
        )
        columns = [column for column in output if column is not None and column.requires_grad]
        learner.accelerator.backward(torch.stack(columns).sum())


def _full_row(num_tokens: int, longest: int) -> MicroBatch:
    """Sequences of up to `longest` tokens, of which all but each first one are trained."""
    position_ids = torch.arange(num_tokens) % longest
    trained = position_ids.nonzero()[:, 0]
    index, column = torch.arange(len(trained)), torch.zeros(len(trained))
    whole, rest = divmod(num_tokens, longest)
    lengths = [longest] * whole + [rest] * (rest > 0)
    return MicroBatch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64),
        position_ids=position_ids,
        previous=torch.where(position_ids > 0, torch.arange(num_tokens) - 1, -1),
        trained=trained,
        sampled_index=index,
        advantages=column,
        rollout_logprobs=column,
        turn_ids=index,
        sequence_ids=trained // longest,
        trajectory_tokens=column,
        group_tokens=column,
        layout=tuple(Node(length) for length in lengths),
    )
