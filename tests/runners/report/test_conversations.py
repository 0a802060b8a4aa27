"""Conversations: what the records of a real run with an environment say of their turns."""

import json


def test_turns_cut_the_text_where_given_tokens_follow_sampled_ones(talks):
    """Their characters are the text's, the sampled ones' tokens those that count."""
    lines = (talks / "completions.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert any(len(record["turns"]) > 2 for record in records)
    for record in records:
        text, turns, at = record["completion"], record["turns"], 0
        assert [turn["sampled"] for turn in turns] == [i % 2 == 0 for i in range(len(turns))]
        assert sum(turn["tokens"] for turn in turns if turn["sampled"]) == record["tokens"]
        for number, turn in enumerate(turns):
            piece = text[at : at + turn["characters"]]
            at += turn["characters"]
            if number == 0:
                assert piece.startswith("<reasoning>")
            told = "<|tool|>seen: <b>again</b><|assistant|>"
            assert turn["sampled"] or piece.removeprefix("<|end|>") == told
        assert at == len(text)
