"""What every section of a config is: strict, frozen, and explained by its docstrings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ConfigError(ValueError):
    """A config that cannot be run, with the key and what to write instead."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    def require_use(self, uses: dict[str, tuple[bool, str]]) -> None:
        """
        Args:
            uses: by key, whether it has a use here, and where it would have one.

        Raises:
            ValueError: a key that has none was given another value than its default.
        """
        for key, (used, where) in uses.items():
            if not used and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key}={getattr(self, key)} does nothing without {where}")
