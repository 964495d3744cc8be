"""Families of file-system problems: the files, the question, how it must end, and a way there."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

WORDS = [
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "jetty",
    "knoll", "larch", "maple", "north",
]  # fmt: skip
FOLDERS = ["archive", "backup", "cache", "inbox", "media", "old", "parts", "shared"]
LEVELS = ("INFO", "INFO", "INFO", "DEBUG", "WARNING", "ERROR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Paths are relative to the work folder."""

    question: str
    files: Mapping[str, str]  # at the start, by path
    command: str  # solves it, or prints the answer
    answer: str | None = None  # to be said
    end: Mapping[str, str | None] = field(default_factory=dict)  # files at the end; None: no file


def make_problem(family: str, seed: str) -> Problem:
    """The problem of a family that a seed stands for, the same on every machine."""
    return FAMILIES[family](random.Random(f"{family} {seed}"))


def _largest(generator: random.Random) -> Problem:
    folder, sizes = generator.choice(FOLDERS), generator.sample(range(20, 1500), 8)
    files = {
        f"{path}.dat": "x" * size
        for path, size in zip(_paths(generator, folder, 8), sizes, strict=True)
    }
    largest = max(files, key=lambda path: len(files[path]))
    return Problem(
        question=f"Which file below {folder}/ is the largest? "
        "Answer with its name, without folders.",
        files=files,
        command=f"find {folder} -type f -printf '%s %f\\n' | sort -n | tail -n 1",
        answer=largest.rpartition("/")[2],
    )


def _count(generator: random.Random) -> Problem:
    word = generator.choice(WORDS)
    files = {f"{path}.log": _lines(generator, 20) for path in _paths(generator, "logs", 4)}
    matching = [line for text in files.values() for line in text.splitlines() if word in line]
    return Problem(
        question=f"How many lines of the .log files below logs/ contain the word {word}?",
        files=files,
        command=f"grep -rh {word} logs | wc -l",
        answer=str(len(matching)),
    )


def _most_frequent(generator: random.Random) -> Problem:
    visitors = [f"10.0.{generator.randint(0, 9)}.{n}" for n in generator.sample(range(1, 250), 5)]
    counts = generator.sample(range(2, 14), 5)
    rows = [who for who, count in zip(visitors, counts, strict=True) for _ in range(count)]
    generator.shuffle(rows)
    text = "".join(f"{who} GET /{generator.choice(WORDS)}.html 200\n" for who in rows)
    return Problem(
        question="Each line of access.log begins with an address. Which address is there most?",
        files={"access.log": text},
        command="cut -d' ' -f1 access.log | sort | uniq -c | sort -n | tail -n 1",
        answer=Counter(rows).most_common(1)[0][0],
    )


def _sum_column(generator: random.Random) -> Problem:
    goods = generator.sample(WORDS, 4)
    rows = [(generator.choice(goods), generator.randint(1, 90)) for _ in range(25)]
    wanted = generator.choice(rows)[0]
    text = "day,item,amount\n" + "".join(
        f"{day},{item},{amount}\n" for day, (item, amount) in enumerate(rows, start=1)
    )
    return Problem(
        question=f"What is the sum of the amounts of the item {wanted} in sales.csv?",
        files={"sales.csv": text},
        command=f"awk -F, '$2==\"{wanted}\" {{n+=$3}} END {{print n}}' sales.csv",
        answer=str(sum(amount for item, amount in rows if item == wanted)),
    )


def _same_content(generator: random.Random) -> Problem:
    folder = generator.choice(FOLDERS)
    files = {f"{path}.txt": _lines(generator, 3) for path in _paths(generator, folder, 6)}
    twin = generator.choice(list(files))
    return Problem(
        question=f"Which file below {folder}/ has the same content as original.txt? "
        "Answer with its name, without folders.",
        files=files | {"original.txt": files[twin]},
        command=f"for f in $(find {folder} -type f); "
        "do if cmp -s $f original.txt; then basename $f; fi; done",
        answer=twin.rpartition("/")[2],
    )


def _rename(generator: random.Random) -> Problem:
    old, new = generator.sample(["txt", "text", "md", "note"], 2)
    files = {f"{path}.{old}": _lines(generator, 2) for path in _paths(generator, "notes", 4)}
    others = {f"{path}.log": _lines(generator, 2) for path in _paths(generator, "notes", 2)}
    moved = {path.removesuffix(old) + new: text for path, text in files.items()}
    return Problem(
        question=f"Rename every .{old} file below notes/, at any depth, to end in .{new} instead.",
        files=files | others,
        command=f"for f in $(find notes -name '*.{old}'); do mv $f ${{f%{old}}}{new}; done",
        end=dict.fromkeys(files) | others | moved,
    )


def _fix_config(generator: random.Random) -> Problem:
    keys = generator.sample(WORDS, 6)
    values = {key: generator.randint(1, 99) for key in keys}
    key, value = generator.choice(keys), generator.randint(100, 999)
    text = "# settings\n" + "".join(f"{name} = {number}\n" for name, number in values.items())
    return Problem(
        question=f"In etc/app.conf, set {key} to {value}. Leave all else as it is.",
        files={"etc/app.conf": text},
        command=f"sed -i 's/^{key} = .*/{key} = {value}/' etc/app.conf",
        end={"etc/app.conf": text.replace(f"{key} = {values[key]}\n", f"{key} = {value}\n")},
    )


def _extract(generator: random.Random) -> Problem:
    level = generator.choice(["ERROR", "WARNING"])
    rows = [f"{n:03} {generator.choice(LEVELS)} {_words(generator, 3)}" for n in range(30)]
    rows.append(f"030 {level} {_words(generator, 3)}")
    wanted = [row for row in rows if row.split()[1] == level]
    name = f"{generator.choice(WORDS)}.log"
    return Problem(
        question=f"Write all {level} lines of {name}, in their order, to the file found.txt.",
        files={name: "\n".join(rows) + "\n"},
        command=f"grep ' {level} ' {name} > found.txt",
        end={"found.txt": "\n".join(wanted) + "\n"},
    )


def _delete_empty(generator: random.Random) -> Problem:
    folder = generator.choice(FOLDERS)
    paths = [f"{path}.tmp" for path in _paths(generator, folder, 8)]
    empty = dict.fromkeys(paths[:3], "")
    full = {path: _lines(generator, 1) for path in paths[3:]}
    return Problem(
        question=f"Delete the empty files below {folder}/, and no other.",
        files=empty | full,
        command=f"find {folder} -type f -empty -delete",
        end=dict.fromkeys(empty) | full,
    )


def _merge(generator: random.Random) -> Problem:
    files = {f"lists/{name}.txt": _lines(generator, 6, 1) for name in generator.sample(WORDS, 3)}
    words = sorted({line for text in files.values() for line in text.splitlines()})
    name = f"{generator.choice(['all', 'merged', 'words'])}.txt"
    return Problem(
        question="Merge the lines of the files in lists/, sorted and each line once, into the "
        f"file {name}.",
        files=files,
        command=f"cat lists/*.txt | sort -u > {name}",
        end={name: "\n".join(words) + "\n"},
    )


def _sort_by_kind(generator: random.Random) -> Problem:
    kinds = generator.sample(["csv", "txt", "log", "ini"], 2)
    names = generator.sample(WORDS, 6)
    files = {
        f"inbox/{name}.{kinds[place % 2]}": _lines(generator, 1) for place, name in enumerate(names)
    }
    moved = {f"{path[-3:]}/{path.removeprefix('inbox/')}": text for path, text in files.items()}
    return Problem(
        question=f"Move the files of inbox/: those that end in .{kinds[0]} into the new folder "
        f"{kinds[0]}/, those in .{kinds[1]} into {kinds[1]}/.",
        files=files,
        command="; ".join(f"mkdir {kind} && mv inbox/*.{kind} {kind}/" for kind in kinds),
        end=dict.fromkeys(files) | moved,
    )


def _replace_word(generator: random.Random) -> Problem:
    old, new = generator.sample(WORDS, 2)
    files = {f"{path}.txt": _lines(generator, 4) for path in _paths(generator, "text", 3)}
    first = next(iter(files))
    files[first] += f"{old} {old}\n"
    others = {"text/keep.log": f"{old} stays\n"}
    return Problem(
        question=f"Replace the word {old} by {new} everywhere in the .txt files below text/. "
        "Leave other files alone.",
        files=files | others,
        command=f"find text -name '*.txt' -exec sed -i 's/{old}/{new}/g' {{}} +",
        end={path: text.replace(old, new) for path, text in files.items()} | others,
    )


FAMILIES: Mapping[str, Callable[[random.Random], Problem]] = {
    "largest_file": _largest,
    "count_lines": _count,
    "most_frequent": _most_frequent,
    "sum_column": _sum_column,
    "same_content": _same_content,
    "rename": _rename,
    "fix_config": _fix_config,
    "extract_lines": _extract,
    "delete_empty": _delete_empty,
    "merge_lists": _merge,
    "sort_by_kind": _sort_by_kind,
    "replace_word": _replace_word,
}


def _paths(generator: random.Random, folder: str, count: int) -> list[str]:
    """Paths without endings at depths of one to three, whose last parts all differ."""
    paths = []
    for name in generator.sample(WORDS, count):
        parents = generator.choices(WORDS, k=generator.randint(0, 2))
        paths.append("/".join([folder, *(f"{parent}.d" for parent in parents), name]))
    return paths


def _words(generator: random.Random, count: int) -> str:
    return " ".join(generator.choices(WORDS, k=count))


def _lines(generator: random.Random, count: int, words: int = 4) -> str:
    return "".join(f"{_words(generator, words)}\n" for _ in range(count))
