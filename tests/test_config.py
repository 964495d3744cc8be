"""The config: strict, documented, and the same whichever way it is read."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl import config_file
from agentrl.config import ConfigError, RunConfig
from agentrl.config_file import (
    describe_config,
    dump_config,
    load_config,
    make_config,
    parse_overrides,
)

ROOT = Path(__file__).resolve().parents[1]
LEAST = {"model": {"name_or_path": "m"}, "env": {"id": "e"}}
SECTIONS = {name: kind for name, (kind, prefix) in config_file.SECTIONS.items() if name == prefix}
KEYS = {
    f"{section}.{key}": field
    for section, kind in SECTIONS.items()
    for key, field in kind.model_fields.items()
} | {name: field for name, field in RunConfig.model_fields.items() if name not in SECTIONS}
SELF_EXPLANATORY = {
    "optim.learning_rate",
    "optim.lr_scheduler_type",
    "optim.adam_beta1",
    "optim.adam_beta2",
    "optim.adam_epsilon",
    "optim.weight_decay",
}
UNITS = ("_tokens", "_s", "_steps", "_turns", "_calls", "_generations", "_fraction", "_attempts")
NO_UNIT = {  # its documentation says what is counted
    "rollout.max_staleness",
    "sglang.max_tries",
    "rollout.min_group_size",
    "loss.max_mismatch",
    "advantage.length_penalty",  # a name
    "advantage.length_penalty_weight",
    "optim.max_grad_norm",
    "checkpoint.save_total_limit",
}


def config(*overrides):
    return make_config(parse_overrides(list(overrides), {k: dict(v) for k, v in LEAST.items()}))


def refused(*overrides) -> str:
    with pytest.raises(ConfigError) as caught:
        config(*overrides)
    return str(caught.value)


@pytest.mark.parametrize("key", KEYS)
def test_every_key_says_what_it_means(key):
    assert KEYS[key].description or key in SELF_EXPLANATORY
    assert key in describe_config()


@pytest.mark.parametrize("key", [k for k in KEYS if re.search(r"max|min_|limit|length|timeout", k)])
def test_every_limit_names_its_unit(key):
    """F092: limits of one style of name and several units are mistaken for each other."""
    assert key.endswith(UNITS) or key in NO_UNIT


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_config_loads_and_survives_its_dump(path, tmp_path):
    """F096."""
    shipped = load_config(path)
    (tmp_path / "dump.yaml").write_text(dump_config(shipped))
    assert load_config(tmp_path / "dump.yaml") == shipped


def test_sections_that_are_not_written_have_their_defaults():
    """F096."""
    assert config().eval.num_tasks == 0 and config().loss.loss_type == "ppo"


@settings(max_examples=60, deadline=None)
@example("next\x85line", 1e-5, {"\u2028": "\x85"})
@given(
    st.one_of(st.sampled_from(["1e5", "1e-5", "no", "null", "~", "1", "2020-01-01"]), st.text()),
    st.floats(1e-12, 1.0),
    st.dictionaries(st.text(), st.one_of(st.none(), st.booleans(), st.integers(), st.text())),
)
def test_a_dump_reads_back_as_it_was(tmp_path_factory, text, rate, kwargs):
    values = LEAST | {"optim": {"learning_rate": rate}, "output_dir": text}
    before = make_config(values | {"env": {"id": "e", "kwargs": kwargs}})
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(dump_config(before), encoding="utf-8", newline="")
    assert load_config(path) == before


def test_overrides_set_nested_keys_as_yaml():
    changed = config(
        "optim.learning_rate=1e-5", "--rollout.max_turns=3", "env.kwargs.kinds=[sum, word]",
        "loss.epsilon_high=null", "env.kwargs.deep.er=true",
    )  # fmt: skip
    assert changed.optim.learning_rate == 1e-5 and changed.rollout.max_turns == 3
    assert changed.env.kwargs == {"kinds": ["sum", "word"], "deep": {"er": True}}
    assert changed.loss.epsilon_high is None


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.0e-5", "1.e-5", "+1e-5", "0.00001"])
def test_a_number_in_any_notation_is_a_number(text):
    assert config(f"optim.learning_rate={text}").optim.learning_rate == 1e-5


def test_a_bare_no_is_the_word_no_where_that_is_a_choice():
    assert config("model.mixed_precision=no").model.mixed_precision == "no"


@pytest.mark.parametrize("key", [key for key in KEYS if "." in key])
def test_a_key_in_the_wrong_section_is_told_its_own(key):
    """F090: rollout.learning_rate belongs under optim."""
    section, _, name = key.partition(".")
    for other in [None, *SECTIONS]:
        if other == section or (other and name in SECTIONS[other].model_fields):
            continue
        wrong = f"{other}.{name}" if other else name
        if wrong in KEYS or wrong in SECTIONS:
            continue
        message = refused(f"{wrong}=1")
        assert f"unknown key '{wrong}'" in message
        assert re.search(rf"did you mean .*\b{re.escape(key)}\b", message), message


@pytest.mark.parametrize("key", ["max_steps", "seed", "output_dir", "report_to"])
def test_a_key_that_stands_in_no_section_is_told_so(key):
    assert f"did you mean {key}?" in refused(f"optim.{key}=1")


@pytest.mark.parametrize("key", KEYS)
def test_a_key_with_a_letter_missing_is_told_its_name(key):
    """F090: a typo must not train with defaults for hours."""
    typo = key[:-2] + key[-1]
    if typo in KEYS or len(key.rsplit(".", 1)[-1]) < 4:
        return
    assert key in refused(f"{typo}=1").splitlines()[0]


def test_a_key_like_no_other_gets_no_suggestion():
    assert refused("optim.zzz=1") == "unknown key 'optim.zzz'"


def test_all_mistakes_are_said_at_once():
    message = refused("seed=x", "max_steps=0", "optim.learning_rate=-1")
    assert "key 'seed'" in message and "key 'max_steps'" in message
    assert "key 'optim.learning_rate'" in message and "(got -1)" in message


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optim.learning_rate=.nan", "key 'optim.learning_rate'"),
        ("rollout.env_timeout_s=.inf", "finite number"),
        ("rollout.max_turns=1.5", "key 'rollout.max_turns'"),
        ("rollout.max_turns='3'", "key 'rollout.max_turns'"),
        ("model.freeze_embeddings=1", "key 'model.freeze_embeddings'"),
        ("loss.loss_type=clip", "'ppo', 'cispo', 'sapo' or 'reinforce'"),
        ("loss.loss_type=dapo", "loss_type=ppo with aggregation=token_mean"),
        ("loss.delta=2.0 loss.loss_type=sapo", "delta=2.0 does nothing without loss_type=ppo"),
        ("loss.vf_coef=0.5", "vf_coef=0.5 does nothing without advantage.estimator=gae"),
        ("advantage.lam=0.5", "lam=0.5 does nothing without estimator=gae"),
        ("loss.beta_schedule=linear", "beta > 0"),
        ("loss.importance_sampling_min=0.5", "importance_sampling_mode=token_mask"),
        ("loss.kl_in_reward=true loss.beta=0.1", "reinforce_plus_plus or gae"),
        ("advantage.level=turn advantage.estimator=gae", "grpo or rloo"),
        ("advantage.length_penalty=overlong", "overlong_buffer_tokens"),
        ("advantage.estimator=pass_at_k advantage.pass_k=9", "rollout.num_generations=8"),
        ("loss=null", "key 'loss'"),
        ("seed.deep=1", "key 'seed'"),
        ("env.id.deep=1", "'id' holds a value, not a section"),
        ("rollout.max_turns", "not of the form section.key=value"),
        ("env.reward_weights=[1]", "1 reward_weights for 0 reward_funcs"),
        ("rollout.min_group_size=9", "larger than num_generations=8"),
        ("optim.num_iterations=2", "write recompute or rollout"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_its_key(override, said):
    assert said in refused(*override.split())


def test_a_limit_that_hides_a_longer_one_is_refused_with_the_sum():
    """F025."""
    message = refused(
        "rollout.episode_timeout_s=60", "rollout.generate_timeout_s=50", "rollout.env_timeout_s=50"
    )
    assert "episode_timeout_s=60" in message and "= 100" in message


def test_a_server_is_named_by_a_url():
    with pytest.raises(ConfigError, match=r"'node1:30000' is no url such as http://node1:30000"):
        config("sglang.mode=connect", "sglang.urls=[node1:30000]")


def test_minibatches_that_do_not_divide_a_batch_are_told_which_do():
    """F089: the error lists the valid values."""
    message = refused("optim.num_minibatches=3", "loss.old_logprobs=recompute")
    assert "rollout.prompts_per_step=8; valid: [1, 2, 4, 8]" in message


def test_a_missing_key_is_named():
    with pytest.raises(ConfigError, match=r"key 'model\.name_or_path' is missing"):
        make_config({"model": {}, "env": {"id": "e"}})


def test_an_empty_config_says_what_every_run_needs():
    with pytest.raises(
        ConfigError, match=r"key 'model' is missing\nmix: a run has .* write env.id"
    ):
        make_config({})


# Several envs.

MIX = {"model": {"name_or_path": "m"}, "mix": {"sums": {"id": "e"}, "shop": {"id": "f"}}}


def mixed(*overrides):
    return make_config(parse_overrides([*overrides], copy.deepcopy(MIX)))


def test_a_run_has_one_env_under_no_name_or_several_under_theirs():
    assert [*config().envs] == [""] and config().envs[""].id == "e"
    envs = mixed("mix.shop.weight=3.0", "mix.shop.kwargs.n=1").envs
    assert [(name, env.id) for name, env in envs.items()] == [("sums", "e"), ("shop", "f")]
    assert envs["shop"].kwargs == {"n": 1}


def test_held_out_arguments_of_a_mix_stand_under_the_name_of_their_env():
    assert config("eval.env_kwargs.n=2", "env.kwargs.n=1").eval_envs[""].kwargs == {"n": 2}
    envs = mixed("eval.env_kwargs.shop.n=2", "mix.shop.kwargs={n: 1, m: 1}").eval_envs
    assert envs["shop"].kwargs == {"n": 2, "m": 1} and envs["sums"].kwargs == {}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("env.id=e", "a run has either env or mix"),
        ("mix.a/b.id=e", "mix: 'a/b' cannot name an env"),
        ("mix.rollout.id=e", "mix: 'rollout' cannot name an env"),
        ("mix.shop.weight=0.0", "key 'mix.shop.weight'"),
        ("mix.shop.kwarg=1", "did you mean mix.shop.kwargs?"),
        ("mix.shop.reward_weights=[1]", "1 reward_weights for 0 reward_funcs"),
        ("mix.other.kwargs.n=1", "key 'mix.other.id' is missing"),
        ("eval.env_kwargs.n=1", "eval.env_kwargs.n: with a mix"),
    ],
)
def test_a_mix_that_does_not_fit_is_refused_by_its_key(override, said):
    with pytest.raises(ConfigError) as caught:
        mixed(override)
    assert said in str(caught.value)


def test_a_curriculum_needs_a_mix():
    assert "curriculum needs" in refused("curriculum.floor=0.2")
    assert mixed("curriculum={}").curriculum.success_reward == 1.0


def test_the_keys_of_a_mix_are_explained():
    assert "mix.<name>.weight" in describe_config() and "curriculum.floor" in describe_config()


def test_a_mix_survives_its_dump(tmp_path):
    before = mixed("curriculum.floor=0.2", "mix.shop.weight=2.0")
    (tmp_path / "dump.yaml").write_text(dump_config(before))
    assert load_config(tmp_path / "dump.yaml") == before
