"""A judge from a folder: its rewards are the head at the last token, whatever the batch."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from runners.config.sections import JudgeConfig
from runners.errors import UserError
from runners.judges.classifier import ClassifierJudge
from runners.rewards.scoring import Scorer, resolve_rewards
from tests.support.tiny_models import make_model_folder

QUESTION = [{"role": "user", "content": "What is 7+5?"}]
TEXTS = ["12", "The answer is 12, as 7+5=12.", "no", "12" * 60]


def make_classifier(folder, arch="qwen2", labels=1, **options):
    """A folder with a head of random weights in place of the one for words, as transformers writes it."""
    make_model_folder(folder, arch, **options)
    weights = mx.load(str(folder / "model.safetensors"))
    head = mx.random.normal((labels, 32), key=mx.random.key(1))
    mx.save_safetensors(str(folder / "model.safetensors"), {**weights, "score.weight": head})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["SomeForSequenceClassification"], "tie_word_embeddings": False}
    if labels > 1:
        config["id2label"] = {str(i): name for i, name in enumerate(["bad", "fair", "good"])}
    (folder / "config.json").write_text(json.dumps(config))
    return head


def by_hand(folder, head, texts):
    """Each text alone through mlx-lm's own module, without padding: logits of the labels."""
    from mlx_lm.utils import load_model, load_tokenizer

    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    module, _ = load_model(folder, strict=False, model_config={"tie_word_embeddings": True})
    tokenizer = load_tokenizer(folder, eos_token_ids=config["eos_token_id"])
    rows = []
    for text in texts:
        whole = tokenizer.apply_chat_template(
            [*QUESTION, {"role": "assistant", "content": text}], tokenize=False
        )
        tokens = tokenizer.encode(whole, add_special_tokens=False)
        rows.append(np.array(module.model(mx.array([tokens]))[0, -1] @ head.T))
    return np.stack(rows)


def rewards_of(folder, texts=TEXTS, **settings):
    """What a scorer gets."""
    judges = {"rm": JudgeConfig(kind="classifier", path=str(folder), **settings)}
    rewards = resolve_rewards(["judge.rm"], judges=judges)
    rewards[0].function.check()
    return Scorer(rewards, 0.001).score(texts, [QUESTION] * len(texts), {})


@pytest.mark.parametrize("arch", ["qwen2", "llama", "qwen3"])
def test_a_reward_model_gives_its_score(tmp_path, monkeypatch, arch):
    """Padding, order and batches change nothing; reward.timeout is not its limit."""
    head = make_classifier(tmp_path / "rm", arch)
    scores = rewards_of(tmp_path / "rm")
    assert scores.problems == []
    np.testing.assert_allclose(scores.values_kb[0], by_hand(tmp_path / "rm", head, TEXTS)[:, 0], atol=1e-4)
    rows, plain = [], nn.Embedding.__call__
    monkeypatch.setattr(
        nn.Embedding, "__call__", lambda table, ids: rows.append(len(ids)) or plain(table, ids)
    )
    alone = rewards_of(tmp_path / "rm", batch_tokens=8).values_kb
    assert rows[-len(TEXTS) :] == [1] * len(TEXTS)
    np.testing.assert_allclose(alone, scores.values_kb, atol=1e-5)


def test_a_classifier_gives_a_labels_probability(tmp_path):
    """The label is asked for by name."""
    head = make_classifier(tmp_path / "rm", labels=3)
    logits = by_hand(tmp_path / "rm", head, TEXTS)
    wanted = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    found = rewards_of(tmp_path / "rm", label="good").values_kb[0]
    np.testing.assert_allclose(found, wanted[:, 2], atol=1e-5)


def test_a_too_long_conversation_gets_no_reward(tmp_path):
    """It alone, in one line."""
    make_classifier(tmp_path / "rm")
    scores = rewards_of(tmp_path / "rm", max_length=80)
    assert [value == value for value in scores.values_kb[0]] == [True, True, True, False]
    assert "reads judge.rm.max_length tokens at most, at completion 3" in scores.problems[0]


def test_folders_that_are_no_classifier(tmp_path):
    """In one line, before a run: no head, no such label, none named, another width, missing weights."""

    def refused(folder, **settings):
        with pytest.raises(UserError) as caught:
            ClassifierJudge("rm", JudgeConfig(kind="classifier", path=str(folder), **settings)).check()
        return str(caught.value)

    make_model_folder(tmp_path / "lm")
    assert "found no score.weight" in refused(tmp_path / "lm")
    make_classifier(tmp_path / "three", labels=3)
    assert "judge.rm.label: expected one of bad, fair, good, found none" in refused(tmp_path / "three")
    assert "did you mean good?" in refused(tmp_path / "three", label="goood")
    make_classifier(tmp_path / "one")
    assert "expected no label, as the model gives one score" in refused(tmp_path / "one", label="good")
    file = tmp_path / "one" / "model.safetensors"
    weights = dict(mx.load(str(file)))
    mx.save_safetensors(str(file), {**weights, "score.weight": mx.zeros((1, 16))})
    assert "expected the shape [labels, 32], found [1, 16]" in refused(tmp_path / "one")
    lost = next(name for name in weights if "layers" in name)
    mx.save_safetensors(str(file), {name: leaf for name, leaf in weights.items() if name != lost})
    assert lost in refused(tmp_path / "one")
    assert "there is no such folder" in refused("./nowhere")
