"""The sample database of text-to-SQL: a music store of made rows, the same on every machine."""

from __future__ import annotations

import hashlib
import os
import random
import sqlite3
from collections.abc import Sequence
from functools import cache
from pathlib import Path

SCHEMA = """\
CREATE TABLE artists (id INTEGER PRIMARY KEY, name TEXT, country TEXT);
CREATE TABLE albums (id INTEGER PRIMARY KEY, artist_id INTEGER REFERENCES artists(id),
  title TEXT, year INTEGER);
CREATE TABLE tracks (id INTEGER PRIMARY KEY, album_id INTEGER REFERENCES albums(id),
  title TEXT, genre TEXT, milliseconds INTEGER, price REAL);
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT, country TEXT);
CREATE TABLE invoices (id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers(id),
  date TEXT);
CREATE TABLE invoice_lines (id INTEGER PRIMARY KEY, invoice_id INTEGER REFERENCES invoices(id),
  track_id INTEGER REFERENCES tracks(id), quantity INTEGER, unit_price REAL);
"""

GENRES = ("Rock", "Jazz", "Blues", "Folk", "Metal", "Soul", "Reggae", "Classical", "Pop", "Latin")
COUNTRIES = ("Brazil", "Canada", "France", "Germany", "India", "Japan", "Norway", "Portugal", "USA")

_COLORS = [
    "Velvet", "Silver", "Crimson", "Midnight", "Golden", "Electric", "Paper", "Hollow", "Wild",
    "Quiet",
]  # fmt: skip
_ANIMALS = [
    "Foxes", "Ravens", "Tigers", "Wolves", "Herons", "Sparrows", "Otters", "Lions", "Moths",
    "Pilots",
]  # fmt: skip
_NOUNS = [
    "River", "Window", "Summer", "Train", "Shadow", "Engine", "Garden", "Mirror", "Signal",
    "Fire", "Island", "Letter",
]  # fmt: skip
_MOODS = [
    "Slow", "Broken", "Bright", "Lost", "Distant", "Second", "Empty", "Rising", "Burning",
    "Last", "Cold", "Little",
]  # fmt: skip
_FIRST = [
    "Ana", "Bram", "Chloe", "Dev", "Emi", "Finn", "Greta", "Hugo", "Ines", "Jonas", "Kaya",
    "Liam", "Mira", "Noor", "Otto",
]  # fmt: skip
_FAMILY = [
    "Almeida", "Berg", "Costa", "Dubois", "Endo", "Fischer", "Gupta", "Hansen", "Ito", "Keller",
    "Lopes", "Moreau",
]  # fmt: skip
_CITIES = {country: (f"North {country}", f"{country} City") for country in COUNTRIES}


@cache
def music_store() -> bytes:
    """The database as the bytes of an SQLite file, about 100 KiB."""
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA)
    _fill(connection, random.Random("music store"))
    connection.commit()
    content = connection.serialize()
    connection.close()
    return content


@cache
def music_store_file() -> Path:
    """The database as a file in the user's cache folder, written where it is not there yet."""
    content = music_store()
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    file = Path(cache_home) / "agentrl" / f"music-store-{digest}.sqlite"
    if not file.is_file() or file.read_bytes() != content:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(content)
        part.replace(file)  # at once, for other processes do the same
    return file


def _fill(connection: sqlite3.Connection, generator: random.Random) -> None:
    def insert(table: str, rows: Sequence[tuple[object, ...]]) -> None:
        places = ",".join("?" * len(rows[0]))
        connection.executemany(f"INSERT INTO {table} VALUES ({places})", rows)

    names = [f"The {color} {animal}" for color in _COLORS for animal in _ANIMALS]
    artists = [
        (id, name, generator.choice(COUNTRIES))
        for id, name in enumerate(generator.sample(names, 40), start=1)
    ]
    titles = [f"{mood} {noun}" for mood in _MOODS for noun in _NOUNS]
    albums = [
        (id, generator.randint(1, len(artists)), title, generator.randint(1968, 2009))
        for id, title in enumerate(generator.sample(titles, 90), start=1)
    ]
    tracks, lengths = [], generator.sample(range(90_000, 600_000), 1000)
    for album in albums:
        genre = generator.choice(GENRES)
        for title in generator.sample(titles, generator.randint(4, 10)):
            price = generator.choice((0.79, 0.99, 1.29))
            tracks.append((len(tracks) + 1, album[0], title, genre, lengths.pop(), price))
    people = [f"{first} {family}" for first in _FIRST for family in _FAMILY]
    customers = []
    for id, name in enumerate(generator.sample(people, 70), start=1):
        country = generator.choice(COUNTRIES)
        customers.append((id, name, generator.choice(_CITIES[country]), country))
    invoices, lines = [], []
    for id in range(1, 251):
        date = f"{generator.randint(2020, 2023)}-{generator.randint(1, 12):02}"
        date = f"{date}-{generator.randint(1, 28):02}"
        invoices.append((id, generator.randint(1, 60), date))  # the last ten buy nothing
        for track in generator.sample(tracks, generator.randint(1, 5)):
            lines.append((len(lines) + 1, id, track[0], generator.randint(1, 3), track[5]))
    insert("artists", artists)
    insert("albums", albums)
    insert("tracks", tracks)
    insert("customers", customers)
    insert("invoices", invoices)
    insert("invoice_lines", lines)
