"""Groups in two stages have the completions of one stage, and end early if their rewards are equal."""

from collections import defaultdict

import attrs
import pytest

from runners.data.curriculum import updated
from runners.machine import startup
from runners.ranks.ranks import Ranks
from runners.telemetry.diary import Diary
from runners.telemetry.report import Quiet, Report
from runners.training.plan import plan_of
from runners.training.run_state import first_state
from runners.training.setup import SetUp
from runners.training.steps import experience, propose
from runners.training.train import run_training
from tests.support.ranks.rank_threads import as_run_ranks, on_ranks
from tests.support.resuming import config_in, lines_of

LETTERS = ["optim.max_steps=2", "optim.learning_rate=0.0", "eval.at_start=false", "eval.every=0"]
FEW = '''"""One reward that is equal within most groups, and one that is missing for some completions."""

import zlib


def few(completions, **_):
    return [float(zlib.crc32(each[0]["content"].encode()) % 5 == 0) for each in completions]


def none_for_some(completions, **_):
    return [None if zlib.crc32(each[0]["content"].encode()) % 3 else 0.5 for each in completions]
'''
CASES = {
    "one reward": [],
    "two, each normalised in its group, and a penalty on length": [
        'reward.functions=["{folder}/few.py:few", "{folder}/few.py:none_for_some"]',
        "reward.aggregate=normalize_then_sum",
        "loss.baseline=group_mean",
        "loss.scale=group",
        "loss.overlong={buffer=3, penalty=0.5}",
    ],
    "entropies": ["loss.top_entropy_quantile=0.5"],
}


def groups_of(folder):
    """The records of each batch step's groups, in order."""
    found = defaultdict(list)
    for line in lines_of(folder / "completions.jsonl"):
        found[line["batch_step"], line["prompt"]].append(line)
    return found


@pytest.mark.parametrize("name", CASES)
def test_completions_are_those_of_a_single_stage(tmp_path, name):
    """Groups that differ early are equal to the last digit; others only have their first completions."""
    (tmp_path / "few.py").write_text(FEW)
    usual = [f'reward.functions=["{tmp_path}/few.py:few"]', *LETTERS, "optim.batch_size=7"]
    more = [text.replace("{folder}", str(tmp_path)) for text in CASES[name]]
    one, two = (
        run_training(
            config_in(tmp_path / str(first), *usual, *more, f"rollout.first_stage={first}"), report=Quiet()
        ).folder
        for first in (0, 2)
    )
    whole, staged = groups_of(one), groups_of(two)
    assert whole.keys() == staged.keys()
    sizes = {len(group) for group in staged.values()}
    assert sizes == {2, 4}
    for place, group in staged.items():
        drawn = [(line["completion"], line["rewards"]) for line in group]
        assert drawn == [(line["completion"], line["rewards"]) for line in whole[place]][: len(group)]
        if len(group) == 4:
            assert group == whole[place]  # the same rewards and advantages
        else:
            assert [line["advantage"] for line in group] == [0, 0]
            assert len({line["reward"] for line in group}) == 1
    for line in filter(lambda line: "reward" in line, lines_of(two / "training_log.jsonl")):
        mine = [group for (step, _), group in staged.items() if step == line["batch_step"]]
        drawn = [each for group in mine for each in group]
        assert line["completions/mean_length"] == sum(each["tokens"] for each in drawn) / len(drawn)
        assert line["completions/min_length"] > 0
        taught = sum(len({each["reward"] for each in group} - {None}) > 1 for group in mine)
        assert line["groups/taught"] == pytest.approx(taught / 7)
        tokens = sum(each["tokens"] for each in drawn)
        assert line.get("groups/tokens_per_taught", 0) == (tokens / taught if taught else 0)


def collected(config, ranks):
    """Three batch steps on a rank: prompts, completions, rewards, and the final estimates."""
    run, facts = SetUp(config.check(), startup.prepare(), ranks=ranks).build(), []
    plan, state = plan_of(run, Diary(Report())), first_state(run)
    plan.engine.load(plan.weights(state))
    known = run.curriculum
    for step in range(3):
        state = attrs.evolve(state, curriculum=known, batch_step=step)
        found = experience(plan, plan.engine, propose(plan, state))
        state = attrs.evolve(state, position=found.position)
        known = updated(known, found.outcomes, step, run.config.data.rate_decay)
        asked = [example.number for example in found.examples]
        facts.append((asked, found.texts, str(found.rewards_pg), found.sampled_tokens, found.outcomes))
    return facts, [array.tolist() for array in (known.passes_n, known.step_n, known.first_n)]


@pytest.mark.parametrize("number", [2, 5])
def test_ranks_draw_the_prompts_and_stages_of_one(tmp_path, number):
    """Dynamic sampling is on; with five ranks, one has no prompt."""
    (tmp_path / "few.py").write_text(FEW)
    settings = ["data.curriculum=adaptive", "rollout.first_stage=2", "loss.dynamic_sampling=true"]
    rewards = f'reward.functions=["{tmp_path}/few.py:few"]'
    config = config_in(tmp_path / "runs", rewards, "reward.timeout=0", *settings)
    want = collected(config, Ranks())
    assert any(len(outcomes) > 4 for *_, outcomes in want[0])
    for found in on_ranks(number, lambda own: collected(config, as_run_ranks(own))):
        assert found == want
