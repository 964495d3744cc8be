"""One string names any env: an id, a class, a file, a scheme, or what a package offers."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest

import agentrl.env
from agentrl.env import EnvNotFound, make_env, open_env, register_scheme
from envs.adapters import library

SOURCE = """
from agentrl.env import TextEnv

class Echo(TextEnv):
    def __init__(self, word="hi", **kwargs):
        self.word, self.kwargs = word, kwargs

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.word, {}

    def step(self, action):
        return action, 1.0, True, False, {}
"""


@pytest.fixture
def echo(tmp_path: Path) -> str:
    (tmp_path / "echo_env.py").write_text(SOURCE)
    return f"{tmp_path}/echo_env.py:Echo"


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with an installed package that offers the env `echo`."""
    (tmp_path / "echo_package.py").write_text(SOURCE)
    install(tmp_path, "echo-package")
    monkeypatch.syspath_prepend(tmp_path)
    agentrl.env.third_party.cache_clear()
    yield tmp_path
    agentrl.env.third_party.cache_clear()
    sys.modules.pop("echo_package", None)


def install(folder: Path, name: str) -> None:
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[agentrl.envs]\necho = echo_package:Echo\n")


def test_values_after_the_question_mark_are_yaml(echo: str):
    env = make_env(f"{echo}?word=a%26b&slippery=false&size=3&kinds=[x, y]&none=")
    assert env.word == "a&b"
    assert env.kwargs == {"slippery": False, "size": 3, "kinds": ["x", "y"], "none": None}


def test_they_add_to_the_kwargs_and_none_is_given_twice(echo: str):
    assert make_env(f"{echo}?size=3", word="ho").word == "ho"
    for twice in (f"{echo}?size=3&size=4", f"{echo}?word=a"):
        with pytest.raises(EnvNotFound, match="is given twice"):
            make_env(twice, word="ho")


@pytest.mark.parametrize("query", ["size", "=3", "size=3&", "size={"])
def test_a_malformed_query_says_what_is_wrong(echo: str, query: str):
    with pytest.raises(EnvNotFound, match=r"after \? comes key=value|is no YAML"):
        make_env(f"{echo}?{query}")


def test_plain_ids_and_classes_take_a_query_too():
    assert make_env("envs.arithmetic:Arithmetic?max_operations=1").max_operations == 1
    env = make_env("agentrl/Arithmetic-v0?kinds=[word]").unwrapped
    assert env.kinds == ("word",)


def test_a_scheme_gives_the_rest_to_its_class(echo: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agentrl.env, "_schemes", dict(agentrl.env._schemes))
    register_scheme("own", "tests.test_one_string:Named")
    env = make_env("own:http://host:80/a?size=2")
    assert (env.rest, env.size) == ("http://host:80/a", 2)


class Named(gymnasium.Env):
    def __init__(self, rest: str, size: int) -> None:
        self.rest, self.size = rest, size


@pytest.mark.usefixtures("offer")
def test_an_installed_package_offers_envs_by_entry_point():
    assert make_env("echo").reset(seed=0)[0] == "hi"
    assert make_env("echo:ho?size=2").word == "ho"
    assert make_env("echo?word=hm").word == "hm"


def test_a_name_that_two_packages_offer_is_refused_by_both_names(offer: Path):
    install(offer, "other-package")
    agentrl.env.third_party.cache_clear()
    with pytest.raises(EnvNotFound, match=r"(?s)echo-package.*other-package|other-package.*echo"):
        make_env("echo")


@pytest.mark.usefixtures("offer")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gmy:FrozenLake-v1", "Did you mean gym:"),
        ("echos:a", "Did you mean echo:"),
        ("nothing-like-it:a", "Schemes are gym, rg, ta, openenv, verifiers, mcp, echo"),
        ("ecoh", "Did you mean echo"),
        ("rg:no_such_set", "it has ab, "),
        ("ta:NoGame-v0", "textarena has no"),
    ],
)
def test_a_name_that_leads_nowhere_says_which_are_near(name: str, said: str):
    with pytest.raises(EnvNotFound) as caught:
        make_env(name)
    assert said in str(caught.value)


def test_a_library_that_is_not_installed_is_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
):
    library.cache_clear()  # where another test has loaded it
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(EnvNotFound, match=r"pip install -e '\.\[reasoning-gym\]'"):
        library("rg")


def test_an_env_that_refuses_its_kwargs_is_bad_input(echo: str, tmp_path: Path):
    strict = tmp_path / "strict.py"
    strict.write_text(
        textwrap.dedent(
            """
            class Strict:
                def __init__(self, *, size): ...
            """
        )
    )
    with pytest.raises(EnvNotFound, match="unexpected keyword argument 'sise'"):
        open_env(f"{strict}:Strict?sise=1", {})
