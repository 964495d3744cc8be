"""Envs of other libraries through their adapters: theirs in play, rewards and seeds."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from gymnasium import spaces

from agentrl.env import Blocking, EnvNotFound, make_env
from agentrl.tool import Unavailable
from agentrl.trajectory import Trajectory
from agentrl.types import Action, Message, Task, ToolCall
from envs.adapters.gym import describe_actions, read_action

# --- gymnasium


def test_frozen_lake_is_told_in_words_and_walked_by_name():
    env = make_env("gym:FrozenLake-v1?is_slippery=false")
    first, _ = env.reset(seed=0)
    assert "left, down, right, up" in first
    assert first.endswith("PFFF\nFHFH\nFFFH\nHFFG")
    told, reward, terminated, _, info = env.step(Action("Not left. I go DOWN."))
    assert told == "SFFF\nPHFH\nFFFH\nHFFG"
    assert (reward, terminated, info["metrics"]) == (0.0, False, {"gym/unreadable": 0})
    for move in ("down", "right", "down", "right"):
        env.step(move)
    _, reward, terminated, _, _ = env.step("right")
    assert (reward, terminated) == (1.0, True)


def test_blackjack_is_told_in_words():
    env = make_env("agentrl/Blackjack-v0").unwrapped
    assert "Your cards sum to 20. The dealer shows a 7." in env.reset(seed=1)[0]
    _, reward, terminated, _, _ = env.step("stick")
    assert (reward, terminated) == (1.0, True)
    with pytest.raises(RuntimeError, match="the episode is over"):
        env.step("stick")


def test_a_reply_without_an_action_is_answered_and_the_episode_bounded():
    env = make_env("gym:Taxi-v4?max_unreadable=2&unreadable_reward=-2")
    env.reset(seed=0)
    told, reward, terminated, truncated, _ = env.step("I would rather not say.")
    assert told == "There is no action in your reply. Reply with a number from 0 to 5."
    assert (reward, terminated, truncated) == (-2.0, False, False)
    _, _, _, truncated, info = env.step("7")
    assert truncated
    assert info["metrics"] == {"gym/unreadable": 2}


def test_the_inner_envs_seed_rewards_and_truncation_pass_through():
    texts = [make_env("gym:CartPole-v1").reset(seed=seed)[0] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    env = make_env("gym:CartPole-v1?max_episode_steps=2")
    env.reset(seed=0)
    assert env.step("1")[1:4] == (1.0, False, False)
    assert env.step("0")[1:4] == (1.0, False, True)


LETTERS = spaces.Text(5)


@pytest.mark.parametrize(
    ("space", "reply", "action"),
    [
        (spaces.Discrete(4), "1, no: 3.", 3),
        (spaces.Discrete(4), "3.5", None),
        (spaces.Discrete(4), "4", None),
        (spaces.Discrete(4), "x3", None),
        (spaces.Discrete(4), "9" * 400, None),
        (spaces.Discrete(5, start=-2), "I take -1", -1),
        (spaces.MultiDiscrete([3, 2]), "[0, 0]? No, [2, 1]", [2, 1]),
        (spaces.MultiDiscrete([3, 2]), "[2, 2]", None),
        (spaces.MultiDiscrete([3, 2]), "[1.5, 0]", None),
        (spaces.MultiBinary(3), "[1, 0, 1]", [1, 0, 1]),
        (spaces.Box(-1, 1, (2,)), "[0.5, -1]", [0.5, -1.0]),
        (spaces.Box(-1, 1, (2,)), "[0.5, -2]", None),
        (spaces.Box(-1, 1, (1,)), "0.5", [0.5]),
        (LETTERS, " abc\n", "abc"),
        (LETTERS, "abcdef", None),
        (spaces.Tuple((spaces.Discrete(2), LETTERS)), 'So: [1, "ab"]', (1, "ab")),
        (
            spaces.Dict(a=spaces.Discrete(3), b=spaces.MultiBinary(2)),
            'I do {"a": 2, "b": [0, 1]}.',
            {"a": 2, "b": [0, 1]},
        ),
        (spaces.Dict(a=spaces.Discrete(3)), '{"b": 2}', None),
    ],
)
def test_the_last_action_of_a_reply_counts(space: spaces.Space[Any], reply: str, action: Any):
    found = read_action(space, reply)
    plain = json.loads(json.dumps(found, default=lambda value: value.tolist()))
    expected = list(action) if isinstance(action, tuple) else action
    assert plain == expected
    assert describe_actions(space)


@pytest.mark.parametrize(
    ("reply", "action"), [("STICK", 0), ("\u017ftick", None), ("h\u0131t", None)]
)
def test_a_name_in_letters_that_only_look_alike_is_no_action(reply: str, action: int | None):
    assert read_action(spaces.Discrete(2), reply, ("stick", "hit")) == action


def test_hostile_replies_are_read_in_no_time():
    began = time.monotonic()
    assert read_action(spaces.MultiBinary(3), "[" * 100_000) is None
    assert read_action(spaces.Discrete(3), "1" * 100_000) is None
    assert time.monotonic() - began < 0.5


# --- reasoning-gym


def score(env: Any, task: Task, reply: str) -> float:
    tape = Trajectory()
    tape.messages.append(Message(role="assistant", content=reply))
    return asyncio.run(env.rubric.score(task=task, trajectory=tape, env=env))["score"]


def test_reasoning_gyms_questions_and_scores_are_its_own():
    """F050, F052: an answer that its scorer cannot read is the policy's fault."""
    env = make_env("rg:prime_factorization?size=20&max_value=50")
    task = env.tasks("train")[3]
    assert task.prompt[0].content.startswith("Find the prime factorization of")
    assert score(env, task, f"<answer>1</answer> or <answer>{task.answer}</answer>") == 1.0
    assert score(env, task, task.answer) == 1.0
    for wrong in ("<answer>xx</answer>", "", "x" * 10_000):
        assert score(env, task, wrong) < 0.1


def test_its_splits_share_no_question_and_come_from_the_seed():
    env = make_env("rg:basic_arithmetic?size=100&min_terms=2&max_terms=2&max_digits=1")
    asked = {
        split: {task.prompt[0].content for task in env.tasks(split)} for split in ("train", "test")
    }
    assert asked["train"]
    assert not asked["train"] & asked["test"]
    other = make_env("rg:basic_arithmetic?size=100&min_terms=2&max_terms=2&max_digits=1&seed=1")
    assert [task.answer for task in other.tasks("train")] != [
        task.answer for task in env.tasks("train")
    ]


# --- TextArena


def game_of(seed: int) -> tuple[str, list[Any]]:
    """The beginning of a game, and what it says to three moves."""
    env = make_env("ta:Minesweeper-v0")
    begun, _ = env.reset(seed=seed)
    return begun, [env.step(f"[{row} 2]")[:2] for row in (1, 2, 3)]


def test_many_threads_play_the_same_games_and_leave_the_global_random_state_alone():
    expected = [game_of(seed) for seed in range(24)]
    assert len({str(game) for game in expected}) > 12
    random.seed(3)
    before = random.getstate()
    drawn = [random.random() for _ in range(100)]
    random.setstate(before)
    with ThreadPoolExecutor(12) as pool:
        games = pool.map(game_of, list(range(24)) * 2)
        assert [random.random() for _ in range(100)] == drawn
        assert list(games) == expected * 2


def test_a_game_never_puts_the_global_random_state_back(monkeypatch: pytest.MonkeyPatch):
    """Another thread may have drawn meanwhile, and would draw the same again."""
    env = make_env("ta:GuessTheNumber-v0")
    monkeypatch.setattr(random, "setstate", lambda state: pytest.fail("put back"))
    env.reset(seed=0)
    env.step("[1]")


def test_a_game_says_what_is_new_and_rewards_at_its_end():
    env = make_env("ta:GuessTheNumber-v0?max_number=3")
    begun, _ = env.reset(seed=0)
    assert "guess the number between 1 and 3" in begun
    told, reward, terminated, _, _ = env.step("I do not know")
    assert "invalid move" in told and "guess the number between" not in told
    rewards = [reward]
    for number in (1, 2, 3):
        if not terminated:
            told, reward, terminated, _, _ = env.step(f"[{number}]")
            rewards.append(reward)
    assert (rewards[-1], terminated) == (1, True)
    assert not any(rewards[:-1])
    assert told.startswith("Congratulations")


def test_a_game_that_a_move_breaks_ends_and_is_counted(monkeypatch: pytest.MonkeyPatch):
    env = make_env("ta:GuessTheNumber-v0")
    env.reset(seed=0)
    monkeypatch.setattr(env.game, "step", lambda action: 1 / 0)
    told, reward, terminated, _, info = env.step("[1]")
    assert (reward, terminated, info["metrics"]) == (0.0, True, {"ta/game_errors": 1})
    assert "division by zero" in told


def test_a_game_of_two_is_refused_before_a_run():
    with pytest.raises(EnvNotFound, match="cannot be played by one player"):
        make_env("ta:TicTacToe-v0").preflight()


# --- verifiers

TASKSET = '''
import verifiers.v1 as vf

__all__ = ["Sums"]


class Data(vf.TaskData):
    answer: str


class Count(vf.State):
    calls: int = 0


class Adder(vf.Toolset[vf.ToolsetConfig, Count]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        self.state.calls += 1
        return str(a + b)


class Sum(vf.Task[Data, Count]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]

    @vf.reward(weight=2.0)
    async def correct(self, task, trace) -> float:
        return float(task.answer in trace.last_reply)

    @vf.metric
    async def num_calls(self, trace) -> float:
        return float(trace.state.calls + 10 * len(trace.tool_messages))


class Config(vf.TasksetConfig):
    size: int = 20


class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for n in range(self.config.size):
            data = Data(prompt=f"What is {n}+1?", answer=str(n + 1), system_prompt="Be brief.")
            yield Sum(data, self.config.task)
'''


@pytest.fixture(scope="module")
def taskset(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("taskset")
    (folder / "sums_for_tests.py").write_text(TASKSET)
    (folder / "judged_for_tests.py").write_text(
        TASKSET.replace("trace) -> float:", "trace, runtime) -> float:")
    )
    sys.path.insert(0, str(folder))
    yield "verifiers:sums_for_tests"
    sys.path.remove(str(folder))


def test_a_verifiers_taskset_is_played_with_its_tools_state_and_rewards(taskset: str):
    async def play() -> dict[str, float]:
        env = make_env(f"{taskset}?size=30")
        assert env.preflight() == []
        task = env.tasks("train")[5]
        tape = Trajectory()
        observation, _ = await env.reset(seed=0, options={"task": task})
        tape.messages += observation
        assert [message.role for message in observation] == ["system", "user"]
        call = ToolCall(id="c", name="adder_add", arguments={"a": 5, "b": 1})
        for action in (Action("", attempts=(call,)), Action("It is 6.")):
            tape.messages.append(action.to_message())
            answers, *_ = await env.step(action)
            tape.messages += answers
        assert tape.messages[3].content == "6"
        return await env.rubric.score(task=task, trajectory=tape, env=env)

    rewards = asyncio.run(play())
    assert rewards == {"reward": 2.0, "verifiers/correct": 1.0, "verifiers/num_calls": 11.0}


def test_its_splits_are_disjoint_and_its_config_is_taken(taskset: str):
    env = make_env(f"{taskset}?size=30")
    train, test = ({task.id for task in env.tasks(split)} for split in ("train", "test"))
    assert (len(train), len(test), train & test) == (27, 3, set())
    assert len(make_env(f"{taskset}?num_tasks=5").tasks("train")) == 5


def test_what_only_verifiers_own_runs_have_is_refused_before_a_run(taskset: str):
    with pytest.raises(EnvNotFound, match="rewards that ask the runtime"):
        make_env("verifiers:judged_for_tests").preflight()
    with pytest.raises(EnvNotFound, match="taskset 'no_such_set' not found"):
        make_env("verifiers:no_such_set")
    with pytest.raises(EnvNotFound, match="sise"):
        make_env(f"{taskset}?sise=3")


# --- MCP

SERVER = '''
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


server.run()
'''


def test_an_mcp_servers_tools_with_tasks_from_a_file_are_an_env(tmp_path: Path):
    (tmp_path / "server.py").write_text(SERVER)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "2+3?", "answer": "5"}\n')

    async def play() -> float:
        env = make_env(f"mcp:{sys.executable} {tmp_path}/server.py?tasks={rows}")
        task = env.tasks("train")[0]
        try:
            await env.acquire()
            tape = Trajectory()
            observation, _ = await env.reset(seed=0, options={"task": task})
            assert observation[-1].content == "2+3?"
            call = ToolCall(id="c", name="add", arguments={"a": 2, "b": 3})
            answers, *_ = await env.step(Action("", attempts=(call,)))
            assert answers[0].content == "5"
            final = Action("I add.\n5.")
            tape.messages.append(final.to_message())
            *_, terminated, _, _ = await env.step(final)
            assert terminated
            return (await env.rubric.score(task=task, trajectory=tape, env=env))["exact"]
        finally:
            await env.close()
            await env.close()

    assert asyncio.run(play()) == 1.0


def test_a_bad_row_of_a_task_file_is_named_by_file_and_line(tmp_path: Path):
    (tmp_path / "server.py").write_text(SERVER)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "2+3?", "answer": "5"}\n{"question": "2+3?", "answer": 5}\n')
    env = make_env(f"mcp:{sys.executable} {tmp_path}/server.py?tasks={rows}")
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: a row must be"):
        env.tasks("train")


# --- OpenEnv


@pytest.fixture(scope="module", autouse=True)
def openenv_server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A real one, which takes seconds to start, and so starts while other tests run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("openenv_server.py")
    with subprocess.Popen([sys.executable, str(script), str(port)]) as server:
        yield f"http://127.0.0.1:{port}", server
        server.kill()


@pytest.fixture(scope="module")
def openenv(openenv_server: tuple[str, subprocess.Popen[bytes]]) -> str:
    """The url of the server, once it answers."""
    url, server = openenv_server
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urlopen(f"{url}/schema", timeout=5):
                return url
        except URLError:
            time.sleep(0.1)
    raise TimeoutError(f"the server did not answer at {url}")


def test_an_openenv_server_is_played_in_text(openenv: str):
    env = make_env(f"openenv:{openenv}")
    assert env.preflight() == [f"OpenEnv server {openenv}: a reply is digit (integer)"]
    blocking = Blocking(env)
    assert blocking.reset(seed=3)[0] == "Guess my digit. It is not 8."
    assert blocking.step("7")[:4] == ("wrong", 0.0, False, False)
    told, *_, info = blocking.step("seven")
    assert told == "Error: this is no action; a reply is digit (integer)."
    assert info["metrics"] == {"openenv/rejected_actions": 1}
    assert blocking.step("3")[:4] == ("right", 1.0, True, False)
    with pytest.raises(RuntimeError, match="the episode is over"):
        blocking.step("3")
    blocking.close()
    blocking.close()


def test_sessions_of_many_episodes_do_not_mix(openenv: str):
    async def one(seed: int) -> float:
        env = make_env(f"openenv:{openenv}")
        await env.reset(seed=seed)
        await env.step(str((seed + 1) % 10))
        _, reward, *_ = await env.step(str(seed % 10))
        await env.close()
        return reward

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*map(one, range(32)))

    assert asyncio.run(all_of_them()) == [1.0] * 32


def test_a_server_that_fails_or_is_away_is_a_fault_and_no_reward(openenv: str):
    """F052."""
    blocking = Blocking(make_env(f"openenv:{openenv}"))
    blocking.reset(seed=0)
    with pytest.raises(Unavailable, match="the server stumbles"):
        blocking.step("10")
    blocking.close()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        away = make_env(f"openenv:http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(EnvNotFound, match="no OpenEnv server answers"):
            away.preflight()
        with pytest.raises(Unavailable):
            Blocking(away).reset(seed=0)
