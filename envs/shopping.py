"""Shopping: find the right product of a small shop and buy it; what was ordered is what counts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from agentrl.rubric import Rubric
from agentrl.threads import inline
from agentrl.tool import tool
from agentrl.types import Action, Message, Task
from envs.gold import calling
from envs.rows import in_split, require_split
from envs.shop import Goal, Shop, goals, money, new_shop
from envs.tool_env import ToolEnv, demonstration

NUM_TASKS = {"train": 1000, "test": 100}
PAGE = 8  # products in one answer of search_products


@inline
def bought_right(env: Any) -> bool:
    """Whether one fitting product was ordered, in the quantity wanted, and nothing else."""
    shop: Shop = env.unwrapped.shop
    goal: Goal = env.unwrapped.task.info["goal"]
    # Before any order, which took from the stock.
    fitting = goal.accepts(new_shop(env.unwrapped.task.info["seed"]))
    return shop.orders in ({id: goal.quantity} for id in fitting)


@inline
def bought_anything(env: Any) -> bool:
    return bool(env.unwrapped.shop.orders)


class Shopping(ToolEnv):
    """The reward is 1 where the orders at the end are what the goal asks for, else 0.

    What the policy says does not count. An order cannot be taken back, so that a wrong one is
    final. The shop is made anew for each episode.
    """

    system_prompt = (
        "You shop for a customer with the tools search_products and buy. An order is final. "
        "Buy exactly what is asked for, then say: Done."
    )
    demonstrations = (
        demonstration(
            "Buy 2 blue vases of the same kind, for at most $30.00 in all.",
            [
                (
                    "search_products",
                    {"query": "blue vase"},
                    "k4h2: blue bamboo vase, $19.50, rated 4.1, 6 in stock\n"
                    "q7w9: blue plastic vase, $12.00, rated 3.6, 4 in stock",
                ),
                (
                    "buy",
                    {"product_id": "q7w9", "quantity": 2},
                    "Ordered 2 x q7w9 (blue plastic vase) for $24.00.",
                ),
            ],
            "Done.",
        ),
    )
    rubric = Rubric([bought_right, bought_anything], weights=[1.0, 0.0])

    def __init__(self, **limits: Any) -> None:
        """
        Args:
            limits: As `ToolEnv` takes them.
        """
        super().__init__(**limits)
        self.tools = (
            tool(inline=True)(self.search_products),
            tool(inline=True)(self.buy),
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """1,000 training or 100 test goals, each over a shop of its own."""
        require_split(split)
        return _tasks(split)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        observation, info = await super().reset(seed=seed, options=options)
        self.shop = new_shop(self.task.info["seed"])
        return observation, info

    def search_products(self, query: str, page: int = 1) -> str:
        """List the products that have all words of the query in their name.

        Args:
            query: Such as scarf, or red scarf.
            page: Of a long list.
        """
        words = [word.removesuffix("s") for word in query.lower().split()]
        found = [product for product in self.shop.products.values() if product.has(words)]
        if not found:
            return "No product has all these words; try fewer."
        shown = found[PAGE * (page - 1) : PAGE * page] if page > 0 else []
        lines = [
            f"{product.id}: {product.name}, {money(product.price)}, rated {product.rating:.1f}, "
            f"{self.shop.stock[product.id]} in stock"
            for product in shown
        ]
        pages = -(-len(found) // PAGE)
        if not shown:
            return f"There is no page {page} of {pages}."
        return "\n".join(lines + [f"(page {page} of {pages})"] * (pages > 1))

    def buy(self, product_id: str, quantity: int = 1) -> str:
        """Order a product. This is final.

        Args:
            product_id: As search_products gives it.
            quantity: How many.
        """
        product = self.shop.products.get(product_id.strip())
        if product is None:
            raise ValueError(f"there is no product {product_id!r}; search for it first")
        if not 1 <= quantity <= self.shop.stock[product.id]:
            raise ValueError(f"quantity must be 1 to {self.shop.stock[product.id]}, the stock")
        self.shop.stock[product.id] -= quantity
        self.shop.orders[product.id] = self.shop.orders.get(product.id, 0) + quantity
        total = money(product.price * quantity)
        return f"Ordered {quantity} x {product.id} ({product.name}) for {total}."

    def gold(self, task: Task) -> list[Action]:
        """Turns that earn the full reward."""
        goal: Goal = task.info["goal"]
        id = min(goal.accepts(new_shop(task.info["seed"])))
        return [
            calling("search_products", query=" ".join(goal.words)),
            calling("buy", product_id=id, quantity=goal.quantity),
            Action("Done."),
        ]


@cache
def _tasks(split: str) -> tuple[Task, ...]:
    tasks: dict[str, Task] = {}
    for goal, seed in goals():
        text = str(goal)
        if text not in tasks and in_split(text, split):
            tasks[text] = Task(
                id=f"shopping-{split}-{len(tasks)}",
                prompt=(Message(role="user", content=text),),
                info={"goal": goal, "seed": seed},
            )
        if len(tasks) == NUM_TASKS[split]:
            break
    return tuple(tasks.values())
