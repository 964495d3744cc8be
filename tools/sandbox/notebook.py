"""The persistent interpreter of a sandbox: one cell after another in one namespace, as a notebook.

The worker runs it in a child of its own, from source, so it uses the standard library alone.
"""

from __future__ import annotations

import ast
import io
import itertools
import json
import linecache
import os
import signal
import sys
import traceback
import types

LIMIT = 1 << 16  # characters of a traceback


def interpret(code, answer, home):
    """Read [id, text] a line from the fd `code`; write [id, exit code, error] to `answer`."""
    pid, null, out, commands = os.getpid(), os.dup(0), os.dup(1), os.fdopen(code, "rb")
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.path.insert(0, "")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in itertools.count(1):
        line = commands.readline()
        if not line:
            return
        for source, fd in ((null, 0), (out, 1), (out, 2)):
            os.dup2(source, fd)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(
                io.FileIO(fd, "w", closefd=False), "utf-8", "backslashreplace", write_through=True
            )
            for fd in (1, 2)
        )
        id, cell = json.loads(line)
        outcome = [id, *run_cell(cell, f"<cell {number}>", vars(module), home)]
        if os.getpid() != pid:  # a fork of the cell's own
            os._exit(0)
        line = json.dumps(outcome).encode() + b"\n"
        while line:
            line = line[os.write(answer, line) :]


def run_cell(code, name, namespace, home):
    """[exit code, error]; the value of a last expression is printed."""
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            if value is not None:
                namespace["_"] = value
                print(repr(value))
        return [0, ""]
    except SystemExit as error:
        return [0, ""] if error.code in (None, 0) else [1, f"SystemExit: {error.code}\n"]
    except BaseException as error:
        return [1, describe(error, home)]
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def describe(error, home):
    """The traceback without frames of libraries and of this file, at most LIMIT characters."""
    summary = traceback.TracebackException.from_exception(error)
    seen = [summary]
    for one in seen:
        one.stack = traceback.StackSummary.from_list(
            (frame.filename, frame.lineno or 0, frame.name, frame.line)
            for frame in one.stack
            if frame.filename.startswith(("<cell ", home + "/"))
        )
        seen += [other for other in (one.__cause__, one.__context__) if other is not None]
        seen += getattr(one, "exceptions", None) or []
    text = "".join(summary.format())
    return text if len(text) <= LIMIT else f"{text[: LIMIT // 2]}\n...\n{text[-LIMIT // 2 :]}"
