"""Configs as strict YAML with dotted overrides: read, checked, explained and written."""

from __future__ import annotations

import difflib
import json
import re
import tempfile
import textwrap
from collections.abc import Hashable
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import ValidationError

from agentrl.config import ConfigError, RunConfig, Section


class _Loader(yaml.SafeLoader):
    """YAML that reads `1e-5` as a number and refuses a key written twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                break  # refused below, with its place
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is written twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes a string that `_Loader` would read as a number, or would fold a line break of."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        odd_break = any(character in data for character in "\x85\u2028\u2029")
        style = '"' if odd_break else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)

for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML file, apply `section.key=value` overrides, and check everything.

    Raises:
        ConfigError: names the file or the key, and what to write.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path} is no UTF-8 text: {error}") from error
    values = _parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path} holds no mapping of keys to values")
    return make_config(parse_overrides(overrides or [], values))


def parse_overrides(overrides: list[str], values: dict[str, Any] | None = None) -> dict[str, Any]:
    """Set `section.key=value` in a nested dictionary, by default an empty one.

    Raises:
        ConfigError: names the override.
    """
    values = {} if values is None else values
    for override in overrides:
        _override(values, override)
    return values


def make_config(values: dict[str, Any]) -> RunConfig:
    """Check a nested dictionary; see `load_config`."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(detail) for detail in error.errors())) from error


def dump_config(config: RunConfig) -> str:
    """The config, every default written out, as YAML that `load_config` reads back."""
    return yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def describe_config() -> str:
    """Every key with its default and what it counts, for `--help`."""
    lines = []
    for name, field in RunConfig.model_fields.items():
        if path := SECTIONS.get(name):
            section, prefix = path
            about = " ".join(filter(None, (field.description, section.__doc__)))
            lines.append(f"\n{prefix}: {about}")
            lines += [_describe(f"  {prefix}.{key}", f) for key, f in section.model_fields.items()]
        else:
            lines.append(_describe(name, field))
    return "\n".join(lines)


def _sections() -> dict[str, tuple[type[Section], str]]:
    found = {}
    for name, field in RunConfig.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                many = get_origin(field.annotation) is dict
                found[name] = (kind, f"{name}.<name>" if many else name)
    return found


SECTIONS = _sections()
"""By key of a config: the kind of section that it holds, and how keys in it are begun."""


def fresh_folder(folder: Path, sign: str) -> Path:
    """Make `folder`, or where it holds a `sign` already, the first free `folder-2`, `folder-3`, …

    Raises:
        ConfigError: it cannot be written to.
    """
    candidate, number = folder, 1
    while (candidate / sign).exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    try:
        candidate.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=candidate).close()
    except OSError as error:
        raise ConfigError(
            f"the output folder {candidate} cannot be written: {error.strerror or error}"
        ) from error
    return candidate


def _describe(name: str, field: Any) -> str:
    default = "required"
    if not field.is_required():
        # As a config writes it: null, true.
        default = f"default {json.dumps(field.get_default(call_default_factory=True))}"
    text = f"{name} ({default})  {field.description or ''}"
    return textwrap.fill(text, 100, subsequent_indent=" " * 6, break_on_hyphens=False)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{source}, line {mark.line + 1}" if mark else source
        raise ConfigError(f"{where}: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:  # a control character; a date that is none
        raise ConfigError(f"{source}: {error}") from error


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    *sections, last = key.strip().lstrip("-").split(".")
    for section in sections:
        if values.get(section) is None:  # also where a file says `env: null`
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            raise ConfigError(f"override {override!r}: {section!r} holds a value, not a section")
    values[last] = _parse_yaml(text, f"override {key!r}")


def _explain(detail: Any) -> str:
    location = [str(part) for part in detail["loc"]]
    key = ".".join(location)
    if detail["type"] == "extra_forbidden":
        return f"unknown key {key!r}{_suggest(location)}"
    if detail["type"] == "missing":
        return f"key {key!r} is missing"
    message = detail["msg"].removeprefix("Value error, ")
    if not key:
        return message
    return (
        f"key {key!r}: {message} (got {detail['input']!r})"
        if detail["type"] != "value_error"
        else f"{key}: {message}"
    )


def _suggest(location: list[str]) -> str:
    known = {name: name for name in RunConfig.model_fields}
    for name, (section, prefix) in SECTIONS.items():
        prefix = ".".join(location[:2]) if location[0] == name == "mix" else prefix
        known |= {f"{prefix}.{key}": key for key in section.model_fields}
    wanted = location[-1]
    near = (
        [path for path, key in known.items() if key == wanted]  # the right key, elsewhere
        or difflib.get_close_matches(".".join(location), known, n=1, cutoff=0.85)
        or [
            path
            for match in difflib.get_close_matches(wanted, set(known.values()), n=1, cutoff=0.7)
            for path, key in known.items()
            if key == match
        ]
    )
    return f"; did you mean {' or '.join(near)}?" if near else ""
