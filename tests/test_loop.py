"""The loop with its real parts: learner and engine agree, and nothing is left half done."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from accelerate import Accelerator

from agentrl.config_file import load_config
from agentrl.metrics import load_metrics
from agentrl.protocols import Probe, SyncError
from agentrl.renderer import Renderer
from rollout.engines.local import LocalEngine
from rollout.manager import RolloutManager
from rollout.stage import EnvSetup
from rollout.tasks import TaskStream, held_out
from tests.runs import Tiny, save_model, write_config
from train.checkpoint import latest_checkpoint, read_checkpoint
from train.display import Display
from train.interrupt import uninterrupted
from train.learner import Learner, TrainingError
from train.loop import is_due, train
from train.model import load_model
from train.record import RunRecord
from train.shared_rollouts import SharedRollouts

pytestmark = [
    pytest.mark.filterwarnings("ignore:learner and engine differ"),
    pytest.mark.usefixtures("fresh_accelerate"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


class Parts:
    """What the door builds."""

    def __init__(self, folder, model, *, share_weights=True, **changes):
        self.config = load_config(write_config(folder, model, **changes))
        accelerator = Accelerator(cpu=True)
        loaded, tokenizer = load_model(self.config.model)
        self.learner = Learner(loaded, self.config, accelerator)
        rollout = self.config.rollout
        self.engine = LocalEngine(
            self.learner.model,
            num_slots=rollout.max_concurrent_generations,
            max_context_tokens=rollout.max_context_tokens,
            dtype=torch.float32,
            share_weights=share_weights,
        )
        self.rollouts = RolloutManager(
            engine=self.engine,
            envs={"": EnvSetup(make_env=Tiny, renderer=Renderer(tokenizer, tool_format="none"))},
            config=rollout,
            tasks=TaskStream(Tiny().tasks("train"), 0),
            eval_config=self.config.eval,
            eval_draws=held_out({"": Tiny().tasks("test")}, self.config.eval.num_tasks),
        )
        self.folder = folder / "run"
        self.folder.mkdir()
        self.record = RunRecord(self.folder, self.config, accelerator, tokenizer, None)
        self.display = Display(max_steps=self.config.max_steps, title="test")

    def train(self):
        with self.rollouts:
            rollouts = SharedRollouts(self.learner.ranks, self.rollouts)
            args = (self.config, self.learner, rollouts, self.record, self.display)
            train(*args, None, self.probe)

    def probe(self):
        ids = list(range(40, 72))
        return Probe(token_ids=ids, logprobs=self.learner.logprobs(ids), tolerance=1e-3)

    def metrics(self):
        return load_metrics(self.folder / "metrics.jsonl")


def test_an_engine_with_weights_of_its_own_gets_the_learners(tmp_path, model):
    parts = Parts(tmp_path, model, share_weights=False, eval__num_tasks=0)
    parts.train()
    assert all(record["sync/probe_abs_diff"] < 1e-4 for record in parts.metrics())
    assert parts.engine.version == parts.learner.version == 2


def test_weights_that_reach_no_server_are_sent_once_more(tmp_path, model):
    parts = Parts(tmp_path, model, share_weights=False, eval__num_tasks=0)
    update, failed = parts.engine._update_weights, set()

    def fails_at_first(weights, version, probe):
        if version not in failed:
            failed.add(version)
            raise SyncError("a server died")
        return update(weights, version, probe)

    parts.engine._update_weights = fails_at_first
    parts.train()
    assert failed == {0, 1, 2} and parts.engine.version == 2


def test_an_engine_with_other_weights_stops_the_run_and_the_step_is_saved(tmp_path, model):
    parts = Parts(tmp_path, model, share_weights=False, eval__num_tasks=0)
    update = parts.engine._update_weights

    def keeps_others(weights, version, probe):
        if version == 0:
            return update(weights, version, probe)
        with torch.no_grad():
            parts.engine._model.lm_head.weight[40:60] += 0.05
        return {"sync/probe_abs_diff": probe.check(parts.engine._score(probe.token_ids), 1, "it")}

    parts.engine._update_weights = keeps_others
    with pytest.raises(SyncError, match=r"nats per token, more than 0\.001"):
        parts.train()
    state = torch.load(latest_checkpoint(parts.record.checkpoints) / "state.pt", weights_only=True)
    assert state["step"] == state["learner"]["version"] == 1, "saved as the step it is"


def test_one_step_of_staleness_trains_and_is_never_exceeded(tmp_path, model):
    parts = Parts(
        tmp_path, model, share_weights=False, rollout__max_staleness=1, max_steps=5,
        eval__num_tasks=0, optim__learning_rate=1e-3,
    )  # fmt: skip
    parts.train()
    staleness = [record["rollout/staleness"] for record in parts.metrics()]
    assert len(staleness) == 5 and max(staleness) <= 1
    assert max(staleness) > 0, "groups were sampled while the learner trained"
    assert parts.learner.version == 5


def test_evaluations_come_before_between_and_after_once_each(tmp_path, model):
    """F088: once per update, however it is accumulated."""
    parts = Parts(
        tmp_path, model, max_steps=4, eval__eval_steps=2, optim__micro_batch_tokens=128
    )  # fmt: skip
    parts.train()
    assert all(r["train/optimizer_steps"] == 1 for r in parts.metrics() if "loss" in r)
    lines = (parts.folder / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 4 + 3
    assert [r["step"] for r in parts.metrics() if "eval/reward" in r] == [0, 2, 4]


def test_a_checkpoint_holds_the_evaluation_of_its_own_step(tmp_path, model):
    parts = Parts(tmp_path, model, max_steps=2, checkpoint__save_steps=1, eval__eval_steps=1)
    parts.train()
    newest = read_checkpoint(latest_checkpoint(parts.record.checkpoints))
    assert newest.step == 2 and list(newest.metrics["evaluations"]) == [0, 1, 2]


def test_a_batch_that_was_trained_on_in_part_is_not_saved(tmp_path, model):
    """Its rollouts would be played and trained on again, by weights that they moved already."""
    parts = Parts(
        tmp_path,
        model,
        max_steps=2,
        checkpoint__save_steps=1,
        optim__num_minibatches=2,
        loss__old_logprobs="recompute",
    )
    step, calls = parts.learner._step, []

    def fail_in_the_second_batch(*args):
        calls.append(args)
        if len(calls) == 4:
            raise TrainingError("enough")
        step(*args)

    parts.learner._step = fail_in_the_second_batch
    with pytest.raises(TrainingError, match="enough"):
        parts.train()
    (saved,) = parts.record.checkpoints.glob("checkpoint-*")
    assert saved.name == "checkpoint-000001"


def test_checkpoints_come_every_so_many_steps_and_at_the_end(tmp_path, model):
    parts = Parts(
        tmp_path, model, max_steps=3, checkpoint__save_steps=2, eval__num_tasks=0,
    )  # fmt: skip
    parts.train()
    saved = sorted(p.name for p in parts.record.checkpoints.glob("checkpoint-*"))
    assert saved == ["checkpoint-000002", "checkpoint-000003"]


def test_an_error_in_rollouts_saves_what_was_trained(tmp_path, model):
    parts = Parts(tmp_path, model, max_steps=3, eval__num_tasks=0)
    next_groups, calls = parts.rollouts.next_groups, []

    def dies(count):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no more")
        return next_groups(count)

    parts.rollouts.next_groups = dies
    with pytest.raises(RuntimeError, match="no more"):
        parts.train()
    assert latest_checkpoint(parts.record.checkpoints).name == "checkpoint-000001"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_uninterrupted_holds_a_signal_back_until_the_end(number):
    before = signal.getsignal(number)
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(number) is before


def test_an_error_inside_uninterrupted_is_the_one_that_rises():
    with pytest.raises(LookupError), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        raise LookupError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_due_every_zero_steps_is_never_due():
    assert [is_due(step, 2) for step in (1, 2, 3, 4)] == [False, True, False, True]
    assert not is_due(4, 0)


def test_an_engine_that_lost_its_weights_gets_them_in_rollouts_and_in_evaluations(tmp_path, model):
    parts = Parts(tmp_path, model, share_weights=False, eval__num_tasks=2)
    engine, given = parts.engine, []
    update, generate = engine.update_weights, engine.generate

    async def update_weights(weights, version, probe):
        given.append(version)
        engine.wants_weights.clear()
        return await update(weights, version, probe)

    async def generate_once(token_ids, sampling, *, session):
        # The first of each kind: a server comes back while it runs.
        if session in ("eval0-0", "g0-0") and len(given) in (1, 2):
            engine.wants_weights.set()
        return await generate(token_ids, sampling, session=session)

    engine.update_weights, engine.generate = update_weights, generate_once
    parts.train()
    assert given == [0, 0, 0, 1, 2]
    assert [record["step"] for record in parts.metrics()] == [0, 1, 2]
