"""The arithmetic env: right answers, disjoint splits, no reward without the answer."""

from __future__ import annotations

import asyncio
import re

import pytest

from agentrl.trajectory import Trajectory
from agentrl.types import Action, Message, ToolCall
from envs.arithmetic import Arithmetic, ArithmeticPython, _key
from envs.word_problems import TEMPLATES
from tools.calculator import calc, evaluate

EVERYTHING = Arithmetic(kinds=("product", "expression", "word"), max_operations=3)


def question(task) -> str:
    return task.prompt[0].content


def test_tasks_are_the_same_each_time_and_kinds_take_turns():
    tasks = Arithmetic().tasks("train")
    assert [task.info["kind"] for task in tasks[:4]] == ["product", "word", "product", "word"]
    assert len(tasks) == 4000
    assert len({task.id for task in tasks}) == 4000
    assert tasks[0].id == "train-0-product"
    assert list(tasks) == list(Arithmetic(kinds=["product", "word"]).tasks("train"))


def test_no_test_problem_is_trained_on():
    train = {question(task) for task in EVERYTHING.tasks("train")}
    test = {question(task) for task in EVERYTHING.tasks("test")}
    assert len(EVERYTHING.tasks("test")) == 600
    assert not train & test

    def numbers(split: str) -> set[str]:
        return {_key(question(t)) for t in Arithmetic(kinds=["product"]).tasks(split)}

    assert len(numbers("train")) == 2000  # 23 * 47 and 47 * 23 count as one
    assert not numbers("train") & numbers("test")


def test_answers_of_products_and_expressions_are_right():
    for task in EVERYTHING.tasks("test"):
        if task.info["kind"] != "word":
            expression = question(task).removeprefix("What is ").removesuffix("?")
            assert int(task.answer) == eval(expression)


def test_word_problems_are_short_and_work_out():
    for task in EVERYTHING.tasks("train"):
        if task.info["kind"] == "word":
            assert len(question(task).split()) <= 35
            assert int(task.answer) > 0
            assert "{" not in question(task)


def test_a_kind_written_twice_comes_twice_as_often():
    tasks = Arithmetic(kinds=["product", "word", "word"]).tasks("test")
    assert [task.info["kind"] for task in tasks[:6]] == ["product", "word", "word"] * 2
    assert len(tasks) == len({task.prompt[0].content for task in tasks}) == 400


def test_templates_have_the_number_of_operations_they_claim():
    for size, templates in TEMPLATES.items():
        for text, expression in templates:
            assert len(re.findall(r"[-+*/]", expression)) == size
            assert set(re.findall(r"\{[abcmn]\}", text)) == set(
                re.findall(r"\{[abcmn]\}", expression)
            )


def test_demonstrations_show_what_the_calculator_says_for_each_kind_asked_for():
    shown = [len(Arithmetic(kinds=[kind]).demonstrations) for kind in EVERYTHING.kinds]
    assert min(shown) >= 1 and len(EVERYTHING.demonstrations) == sum(shown)
    for demonstration in EVERYTHING.demonstrations:
        _, calling, result, answer = demonstration
        arguments = calling.tool_calls[0].arguments
        assert asyncio.run(calc(arguments)).content == result.content
        assert answer.content == f"The answer is {evaluate(arguments['expression'])}."


def test_with_python_the_problems_are_the_same_and_the_demonstrations_call_python():
    kinds = ("product", "expression", "word")
    env = ArithmeticPython(kinds=kinds, max_operations=2)
    assert env.tasks("test") == Arithmetic(kinds=kinds, max_operations=2).tasks("test")
    assert [tool.name for tool in env.tools] == ["python"] and len(env.demonstrations) == 5
    for _, calling, result, _ in env.demonstrations:
        [call] = calling.tool_calls
        assert call.name == "python" and str(eval(call.arguments["code"])) == result.content


def scores(env: Arithmetic, *actions: Action) -> dict[str, float]:
    """The rewards of an episode in which the policy acts so."""

    async def main() -> dict[str, float]:
        task = env.tasks("test")[1]
        tape = Trajectory(id="e")
        observation, _ = await env.reset(seed=0, options={"task": task})
        tape.messages.extend(observation)
        for action in actions:
            tape.messages.append(action.to_message())
            answers, *_ = await env.step(action)
            tape.messages.extend(answers)
        assert Arithmetic.rubric is not None
        return await Arithmetic.rubric.score(task=task, trajectory=tape, env=env)

    return asyncio.run(main())


def calling(text: str = "") -> Action:
    call = ToolCall(id="c0", name="calc", arguments={"expression": "1+1"})
    return Action(f"{text}<calc>1+1</calc>", content=text, attempts=(call,))


def test_the_right_last_number_is_rewarded_with_its_kind():
    env = Arithmetic()
    gold = env.tasks("test")[1].answer
    rewards = scores(env, calling(), Action(f"1 and then 2. The answer is {gold}."))
    assert rewards == {"correct": 1.0, "correct/word": 1.0, "called_tool": 1.0}
    assert Arithmetic.rubric is not None
    assert Arithmetic.rubric.total(rewards) == 1.0


def test_wrong_empty_and_unfinished_answers_are_worth_nothing():
    """F051: nor is a number beside a call that nothing followed, or one of the demonstrations."""
    env = Arithmetic()
    gold = env.tasks("test")[1].answer
    wrong = {"correct": 0.0, "correct/word": 0.0}
    assert scores(env, Action("The answer is 1.5.")) == wrong | {"called_tool": 0.0}
    assert scores(env, Action("")) == wrong | {"called_tool": 0.0}
    assert scores(env) == wrong | {"called_tool": 0.0}
    assert scores(env, calling(f"The answer is {gold}.")) == wrong | {"called_tool": 1.0}


def test_bad_arguments_of_the_env_are_named():
    with pytest.raises(ValueError, match="product, expression, word"):
        Arithmetic(kinds=("sum",))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1, 2 or 3, not 4"):
        Arithmetic(max_operations=4)
    with pytest.raises(ValueError, match="no split 'validation'; there are train, test"):
        Arithmetic().tasks("validation")


def test_the_prompt_of_the_default_env_is_short():
    observation, _ = asyncio.run(Arithmetic().reset(seed=0))
    assert sum(len(message.content) for message in observation) < 600
    assert isinstance(observation[0], Message)
