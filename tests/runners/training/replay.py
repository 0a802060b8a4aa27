"""The specification of a whole run in NumPy float64: from a config's keys and the completions that it drew.

`reference.py` has the loss, `reference_advantages.py` the advantages, `numpy_llama.py` the model. Here is
what a run makes of them, written from docs/config.md: what a key means, and in which order things happen.
"""

import json
import math
from types import SimpleNamespace

import numpy as np

from tests.runners.training import numpy_llama
from tests.support import reference
from tests.support.properties import reference_advantages

EOS = 2  # of the tiny models' tokenizers
NAMES = "odd", "last"  # of RECORDING's rewards


class Replay:
    """A run: θ, what samples, the reference, Adam's moments; `lines` are the figures of its updates."""

    def __init__(self, keys, calls, weights, model, encode):
        """`keys`: all of [optim], [loss], [rollout] and [reward]; `calls`: see `read_calls`; `encode`: from a
        prompt to its tokens."""
        self.optim, self.loss, self.rollout, self.reward = keys
        self.calls, self.model, self.encode = iter(calls), model, encode
        self.theta, self.old, self.ref = weights, weights, weights
        self.m = {name: np.zeros_like(leaf) for name, leaf in weights.items()}
        self.v = dict(self.m)
        self.step = self.update = self.synced = self.ref_synced = 0
        self.lines = []

    def run(self, examples):
        """All updates; the weights afterwards."""
        optim = self.optim
        steps = optim.max_steps or math.ceil(examples * optim.num_epochs / optim.batch_size)
        phases = math.ceil(steps / optim.gradient_accumulation_steps)
        self.updates = phases * optim.num_iterations * optim.minibatches
        while self.step < steps:
            count = min(optim.gradient_accumulation_steps, steps - self.step)
            batches = [self.collect() for _ in range(count)]
            self.step += count
            for _ in range(optim.num_iterations):
                for part in range(optim.minibatches):
                    rows = [row for batch in batches for row in self.minibatch(batch, part)]
                    self.learn(rows, batches)
            if self.step - self.synced >= self.loss.sync_every:
                self.old, self.synced = self.theta, self.step
            every, mixup = self.loss.ref_sync_every, self.loss.ref_mixup
            if every and self.step - self.ref_synced >= every:
                self.ref = {k: mixup * leaf + (1 - mixup) * self.ref[k] for k, leaf in self.theta.items()}
                self.ref_synced = self.step
        assert next(self.calls, None) is None, "the rewards were called more often"
        return self.theta

    def minibatch(self, batch, part):
        """Consecutive rows."""
        bounds = [len(batch) * i // self.optim.minibatches for i in (part, part + 1)]
        return batch[slice(*bounds)]

    def collect(self):
        """The rows of a batch step, with dynamic sampling's rounds; each knows its batch's statistics."""
        size, missing, groups, drawn = self.rollout.num_generations, self.optim.batch_size, [], 0
        rounds = self.loss.max_resample if self.loss.dynamic_sampling else 0
        for number in range(rounds + 1):
            found = self.scored(next(self.calls), missing)
            drawn += sum(len(row.ids) for group in found for row in group)
            varied = [group for group in found if len({row.reward for row in group}) > 1]
            missing -= len(varied)
            if not missing or number == rounds:
                flat = [group for group in found if group not in varied][:missing]
                groups += [group for group in found if group in varied or group in flat]
                break
            groups += varied
        rewards = np.array([[row.reward for row in group] for group in groups])
        assert rewards.shape == (self.optim.batch_size, size)
        adv = reference_advantages.group_advantages(
            rewards, baseline=self.loss.baseline, scale=self.loss.scale
        )
        rows = [row for group in groups for row in group]
        for row, advantage in zip(rows, adv.reshape(-1), strict=True):
            row.advantage = advantage
            z = self.logits(self.old, row) / self.rollout.temperature
            row.old, row.entropy = picked(z, row.ids), entropies(z)
            row.mu = np.array([self.drawn_logp(*pair) for pair in zip(z, row.ids, strict=True)])
            row.ref = picked(self.logits(self.ref, row) / self.rollout.temperature, row.ids)
            row.counts = row.finished or not self.loss.mask_truncated_completions
        counted = sorted(h for row in rows if row.counts for h in row.entropy)
        number = max(1, round(self.loss.top_entropy_quantile * len(counted)))
        for row in rows:
            row.keep = np.ones(len(row.ids))
            if self.loss.top_entropy_quantile < 1:
                row.keep = 1.0 * (row.entropy >= counted[-number] - 1e-9)
        return rows

    def scored(self, call, missing):
        """Groups of rows with their combined rewards."""
        size, limit = self.rollout.num_generations, self.rollout.max_new_tokens
        ids = call["ids"]
        assert len(ids) == missing * size and call["prompts"] == [
            prompt for prompt in call["prompts"][::size] for _ in range(size)
        ]
        values = np.array([call["values"][name] for name in NAMES], np.float64)
        weights = self.reward.weights or [1.0] * len(NAMES)
        total = reference_advantages.combine_rewards(
            values, weights, aggregate=self.reward.aggregate, group_size=size
        )
        buffer, factor = self.loss.overlong["buffer"], self.loss.overlong["penalty"]
        rows = []
        for prompt, tokens, reward in zip(call["prompts"], ids, total, strict=True):
            assert 1 <= len(tokens) <= limit and EOS not in tokens[:-1]
            finished = tokens[-1] == EOS
            assert finished or len(tokens) == limit
            penalty = (
                reference_advantages.overlong_penalty(len(tokens), limit, buffer, factor) if buffer else 0
            )
            row = SimpleNamespace(prompt=self.encode(prompt), ids=tokens, finished=finished)
            row.reward, row.penalty = reward + penalty, penalty
            rows.append(row)
        return [rows[i : i + size] for i in range(0, len(rows), size)]

    def logits(self, weights, row):
        """[T,V] at the places of a completion's tokens."""
        z, row.tape = numpy_llama.forward(weights, self.model, np.array(row.prompt + row.ids[:-1]))
        return z[len(row.prompt) - 1 :]

    def drawn_logp(self, z, token):
        """log μ: of the tempered distribution, cut off and normalised again."""
        rollout = self.rollout
        kept, _ = reference.kept_tokens(z, rollout.top_p, rollout.top_k, rollout.min_p)
        assert kept[token], "a token was drawn that is cut off"
        return picked(np.where(kept, z, -np.inf)[None], [token])[0]

    def learn(self, rows, batches):
        """One update of these rows, and its figures."""
        spec, temperature = self.loss, self.rollout.temperature
        width = max(len(row.ids) for row in rows)
        z = [self.logits(self.theta, row) / temperature for row in rows]

        def padded(values):
            return np.array([[*value, *[0.0] * (width - len(value))] for value in values])

        arrays = {
            "old": padded([row.old for row in rows]),
            "rollout": padded([row.mu for row in rows]),
            "ref": padded([row.ref for row in rows]) if spec.beta else None,
            "entropy": padded([entropies(each) for each in z]),
            "keep": padded([row.keep for row in rows]),
            "max_completion_length": self.rollout.max_new_tokens,
        }
        logp = padded([picked(each, row.ids) for each, row in zip(z, rows, strict=True)])
        adv = np.array([row.advantage for row in rows])
        mask = padded([[float(row.counts)] * len(row.ids) for row in rows])
        out = reference.policy_loss(spec, logp, adv, mask, **arrays)
        total = {name: np.zeros_like(leaf) for name, leaf in self.theta.items()}
        for i, row in enumerate(rows):
            p, count = numpy_llama.softmax(z[i]), len(row.ids)
            drawn = np.eye(p.shape[1])[row.ids]
            by_entropy = -p * (np.log(p) + entropies(z[i])[:, None])
            dz = out.grad[i, :count, None] * (drawn - p) + out.entropy_grad[i, :count, None] * by_entropy
            dz = np.concatenate([np.zeros((len(row.prompt) - 1, p.shape[1])), dz / temperature])
            for name, part in numpy_llama.gradient(self.theta, self.model, row.tape, dz).items():
                total[name] += part
        line = {"loss": out.loss, **self.step_optimizer(total), **self.of_rollouts(batches)}
        active = adv != 0 if not spec.beta and not spec.entropy_coef else np.ones(len(rows), bool)
        seen = reference.policy_loss(spec, logp, adv, mask * active[:, None], **arrays).stats
        if seen["num_tokens"]:
            line |= {name: seen[of] for name, of in LOGGED.items() if name != "kl" or spec.beta}
            both, one = spec.surrogate in ("clip", "dual_clip"), spec.surrogate == "cispo"
            line |= {name: seen[of] for name, of in CLIPPED.items()} if both else {}
            line |= {"cispo_clip_ratio": seen["clip_high"]} if one else {}
        self.lines.append(line)

    def step_optimizer(self, total):
        """Clipped AdamW; the norm before, and the rate."""
        optim = self.optim
        norm = math.sqrt(sum(float((part**2).sum()) for part in total.values()))
        factor = min(1.0, optim.max_grad_norm / (norm + 1e-6)) if optim.max_grad_norm else 1.0
        warm, rate, u = round(self.updates * optim.warmup_ratio), optim.learning_rate, self.update
        if u < warm:
            rate *= (u + 1) / (warm + 1)
        else:
            done = (u - warm) / max(self.updates - warm, 1)
            cosine = 0.5 * (1 + math.cos(math.pi * done))
            rate *= {"cosine": cosine, "linear": 1 - done, "constant": 1.0}[optim.schedule]
        self.update += 1
        b1, b2 = optim.betas
        theta = {}
        for name, leaf in self.theta.items():
            grad = factor * total[name]
            self.m[name] = b1 * self.m[name] + (1 - b1) * grad
            self.v[name] = b2 * self.v[name] + (1 - b2) * grad**2
            m, v = self.m[name] / (1 - b1**self.update), self.v[name] / (1 - b2**self.update)
            theta[name] = leaf * (1 - rate * optim.weight_decay) - rate * m / (np.sqrt(v) + optim.eps)
        self.theta = theta
        return {"grad_norm": norm, "learning_rate": rate, "update": self.update, "batch_step": self.step}

    def of_rollouts(self, batches):
        """Rewards and lengths of the update's batch steps."""
        rows, size = [row for batch in batches for row in batch], self.rollout.num_generations
        groups = [[row.reward for row in rows[i : i + size]] for i in range(0, len(rows), size)]
        lengths = [len(row.ids) for row in rows]
        found = {
            "reward": np.mean(groups),
            "reward_std": np.mean([np.std(group, ddof=1) for group in groups]),
            "frac_reward_zero_std": np.mean([len(set(group)) == 1 for group in groups]),
            "completions/mean_length": np.mean(lengths),
            "completions/max_length": max(lengths),
            "completions/clipped_ratio": np.mean([not row.finished for row in rows]),
        }
        return found | ({"length_penalty": np.mean([row.penalty for row in rows])} if rows[0].penalty else {})


LOGGED = {
    "entropy": "entropy",
    "kl": "kl",
    "ratio/min": "ratio_min",
    "ratio/mean": "ratio_mean",
    "ratio/max": "ratio_max",
    "sampling/sampling_logp_difference/mean": "logp_diff_mean",
    "sampling/sampling_logp_difference/max": "logp_diff_max",
    "sampling/importance_sampling_ratio/min": "is_ratio_min",
    "sampling/importance_sampling_ratio/mean": "is_ratio_mean",
    "sampling/importance_sampling_ratio/max": "is_ratio_max",
    "sampling/kl": "sampling_kl_k3",
    "sampling/masked_fraction": "masked_fraction",
}
CLIPPED = {
    "clip_ratio/low_mean": "clip_low",
    "clip_ratio/high_mean": "clip_high",
    "clip_ratio/region_mean": "clip_region",
}


def picked(z, tokens):
    """log softmax of these tokens."""
    top = z.max(-1)
    return z[np.arange(len(tokens)), tokens] - top - np.log(np.exp(z - top[:, None]).sum(-1))


def entropies(z):
    """Of each row of logits."""
    p = numpy_llama.softmax(z)
    return -(p * np.log(p)).sum(-1)


def read_calls(file):
    """What `RECORDING` has written; two rewards of a batch are one call."""
    calls = []
    for line in file.read_text().splitlines():
        call = json.loads(line)
        if calls and call["name"] not in calls[-1]["values"] and calls[-1]["ids"] == call["ids"]:
            calls[-1]["values"][call["name"]] = call["values"]
        else:
            calls.append({**call, "values": {call["name"]: call["values"]}})
    return calls


RECORDING = '''"""Two rewards that note what they are called with."""

import json
import pathlib


def note(name, prompts, ids, values):
    asked = [prompt[-1]["content"] for prompt in prompts]
    line = {"name": name, "prompts": asked, "ids": ids, "values": values}
    with open(pathlib.Path(__file__).with_name("calls.jsonl"), "a") as file:
        file.write(json.dumps(line) + "\\n")
    return values


def odd(completions, prompts, completion_ids, **_):
    return note("odd", prompts, completion_ids, [sum(n % 2 for n in ids) / 4 for ids in completion_ids])


def last(completions, prompts, completion_ids, **_):
    return note("last", prompts, completion_ids, [float(ids[-1] % 7 < 3) for ids in completion_ids])
'''
