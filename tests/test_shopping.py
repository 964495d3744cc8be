"""Shopping: what was ordered in the end is what counts, whatever was said."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from agentrl.types import Action, Task
from envs.gold import calling
from envs.shop import Goal, new_shop
from envs.shopping import PAGE, Shopping
from tests.solving import last_result, play

ENV = Shopping()
TASKS = ENV.tasks("train")


def rewards(task: Task, actions: Sequence[Action]) -> dict[str, float]:
    return asyncio.run(play(Shopping(), task, actions))[0]


def said(task: Task, *actions: Action) -> str:
    """What the tool said last."""
    return last_result(asyncio.run(play(Shopping(), task, actions))[1])


def task_with(**wanted: object) -> Task:
    """The first one whose goal has these values."""
    return next(
        task
        for task in TASKS
        if all(getattr(task.info["goal"], key) == value for key, value in wanted.items())
    )


def test_every_gold_solution_earns_the_full_reward():
    for task in [*TASKS[:40], *ENV.tasks("test")[:40]]:
        assert rewards(task, ENV.gold(task)) == {"bought_right": 1.0, "bought_anything": 1.0}


def test_no_goal_of_the_test_split_is_trained_on():
    goals = {split: {str(t.info["goal"]) for t in ENV.tasks(split)} for split in ("train", "test")}
    assert (len(goals["train"]), len(goals["test"])) == (1000, 100)
    assert not goals["train"] & goals["test"]
    with pytest.raises(ValueError, match="no split 'dev'; there are train, test"):
        ENV.tasks("dev")


def test_each_goal_can_be_met_and_missed_by_a_product_of_the_same_words():
    for task in TASKS:
        shop, goal = new_shop(task.info["seed"]), task.info["goal"]
        alike = {id for id, product in shop.products.items() if product.has(goal.words)}
        assert goal.accepts(shop) < alike


def test_a_wrong_product_is_worth_nothing_and_stays_bought():
    for task in TASKS[:50]:
        goal: Goal = task.info["goal"]
        shop = new_shop(task.info["seed"])
        wrong = min(set(shop.products) - goal.accepts(shop))
        buying = calling("buy", product_id=wrong, quantity=1)
        assert rewards(task, [buying, Action("Done.")])["bought_right"] == 0.0
        assert rewards(task, [buying, *ENV.gold(task)])["bought_right"] == 0.0


def test_the_quantity_must_be_right():
    task = task_with(quantity=2)
    _, buying, done = ENV.gold(task)
    id = buying.tool_calls[0].arguments["product_id"]
    one = calling("buy", product_id=id, quantity=1)
    assert rewards(task, [one, done])["bought_right"] == 0.0
    assert rewards(task, [one, one, done])["bought_right"] == 1.0
    assert rewards(task, [buying, one, done])["bought_right"] == 0.0


def test_words_alone_buy_nothing():
    """F051."""
    for text in ("Done.", "", "I ordered it: Ordered 1 x abcd"):
        assert rewards(TASKS[0], [Action(text)]) == {"bought_right": 0.0, "bought_anything": 0.0}


def test_the_database_is_the_episodes_own():
    task = TASKS[0]

    async def main() -> list[dict[str, int]]:
        first, second = Shopping(), Shopping()
        for env in (first, second):
            await env.reset(seed=0, options={"task": task})
        await first.step(ENV.gold(task)[1])
        orders = [dict(first.shop.orders), dict(second.shop.orders)]
        await first.reset(seed=0, options={"task": task})
        return [*orders, first.shop.orders]

    first, second, again = asyncio.run(main())
    assert first and not second and not again


def test_a_long_list_comes_in_pages():
    everything = calling("search_products", query="")
    lines = said(TASKS[0], everything).splitlines()
    assert len(lines) == PAGE + 1
    assert lines[-1] == "(page 1 of 3)"
    pages = [said(TASKS[0], calling("search_products", query="", page=page)) for page in (1, 2, 3)]
    assert len({line for page in pages for line in page.splitlines()[:-1]}) == 24
    for page in (0, 4):
        beyond = said(TASKS[0], calling("search_products", query="", page=page))
        assert beyond == f"There is no page {page} of 3."


def test_what_cannot_be_bought_is_said():
    task = TASKS[0]
    id = next(iter(new_shop(task.info["seed"]).products))
    assert "there is no product 'zzzz'" in said(task, calling("buy", product_id="zzzz"))
    for quantity in (0, -1, 10):
        refused = said(task, calling("buy", product_id=id, quantity=quantity))
        assert "quantity must be 1 to" in refused
    assert "try fewer" in said(task, calling("search_products", query="purple elephant"))
