"""One read-only SQLite query in a process of its own: a request on stdin, rows on stdout, as JSON.

It is the policy's SQL that runs here, so the process is small, bounded, and nobody's loss: SQLite's
own limits and authorizer say what a query may do, rlimits hold where those have a gap, and whoever
started it kills it at the deadline. Only the standard library is used (`python -I -S`).
"""

import contextlib
import json
import resource
import sqlite3
import sys
import time

MEMORY = 512 << 20  # bytes of address space; sorting and temporary tables stay in it
ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
PRAGMAS = {
    "table_info",
    "table_xinfo",
    "table_list",
    "index_list",
    "index_info",
    "foreign_key_list",
}
FORBIDDEN_FUNCTIONS = {"load_extension", "fts3_tokenizer"}
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1_000_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 200,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 250_000,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 50,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1_000,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}


def authorize(action, first, second, database, trigger):
    if action == sqlite3.SQLITE_FUNCTION and second in FORBIDDEN_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_PRAGMA and first in PRAGMAS:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY


def query(uri, sql, timeout_s, max_rows, max_cell_chars, max_chars):
    deadline = time.monotonic() + timeout_s
    connection = sqlite3.connect(uri, uri=True, cached_statements=0)
    connection.text_factory = lambda data: data.decode(errors="replace")
    for limit, value in LIMITS.items():
        connection.setlimit(limit, value)
    connection.execute("PRAGMA query_only = ON")
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.set_authorizer(authorize)
    connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
    cursor = connection.execute(sql)
    if cursor.description is None:
        return {"error": "it is no SELECT statement"}
    rows, left = [], max_chars
    for row in cursor:
        if len(rows) == max_rows or left <= 0:
            return {"columns": names(cursor), "rows": rows, "more": True}
        rows.append([cell(value, max_cell_chars) for value in row])
        left -= sum(len(value) if isinstance(value, str) else 8 for value in rows[-1])
    return {"columns": names(cursor), "rows": rows, "more": False}


def names(cursor):
    return [column[0] for column in cursor.description]


def cell(value, max_chars):
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, str) and len(value) > max_chars:
        return f"{value[:max_chars]}… ({len(value)} characters)"
    return value


def main():
    request = json.load(sys.stdin)
    with contextlib.suppress(ValueError):  # a lower limit holds already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    seconds = int(request["timeout_s"]) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # SIGXCPU, then SIGKILL
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        answer = query(**request)
    except sqlite3.OperationalError as error:
        late = str(error) == "interrupted"
        answer = {"timed_out": True} if late else {"error": str(error)}
    except (sqlite3.Error, sqlite3.Warning, OverflowError, UnicodeError, ValueError) as error:
        answer = {"error": str(error)}
    except MemoryError:
        answer = {"error": "out of memory"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
