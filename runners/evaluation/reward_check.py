"""Checks a run before it starts: its first prompt, its prompt lengths and its rewards.

No weights are loaded. The rewards score the data's reference answers in the required format, and
bad answers. A reward that cannot distinguish the two gives no useful gradient. Without reference
answers, or if no correct completion is known, the rewards score neutral texts, which only shows
whether the rewards run.
"""

import itertools
import re
from collections.abc import Iterable, Sequence

import attrs
import numpy as np

from runners.answers.forms import PLACE, AnswerForm
from runners.answers.thoughts import split_thoughts
from runners.answers.values import parse_number
from runners.config.loading import Config
from runners.config.names import REWARD_NAMES
from runners.data.datasets import load_rows, with_answers_of
from runners.data.prompts import Example, build_examples, columns_of, processor_of, reward_columns
from runners.data.rendering import template_notices, use_template
from runners.environments.environments import (
    Environments,
    build_environments,
    load_code,
    start_worker,
)
from runners.errors import UserError, show
from runners.evaluation.evaluation import held_out
from runners.files.json_files import read_json
from runners.models.folders import resolve_model
from runners.models.model_reader import load_tokenizer
from runners.rewards.scoring import Reward, Scorer, check_columns
from runners.tokenization.text import TextDecoder, encode

GOLD = "reference answer"
BARE = "answer without form"
WRONG = "wrong answer"

_READ_ANSWERS = ("correctness_reward_func", "task_score")


@attrs.frozen(eq=False)
class RewardCheck:
    """The results of the checks."""

    prompt: str  # the first prompt, as the model receives it
    train: int  # number of training examples
    evaluation: int  # number of problems in an evaluation
    held_out: int  # number of all held-out problems
    lengths: tuple[int, ...]  # numbers of tokens of the training prompts, ascending
    kinds: tuple[str, ...]  # kinds of scored texts
    rewards: tuple[str, ...]
    values_kan: np.ndarray  # [reward, kind of text, problem]; NaN: no reward
    knows_right: bool  # False if the form reads answers, but no correct completion is known
    warnings: tuple[str, ...]
    images: tuple[tuple[str, int], ...]  # names and numbers of tokens of the first prompt's images


def check_rewards(config: Config, *, problems: int = 8) -> RewardCheck:
    """Reads the data, renders the prompts and scores answers to the first `problems` prompts.

    Raises UserError for each error that would stop the run before its first step.
    """
    worker = start_worker(config)
    rewards = load_code(config, worker)
    rows = load_rows(config.data, config.folders)
    config = with_answers_of(config, *rows)
    data = config.data
    columns = reward_columns((*rows[0], *rows[1]), data.answer)
    check_columns(rewards, columns, environments=config.env.answers and not config.env.agents)
    path = resolve_model(config.model.path, custom_loader=bool(config.model.loader))
    tokenizer = load_tokenizer(path, config.model.trust_remote_code)
    use_template(tokenizer, data.chat_template)
    processor = processor_of(data, path, read_json(path / "config.json"))
    end_ids = tuple(sorted(tokenizer.eos_token_ids))
    decoder = TextDecoder(tokenizer)
    environments = build_environments(
        config.env, data, tokenizer, decoder, end_ids, config.folders, worker
    )
    # These rewards can only score episodes.
    if environments is not None:
        rewards = [each for each in rewards if "environments" not in each.parameters.needed]
    tools = environments.schemas if environments else ()
    (train, dropped), (evaluation, dropped_there) = (
        build_examples(part, data, tokenizer, tools, processor, columns) for part in rows
    )
    form = config.answer_form
    tried = train[:problems]
    # Without a form, the user's rewards may read the bare answer.
    right = PLACE if any(example.answer for example in tried) else ""
    if form is not None:
        tried = [attrs.evolve(example, answer=form.gold(example.answer)) for example in tried]
        right = form.right
    knows_right = bool(right) or form is None
    kinds, values_kan, faults = _score(config, rewards, tried, right, decoder)
    if environments is not None:
        faults += _begun(environments, columns, train[0])
    warnings = [
        *rows[0].notices("train", dropped, data.max_prompt_length),
        *rows[1].notices("eval", dropped_there, data.max_prompt_length),
        *template_notices(tokenizer, data, config.rollout.stop),
        *faults,
        # It is unknown which answers the user's pattern or function extracts.
        *(_judge(rewards, kinds, values_kan, form, tried) if knows_right else []),
    ]
    return RewardCheck(
        prompt=train[0].text,
        train=len(train),
        evaluation=len(held_out(evaluation, config.eval.samples)),
        held_out=len(evaluation),
        lengths=tuple(sorted(len(example.tokens) for example in train)),
        kinds=tuple(kinds),
        rewards=tuple(reward.name for reward in rewards),
        values_kan=values_kan,
        knows_right=knows_right,
        warnings=tuple(warnings),
        images=tuple(
            (each.name, processor.count_tokens(each)) for each in train[0].images if processor
        ),
    )


def _begun(environments: Environments, columns: Iterable[str], example: Example) -> list[str]:
    """Returns messages about errors at the start of an episode."""
    try:
        environments.check_columns(columns)
        session = environments.begin([example])
    except UserError as error:
        return [str(error)]
    environments.release(session)
    found = [f"the environment: {episode.fault}" for episode in session.episodes if episode.fault]
    if not found and not environments.tools:
        found.append(
            "there are no tools, because the environment has no public method besides reset"
        )
    return found


def _answers(example: Example, form: str, nudge: str) -> dict[str, str]:
    """Returns completions for one problem, by kind. An empty `form` means that no correct
    completion is known; then the completions are neutral texts.
    """
    if not form:
        return {
            "prompt's words": nudge + example.messages[-1]["content"],
            "one sentence": f"{nudge}This is a sentence.",
            "empty": nudge,
        }
    if form == PLACE:
        return {
            GOLD: nudge + example.answer,
            WRONG: nudge + _wrong(example.answer),
            "empty": nudge,
        }
    return {
        GOLD: form.replace(PLACE, example.answer),
        WRONG: form.replace(PLACE, _wrong(example.answer)),
        BARE: example.answer,
        "form without answer": form.replace(PLACE, ""),
        "cut off": form.partition(PLACE)[0],
        "empty": nudge,
    }


def _behind(opening: str, text: str) -> str:
    """Returns the text as a completion that starts with the chat template's opening and closes the
    opening's tag.
    """
    if not opening or text.startswith(opening.strip()):
        return text
    tag = re.search(r"<(\w+)>\s*$", opening)
    return f"{opening}</{tag[1]}>\n{text}" if tag else opening + text


def _wrong(answer: str) -> str:
    """Returns a wrong answer of the same kind: the next number or letter, or a text that does not
    occur in the data.
    """
    if len(answer) == 1 and answer.isalpha():
        return "B" if answer in "Aa" else "A"
    number = parse_number(answer)
    return "no-such-answer" if number is None else str(number + 1)


def _score(
    config: Config,
    rewards: Sequence[Reward],
    examples: Sequence[Example],
    form: str,
    decoder: TextDecoder,
) -> tuple[list[str], np.ndarray, list[str]]:
    """Returns the kinds of answers, each reward's values for these answers [K, A, N], and the
    errors.
    """
    if not rewards:
        return [], np.zeros((0, 0, 0)), []
    data = config.data
    scorer = Scorer(rewards, config.reward.timeout, "skip", data.thoughts)
    is_open = split_thoughts(data.nudge, data.thoughts)[1] is None
    nudge = data.nudge + (data.thoughts[1] if is_open else "")
    answers = [_answers(example, form, nudge) for example in examples]
    by_kind = {kind: [each[kind] for each in answers] for kind in answers[0]}
    values = []
    faults: list[str] = []
    for kind, texts in by_kind.items():
        begun = [_behind(examples[0].opening, text) for text in texts]
        tokens = [encode(decoder.tokenizer, text, add_special_tokens=False) for text in begun]
        scores = scorer.score(
            [decoder.decode(each) for each in tokens],  # as in a run
            [list(example.messages) for example in examples],
            columns_of(examples),
            [list(each) for each in tokens],
        )
        values.append(scores.values_kb)
        faults += [f"{problem} ({kind})" for problem in scores.problems]
    return list(by_kind), np.stack(values, axis=1), faults


def _judge(
    rewards: Sequence[Reward],
    kinds: Sequence[str],
    values_kan: np.ndarray,
    form: AnswerForm | None,
    examples: Sequence[Example],
) -> list[str]:
    """Returns messages about rewards that give every text the same value, and about wrong answers
    whose total reward is not below the reference answer's.

    Without an answer format, no text is better than another, so only rewards that give no value at
    all are reported.
    """
    found = []
    for reward, values_an in zip(rewards, values_kan, strict=True):
        known = values_an[~np.isnan(values_an)]
        if not known.size:
            found.append(f"{reward.name} returned no reward for any answer")
        elif form and np.all(known == known[0]):
            found.append(f"{reward.name} returned {known[0]:g} for every answer, good or bad")
        elif form:
            right_n = values_an[kinds.index(GOLD)]
            wrong_n = values_an[kinds.index(WRONG)]
            worse = [example.answer for example in itertools.compress(examples, right_n < wrong_n)]
            # The user's reward may depend on the length, which differs by chance.
            if len(worse) == len(examples) or (worse and reward.name in REWARD_NAMES):
                found.append(
                    f"{reward.name} returned less for the reference answer {show(worse[0])} than "
                    "for a wrong one"
                )
    if form is None or not rewards:
        return found
    alone = all(form.is_right(example.answer, example.answer) for example in examples)
    good = (GOLD, BARE) if alone else (GOLD,)
    weights = np.array([reward.weight for reward in rewards])
    totals_a = np.nansum(weights[:, None, None] * values_kan, axis=0).mean(axis=1)
    gold = totals_a[list(kinds).index(GOLD)]
    # The user's rewards may ignore the answer, but must not prefer a bad completion to a correct
    # one.
    reads = any(reward.name in _READ_ANSWERS for reward in rewards)
    preferred = (totals_a > gold) | (reads & (totals_a == gold))
    better = [kind for kind in itertools.compress(kinds, preferred) if kind not in good]
    if better:
        found.append(
            f"the reference answer's total reward is not above the total reward of: "
            f"{', '.join(better)}"
        )
    return found
