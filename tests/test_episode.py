"""One episode: its budget, its ends, its faults."""

import asyncio
import inspect
import logging
import math
import time

import pytest

from agentrl.env import TextEnv
from agentrl.protocols import EngineDied, EngineError
from agentrl.rubric import Rubric
from agentrl.tool import Unavailable
from agentrl.types import Completion, Message, StopReason
from rollout.episode import play
from rollout.stage import PromptMemo
from tests.engines import CountEnv, ScriptedEngine, byte_renderer, forever
from tests.stages import episode_of, stage_of


@pytest.fixture(scope="module")
def renderer():
    return byte_renderer()


def play_one(engine, make_env=CountEnv, **values):
    async def run():
        return await play(episode_of(), stage_of(engine, make_env, **values))

    return asyncio.run(run())


def test_the_tape_is_the_dialogue_and_only_sampled_tokens_are_trained(renderer):
    engine = ScriptedEngine(renderer, lambda r: ["no", "yes"][r.turn])
    tape = play_one(engine, lambda: CountEnv(2))
    text = renderer.decode(tape.token_ids)
    assert text == "<s>user\ngo<e>\n<s>assistant\nno<e>\n<s>user\nmore 1<e>\n<s>assistant\nyes<e>"
    sampled = [t for t, m in zip(tape.token_ids, tape.loss_mask, strict=True) if m]
    assert renderer.decode(sampled) == "no<e>yes<e>"
    assert [m.role for m in tape.messages] == ["user", "assistant", "user", "assistant"]
    assert (tape.stop_reason, tape.reward, tape.rewards) == (StopReason.DONE, 1.0, {"env": 1.0})
    assert tape.metrics == {"asked": 2.0}
    assert set(tape.timings) == {"queue", "generate", "env"}


def test_the_next_request_is_the_tape_verbatim(renderer):
    engine = ScriptedEngine(renderer, "ok")
    tape = play_one(engine, lambda: CountEnv(3))
    for request, turn in zip(engine.requests, tape.turns, strict=True):
        assert request.token_ids == tape.token_ids[: turn.start]


@pytest.mark.parametrize(
    ("prompt_length", "episode_tokens", "expected"),
    [(20, 4096, 50), (70, 4096, 30), (99, 4096, 1), (70, 10, 10)],
)
def test_a_request_asks_for_no_more_than_fits(renderer, prompt_length, episode_tokens, expected):
    """F031."""
    frame = len(renderer.prompt(play_one(ScriptedEngine(renderer)).messages[:1])) - len("go")

    class Long(CountEnv):
        async def reset(self, *, seed=None, options=None):
            await super().reset(seed=seed, options=options)
            return "x" * (prompt_length - frame), {}

    engine = ScriptedEngine(renderer)
    play_one(
        engine, Long, max_context_tokens=100, max_new_tokens=50, max_episode_tokens=episode_tokens
    )
    assert len(engine.requests[0].token_ids) == prompt_length
    assert engine.requests[0].sampling.max_new_tokens == expected


def test_a_prompt_that_fills_the_context_is_never_sent(renderer):
    """F017, F031: no call, nothing cut, and a trajectory of no turns."""
    engine = ScriptedEngine(renderer)
    tape = play_one(engine, max_context_tokens=10)
    assert not engine.requests and not tape.turns and tape.reward is None
    assert tape.stop_reason is StopReason.PROMPT_TOO_LONG
    assert "max_context_tokens=10" in tape.error
    assert tape.segments() == [] and tape.num_sampled_tokens == 0


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_new_tokens": 5}, StopReason.TURN_LENGTH),
        ({"max_episode_tokens": 12}, StopReason.EPISODE_LENGTH),
        ({"max_context_tokens": 60}, StopReason.CONTEXT_LENGTH),
        ({"max_turns": 2}, StopReason.MAX_TURNS),
    ],
)
def test_each_limit_ends_the_episode_under_its_name(renderer, limits, reason):
    engine = ScriptedEngine(renderer, "0123456")
    tape = play_one(engine, lambda: CountEnv(5), **limits)
    assert tape.stop_reason is reason
    assert tape.reward == 0.0  # a limit is the policy's own doing
    assert tape.num_sampled_tokens <= limits.get("max_episode_tokens", math.inf)
    assert len(tape) <= limits.get("max_context_tokens", math.inf)


def test_a_turn_cut_by_length_is_not_stepped(renderer):
    envs = []
    tape = play_one(
        ScriptedEngine(renderer, "a long answer"),
        lambda: envs.append(CountEnv()) or envs[-1],
        max_new_tokens=3,
    )
    assert envs[0].turn == 0 and tape.turns[0].finish_reason == "length"


def test_an_observation_that_does_not_fit_is_not_appended(renderer):
    class Wordy(CountEnv):
        async def step(self, action):
            return "y" * 500, 0.0, False, False, {}

    tape = play_one(ScriptedEngine(renderer, "ok"), Wordy, max_context_tokens=100)
    assert tape.stop_reason is StopReason.CONTEXT_LENGTH
    assert len(tape) == tape.turns[-1].end


def test_saying_nothing_is_left_to_the_env_and_ends(renderer):
    """F036: the env names the end; without that, `max_turns` bounds the calls."""

    class Strict(CountEnv):
        async def step(self, action):
            info = {} if action.strip() else {"stop_reason": StopReason.NO_ACTION}
            return "again", 0.0, False, False, info

    engine = ScriptedEngine(renderer, "")
    assert play_one(engine, Strict).stop_reason is StopReason.NO_ACTION
    assert len(engine.requests) == 1
    engine = ScriptedEngine(renderer, "")
    assert play_one(engine, lambda: CountEnv(99), max_turns=3).stop_reason is StopReason.MAX_TURNS
    assert len(engine.requests) == 3


class Boom(CountEnv):
    """Raises in the method named."""

    def __init__(self, where):
        super().__init__(2)
        self.where = where

    async def reset(self, *, seed=None, options=None):
        if self.where == "reset":
            raise ValueError("boom")
        return await super().reset(seed=seed, options=options)

    async def step(self, action):
        if self.where == "step":
            raise ValueError("boom")
        return await super().step(action)

    async def close(self):
        await super().close()
        if self.where == "close":
            raise ValueError("boom")


@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_env_that_raises_ends_its_episode_with_the_cause(renderer, caplog, where):
    envs = []
    engine = ScriptedEngine(renderer)
    with caplog.at_level(logging.WARNING, "agentrl"):
        tape = play_one(engine, lambda: envs.append(Boom(where)) or envs[-1])
    assert (tape.stop_reason, tape.error) == (StopReason.ENV_ERROR, "ValueError: boom")
    assert tape.reward is None
    assert envs[0].closed == 1 and engine.released == ["e0"]
    assert "e0" in caplog.text and "Traceback" in caplog.text


def test_an_env_that_raises_in_close_is_counted_and_its_episode_kept(renderer, caplog):
    tape = play_one(ScriptedEngine(renderer, "yes"), lambda: Boom("close"))
    assert (tape.stop_reason, tape.reward) == (StopReason.DONE, 2.0)
    assert tape.metrics["env/close_errors"] == 1.0
    assert "boom" in caplog.text


@pytest.mark.parametrize("exit", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["reset", "step", "close", "reward"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_code_that_exits_ends_its_episode_and_not_the_loop(renderer, where, exit, asynchronous):
    """F019: raised on an event loop, these two end the loop itself, and the run hangs."""

    def leave(here):
        if here == where:
            raise exit("bye")

    class Plain(TextEnv):
        def reset(self, *, seed=None, options=None):
            leave("reset")
            return "go", {}

        def step(self, action):
            leave("step")
            return "", 0.0, True, False, {}

        def close(self):
            leave("close")

    class Async(Plain):
        async def reset(self, *, seed=None, options=None):
            return super().reset()

        async def step(self, action):
            return super().step(action)

        async def close(self):
            super().close()

    def reward(completion):
        leave("reward")
        return 1.0

    async def async_reward(completion):
        return reward(completion)

    tape = play_one(
        ScriptedEngine(renderer),
        Async if asynchronous else Plain,
        rubric=Rubric([async_reward if asynchronous else reward]),
    )
    if where == "close":
        assert tape.metrics["env/close_errors"] == 1.0 and tape.reward == 1.0
    else:
        assert tape.stop_reason in (StopReason.ENV_ERROR, StopReason.REWARD_ERROR)
        assert exit.__name__ in tape.error and "bye" in tape.error


def test_an_env_metric_that_is_no_number_voids_its_episode(renderer):
    """Later, the mean over the batch would refuse it, and end the run."""

    class Odd(CountEnv):
        async def step(self, action):
            return "", 1.0, True, False, {"metrics": {"odd": math.nan}}

    tape = play_one(ScriptedEngine(renderer), Odd)
    assert tape.stop_reason is StopReason.ENV_ERROR and "odd" in tape.error


def test_an_env_that_rewards_nothing_says_so(renderer):
    """Else the mean of its rewards would be over the good episodes alone."""
    assert play_one(ScriptedEngine(renderer, "no")).rewards == {"env": 0.0}


def test_each_turn_keeps_what_the_env_gave_for_it(renderer):
    """What a rubric adds is the whole episode's."""
    engine = ScriptedEngine(renderer, lambda r: ["yes", "no", "yes"][r.turn])
    rubric = Rubric([lambda_named("brief", 0.5)])
    tape = play_one(engine, lambda: CountEnv(3), rubric=rubric)
    assert [turn.reward for turn in tape.turns] == [1.0, 0.0, 1.0]
    assert tape.rewards["env"] == 2.0 and tape.reward == 2.5


def test_the_scores_deadline_alone_bounds_a_reward(renderer):
    """F025: no shorter one hides inside."""
    assert "timeout_s" not in inspect.signature(Rubric).parameters
    tape = play_one(ScriptedEngine(renderer), rubric=Rubric([slow]), score_timeout_s=5)
    assert tape.reward == 1.0


def test_a_constructor_that_raises_ends_the_episode(renderer):
    def broken():
        raise OSError("no sandbox")

    tape = play_one(ScriptedEngine(renderer), broken)
    assert (tape.stop_reason, tape.error) == (StopReason.ENV_ERROR, "OSError: no sandbox")


def boom(completion):
    raise ValueError("boom")


def nan(completion):
    return math.nan


def slow(completion):
    time.sleep(1.0)
    return 1.0


@pytest.mark.parametrize(
    ("function", "word"), [(boom, "boom"), (nan, "nan"), (slow, "did not end")]
)
def test_a_reward_that_fails_voids_its_episode(renderer, function, word):
    """F051."""
    tape = play_one(ScriptedEngine(renderer), rubric=Rubric([function]), score_timeout_s=0.2)
    assert tape.stop_reason is StopReason.REWARD_ERROR and word in tape.error
    assert tape.reward is None


@pytest.mark.parametrize("reward", [math.nan, math.inf, None])
def test_a_step_reward_that_is_no_number_voids_its_episode(renderer, reward):
    """F051."""

    class Odd(CountEnv):
        async def step(self, action):
            return "", reward, True, False, {}

    tape = play_one(ScriptedEngine(renderer), Odd)
    assert tape.stop_reason is StopReason.REWARD_ERROR and tape.reward is None


def test_rewards_of_env_and_rubrics_are_added_with_their_weights(renderer):
    class Judged(CountEnv):
        rubric = Rubric([lambda_named("brief", 0.5)], weights=[2.0])

    rubric = Rubric([lambda_named("style", 3.0)], weights=[0.0])
    tape = play_one(ScriptedEngine(renderer, "yes"), Judged, rubric=rubric)
    assert tape.rewards == {"env": 1.0, "brief": 0.5, "style": 3.0}
    assert tape.reward == 2.0


def lambda_named(name, value):
    def reward(completion):
        return value

    reward.__name__ = name
    return reward


def test_the_rubric_sees_the_env_before_it_is_closed(renderer):
    def still_open(env):
        return float(env.closed == 0)

    tape = play_one(ScriptedEngine(renderer), rubric=Rubric([still_open]))
    assert tape.reward == 1.0


class Hanging(CountEnv):
    async def step(self, action):
        await forever()


class Sleeping(TextEnv):
    """Sync, and it hangs."""

    def reset(self, *, seed=None, options=None):
        return "go", {}

    def step(self, action):
        time.sleep(1.0)


@pytest.mark.parametrize("env", [Hanging, Sleeping])
def test_an_env_that_hangs_ends_at_its_deadline(renderer, env):
    began = time.monotonic()
    tape = play_one(ScriptedEngine(renderer), env, env_timeout_s=0.2)
    assert time.monotonic() - began < 0.9
    assert tape.stop_reason is StopReason.ENV_TIMEOUT and "step" in tape.error


def test_an_engine_that_hangs_ends_at_its_deadline(renderer):
    """F024."""
    tape = play_one(ScriptedEngine(renderer, forever), generate_timeout_s=0.2)
    assert tape.stop_reason is StopReason.ENGINE_TIMEOUT and tape.reward is None


def test_an_episode_has_a_deadline_of_its_own(renderer):
    async def slowly(request):
        await asyncio.sleep(0.15)
        return "ok"

    tape = play_one(
        ScriptedEngine(renderer, slowly),
        lambda: CountEnv(99),
        generate_timeout_s=0.2,
        env_timeout_s=0.2,
        episode_timeout_s=0.5,
        max_turns=99,
    )
    assert tape.stop_reason is StopReason.EPISODE_TIMEOUT and tape.turns


def test_waiting_for_a_slot_does_not_count_as_playing(renderer):
    async def slowly(request):
        await asyncio.sleep(0.15)
        return "yes"

    async def run():
        limits = {"generate_timeout_s": 0.2, "env_timeout_s": 0.2, "episode_timeout_s": 0.4}
        stage = stage_of(ScriptedEngine(renderer, slowly), generations=1, **limits)
        return await asyncio.gather(*(play(episode_of(f"e{i}"), stage) for i in range(5)))

    tapes = asyncio.run(run())
    assert [tape.stop_reason for tape in tapes] == [StopReason.DONE] * 5
    assert tapes[-1].timings["queue"] > 0.4 > tapes[-1].timings["generate"]


def test_an_engine_error_is_a_fault_and_a_dead_engine_stops_the_run(renderer):
    def fail(request):
        raise EngineError("out of memory")

    tape = play_one(ScriptedEngine(renderer, fail))
    assert tape.stop_reason is StopReason.ENGINE_ERROR
    assert tape.error == "EngineError: out of memory"

    def die(request):
        raise EngineDied("gone")

    engine = ScriptedEngine(renderer, die)
    with pytest.raises(EngineDied):
        play_one(engine)
    assert engine.released == ["e0"]


def test_an_aborted_turn_keeps_its_tokens_and_is_not_trained(renderer):
    """F028."""
    partial = Completion(
        token_ids=[5] * 57, logprobs=[-1.0] * 57, finish_reason="abort", versions=[0] * 57
    )
    tape = play_one(ScriptedEngine(renderer, partial))
    assert tape.stop_reason is StopReason.ABORTED and tape.reward is None
    assert tape.num_sampled_tokens == 57


def test_a_reply_whose_logprobs_do_not_match_is_an_engine_fault(renderer):
    short = Completion(token_ids=[5, 6], logprobs=[-1.0], finish_reason="stop", versions=[0, 0])
    tape = play_one(ScriptedEngine(renderer, short))
    assert tape.stop_reason is StopReason.ENGINE_ERROR and "logprobs" in tape.error


def test_a_cancelled_episode_aborts_its_request_and_closes_its_env(renderer):
    """F026: cancel 4 of 8, and 4 requests remain."""
    envs = []
    engine = ScriptedEngine(renderer, forever)

    async def run():
        stage = stage_of(engine, lambda: envs.append(CountEnv()) or envs[-1])
        tasks = [asyncio.create_task(play(episode_of(f"e{i}"), stage)) for i in range(8)]
        await asyncio.sleep(0.05)
        assert engine.in_flight == 8
        for task in tasks[:4]:
            task.cancel()
        await asyncio.wait(tasks[:4], timeout=1)
        assert engine.in_flight == 4 and sum(env.closed for env in envs) == 4
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=1)
        assert not stage.generation.locked() and stage.generation.in_flight == 0

    asyncio.run(run())
    assert sorted(engine.released) == [f"e{i}" for i in range(8)]


def test_blocking_env_calls_do_not_stall_the_loop(renderer):
    """F023: 8 episodes that each block for 0.2 s, while a heartbeat goes on."""

    class Blocking(Sleeping):
        def step(self, action):
            time.sleep(0.2)
            return "", 1.0, True, False, {}

    async def run():
        gaps = []

        async def beat():
            while True:
                began = time.perf_counter()
                await asyncio.sleep(0.02)
                gaps.append(time.perf_counter() - began)

        heart = asyncio.create_task(beat())
        stage = stage_of(ScriptedEngine(renderer), Blocking)
        began = time.perf_counter()
        tapes = await asyncio.gather(*(play(episode_of(f"e{i}"), stage) for i in range(8)))
        heart.cancel()
        return tapes, time.perf_counter() - began, max(gaps)

    tapes, wall, gap = asyncio.run(run())
    assert all(tape.reward == 1.0 for tape in tapes)
    assert wall < 1.0 and gap < 0.15


def test_each_turn_has_a_sampling_seed_of_its_own(renderer):
    def seeds(seed):
        engine = ScriptedEngine(renderer)

        async def run():
            await play(episode_of(seed=seed), stage_of(engine, lambda: CountEnv(3)))

        asyncio.run(run())
        return [request.sampling.seed for request in engine.requests]

    assert len(set(seeds(1) + seeds(2))) == 6
    assert seeds(1) == seeds(1)


def test_a_prompt_is_rendered_once_for_a_group():
    calls = []
    memo = PromptMemo(lambda messages: calls.append(1) or [len(messages)])
    assert memo(["a"]) == memo(["a"]) == [1] and len(calls) == 1
    assert memo(["a", "b"]) == [2] and len(calls) == 2


# What an episode must have to itself.


class Needs(CountEnv):
    """Waits for one of `num` things before its reset, and gives it back in `close`."""

    def __init__(self, things: asyncio.Semaphore, num_turns: int = 1) -> None:
        super().__init__(num_turns)
        self.things, self.has = things, False

    async def acquire(self):
        await self.things.acquire()
        self.has = True

    async def reset(self, *, seed=None, options=None):
        assert self.has
        return await super().reset(seed=seed, options=options)

    async def close(self):
        await super().close()
        if self.has:
            self.things.release()
        self.has = False


def test_waiting_for_a_thing_of_its_own_counts_as_queueing_and_holds_no_slot(renderer):
    """F105: 4 wait for one, far longer than a reset or an episode may take."""

    async def slowly(request):
        await asyncio.sleep(0.15)
        return "yes"

    async def run():
        things = asyncio.Semaphore(1)
        limits = {"generate_timeout_s": 0.2, "env_timeout_s": 0.2, "episode_timeout_s": 0.4}
        engine = ScriptedEngine(renderer, slowly)
        stage = stage_of(engine, lambda: Needs(things), env_calls=1, **limits)
        episodes = [episode_of(f"e{i}") for i in range(4)]
        played = [asyncio.create_task(play(episode, stage)) for episode in episodes]
        await asyncio.sleep(0.1)
        assert [episode.phase for episode in episodes].count("acquire") == 3
        assert not stage.env_calls.locked()
        return await asyncio.gather(*played)

    tapes = asyncio.run(run())
    assert [tape.stop_reason for tape in tapes] == [StopReason.DONE] * 4
    assert max(tape.timings["queue"] for tape in tapes) > 0.4


def test_many_more_episodes_than_things_never_lock_each_other_out(renderer):
    """32 episodes with 2 things, 4 slots for env calls and 2 requests at once."""

    async def run():
        things = asyncio.Semaphore(2)
        stage = stage_of(
            ScriptedEngine(renderer), lambda: Needs(things, 3), env_calls=4, generations=2
        )
        async with asyncio.timeout(5):
            return await asyncio.gather(*(play(episode_of(f"e{i}"), stage) for i in range(32)))

    assert {tape.stop_reason for tape in asyncio.run(run())} == {StopReason.DONE}


@pytest.mark.parametrize("error", [Unavailable("no sandbox"), TimeoutError("too late")])
def test_a_thing_that_is_not_to_be_had_is_a_fault_of_the_env(renderer, error):
    """F104."""

    class Out(CountEnv):
        async def acquire(self):
            raise error

    env = Out()
    tape = play_one(ScriptedEngine(renderer), lambda: env)
    assert tape.stop_reason is StopReason.ENV_ERROR and str(error) in tape.error
    assert tape.reward is None and env.closed == 1


def test_an_episode_cancelled_while_it_waits_closes_its_env(renderer):
    """F026."""
    envs = []

    async def run():
        things = asyncio.Semaphore(0)
        stage = stage_of(ScriptedEngine(renderer), lambda: envs.append(Needs(things)) or envs[-1])
        playing = asyncio.create_task(play(episode_of(), stage))
        await asyncio.sleep(0.02)
        playing.cancel()
        await asyncio.wait([playing], timeout=1)
        assert playing.cancelled()

    asyncio.run(run())
    assert envs[0].closed == 1


# Results of tools.


class Answers(CountEnv):
    """Answers each turn as a tool."""

    def __init__(self, *contents):
        super().__init__(len(contents) + 1)
        self.contents = contents

    async def step(self, action):
        _, reward, over, truncated, info = await super().step(action)
        if over:
            return "", reward, over, truncated, info
        return Message(role="tool", content=self.contents[self.turn - 1]), reward, over, False, info


def test_the_middle_of_a_long_tool_result_is_left_out_and_counted(renderer):
    """F100: a cap in tokens; one token a byte here."""
    long = "head" + "x" * 300 + "tail"
    tape = play_one(ScriptedEngine(renderer), lambda: Answers("short", long), max_tool_tokens=100)
    short, cut = (m.content for m in tape.messages if m.role == "tool")
    assert short == "short" and len(cut) <= 100
    assert cut.startswith("head") and cut.endswith("tail") and "tokens left out]" in cut
    assert cut in renderer.decode(tape.token_ids), "what is in the transcript is what was read"
    assert tape.metrics["tool/clipped"] == 1.0


def test_an_episode_whose_results_are_short_says_that_none_was_cut(renderer):
    tape = play_one(ScriptedEngine(renderer), lambda: Answers("x" * 100), max_tool_tokens=100)
    assert tape.metrics["tool/clipped"] == 0.0 and "x" * 100 in renderer.decode(tape.token_ids)
