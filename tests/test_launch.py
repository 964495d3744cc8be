"""What a server is started with, and what is said when it ended."""

import os
import socket
import sys

import pytest

from agentrl.config import ConfigError, SGLangConfig
from rollout import launch
from rollout.launch import (
    Launch,
    assign_gpus,
    begin_log,
    explain_end,
    find_interpreter,
    hold_port,
    last_line,
    launch_command,
    launch_environment,
)


@pytest.mark.parametrize(
    ("options", "num_gpus", "num_learner_gpus", "shares"),
    [
        ({"colocate": True}, 8, 8, [[0], [1], [2], [3], [4], [5], [6], [7]]),
        ({"colocate": True, "tensor_parallel_size": 2}, 8, 8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ({}, 8, 4, [[4], [5], [6], [7]]),
        ({"tensor_parallel_size": 2}, 8, 4, [[4, 5], [6, 7]]),
        ({"num_servers": 1, "tensor_parallel_size": 2}, 8, 4, [[6, 7]]),
        ({"colocate": True}, 1, 1, [[0]]),
        ({}, 0, 1, [[]]),
        ({"num_servers": 2}, 0, 1, [[], []]),
    ],
)
def test_the_learner_has_the_first_gpus_and_servers_the_last(
    options, num_gpus, num_learner_gpus, shares
):
    gpus = range(num_gpus)
    assert assign_gpus(SGLangConfig(**options), gpus, num_learner_gpus=num_learner_gpus) == shares


@pytest.mark.parametrize(
    ("options", "num_gpus", "num_learner_gpus", "said"),
    [
        ({}, 1, 1, "1 GPU, of which the learner keeps 1; .*sglang.colocate=true"),
        ({"num_servers": 3, "tensor_parallel_size": 2}, 8, 4, "needs 6 GPUs for servers"),
        ({"tensor_parallel_size": 16, "colocate": True}, 8, 8, "needs 16 GPUs.* are 8 GPUs"),
        ({"tensor_parallel_size": 2}, 8, 5, "does not divide the 3 GPUs"),
    ],
)
def test_gpus_that_do_not_suffice_are_bad_input(options, num_gpus, num_learner_gpus, said):
    with pytest.raises(ConfigError, match=said):
        assign_gpus(SGLangConfig(**options), range(num_gpus), num_learner_gpus=num_learner_gpus)


def command(config, tmp_path, **changes):
    run = Launch(
        model_path="m", dtype="bfloat16", context_tokens=4096, max_requests=64, log_folder=tmp_path
    )
    fields = {name: getattr(run, name) for name in Launch.__slots__} | changes
    return launch_command(config, Launch(**fields), python="py", port=1, nccl_port=2)


def test_the_users_arguments_come_last_and_win(tmp_path):
    config = SGLangConfig(mem_fraction=0.6, server_args=["--mem-fraction-static=0.7"])
    arguments = command(config, tmp_path, gpus=[0])
    assert arguments[:4] == ["py", "-P", "-m", "sglang.launch_server"]
    assert arguments[-1] == "--mem-fraction-static=0.7"
    assert "--mem-fraction-static=0.6" in arguments
    assert "--device=cpu" not in arguments


def test_servers_that_share_gpus_with_the_learner_can_give_memory_back(tmp_path):
    assert "--enable-memory-saver" in command(SGLangConfig(colocate=True), tmp_path, gpus=[0])


@pytest.mark.parametrize("gpus", [[], [0]])
def test_no_request_of_a_servers_own_runs_into_the_first_update(gpus, tmp_path):
    """It would be aborted, or find its memory lent; SGLang ends itself when it fails."""
    assert "--skip-server-warmup" in command(SGLangConfig(), tmp_path, gpus=gpus)


def test_on_a_cpu_the_cache_is_bounded_and_an_idle_server_sleeps(tmp_path):
    arguments = command(SGLangConfig(), tmp_path)
    assert {"--device=cpu", "--sleep-on-idle", "--max-total-tokens=16384"} <= {*arguments}
    assert "--max-total-tokens=32768" in command(SGLangConfig(), tmp_path, context_tokens=32768)


def test_servers_that_are_sent_adapters_make_room_for_them(tmp_path):
    changes = {"lora_rank": 8, "lora_targets": ["q_proj", "o_proj"], "gpus": [0]}
    arguments = command(SGLangConfig(server_args=["--x"]), tmp_path, **changes)
    assert {"--enable-lora", "--max-lora-rank=8", "--max-loras-per-batch=2"} <= {*arguments}
    place = arguments.index("--lora-target-modules")
    assert arguments[place:] == ["--lora-target-modules", "q_proj", "o_proj", "--x"]
    assert "--enable-lora" not in command(SGLangConfig(), tmp_path, gpus=[0])


def test_a_port_is_not_the_users_to_choose(tmp_path):
    with pytest.raises(ConfigError, match="--port=30000"):
        command(SGLangConfig(server_args=["--port=30000"]), tmp_path)


def test_a_server_hears_nothing_of_the_learners_process_group(tmp_path):
    """A server that reads TORCHELASTIC_USE_AGENT_STORE waits for a store that is not its own."""
    base = {
        "PATH": "/bin",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "h",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "ACCELERATE_USE_FSDP": "1",
        "PYTHONPATH": ".",
    }
    assert launch_environment(base, gpus=[0], model_path="org/model") == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "0",
        "SGLANG_GRPC_PORT": "65535",  # its own choice, the port + 10000, may be no port
    }
    on_cpu = launch_environment(base, gpus=[], model_path=str(tmp_path))
    assert on_cpu["HF_HUB_OFFLINE"] == "1" and on_cpu["OMP_NUM_THREADS"] == "1"


def test_gpus_count_among_the_visible_ones():
    base = {"CUDA_VISIBLE_DEVICES": "4,5,GPU-a,GPU-b"}
    environment = launch_environment(base, gpus=[2, 3], model_path="org/model")
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"


def test_a_server_sees_the_learners_gpu_behind_its_own():
    """It maps the learner's memory, and counts its own GPUs from 0."""
    environment = launch_environment({}, gpus=[2, 3], learner_gpus=[0], model_path="org/model")
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3,0"
    shared = launch_environment({}, gpus=[0], learner_gpus=[0], model_path="org/model")
    assert shared["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_held_port_is_given_to_nobody_but_the_server():
    """F034."""
    with hold_port() as holder, socket.socket() as server, socket.socket() as foreign:
        address = holder.getsockname()
        with pytest.raises(OSError, match="in use"):
            foreign.bind(address)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()
        with socket.create_connection(address, 1):
            server.accept()[0].close()


def test_without_sglang_the_error_says_what_to_type(tmp_path, monkeypatch):
    """F095."""
    monkeypatch.setattr(launch, "ROOT", tmp_path)
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"make sglang-cpu.*pip install 'sglang>=0.5.15'"):
        find_interpreter(None)
    with pytest.raises(ConfigError, match=r"sglang.python=/nowhere/python"):
        find_interpreter("/nowhere/python")
    own = tmp_path / ".venv-sglang" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    assert find_interpreter(None) == str(own)


@pytest.mark.parametrize(
    ("status", "log", "said"),
    [
        (137, "all is well\n", ("SIGKILL", "all is well", "run out of memory?")),
        (
            1,
            "noise\n" * 50
            + "[x] Traceback (most recent call last):\n  f()\nOutOfMemoryError: 2 GiB",
            ("exit status 1", "  f()\nOutOfMemoryError", "lower sglang.mem_fraction"),
        ),
        (1, "No module named sglang", ("make sglang-cpu",)),
        (2, "launch_server.py: error: unrecognized arguments: --x", ("sglang.server_args",)),
        (-9, "", ("SIGKILL",)),
    ],
)
def test_the_end_of_a_server_is_told_with_what_its_log_says_and_what_to_do(
    status, log, said, tmp_path
):
    (tmp_path / "log").write_text(log)
    text = explain_end(status, tmp_path / "log")
    assert all(part in text for part in said)
    assert "noise" not in text


def test_the_log_of_a_start_is_not_taken_for_that_of_the_next(tmp_path):
    with (tmp_path / "log").open("wb") as log:
        for said in (b"Traceback (most recent call last):\nout of memory\n", b"[12:00] loading\n"):
            begin_log(log, ["python", "-m", "sglang"])
            log.write(said + b"  warn(\n")
    text = explain_end(137, tmp_path / "log")
    assert "[12:00] loading" in text and "lower" not in text and "Traceback" not in text
    assert last_line(tmp_path / "log") == "[12:00] loading"


def test_a_huge_log_is_read_from_its_end_only(tmp_path):
    (tmp_path / "log").write_text("x" * 2**20 + f"\nlast words of {os.getpid()}\n")
    assert explain_end(1, tmp_path / "log").splitlines()[-1] == f"last words of {os.getpid()}"
