"""What a keeper runs ends with whoever holds its pipe, and takes all of its descendants along."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.processes import assert_gone, descendants

KEEPER = [sys.executable, str(Path(__file__).parent.parent / "rollout" / "keeper.py")]
# Three sleepers: a child, one in a session of its own, and one whose parent is gone.
FAMILY = "sleep 1000 & setsid sleep 1000 & (setsid sleep 1000 &) ; echo ready; "


def start(script):
    keeper = subprocess.Popen(
        [*KEEPER, "bash", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert keeper.stdout.readline() == "ready\n"
    return keeper


@pytest.mark.parametrize("end", ["pipe", "sigterm", "by itself"])
def test_no_descendant_outlives_the_keeper(end):
    """F037."""
    keeper = start(FAMILY + ("exec sleep 0.5" if end == "by itself" else "wait"))
    processes = descendants(keeper.pid)
    assert len(processes) >= 3
    if end == "pipe":
        keeper.stdin.close()
    elif end == "sigterm":
        keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(10) == (0 if end == "by itself" else 143)
    assert_gone(processes)


def test_deaf_processes_are_killed_after_their_grace():
    keeper = start("trap '' TERM; echo ready; while true; do sleep 0.1; done")
    processes = descendants(keeper.pid)
    began = time.monotonic()
    keeper.stdin.close()
    keeper.wait(15)
    assert_gone(processes)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("forks", [False, True])
def test_kill_9_of_the_holder_is_the_end_of_all(forks):
    """F037, also where a worker that the trainer forked holds the pipe open."""
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, subprocess, time\n"
            f"k = subprocess.Popen({[*KEEPER, 'bash', '-c', FAMILY + 'wait']!r}, "
            "stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)\n"
            f"k.stdout.readline(); pid = os.fork() if {forks} else 0\n"
            f"if pid or not {forks}: print(k.pid, pid, flush=True)\n"
            "time.sleep(1000)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    keeper_pid, fork_pid = map(int, holder.stdout.readline().split())
    processes = [psutil.Process(keeper_pid), *descendants(keeper_pid)]
    holder.kill()
    holder.wait()
    try:
        assert_gone(processes)
    finally:
        if forks:
            psutil.Process(fork_pid).kill()


def test_kill_9_of_the_keeper_takes_the_command_along():
    keeper = start("echo ready; wait; sleep 1000")
    command = psutil.Process(keeper.pid).children()
    keeper.kill()
    keeper.wait()
    assert_gone(command)


@pytest.mark.parametrize(("script", "status"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_the_exit_status_is_the_commands_own(script, status):
    keeper = subprocess.Popen([*KEEPER, "bash", "-c", script], stdin=subprocess.PIPE)
    assert keeper.wait(10) == status
