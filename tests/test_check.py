"""`python -m envs check`: sound envs pass, and each check fails on an env that is broken so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from envs.__main__ import main

ROOT = Path(__file__).resolve().parents[1]

SOUND = '''
import asyncio
import random
import time

import numpy as np

from agentrl import Action, Message, Rubric, Task, TextEnv, tool
from envs.tool_env import ToolEnv


@tool(inline=True)
def double(n: int) -> int:
    """Twice a number."""
    return 2 * n


def correct(completion: str, answer: str) -> float:
    return float(completion == answer)


class Sound(ToolEnv):
    tools = (double,)
    rubric = Rubric([correct])

    def tasks(self, split):
        return [self.task_of(n) for n in range(8)]

    def task_of(self, n):
        question = Message(role="user", content=f"Twice {n}?")
        return Task(id=str(n), prompt=(question,), answer=str(2 * n))


class Seeded(TextEnv):
    """Without tools and tasks; sync."""

    shared = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.over = False
        return self.begin(), {}

    def begin(self):
        return f"Guess {self.np_random.integers(100)}."

    def step(self, action):
        if self.over:
            raise RuntimeError("call reset before step")
        self.over = True
        return "", 0.0, True, False, {}
'''

BROKEN = {  # the check that fails, what it says, the source
    "text": (
        "name it gym:",
        """
class Broken(Seeded):
    def begin(self):
        return 5
""",
    ),
    "gymnasium": (
        "check_env",
        """
class Broken(Seeded):
    def step(self, action):
        return *super().step(action)[:3], "no", {}
""",
    ),
    "seed": (
        "share nothing that changes",
        """
class Broken(Seeded):
    def begin(self):
        self.shared.append(1)
        return f"Episode {len(self.shared) // 20}."
""",
    ),
    "random": (
        "draw from self.np_random",
        """
class Broken(Seeded):
    def begin(self):
        np.random.rand()
        return "Guess."
""",
    ),
    "close": (
        "close raises AttributeError",
        """
class Broken(Seeded):
    def close(self):
        del self.over
""",
    ),
    "end": (
        "raise RuntimeError until the next reset",
        """
class Broken(Seeded):
    def step(self, action):
        return "", 0.0, True, False, {}
""",
    ),
    "tools": (
        "held up the event loop",
        """
@tool
async def slow(n: int) -> int:
    "A number."
    time.sleep(0.7)
    return n

class Broken(Sound):
    tools = (slow,)
""",
    ),
    "gold": (
        "give the env gold(task)",
        """
class Broken(Sound):
    rubric = Rubric([lambda completion, answer: float(completion == f"#### {answer}")])
""",
    ),
    "at once": (
        "of 64 instances began in another way",
        """
class Broken(Sound):
    at_work = 0

    async def reset(self, *, seed=None, options=None):
        Broken.at_work += 1
        await asyncio.sleep(0.01)
        crowded = Broken.at_work > 20
        observation, info = await super().reset(seed=seed, options=options)
        return [*observation, *[Message(role="user", content="hurry")] * crowded], info

    async def close(self):
        Broken.at_work = 0
""",
    ),
    "tokens": (
        "step speaks as the assistant",
        """
class Broken(Sound):
    async def step(self, action):
        answers, *rest = await super().step(action)
        return [Message(role="assistant", content="Hm.")] * len(answers), *rest
""",
    ),
}


@pytest.fixture
def envs(tmp_path: Path):
    def write(source: str) -> str:
        file = tmp_path / "envs_to_check.py"
        file.write_text(SOUND + source)
        return f"{file}:{'Broken' if source else 'Sound'}"

    return write


@pytest.fixture(scope="module")
def tokenizer(assets: Path) -> str:
    return str(assets / "tokenizers" / "smollm2")


def failed_checks(output: str) -> list[str]:
    return [line[8:24].strip() for line in output.splitlines() if line.startswith("FAILED")]


def test_a_sound_env_passes_every_check(envs, tokenizer, capsys: pytest.CaptureFixture[str]):
    assert main(["check", envs(""), "--tokenizer", tokenizer]) == 0
    output = capsys.readouterr().out
    checked = [line[8:24].strip() for line in output.splitlines()[:-1]]
    assert checked == list(BROKEN)
    assert "64 instances" in output
    assert "sampled ones are trained" in output


@pytest.mark.parametrize("check", BROKEN)
def test_each_check_fails_on_an_env_that_is_broken_so(
    check: str, envs, tokenizer: str, capsys: pytest.CaptureFixture[str]
):
    said, source = BROKEN[check]
    assert main(["check", envs(source), "--tokenizer", tokenizer]) == 1
    output = capsys.readouterr().out
    assert check in failed_checks(output)
    assert said in " ".join(output.split())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            """
@tool
async def stubborn(n: int) -> int:
    "A number."
    for _ in range(3):  # of CancelledError it takes no notice
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            pass

class Broken(Sound):
    tools = (stubborn,)
""",
            "let CancelledError rise",
        ),
        (
            """
class Broken(Sound):
    async def step(self, action):
        answers, *rest = await super().step(action)
        return answers[::-1], *rest
""",
            "every call needs its answer, in order",
        ),
        (
            """
from agentrl import Unavailable

@tool
def away(n: int) -> int:
    "A number."
    raise Unavailable("out to lunch")

class Broken(Sound):
    tools = (away,)
""",
            "raised Unavailable: out to lunch",
        ),
    ],
)
def test_a_tool_must_answer_in_time_and_in_words(
    source: str, said: str, envs, monkeypatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("envs.cli.check_tools.DEADLINE_S", 0.1)
    monkeypatch.setattr("envs.cli.check_tools.GRACE_S", 0.2)
    assert main(["check", envs(source)]) == 1
    assert said in " ".join(capsys.readouterr().out.split())


def test_sync_envs_are_checked_without_tools_and_solutions(
    envs, capsys: pytest.CaptureFixture[str]
):
    assert main(["check", envs("").replace(":Sound", ":Seeded"), "--instances", "4"]) == 0
    output = capsys.readouterr().out
    assert "skipped tools" in output
    assert "skipped gold" in output
    assert "skipped tokens" in output


@pytest.mark.parametrize("id", ["agentrl/FrozenLake-v0", "agentrl/Blackjack-v0"])
def test_the_games_of_gymnasium_pass(id: str, tokenizer: str):
    assert main(["check", id, "--tokenizer", tokenizer]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "agentrl/FrozenLak-v0"], "Did you mean agentrl/FrozenLake-v0"),
        (["check", "agentrl/FrozenLake-v0?sise=3"], "unexpected keyword argument 'sise'"),
        (["check", "agentrl/FrozenLake-v0", "--tokenizer", "/no/where"], "there is no tokenizer"),
        (["play", "no/where.py:Env"], "there is no file no/where.py"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_a_file_is_checked_from_its_own_folder(envs, tmp_path: Path):
    envs("")
    result = subprocess.run(
        [sys.executable, "-m", "envs", "check", "envs_to_check.py:Sound", "--instances", "2"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_event_loop_ends_with_what_envs_share_shut_down(
    envs, capsys: pytest.CaptureFixture[str]
):
    source = """
from agentrl.shutdown import at_shutdown

class Broken(Sound):
    async def acquire(self):
        if not self.shared:
            at_shutdown(self.end)
        self.shared.append(1)

    shared = []

    async def end(self):
        print("ended")
"""
    assert main(["check", envs(source), "--instances", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "ended"
