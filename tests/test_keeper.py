"""What a keeper runs ends with whoever holds its pipe, and takes all of its descendants along."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

KEEPER = [sys.executable, str(Path(__file__).parent.parent / "rollout" / "keeper.py")]
# Three sleepers: a child, one in a session of its own, and one whose parent is gone.
FAMILY = "sleep 1000 & setsid sleep 1000 & (setsid sleep 1000 &) ; echo ready; "


def family(keeper):
    return psutil.Process(keeper.pid).children(recursive=True)


def start(script):
    keeper = subprocess.Popen(
        [*KEEPER, "bash", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert keeper.stdout.readline() == "ready\n"
    return keeper


def assert_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize("end", ["pipe", "sigterm", "by itself"])
def test_no_descendant_outlives_the_keeper(end):
    """F037."""
    keeper = start(FAMILY + ("exec sleep 0.5" if end == "by itself" else "wait"))
    processes = family(keeper)
    assert len(processes) >= 3
    if end == "pipe":
        keeper.stdin.close()
    elif end == "sigterm":
        keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(10) == (0 if end == "by itself" else 143)
    assert_gone(processes)


def test_deaf_processes_are_killed_after_their_grace():
    keeper = start("trap '' TERM; echo ready; while true; do sleep 0.1; done")
    processes = family(keeper)
    began = time.monotonic()
    keeper.stdin.close()
    keeper.wait(15)
    assert_gone(processes)
    assert time.monotonic() - began < 12


def test_kill_9_of_the_holder_is_the_end_of_the_pipe():
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time\n"
            f"k = subprocess.Popen({[*KEEPER, 'bash', '-c', FAMILY + 'wait']!r}, "
            "stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)\n"
            "k.stdout.readline(); print(k.pid, flush=True); time.sleep(1000)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    keeper = psutil.Process(int(holder.stdout.readline()))
    processes = [keeper, *keeper.children(recursive=True)]
    holder.kill()
    holder.wait()
    assert_gone(processes)


@pytest.mark.parametrize(("script", "status"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_the_exit_status_is_the_commands_own(script, status):
    keeper = subprocess.Popen([*KEEPER, "bash", "-c", script], stdin=subprocess.PIPE)
    assert keeper.wait(10) == status
