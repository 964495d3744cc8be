"""What is tried before a run, each check a line: ok, or why it failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Checklist:
    """Prints one line a check; `plain` errors say what to do, others are named by their type."""

    def __init__(self, *plain: type[Exception]) -> None:
        self._plain = plain
        self.num_checks = self.num_failed = 0

    @contextmanager
    def check(self, name: str) -> Iterator[Callable[[str], None]]:
        """Take what the block says of itself; an error in it is the result, and goes no further."""
        said: list[str] = []
        self.num_checks += 1
        try:
            yield said.append
        except Exception as error:
            self.num_failed += 1
            text = str(error) or type(error).__name__
            if not isinstance(error, self._plain):
                text = f"{type(error).__name__}: {text}"
            self._line("FAILED", name, text)
        else:
            self._line("ok", name, "; ".join(said))

    def skip(self, name: str, why: str) -> None:
        self._line("skipped", name, why)

    def finish(self) -> None:
        checks = f"{self.num_checks} checks"
        failed = f"{self.num_failed} of {checks} failed"
        print(failed if self.num_failed else f"{checks}, all passed", flush=True)

    def _line(self, result: str, name: str, text: str) -> None:
        indented = text.replace("\n", "\n" + " " * 24)
        print(f"{result:<8}{name:<16}{indented}", flush=True)
