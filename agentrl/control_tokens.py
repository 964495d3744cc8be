"""The control tokens of a tokenizer, and how untrusted text is kept from forging them."""

from __future__ import annotations

import json
import re
from typing import Any


class ControlTokens:
    """The added tokens of a fast Hugging Face tokenizer.

    Added tokens that are mere white space (Gemma has many) are ordinary text.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder
        self.special: dict[str, int] = {
            token.content: id for id, token in added.items() if token.special
        }
        self._backend = tokenizer.backend_tokenizer
        contents = [token.content for token in added.values()]
        strings = "|".join(re.escape(text) for text in contents if text.strip(" \t\n\r▁"))
        # Matches the first character of each occurrence, so that overlapping ones are all found.
        self._spelled = re.compile(f"(?=(?:{strings}))(.)" if strings else "(?!)", re.DOTALL)

    def first_special(self, text: str) -> str:
        """The special token that comes first in `text`; "" if there is none."""
        found = [token for token in self.special if token in text]
        return min(found, key=text.index, default="")

    def spelled_in(self, text: str) -> bool:
        """Whether `text` spells a control token, as it is or once the tokenizer normalised it."""
        if self._spelled.search(text):
            return True
        normalizer = self._backend.normalizer
        if normalizer is None or text.isascii():
            return False
        return self._spelled.search(normalizer.normalize_str(text)) is not None

    def guard(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """Put a mark into each control token that the untrusted text of `messages` spells.

        Untrusted is what users and tools say, and a tool's name, which a model may have made up.

        Returns: the messages, and the mark: a character that they did not hold, at which the
            rendered text must be cut before it is encoded; "" if there is nothing to cut.
        """
        forged = [
            (message, key)
            for message in messages
            if message["role"] in ("user", "tool")
            for key in ("content", "name")
            if self.spelled_in(message.get(key, ""))
        ]
        if not forged:
            return messages, ""
        used = set(json.dumps(messages, ensure_ascii=False))
        mark = next(char for char in map(chr, range(0xE000, 0xF900)) if char not in used)
        for message, key in forged:
            text = message[key]
            if not self._spelled.search(text):
                text = self._backend.normalizer.normalize_str(text)
            message[key] = self._spelled.sub(lambda first: first[1] + mark, text)
        return messages, mark
