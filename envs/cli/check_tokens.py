"""Whether an episode's tokens extend one another, and the mask covers what was sampled alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.renderer import Renderer, RendererError
from agentrl.types import Action, Completion
from envs.cli.check_tools import example_turn
from envs.cli.subject import CheckFailed, Subject


async def check_tokens(subject: Subject, tokenizer: Any, tool_format: str) -> str:
    """How the env, the tokenizer and the tool format go together.

    Raises:
        CheckFailed: they do not.
    """
    turns = list(subject.solution(subject.tasks[0])) or [Action("No.")]
    if subject.tools and tool_format != "none":
        turns.insert(0, example_turn(subject.tools[0]))
    schemas = [tool.schema for tool in subject.tools]
    try:
        renderer = Renderer(tokenizer, tool_format=tool_format, tools=schemas)
        return "; ".join([await _play(subject, turns, renderer), renderer.probe()])
    except RendererError as error:
        raise CheckFailed(str(error)) from error


async def _play(subject: Subject, turns: Sequence[Action], renderer: Renderer) -> str:
    sampled: list[int] = []
    async with subject.game() as game:
        tape = game.tape
        await game.begin(subject.tasks[0], seed=0)
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
                raise CheckFailed(
                    f"the calls of a solution do not survive tool_format {renderer.parser.name}: "
                    f"{[call.name for call in scripted.tool_calls]} was read as {read.attempts}"
                )
            new = await game.act(read)
            if any(message.role == "assistant" for message in new):
                raise CheckFailed(
                    "step speaks as the assistant: what the policy says, it samples itself"
                )
            if game.over:
                break
            history = tape.messages[: len(tape.messages) - len(new)]
            delta = renderer.observation(history, new, context=tape.context)
            tape.observe(delta.token_ids, new_segment=delta.new_segment)
            if tape.context[: len(before)] != before:
                raise CheckFailed("a step's prompt does not begin with the tokens before it")
            shown = renderer.decode(delta.token_ids)
            for message in new:
                if message.content.strip()[:40] not in shown:
                    raise CheckFailed(f"the template does not show what role {message.role!r} says")
    trained = [id for id, is_sampled in zip(tape.token_ids, tape.loss_mask, strict=True)
               if is_sampled]  # fmt: skip
    if trained != sampled:
        raise CheckFailed("the loss mask does not cover exactly the tokens that were sampled")
    return f"{len(tape)} tokens, of which {len(trained)} sampled ones are trained"


def load_tokenizer(name: str) -> Any:
    """From a folder or the hub. Raises RendererError where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise RendererError(f"there is no tokenizer {name!r}: {error}") from error
