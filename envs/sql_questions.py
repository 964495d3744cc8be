"""Questions on the music store, each with the SQL that answers it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

from envs.music_store import COUNTRIES, GENRES, music_store


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    text: str
    sql: str
    ordered: bool = False  # whether the question asks for an order


def questions() -> Iterator[Question]:
    """All questions whose answer has rows."""
    connection = sqlite3.connect(":memory:")
    connection.deserialize(music_store())
    try:
        for question in _all(connection):
            if connection.execute(question.sql).fetchone() not in (None, (None,)):
                yield question
    finally:
        connection.close()


def _all(store: sqlite3.Connection) -> Iterator[Question]:
    for genre in GENRES:
        yield from _of_genre(genre)
    for (artist,) in store.execute("SELECT name FROM artists ORDER BY id"):
        yield from _of_artist(artist)
    for country in COUNTRIES:
        yield from _of_country(country)
    for (customer,) in store.execute("SELECT name FROM customers ORDER BY id"):
        yield from _of_customer(customer)
    for (album,) in store.execute("SELECT title FROM albums ORDER BY id"):
        yield from _of_album(album)
    for year in range(1968, 2010):
        yield Question(
            text=f"Give title and artist name of each album of {year}.",
            sql="SELECT b.title, a.name FROM albums b JOIN artists a ON a.id = b.artist_id "
            f"WHERE b.year = {year}",
        )


def _of_genre(genre: str) -> Iterator[Question]:
    yield Question(
        text=f"How many {genre} tracks are there?",
        sql=f"SELECT COUNT(*) FROM tracks WHERE genre = '{genre}'",
    )
    yield Question(
        text=f"What is the average length of the {genre} tracks, in milliseconds?",
        sql=f"SELECT AVG(milliseconds) FROM tracks WHERE genre = '{genre}'",
    )
    for count in (3, 5, 10):
        yield Question(
            text=f"Give the titles of the {count} longest {genre} tracks, the longest first.",
            sql=f"SELECT title FROM tracks WHERE genre = '{genre}' "
            f"ORDER BY milliseconds DESC LIMIT {count}",
            ordered=True,
        )
    for year in range(2020, 2024):
        yield Question(
            text=f"What was the revenue of {genre} tracks in {year}, the sum of unit price times "
            "quantity?",
            sql="SELECT SUM(l.unit_price * l.quantity) FROM invoice_lines l "
            "JOIN tracks t ON t.id = l.track_id JOIN invoices i ON i.id = l.invoice_id "
            f"WHERE t.genre = '{genre}' AND i.date LIKE '{year}-%'",
        )


def _of_artist(artist: str) -> Iterator[Question]:
    yield Question(
        text=f"Give title and year of the albums of {artist}, the oldest first, those of one year "
        "by title.",
        sql="SELECT b.title, b.year FROM albums b JOIN artists a ON a.id = b.artist_id "
        f"WHERE a.name = '{artist}' ORDER BY b.year, b.title",
        ordered=True,
    )
    yield Question(
        text=f"What is the title of the longest track of {artist}?",
        sql="SELECT t.title FROM tracks t JOIN albums b ON b.id = t.album_id "
        f"JOIN artists a ON a.id = b.artist_id WHERE a.name = '{artist}' "
        "ORDER BY t.milliseconds DESC LIMIT 1",
    )
    yield Question(
        text=f"Which genres are on albums of {artist}? Give each once.",
        sql="SELECT DISTINCT t.genre FROM tracks t JOIN albums b ON b.id = t.album_id "
        f"JOIN artists a ON a.id = b.artist_id WHERE a.name = '{artist}'",
    )
    yield Question(
        text=f"How many different customers have bought a track of {artist}?",
        sql="SELECT COUNT(DISTINCT i.customer_id) FROM invoices i "
        "JOIN invoice_lines l ON l.invoice_id = i.id JOIN tracks t ON t.id = l.track_id "
        "JOIN albums b ON b.id = t.album_id JOIN artists a ON a.id = b.artist_id "
        f"WHERE a.name = '{artist}'",
    )


def _of_country(country: str) -> Iterator[Question]:
    yield Question(
        text=f"Give name and city of the customers from {country}.",
        sql=f"SELECT name, city FROM customers WHERE country = '{country}'",
    )
    yield Question(
        text=f"Give name and number of invoices of each customer from {country} who has one, the "
        "highest number first, equal ones by name.",
        sql="SELECT c.name, COUNT(*) FROM customers c JOIN invoices i ON i.customer_id = c.id "
        f"WHERE c.country = '{country}' GROUP BY c.id ORDER BY COUNT(*) DESC, c.name",
        ordered=True,
    )
    yield Question(
        text=f"Which customers from {country} have no invoice? Give their names.",
        sql=f"SELECT name FROM customers WHERE country = '{country}' "
        "AND id NOT IN (SELECT customer_id FROM invoices)",
    )
    for count in (2, 3):
        yield Question(
            text=f"Which artists from {country} have at least {count} albums? Give name and number "
            "of albums.",
            sql="SELECT a.name, COUNT(*) FROM artists a JOIN albums b ON b.artist_id = a.id "
            f"WHERE a.country = '{country}' GROUP BY a.id HAVING COUNT(*) >= {count}",
        )


def _of_customer(customer: str) -> Iterator[Question]:
    yield Question(
        text=f"What are the dates of the invoices of {customer}? Give one row for each invoice.",
        sql="SELECT i.date FROM invoices i JOIN customers c ON c.id = i.customer_id "
        f"WHERE c.name = '{customer}'",
    )
    yield Question(
        text=f"How much has {customer} spent in all, as the sum of unit price times quantity?",
        sql="SELECT SUM(l.unit_price * l.quantity) FROM invoice_lines l "
        "JOIN invoices i ON i.id = l.invoice_id JOIN customers c ON c.id = i.customer_id "
        f"WHERE c.name = '{customer}'",
    )


def _of_album(album: str) -> Iterator[Question]:
    yield Question(
        text=f"Give title and price of the tracks on the album {album}.",
        sql="SELECT t.title, t.price FROM tracks t JOIN albums b ON b.id = t.album_id "
        f"WHERE b.title = '{album}'",
    )
    yield Question(
        text=f"Which tracks of the album {album} were never sold? Give their titles.",
        sql="SELECT t.title FROM tracks t JOIN albums b ON b.id = t.album_id "
        f"WHERE b.title = '{album}' AND t.id NOT IN (SELECT track_id FROM invoice_lines)",
    )
