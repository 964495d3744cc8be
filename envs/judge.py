"""Runs hidden tests on a function, in a process that never runs the function itself.

A program of its own: its source is run inside a sandbox by `python3 -I -c`. The process that
holds the tests starts a second one for the code under test, sends it the arguments of each call,
and reads the result back as a literal. The code cannot end, patch or inspect what judges it: all it
can do is to answer calls. The tests see values of builtin types alone, with no methods of the
code's own; infinities and NaN are none of them.
"""

import ast
import ctypes
import json
import os
import subprocess
import sys

PR_SET_DUMPABLE = 4
MAX_CHARS = 1 << 22  # of one result

SERVE = """
import os, sys
calls, out = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_RDWR), 0)
os.dup2(0, 1)
source, entry_point = eval(calls.readline())
names = {"__name__": "solution"}
for part in source:
    exec(compile(part, "solution", "exec"), names)
for line in calls:
    print(repr(names[entry_point](*eval(line))), file=out, flush=True)
"""


def main() -> None:
    """Reads {"prompt", "test", "entry_point", "code", "nonce"}; writes the nonce if all holds."""
    # No process of the same user may look into this one, or trace it.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")
    task = json.loads(sys.stdin.buffer.read())
    server = subprocess.Popen(
        [sys.executable, "-I", "-c", SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
    )
    assert server.stdin is not None and server.stdout is not None
    calls, results = server.stdin, server.stdout
    print(repr(((task["prompt"], task["code"]), task["entry_point"])), file=calls, flush=True)

    def candidate(*args: object) -> object:
        print(repr(args), file=calls, flush=True)
        line = results.readline(MAX_CHARS)
        if not line.endswith("\n"):
            raise EOFError("no result")
        return ast.literal_eval(line.strip())

    names: dict[str, object] = {"__name__": "tests"}
    exec(compile(task["prompt"], "prompt", "exec"), names)  # what the tests may take from it
    names[task["entry_point"]] = candidate
    exec(compile(task["test"], "test", "exec"), names)
    check = names["check"]
    assert callable(check)
    check(candidate)
    os.write(1, task["nonce"].encode())


if __name__ == "__main__":
    main()
