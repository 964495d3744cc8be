"""Whether an episode's tokens extend one another, and the mask covers what was sampled alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agentrl.renderer import Renderer, RendererError
from agentrl.types import Action, Completion, Task
from envs.cli.game import Game


async def check_tokens(
    make: Callable[[], Game],
    task: Task | None,
    turns: Sequence[Action],
    tokenizer: Any,
    tool_format: str,
    schemas: Sequence[dict[str, Any]],
    failed: type[Exception],
) -> str:
    """How the env, the tokenizer and the tool format go together.

    Raises:
        failed: they do not.
    """
    try:
        renderer = Renderer(tokenizer, tool_format=tool_format, tools=schemas)
        return "; ".join([await _play(make(), task, turns, renderer, failed), renderer.probe()])
    except RendererError as error:
        raise failed(str(error)) from error


async def _play(
    game: Game,
    task: Task | None,
    turns: Sequence[Action],
    renderer: Renderer,
    failed: type[Exception],
) -> str:
    tape, sampled = game.tape, []
    async with game:
        await game.begin(task, seed=0)
        tape.observe(renderer.prompt(tape.messages))
        for scripted in turns:
            ids = renderer.write(scripted)
            sampled += ids
            before = tape.context
            tape.act(
                Completion(
                    token_ids=ids,
                    logprobs=[-1.0] * len(ids),
                    finish_reason="stop",
                    versions=[0] * len(ids),
                )
            )
            read = renderer.parse(ids, "stop")
            if [(c.name, c.arguments) for c in read.tool_calls] != [
                (c.name, c.arguments) for c in scripted.tool_calls
            ]:
                raise failed(
                    f"the calls of a solution do not survive tool_format {renderer.parser.name}: "
                    f"{[call.name for call in scripted.tool_calls]} was read as {read.attempts}"
                )
            new = await game.act(read)
            if any(message.role == "assistant" for message in new):
                raise failed(
                    "step speaks as the assistant: what the policy says, it samples itself"
                )
            if game.over:
                break
            history = tape.messages[: len(tape.messages) - len(new)]
            delta = renderer.observation(history, new, context=tape.context)
            tape.observe(delta.token_ids, new_segment=delta.new_segment)
            if tape.context[: len(before)] != before:
                raise failed("a step's prompt does not begin with the tokens before it")
            shown = renderer.decode(delta.token_ids)
            for message in new:
                if message.content.strip()[:40] not in shown:
                    raise failed(f"the template does not show what role {message.role!r} says")
    trained = [id for id, is_sampled in zip(tape.token_ids, tape.loss_mask, strict=True)
               if is_sampled]  # fmt: skip
    if trained != sampled:
        raise failed("the loss mask does not cover exactly the tokens that were sampled")
    return f"{len(tape)} tokens, of which {len(trained)} sampled ones are trained"


def load_tokenizer(name: str) -> Any:
    """From a folder or the hub. Raises RendererError where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise RendererError(f"there is no tokenizer {name!r}: {error}") from error
