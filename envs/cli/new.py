"""`new`: a working env and its test, to begin from."""

from __future__ import annotations

import keyword
import sys
from importlib.util import find_spec
from pathlib import Path

from agentrl.env import EnvNotFound

ENV = '''"""{Name}: count the letters of a word with a tool."""

from agentrl import Action, Message, Rubric, Task, tool
from envs.tool_env import ToolEnv

WORDS = {{"train": ["banana", "coconut", "papaya", "avocado"], "test": ["guava", "mango"]}}


@tool(inline=True)
def count(word: str, letter: str) -> int:
    """Say how often a letter stands in a word."""
    return word.count(letter)


def correct(completion: str, answer: str) -> float:
    """1 where the reply ends with the answer."""
    return float(completion.rstrip(". \\n").split(" ")[-1] == answer)


class {Name}(ToolEnv):
    system_prompt = "Use the tool count. End your reply with the number."
    tools = (count,)
    rubric = Rubric([correct])

    def tasks(self, split):
        return [self.task_of(word) for word in WORDS[split]]

    def task_of(self, word):
        question = Message(role="user", content=f"How often does a stand in {{word}}?")
        return Task(id=word, prompt=(question,), answer=str(word.count("a")))

    def gold(self, task):
        """Turns that solve the task, for `python -m envs check`."""
        return [Action(f"It is {{task.answer}}.")]
'''

TEST = '''"""What {Name} owes; run it with: python -m pytest test_{name}.py"""

import asyncio
from pathlib import Path

from agentrl import Action, Blocking, Message, ToolCall, Trajectory, make_env

env = make_env(f"{{Path(__file__).with_name('{name}.py')}}:{Name}")
task = env.tasks("train")[0]


def test_the_tool_answers_and_the_episode_goes_on():
    blocking = Blocking(env)
    observation, _ = blocking.reset(seed=0, options={{"task": task}})
    assert "banana" in observation[-1].content
    call = ToolCall(id="0", name="count", arguments={{"word": "banana", "letter": "a"}})
    answers, _, terminated, _, _ = blocking.step(Action("", attempts=(call,)))
    assert answers[0].content == "3"
    assert not terminated


def reward(reply):
    tape = Trajectory()
    tape.messages.append(Message(role="assistant", content=reply))
    return asyncio.run(env.rubric.score(task=task, trajectory=tape, env=env))["correct"]


def test_the_right_answer_alone_is_rewarded():
    assert reward("It is 3.") == 1.0
    assert reward("It is 13.") == 0.0
    assert reward("") == 0.0
'''


def write_env(name: str) -> None:
    """Write `name`.py and test_`name`.py into the present folder.

    Raises:
        EnvNotFound: not a name for a module, one that is taken, or files that are there already.
    """
    files = Path(f"{name}.py"), Path(f"test_{name}.py")
    if not (name.isidentifier() and name.islower()) or keyword.iskeyword(name):
        raise EnvNotFound(f"{name!r} is no name for an env: write it like my_env")
    for file in files:
        if file.exists():
            raise EnvNotFound(f"there is a {file} already; choose another name")
    if name in sys.stdlib_module_names or find_spec(name) is not None:
        raise EnvNotFound(f"there is a module {name} already; choose another name")
    class_name = name.title().replace("_", "")
    for file, text in zip(files, (ENV, TEST), strict=True):
        file.write_text(text.format(name=name, Name=class_name), encoding="utf-8")
    print(
        f"wrote {files[0]} and {files[1]}; try them:\n"
        f"  python -m pytest {files[1]}\n"
        f"  python -m envs check {files[0]}:{class_name}\n"
        f"  python -m envs play {files[0]}:{class_name}"
    )
