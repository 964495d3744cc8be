"""Runs an MCP server over stdio, and when it ends, ends every process that it has started.

    python -I -S mcp_keeper.py PARENT COMMAND [ARGUMENT …]

The streams are the command's. It ends them too when it is told to (SIGTERM), and when whoever
started it, process PARENT, ends in any way.
"""

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(parent, command):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)
    try:
        try:
            child = os.posix_spawnp(command[0], command, os.environ)
        except OSError as error:
            sys.exit(f"{command[0]}: {error.strerror}")
        for fd in (0, 1):  # the streams are the command's alone, so that their ends are seen
            os.close(fd)
        while True:
            pid, status = os.wait()
            if pid == child:
                sys.exit(max(os.waitstatus_to_exitcode(status), 0) or int(status != 0))
    finally:
        end_children()


def end_children():
    """Orphans become this process's children, so that killing children until none is left does."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(ChildProcessError):
        while True:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                for pid in file.read().split():
                    os.kill(int(pid), signal.SIGKILL)
            os.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
