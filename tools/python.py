"""The Python tool: a notebook of the trajectory's own, in its sandbox."""

from __future__ import annotations

import signal

from agentrl.tool import Tool, ToolOutcome, ToolResult
from tools.sandbox.client import GRACE_S
from tools.sandbox.pool import Lease
from tools.sandbox.protocol import ExecResult

ANSWER_S = GRACE_S + 2  # beyond the time of a call, for its sandbox to say what came of it


def python_tool(lease: Lease, *, timeout_s: float = 10.0) -> Tool:
    """A tool `python(code)` that runs one cell after another in one interpreter.

    Args:
        timeout_s: Of one cell. Its time-out is the model's to see; a sandbox that does not answer
            is a fault.
    """

    async def python(code: str) -> ToolResult:
        """Run Python code as a cell of a notebook: variables, imports and files stay for the next.

        Args:
            code: The code. What it prints is shown, and the value of a last expression.
        """
        result = await lease.sandbox.python(code, timeout=timeout_s)
        kept = "variables are lost, files are kept" if result.lost_state else "variables are kept"
        return observation(result, timeout_s, kept=kept)

    return Tool(python, timeout_s=timeout_s + ANSWER_S, serial=True)


def observation(result: ExecResult, timeout_s: float, *, kept: str) -> ToolResult:
    """What the model reads of a run: all output so far, then how it ended, where that is not well.

    Args:
        kept: What is left of the state after a time-out or a violent end, unless all of it is lost.
    """
    if result.lost_files:
        kept = "variables and files are lost"
    texts = [text.rstrip("\n") for text in (result.stdout, result.stderr)]
    outcome = ToolOutcome.OK if result.exit_code == 0 else ToolOutcome.ERROR
    if result.timed_out:
        outcome = ToolOutcome.TIMEOUT
        texts.append(f"[timed out after {timeout_s:g} s; {kept}]")
    elif result.exit_code < 0:
        cause = "too much output" if result.truncated else _signal(-result.exit_code)
        texts.append(f"[ended by {cause}; {kept}]")
    elif result.lost_state:
        texts.append(f"[{kept}]")
    return ToolResult(content="\n".join(filter(None, texts)) or "(no output)", outcome=outcome)


def _signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name}, as where memory runs out" if number == signal.SIGKILL else name
