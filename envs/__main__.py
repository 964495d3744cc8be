"""Find, check, play and begin environments.

python -m envs list                       what can be named
python -m envs check agentrl/GSM8K-v0     whether an env keeps what an env owes
python -m envs play agentrl/Shopping-v0   act in it yourself, or let a server's model
python -m envs new weather                a working env and its test, to begin from
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from agentrl.env import EnvNotFound
from agentrl.renderer import RendererError
from agentrl.shutdown import shut_down
from envs.cli.catalog import print_catalog
from envs.cli.check import check
from envs.cli.new import write_env
from envs.cli.play import PlayError, play

BAD_INPUT = (EnvNotFound, RendererError)


def main(arguments: list[str] | None = None) -> int:
    """0: done. 1: a check failed, or play did. 2: bad input. 130: interrupted."""
    options = parse(arguments)
    try:
        match options.command:
            case "list":
                print_catalog()
            case "new":
                write_env(options.name)
            case "check":
                with asyncio.Runner() as runner:
                    passed = runner.run(_then_shut_down(check(
                        options.env, options.tokenizer, options.tool_format, options.instances
                    )))  # fmt: skip
                return 0 if passed else 1
            case "play":
                with asyncio.Runner() as runner:
                    runner.run(_then_shut_down(play(
                        options.env, options.seed, options.task, options.url, options.model
                    )))  # fmt: skip
        return 0
    except BAD_INPUT as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except PlayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


async def _then_shut_down(work):
    try:
        return await work
    finally:
        await shut_down()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m envs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the envs that can be named")
    checking = commands.add_parser("check", help="whether an env keeps what an env owes")
    checking.add_argument("env", help="its name, with ?key=value for its kwargs")
    checking.add_argument(
        "--tokenizer", metavar="FOLDER_OR_ID", help="check the tokens of an episode too"
    )
    checking.add_argument(
        "--tool-format", default="hermes", choices=["tag", "hermes", "llama3", "none"]
    )
    checking.add_argument(
        "--instances", type=int, default=64, help="how many are played at once (64)"
    )
    playing = commands.add_parser(
        "play", help="act in an env: each line is a reply, or a call written as TOOL {JSON}"
    )
    playing.add_argument("env", help="its name, with ?key=value for its kwargs")
    playing.add_argument("--seed", type=int, default=0)
    playing.add_argument("--task", type=int, default=0, help="the row of its training tasks")
    playing.add_argument(
        "--url", help="of an OpenAI-compatible server, whose model plays: http://localhost:30000/v1"
    )
    playing.add_argument("--model", default="default", help="what the server calls it")
    starting = commands.add_parser("new", help="write NAME.py, a working env, and test_NAME.py")
    starting.add_argument("name", help="in lower_case")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
