"""Shell: small jobs on files, judged by the files as they are in the end, or by the answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from agentrl.rubric import Rubric
from agentrl.tool import Tool
from agentrl.types import Action, Message, Task
from envs.answers import is_same, stated_answer
from envs.gold import calling
from envs.rows import in_split, require_split
from envs.sandboxed import SandboxedEnv
from envs.shell_problems import FAMILIES, make_problem
from envs.tool_env import demonstration
from tools.sandbox.pool import Lease
from tools.sandbox.protocol import Sandbox
from tools.shell import shell_tool

NUM_TASKS = {"train": 1200, "test": 120}


async def solved(env: Any, messages: Sequence[Message]) -> bool:
    """Whether the files, and the answer where one is asked for, are as the problem wants them."""
    problem = make_problem(**env.unwrapped.task.info)
    if problem.answer is not None and not is_same(stated_answer(messages), problem.answer):
        return False
    sandbox = env.unwrapped.lease.sandbox
    for path, wanted in problem.end.items():
        try:
            found = (await sandbox.read_file(path)).decode(errors="replace")
        except FileNotFoundError:
            found = None
        except OSError:  # a folder, a link that leads out, a file that may not be read
            return False
        if (found is None) != (wanted is None):
            return False
        if found is not None and wanted is not None and found.rstrip() != wanted.rstrip():
            return False
    return True


async def solved_by_family(env: Any, messages: Sequence[Message], task: Task) -> dict[str, bool]:
    return {f"solved/{task.info['family']}": await solved(env, messages)}


class ShellTasks(SandboxedEnv):
    """The reward is 1 where the job is done, else 0.

    The files are read by the sandbox itself and not by programs that the policy could have
    replaced. White space at the end of a file does not count; files that the problem does not speak
    of do not either.
    """

    system_prompt = (
        "Do the job with the tool shell, in the current folder. "
        "Then say Done., or, where something is asked, end with: Answer: the answer"
    )
    demonstrations = (
        demonstration(
            "How many .csv files are there below data/?",
            [("shell", {"command": "find data -name '*.csv' | wc -l"}, "3")],
            "Answer: 3",
        ),
        demonstration(
            "Rename old.txt to new.txt.",
            [("shell", {"command": "mv old.txt new.txt && ls"}, "new.txt")],
            "Done.",
        ),
    )
    rubric = Rubric([solved, solved_by_family], weights=[1.0, 0.0])

    def make_tools(self, lease: Lease) -> Sequence[Tool]:
        return [shell_tool(lease)]

    def tasks(self, split: str) -> Sequence[Task]:
        """1,200 training or 120 test jobs, of each family as many."""
        require_split(split)
        return _tasks(split)

    async def setup(self, sandbox: Sandbox) -> None:
        for path, content in make_problem(**self.task.info).files.items():
            await sandbox.write_file(path, content)

    def gold(self, task: Task) -> list[Action]:
        """Turns that earn the full reward."""
        problem = make_problem(**task.info)
        last = "Done." if problem.answer is None else f"Answer: {problem.answer}"
        return [calling("shell", command=problem.command), Action(last)]


@cache
def _tasks(split: str) -> tuple[Task, ...]:
    tasks: list[Task] = []
    seen: set[str] = set()
    index = 0
    while len(tasks) < NUM_TASKS[split]:
        family = list(FAMILIES)[len(tasks) % len(FAMILIES)]
        problem = make_problem(family, seed := str(index))
        index += 1
        key = repr((problem.question, problem.files))
        if key not in seen and in_split(key, split):
            seen.add(key)
            tasks.append(
                Task(
                    id=f"shell-{split}-{len(tasks)}-{family}",
                    prompt=(Message(role="user", content=problem.question),),
                    info={"family": family, "seed": seed},
                )
            )
    return tuple(tasks)
