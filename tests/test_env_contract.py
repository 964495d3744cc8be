"""What an env owes: gymnasium's checker, a name, a seed that fixes it, and nothing left behind.

`python -m envs check` looks for all of it, and here at every env of this project.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import numpy
import pytest
from gymnasium.envs.registration import load_env_creator
from gymnasium.utils.env_checker import check_env

from agentrl.env import Blocking, EnvNotFound, TextEnv, make_env
from agentrl.types import Message, Task
from envs.__main__ import main
from envs.sandboxed import SandboxedEnv
from tests.sandboxes import require_level
from tools.sandbox.protocol import SandboxConfig

OURS = sorted(id for id in gymnasium.registry if id.startswith("agentrl/"))
OTHERS = ["gym:CliffWalking-v1", "rg:basic_arithmetic?size=40", "ta:GuessTheNumber-v0"]

TASK = Task(
    id="t", prompt=(Message(role="user", content="2+3?"),), answer="5", info={"kind": "word"}
)


class Guess(TextEnv):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.secret = str(self.np_random.integers(10))
        return "Guess my digit.", {}

    def step(self, action: str) -> Any:
        return "", float(self.secret in action), True, False, {}


@pytest.fixture(scope="module")
def gsm8k_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("gsm8k") / "rows.jsonl"
    rows = [f'{{"question": "{n}+1?", "answer": "#### {n + 1}"}}\n' for n in range(20)]
    file.write_text("".join(rows))
    return str(file)


@pytest.fixture(params=["agentrl/Arithmetic-v0", "agentrl/GSM8K-v0", "Guess"])
def make(request: pytest.FixtureRequest, gsm8k_file: str) -> Any:
    """A function that makes a fresh env."""
    if request.param == "Guess":
        return Guess
    kwargs = {"path": gsm8k_file} if "GSM8K" in request.param else {}
    return lambda: make_env(request.param, **kwargs)


def test_gymnasiums_checker_passes(make: Any):
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*(different from the unwrapped|not within|spec|Casting).*"
        )
        check_env(Blocking(make()), skip_render_check=True)


@pytest.mark.parametrize("name", [*OURS, *OTHERS])
def test_every_env_passes_every_check(
    name: str, gsm8k_file: str, assets: Path, capsys: pytest.CaptureFixture[str]
):
    kwargs = [f"path={gsm8k_file}"] if "GSM8K" in name else []
    if name in OURS and is_sandboxed(name):
        require_level(SandboxConfig(level="bubblewrap"))
        kwargs.append("sandbox={level: bubblewrap}")
    named = f"{name}?{'&'.join(kwargs)}" if kwargs else name
    tokenizer = str(assets / "tokenizers" / "smollm2")
    passed = main(["check", named, "--instances", "4", "--tokenizer", tokenizer])
    assert passed == 0, capsys.readouterr().out


def is_sandboxed(id: str) -> bool:
    entry_point = gymnasium.registry[id].entry_point
    assert isinstance(entry_point, str)
    creator = load_env_creator(entry_point)
    return isinstance(creator, type) and issubclass(creator, SandboxedEnv)


def test_gymnasium_makes_the_registered_envs():
    env = gymnasium.make("agentrl/Arithmetic-v0", kinds=("product",))
    observation, info = asyncio.run(env.reset(seed=3, options={"task": TASK}))  # type: ignore[arg-type]
    assert observation[-1].content == "2+3?"
    assert info["metrics"]["tool/calls"] == 0


def first_observation(make: Any, seed: int) -> Any:
    return Blocking(make()).reset(seed=seed)[0]


def test_seed_and_task_fix_the_first_observation_in_every_instance_and_thread(make: Any):
    expected = [first_observation(make, seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda seed: first_observation(make, seed), range(8))) == expected


def test_no_global_random_state_is_read_or_moved(make: Any):
    random.seed(1)
    numpy.random.seed(1)
    before = random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[index]
    expected = first_observation(make, 5)
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before  # type: ignore[index]
    random.seed(2)
    numpy.random.seed(2)
    assert first_observation(make, 5) == expected


class Looped(TextEnv):
    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.loop = asyncio.get_running_loop()
        return "Go on.", {}

    async def step(self, action: str) -> Any:
        same = self.loop is asyncio.get_running_loop() and self.loop.is_running()
        return "", float(same), True, False, {}


def test_blocking_calls_share_one_event_loop_so_that_what_lives_on_it_lives_on():
    env = Blocking(Looped())
    env.reset(seed=0)
    assert env.step("")[1] == 1.0


def test_close_may_be_called_twice(make: Any):
    env = Blocking(make())
    env.reset(seed=0)
    env.close()
    env.close()


@pytest.mark.parametrize("name", ["agentrl/Arithmetic-v0", "agentrl/GSM8K-v0"])
def test_a_step_after_the_end_or_before_the_start_is_refused(name: str, gsm8k_file: str):
    env = Blocking(make_env(name, **({"path": gsm8k_file} if "GSM8K" in name else {})))
    with pytest.raises(RuntimeError, match="call reset before step"):
        env.step("5")
    env.reset(seed=0)
    env.step("The answer is 5.")
    with pytest.raises(RuntimeError, match="the episode is over"):
        env.step("5")


def test_an_env_is_named_by_module_and_class():
    env = make_env("envs.arithmetic:Arithmetic", max_operations=1)
    assert type(env).__name__ == "Arithmetic"


def test_an_env_is_named_by_file_and_class(tmp_path: Path):
    source = "from typing import Any\nfrom agentrl.env import TextEnv\n\n" + inspect.getsource(
        Guess
    )
    file = tmp_path / "guess.py"
    file.write_text(source)
    env = make_env(f"{file}:Guess")
    assert env.reset(seed=0)[0] == "Guess my digit."
    assert type(make_env(f"{file}:Guess")) is type(env)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("agentrl/Arithmetics-v0", "Did you mean agentrl/Arithmetic-v0"),
        ("agentrl/Nothing-v0", "package.module:Class"),
        ("FrozenLake", "path/to/file.py:Class"),
        ("frozen lake", "is not registered"),
        ("nowhere.envs:Env", "there is no module 'nowhere'"),
        ("envs.arithmetic:Arithmetik", "has no 'Arithmetik'"),
        ("no/such/file.py:Env", "there is no file no/such/file.py"),
    ],
)
def test_a_name_that_leads_nowhere_says_what_to_write(name: str, said: str):
    with pytest.raises(EnvNotFound) as caught:
        make_env(name)
    assert said in str(caught.value)
