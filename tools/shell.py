"""The shell tool: commands in the trajectory's sandbox, with a folder and variables that stay."""

from __future__ import annotations

import shlex
from dataclasses import replace

from agentrl.tool import Tool, ToolResult
from tools.python import ANSWER_S, observation
from tools.sandbox.pool import Lease

# The state is a file that each command reads first and writes last, so that it outlives a command
# that had to be killed. `export -p` says the current folder too.
_RESTORE = """\
__state="{folder}/.shell_state"
__save() {{ export -p >"$__state.$$" && mv -f "$__state.$$" "$__state"; }} 2>/dev/null
if [ -e "$__state" ]; then
    . "$__state"
    __old=${{OLDPWD-}}
    if cd -- "$PWD"; then OLDPWD=$__old; else PWD=$(pwd -P); fi
fi
trap __save EXIT
"""


def shell_tool(lease: Lease, *, timeout_s: float = 15.0) -> Tool:
    """A tool `shell(command)`.

    Args:
        timeout_s: Of one command. Its time-out is the model's to see; a sandbox that does not
            answer is a fault.
    """

    async def shell(command: str) -> ToolResult:
        """Run a shell command; the current folder and exported variables stay for the next.

        Args:
            command: As for bash. Both of its outputs are shown, and an exit code that is not 0.
        """
        # Where /tmp is everybody's, the state is in the work folder.
        folder = "$PWD" if lease.sandbox.level == "process" else "/tmp"
        script = f"{_RESTORE.format(folder=folder)}eval {shlex.quote(command)}"
        result = await lease.sandbox.exec(script, timeout=timeout_s)
        if result.exit_code > 0 and not result.timed_out:
            said = [result.stderr.rstrip("\n"), f"[exit code {result.exit_code}]"]
            result = replace(result, stderr="\n".join(filter(None, said)))
        return observation(result, timeout_s, kept="folder and variables are as before it")

    return Tool(shell, timeout_s=timeout_s + ANSWER_S, serial=True)
