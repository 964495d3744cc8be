"""A small shop as a database in memory, and what may be bought in it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

NUM_PRODUCTS = 24

_NOUNS = [
    "scarf", "lamp", "backpack", "mug", "kettle", "jacket", "notebook", "chair", "umbrella",
    "wallet", "blanket", "clock",
]  # fmt: skip
_COLORS = ["red", "blue", "green", "black", "white", "yellow"]
_MATERIALS = ["cotton", "steel", "leather", "wooden", "bamboo", "plastic"]  # none ends in s


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One article. Money is in cents."""

    id: str
    name: str  # such as "red cotton scarf"
    price: int
    rating: float  # 1.0 to 5.0

    def has(self, words: Sequence[str]) -> bool:
        return set(words) <= set(self.name.split())


@dataclass(slots=True, kw_only=True)
class Shop:
    """The database of one episode."""

    products: dict[str, Product]
    stock: dict[str, int]
    orders: dict[str, int] = field(default_factory=dict)  # quantities by product


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What to buy. Money is in cents; None: as it may be."""

    words: tuple[str, ...]
    quantity: int
    budget: int | None  # for all together
    min_rating: float | None
    cheapest: bool  # of those that the rest allows

    def __str__(self) -> str:
        thing = f"{' '.join(self.words)}{'s' if self.quantity > 1 else ''}"
        text = f"Buy {self.quantity} {thing}"
        if self.quantity > 1:
            text += " of the same kind"
        if self.min_rating is not None:
            text += f", rated {self.min_rating:.1f} or better"
        if self.budget is not None:
            text += f", for at most {money(self.budget)} in all"
        return text + ("; take the cheapest that fits." if self.cheapest else ".")

    def accepts(self, shop: Shop) -> set[str]:
        """The ids of the products that fit."""
        fit = {
            id: product.price
            for id, product in shop.products.items()
            if product.has(self.words)
            and shop.stock[id] >= self.quantity
            and (self.min_rating is None or product.rating >= self.min_rating)
            and (self.budget is None or product.price * self.quantity <= self.budget)
        }
        if self.cheapest and fit:
            return {id for id, price in fit.items() if price == min(fit.values())}
        return set(fit)


def new_shop(seed: str) -> Shop:
    """The shop that `seed` stands for, with no order yet."""
    return _shop(random.Random(seed))


def _shop(generator: random.Random) -> Shop:
    shop = Shop(products={}, stock={})
    nouns = generator.sample(_NOUNS, 3)
    colors, materials = generator.sample(_COLORS, 3), generator.sample(_MATERIALS, 3)
    while len(shop.products) < NUM_PRODUCTS:
        id = "".join(generator.choices("abcdefghjkmnpqrstuvwxyz23456789", k=4))
        looks = (generator.choice(colors), generator.choice(materials), generator.choice(nouns))
        shop.products[id] = Product(
            id=id,
            name=" ".join(looks),
            price=generator.randrange(500, 9000, 50),
            rating=generator.randint(20, 50) / 10,
        )
        shop.stock[id] = generator.randint(1, 9)
    return shop


def goals() -> Iterator[tuple[Goal, str]]:
    """Goals without end that some product meets and at least two of the same words do not."""
    index = 0
    while True:
        index += 1
        seed = f"shop {index}"
        generator = random.Random(seed)
        shop = _shop(generator)
        product = generator.choice(list(shop.products.values()))
        color, material, noun = product.name.split()
        quantity = generator.randint(1, min(3, shop.stock[product.id]))
        goal = Goal(
            words=generator.choice([(noun,), (color, noun), (material, noun)]),
            quantity=quantity,
            min_rating=product.rating if generator.random() < 0.5 else None,
            budget=product.price * quantity + 100 if generator.random() < 0.6 else None,
            cheapest=generator.random() < 0.4,
        )
        alike = [other for other in shop.products.values() if other.has(goal.words)]
        if 0 < len(goal.accepts(shop)) <= len(alike) - 2:
            yield goal, seed


def money(cents: int) -> str:
    """Such as "$12.50"."""
    return f"${cents / 100:.2f}"
