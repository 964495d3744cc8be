"""Rollouts without a learner, of a model in this process: what evaluate and collect share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress

from agentrl.config import ConfigError, RolloutConfig, RunConfig
from agentrl.config_file import load_config, make_config, parse_overrides
from agentrl.env import EnvNotFound
from agentrl.models import ModelError
from agentrl.protocols import EngineDied
from agentrl.renderer import RendererError
from rollout.engines.local_load import load_engine
from rollout.manager import RolloutError, RolloutManager
from rollout.setups import load_rubrics, make_renderers, make_setups, preflight
from rollout.tasks import Draw, Tasks


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that `read_config` reads."""
    parser.add_argument("--config", metavar="FILE", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")


def read_config(options: argparse.Namespace) -> RunConfig:
    """
    Raises:
        ConfigError: names the key; among others, for servers are to sample.
    """
    config = (
        load_config(options.config, options.overrides)
        if options.config
        else make_config(parse_overrides(options.overrides))
    )
    if config.rollout.engine == "sglang":
        raise ConfigError(
            "rollout.engine=sglang: without a learner nothing brings weights to servers, so this "
            "command samples in its own process; write rollout.engine=local"
        )
    return config


def exit_code(work: Callable[[], None]) -> int:
    """0: done. 1: failed on the way. 2: bad input. 130: interrupted."""
    try:
        work()
        return 0
    except (ConfigError, EnvNotFound, RendererError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RolloutError, EngineDied, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


@contextmanager
def embedded_rollouts(
    config: RunConfig,
    envs: Mapping[str, Any],
    *,
    rollout: RolloutConfig,
    tasks: Tasks,
    eval_draws: Sequence[Draw] = (),
    num_episodes: int,
) -> Iterator[RolloutManager]:
    """A manager over an engine with the model's own weights, with a bar of the episodes played.

    Args:
        envs: opened, by name.

    Raises:
        ConfigError, EnvNotFound, RendererError, ModelError: before anything is sampled.
    """
    console = Console(stderr=True)
    for line in preflight(envs, config.rollout.env_timeout_s):
        console.print(line, soft_wrap=True, markup=False)
    try:
        rubrics = load_rubrics(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    engine, tokenizer = load_engine(config.model.name_or_path, config.rollout)
    renderers = make_renderers(config, envs, tokenizer)
    console.print(f"engine: local (rollout.engine={config.rollout.engine})")
    for line in dict.fromkeys(renderer.probe() for renderer in renderers.values()):
        console.print(line)
    with Progress(console=console) as progress:
        bar = progress.add_task("episodes", total=num_episodes)
        with RolloutManager(
            engine=engine,
            envs=make_setups(config, renderers, rubrics),
            config=rollout,
            tasks=tasks,
            eval_config=config.eval,
            eval_draws=eval_draws,
            seed=config.seed,
            on_episode=lambda _: progress.advance(bar),
        ) as rollouts:
            yield rollouts
