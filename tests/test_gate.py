"""Who may go on when: requests and weight updates, and episodes on the event loop."""

import asyncio

import pytest

from agentrl.protocols import EngineError
from rollout.gate import Gate, Turnstile
from tests.virtual_time import run_virtual


async def nobody():
    raise AssertionError("there is nobody to interrupt")


def test_after_a_failed_update_no_request_gets_through():
    """F070, F072: nobody knows what weights the engine has."""

    async def main():
        gate = Gate(1)
        with pytest.raises(EngineError):
            async with gate.shut(1):
                raise EngineError("no weight 'a'")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60), gate:
                raise AssertionError("a request got through")

    run_virtual(main())


def test_a_request_on_its_way_when_the_others_are_interrupted_is_not_missed():
    """F027: the engine knows of it 0.3 s after it was made; the gate asks until it is out."""

    async def main():
        gate, known, times = Gate(4), asyncio.Event(), []

        async def request():
            async with gate:
                await asyncio.sleep(0.3)
                known.set()
                await left.wait()

        async def interrupt():
            times.append(asyncio.get_running_loop().time())
            if known.is_set():
                left.set()

        left = asyncio.Event()
        task = asyncio.create_task(request())
        await asyncio.sleep(0)
        async with gate.shut(10, interrupt):
            assert gate.in_flight == 0 and task.done()
        assert times == pytest.approx([0.0, 0.2, 0.4])

    run_virtual(main())


def test_an_empty_gate_shuts_at_once_and_interrupts_nobody():
    async def main():
        gate = Gate(1)
        async with gate.shut(1, nobody):
            assert gate.locked()
        assert not gate.locked() and gate.times_shut == 1

    run_virtual(main())


def test_a_request_that_ignores_the_interrupt_fails_the_update_in_time():
    async def main():
        gate = Gate(1)

        async def request():
            async with gate:
                await asyncio.sleep(3600)

        async def deaf(): ...

        task = asyncio.create_task(request())
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            async with gate.shut(30, deaf):
                raise AssertionError("a request was in flight")
        assert asyncio.get_running_loop().time() == pytest.approx(30)
        assert gate.in_flight == 1
        task.cancel()

    run_virtual(main())


def test_who_waits_while_the_gate_is_shut_is_queued_and_one_that_is_cancelled_leaves_no_trace():
    """F022: its place is free again."""

    async def main():
        gate, inside = Gate(2), []

        async def request(name):
            async with gate:
                inside.append(name)
                await asyncio.sleep(1)

        async with gate.shut(1):
            tasks = [asyncio.create_task(request(name)) for name in "abc"]
            await asyncio.sleep(1)
            assert gate.num_queued == 3 and not inside
            tasks[0].cancel()
            await asyncio.sleep(1)
            assert gate.num_queued == 2
        await asyncio.sleep(0.5)
        assert inside == ["b", "c"] and gate.in_flight == 2 and gate.num_queued == 0
        await asyncio.sleep(1)
        assert not gate.locked() and gate.in_flight == 0

    run_virtual(main())


def test_a_gate_that_is_shut_again_at_once_lets_nobody_slip_through():
    async def main():
        gate = Gate(1)

        async def request():
            async with gate:
                await asyncio.sleep(1)

        async with gate.shut(1):
            task = asyncio.create_task(request())
            await asyncio.sleep(1)
        async with gate.shut(1):
            await asyncio.sleep(1)
            assert gate.in_flight == 0
        await task

    run_virtual(main())


def test_many_ready_episodes_leave_the_loop_to_others_in_between():
    async def run():
        turnstile, order = Turnstile(), []

        async def episode(number):
            await turnstile.pass_through()
            order.append(number)

        async def other():
            for _ in range(4):
                await asyncio.sleep(0)
                order.append("other")

        tasks = [asyncio.create_task(episode(number)) for number in range(6)]
        tasks[2].cancel()
        await asyncio.gather(other(), *tasks, return_exceptions=True)
        return order

    order = asyncio.run(run())
    assert [entry for entry in order if entry != "other"] == [0, 1, 3, 4, 5]
    assert order.index("other") < order.index(4)
