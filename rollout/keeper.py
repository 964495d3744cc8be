"""Runs a command that must not outlive whoever started it.

    python rollout/keeper.py COMMAND [ARGUMENT …]     with a pipe as standard input

When the writing end of the pipe is closed, when the keeper's parent ends (by kill -9 too, and also
if a fork of it still holds the pipe), when the keeper is told to stop, and when the command ends by
itself, every descendant is killed, also those that left the process group or lost their parent: the
keeper adopts them.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_S = 3.0  # between SIGTERM and SIGKILL


def main(command: list[str]) -> int:
    """The exit status of the command; 128 + signal where a signal ended it."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    told, tell = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: os.write(tell, b"."))
    keeper, parent = os.getpid(), os.pidfd_open(os.getppid())

    def die_with_the_keeper() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:  # it was killed before that was set
            os._exit(1)

    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_the_keeper,
    )
    select.select([sys.stdin, told, parent, os.pidfd_open(child.pid)], [], [])
    by_itself = child.poll()
    number, deadline = signal.SIGTERM, time.monotonic() + GRACE_S
    while left := psutil.Process().children(recursive=True):
        for process in left:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue
        _, alive = psutil.wait_procs(left, timeout=max(0.1, deadline - time.monotonic()))
        if alive:
            number = signal.SIGKILL
    code = by_itself if by_itself is not None else 128 + signal.SIGTERM
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
