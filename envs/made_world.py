"""A small made world of people, cities and books: documents about it, and questions on them.

Its names are made too, so that no model knows the answers without reading.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

NUM_CITIES, NUM_PEOPLE, NUM_BOOKS, NUM_PLACES = 60, 150, 200, 8

_STARTS = [
    "Bar", "Cal", "Dor", "El", "Fen", "Gal", "Hol", "Is", "Jar", "Kel", "Lor", "Mar", "Nor",
    "Os", "Pel", "Quin", "Ros", "Sel", "Tor", "Ul", "Ver",
]  # fmt: skip
_MIDDLES = ["a", "e", "i", "o", "an", "el", "in", "or", "ar", "en"]
_CITY_ENDS = ["burg", "ton", "mouth", "stead", "wick", "haven", "dale", "ford"]
_RIVER_ENDS = ["wen", "dra", "sse", "lle", "nne", "gra"]
_NAME_ENDS = ["ric", "mund", "linda", "vin", "bert", "tha", "sia", "don", "mira", "las"]
_FAMILY_ENDS = ["sen", "berg", "well", "mann", "ster", "croft", "ley", "quist"]
_COUNTRIES = ["Avaria", "Belmora", "Corvia", "Drevania", "Estora", "Falland", "Grenia"]
_TRADES = ["novelist", "poet", "physician", "botanist", "sailor", "teacher", "builder", "painter"]
_FOODS = ("honey cakes", "smoked eels", "plum wine", "glass beads", "clocks", "woollen rugs")
_ADJECTIVES = [
    "Silent", "Broken", "Golden", "Distant", "Hidden", "Burning", "Frozen", "Crooked", "Last",
    "Second",
]  # fmt: skip
_THINGS = [
    "Lantern", "Orchard", "Bridge", "Harbour", "Compass", "Winter", "Garden", "Letter",
    "Mirror", "Staircase",
]  # fmt: skip
_GENRES = ["novel", "play", "book of poems", "travel book"]
_ASIDES = [
    "Much has been written about this, and little of it agrees.",
    "The older accounts were lost in a fire, and later ones copy each other.",
    "Visitors who come in spring speak of long evenings and of good bread.",
    "A society that meets twice a year keeps the letters and the papers.",
    "Schoolbooks of the time give the matter no more than one short page.",
    "A plaque near the old market recalls it, though few people stop to read.",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class City:
    name: str
    country: str
    river: str
    founded: int
    known_for: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    name: str
    trade: str
    birthplace: City
    born: int
    teacher: str  # another person's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    title: str
    genre: str
    author: Person
    year: int
    setting: City


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    cities: tuple[City, ...]
    people: tuple[Person, ...]
    books: tuple[Book, ...]


def make_world(seed: int) -> World:
    """The same world for the same seed, on every machine."""
    generator = random.Random(f"world {seed}")
    names = _names(generator, _CITY_ENDS, NUM_CITIES + NUM_PLACES)
    names, places = names[:NUM_CITIES], names[NUM_CITIES:]  # books are named after the latter
    rivers = _names(generator, _RIVER_ENDS, NUM_CITIES)
    cities = tuple(
        City(
            name=name,
            country=generator.choice(_COUNTRIES),
            river=river,
            founded=generator.randint(900, 1600),
            known_for=generator.choice(_FOODS),
        )
        for name, river in zip(names, rivers, strict=True)
    )
    first_names = _names(generator, _NAME_ENDS, NUM_PEOPLE)
    family_names = _names(generator, _FAMILY_ENDS, NUM_PEOPLE)
    full_names = [f"{a} {b}" for a, b in zip(first_names, family_names, strict=True)]
    people = tuple(
        Person(
            name=name,
            trade=generator.choice(_TRADES),
            birthplace=generator.choice(cities),
            born=generator.randint(1700, 1900),
            teacher=generator.choice([other for other in full_names if other != name]),
        )
        for name in full_names
    )
    titles = [
        f"The {adjective} {thing} of {place}"
        for adjective in _ADJECTIVES
        for thing in _THINGS
        for place in places
    ]
    books = []
    for title in generator.sample(titles, NUM_BOOKS):
        author = generator.choice(people)
        books.append(
            Book(
                title=title,
                genre=generator.choice(_GENRES),
                author=author,
                year=author.born + generator.randint(22, 60),
                setting=generator.choice(cities),
            )
        )
    return World(cities=cities, people=people, books=tuple(books))


def documents(world: World) -> Iterator[dict[str, str]]:
    """One {"id", "title", "text"} for each city, person and book."""
    for index, city in enumerate(world.cities):
        yield _document(
            f"city-{index}",
            city.name,
            f"{city.name} is a city in {city.country}, known for its {city.known_for}.",
            f"It lies on the river {city.river} and was founded in {city.founded}.",
        )
    for index, person in enumerate(world.people):
        yield _document(
            f"person-{index}",
            person.name,
            f"{person.name} was a {person.trade}, born in {person.born}.",
            f"The birthplace was {person.birthplace.name}, the first teacher {person.teacher}.",
        )
    for index, book in enumerate(world.books):
        yield _document(
            f"book-{index}",
            book.title,
            f"{book.title} is a {book.genre} by {book.author.name}.",
            f"It was published in {book.year} and is set in the city of {book.setting.name}.",
        )


def _document(id: str, title: str, first: str, last: str) -> dict[str, str]:
    """Long enough that a search shows its first sentence and not its last."""
    asides = random.Random(id).sample(_ASIDES, 4)
    return {"id": id, "title": title, "text": " ".join([first, *asides, last])}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`path` holds the titles of the documents to be read one after another."""

    text: str
    answer: str
    path: tuple[str, ...]


def questions(world: World) -> Iterator[Question]:
    """All questions of one document, and of two."""
    for city in world.cities:
        name = city.name
        yield _ask(f"Which river does {name} lie on?", city.river, name)
        yield _ask(f"In which country is {name}?", city.country, name)
        yield _ask(f"In which year was {name} founded?", city.founded, name)
    for person in world.people:
        name, home = person.name, person.birthplace
        yield _ask(f"In which city was {name} born?", home.name, name)
        yield _ask(f"Who was the first teacher of {name}?", person.teacher, name)
        yield _ask(f"In which country was {name} born?", home.country, name, home.name)
        yield _ask(
            f"Which river runs through the birthplace of {name}?", home.river, name, home.name
        )
    for book in world.books:
        title, author, setting = book.title, book.author, book.setting
        yield _ask(f"Who wrote {title}?", author.name, title)
        yield _ask(f"In which year was {title} published?", book.year, title)
        yield _ask(
            f"In which city was the author of {title} born?",
            author.birthplace.name,
            title,
            author.name,
        )
        yield _ask(
            f"Who was the first teacher of the author of {title}?",
            author.teacher,
            title,
            author.name,
        )
        yield _ask(f"In which country is {title} set?", setting.country, title, setting.name)


def _ask(text: str, answer: object, *path: str) -> Question:
    return Question(text=text, answer=str(answer), path=path)


def _names(generator: random.Random, ends: list[str], count: int) -> list[str]:
    names = [start + middle + end for start in _STARTS for middle in _MIDDLES for end in ends]
    return generator.sample(names, count)
