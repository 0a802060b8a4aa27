"""Every metric that a run logs: the one table that docs/metrics.md, `stop.when` and the report read.

A new metric is one line here, and the line of code that puts it into an update's dict. The columns are the
name in training_log.jsonl, the unit, what it is, what is normal, and what to do otherwise. A heading starts
with "#".
"""

from __future__ import annotations

import attrs

_TABLE = """
# Place in the run
update | count | updates of the optimizer so far; 0 is before training | rises by 1 | –
batch_step | count | rollouts so far | `optim.gradient_accumulation_steps` times `update`, or less with `optim.num_iterations` or `optim.minibatches` | –
epoch | passes | how far the run is in its training data | rises to `optim.num_epochs`, unless `optim.max_steps` ends it before | –
num_tokens | tokens | completion tokens sampled so far, including those that were not used, and gold ones that were learned | rises | –

# Success
em | share, 0 to 1 | exact match: held-out problems whose greedy completion has the right answer | rises over many updates. With 200 problems an uncertainty of ±0.07 is normal (95 %, at 0.5) | compare runs with `grpo eval`, which gives intervals. If `reward` rises and `em` does not, a reward can be earned without being right: read `completions.jsonl`
eval/reward | your rewards' | the weighted sum of the run's own rewards, mean over the held-out problems' greedy completions | rises | as for `em`, beside which it stands; where there are no gold answers it is what an evaluation is judged by
eval/reward_std | your rewards' | its spread over the problems | – | –
eval/rewards/{name} | your reward's | the mean of one reward function there | rises for what you care about | as `rewards/{name}/mean`
eval/truncated | share | held-out completions that were cut off at the length limit | below 0.1 | a larger `rollout.max_new_tokens`
em_subset | problems | how many problems `em` and `eval/reward` were measured on | `eval.samples` or all that are held out | –

eval/loss | nats a token | with [supervised updates](sft.md): the cross-entropy of the held-out gold completions' tokens | falls; rises again when an epoch too many is learned by heart | a lower `sft.learning_rate`, fewer `sft.epochs`
eval/perplexity | tokens | its exponential: among how many equally likely tokens the model chooses | falls | the same

# Rewards
reward | your rewards' | mean over completions of what the advantage is computed from: the weighted sum, and the length penalty | rises, with noise from update to update | flat for hundreds of updates: a higher `optim.learning_rate`, more `rollout.num_generations`, easier prompts. Falling: a lower learning rate
reward_std | your rewards' | spread (standard deviation) of `reward` in a group, mean over groups | above 0, falls slowly as the model gets better | 0 means that nothing is learned: see the next row
frac_reward_zero_std | share | groups whose completions all got one reward; they teach nothing | below 0.5 at the start; near 1 at the end of the quickstart, whose problems become easy | near 1 early: prompts of other difficulty, a higher `rollout.temperature`, more `rollout.num_generations`, `loss.dynamic_sampling = true`
rewards/{name}/mean | your reward's | mean of one reward function, before its weight | rises for what you care about | one rises and the others fall: change `reward.weights`, or look for a way to cheat in `completions.jsonl`
rewards/{name}/std | your reward's | its spread over all completions of the update | above 0 | 0: the function gives everything the same value; `grpo check` shows why
length_penalty | your rewards' | mean of the penalty on long completions (`loss.overlong`), a part of `reward` | 0 to a small negative number | strongly negative: completions run into the limit; raise `rollout.max_new_tokens`

# Completions
completions/mean_length | tokens | length of completions | steady, or changes slowly | grows without a better `em`: a length penalty, or `loss.preset = "dr_grpo"`. Falls to a few tokens: a reward pays for short texts
completions/min_length | tokens | the shortest | above 1 | 1: completions that end at once; look at them in `completions.jsonl`
completions/max_length | tokens | the longest | below `rollout.max_new_tokens` | –
completions/clipped_ratio | share | completions that were cut off at `rollout.max_new_tokens` | below 0.1 | a larger limit, `rollout.stop`, or `loss.mask_truncated_completions = true`
dynamic_sampling/resampled_groups | groups | groups that were replaced because all their rewards were equal | below the number of prompts in a batch step | many in every step: prompts of other difficulty
dynamic_sampling/tokens_per_used_token | ratio | sampled tokens for each token that is learned from | 1 to 3 | higher: most sampling is thrown away; prompts of other difficulty, or a lower `loss.max_resample`
groups/taught | share | groups with a spread of rewards, of all that were drawn; the others teach nothing | 0.3 to 0.9 | near 0: [curriculum](curriculum.md), [warm-up](cold-start.md), or easier prompts
groups/tokens_per_taught | tokens | sampled tokens for each group that taught; is not there if none did | a few times `rollout.num_generations` × `completions/mean_length` | rises: `data.curriculum = "adaptive"`, `rollout.first_stage`
groups/pass_rate/new | share, 0 to 1 | with `data.curriculum`, completions that passed, of prompts that had never been measured | – | –
groups/pass_rate/hard | share, 0 to 1 | the same, of prompts whose first measured rate was below 0.25 | rises over many updates | flat while `medium` rises: prompts that are out of reach
groups/pass_rate/medium | share, 0 to 1 | the same, from 0.25 to 0.75 | rises | flat: nothing is learned where most could be
groups/pass_rate/easy | share, 0 to 1 | the same, from 0.75 on | near 1 | falls: the model unlearns; a lower `optim.learning_rate`
groups/share/new | share, 0 to 1 | with `data.curriculum`, groups whose prompt had never been measured | falls once most were | –
groups/share/hard | share, 0 to 1 | the same, with a first rate below 0.25 | below `medium` with `adaptive`, unless nearly all prompts are hard | –
groups/share/medium | share, 0 to 1 | the same, from 0.25 to 0.75 | has most with `adaptive` | –
groups/share/easy | share, 0 to 1 | the same, from 0.75 on | as `hard` | –

# Turns and tools
tools/call_frequency | calls | calls of tools in a completion, the mean | above 0 once the model has found the tools | show the form of a call in the system prompt, or reward one
tools/failure_frequency | share | calls that raised, timed out or named no tool | falls | read the observations in completions.jsonl: the model sees the same
tools/timeouts | count | calls that took longer than `env.timeout` | 0 | a slow service, or a timeout that is too short
tools/cut_observations | count | observations longer than `env.max_observation_tokens` | 0, or few | return less text, or raise the limit
turns/mean | turns | turns of a completion, the mean | below `env.max_turns` | conversations that never end: look at what ends them
turns/max | turns | the longest conversation | at most `env.max_turns` | –
eval/success | share, 0 to 1 | with [env], held-out episodes that succeed: the environment's own reward is 1 or more; without `get_reward`, the answer is the gold one | rises over many updates | compare runs with `grpo eval`, which gives intervals
eval/turns | turns | mean over held-out episodes | as in training | –
eval/tool_calls | calls | mean over held-out episodes | as in training | –
eval/failed_calls | calls | mean over held-out episodes of calls that raised, or named no tool | falls | read the conversations in the [report](report.md)

# The learner
loss | – | the value whose gradient is taken | near 0, of either sign: with one update a rollout, positive and negative advantages cancel. It does not show progress; in [supervised updates](sft.md) it is the cross-entropy, nats a token, and falls | `null`: see `update_skipped`
grad_norm | – | length of the gradient before it is cut to `optim.max_grad_norm` | the same order of magnitude for the whole run; 0 if no group had a spread | grows tenfold and stays: a lower `optim.learning_rate`
learning_rate | – | the optimizer's rate at this update | follows `optim.schedule` | –
entropy | nats a token | how undecided the model is, mean over completion tokens | falls slowly. It depends on model and data: below 0.1 for the quickstart | falls quickly to 0: completions become equal; a lower `optim.learning_rate`, a higher `loss.epsilon_high`, `loss.entropy_coef`. Rises quickly: the model falls apart; a lower learning rate
kl | nats a token | estimate of the KL from the policy to the starting model; only with `loss.beta` above 0 | rises slowly from 0 | above 1: a lower `optim.learning_rate` or a higher `loss.beta`
teacher/kl | nats a token | with [teacher]: the KL from the student to its teacher on the student's completions, exact with `teacher.form = "loss"`, else the mean of log π − log μ | falls | flat: a higher `optim.learning_rate` or `teacher.weight`. Below 0 for many updates: the sampler's weights are not the learner's
update_skipped | true | this update changed nothing, since its numbers were not finite | is not there | a lower `optim.learning_rate`; [faults](faults.md#numbers-that-are-not-finite)
bad_updates | count | such updates so far | is not there | the same

# Experts
experts/max_load | ratio | tokens of the expert with most of them, over the mean of its layer: the largest of all layers | 1.5 to 4; few tokens make it larger | rises over many updates: the router collapses; `loss.router_aux_coef = 0.001`, or adapters that leave the router alone
experts/unused | share | experts that no token chose, mean over layers | 0 with many tokens; with few tokens and many experts well above | rises over many updates: the same
experts/balance | – | the value that `loss.router_aux_coef` multiplies: 1 if the load is even, at most experts / experts per token | 1 to 1.5 | rises over many updates: the same

# Clipping and ratios
clip_ratio/low_mean | share | tokens with a ratio below 1 − `loss.epsilon_low` and a negative advantage | 0 with one update a rollout, else below 0.2 for token ratios | higher: a lower `optim.learning_rate`, fewer `optim.num_iterations` or `optim.minibatches`
clip_ratio/high_mean | share | tokens with a ratio above 1 + `loss.epsilon_high` and a positive advantage | the same | the same
clip_ratio/region_mean | share | both together | the same. GSPO's narrow range clips more | the same
cispo_clip_ratio | share | with `loss.preset = "cispo"` in place of the three: tokens whose weight is capped | below 0.1 | the same
ratio/min | ratio | the smallest | 1 with one update a rollout | near 0 or above 10 in single tokens is harmless when `ratio/mean` stays near 1
ratio/mean | ratio | the mean of all tokens | 0.9 to 1.1 | a lower `optim.learning_rate`, a smaller `loss.sync_every`
ratio/max | ratio | the largest | 1 with one update a rollout | as `ratio/min`

# Sampler against learner
sampling/sampling_logp_difference/mean | nats | mean difference of a token's log-probability, without its sign | about 1e-6 in float32, 1e-3 to 0.02 in bfloat16, up to 0.1 with quantized rollouts or truncated sampling | more bits for `rollout.quantization`
sampling/sampling_logp_difference/max | nats | the largest | single tokens may differ by 1 or more in bfloat16 | only if the mean is high too
sampling/importance_sampling_ratio/min | ratio | learner's probability of a token divided by the sampler's: the smallest | 1 in float32 | `loss.correction = "token_truncate"`
sampling/importance_sampling_ratio/mean | ratio | the mean of all tokens | 0.95 to 1.05 | the same
sampling/importance_sampling_ratio/max | ratio | the largest | 1 in float32, a few in bfloat16 | the same
sampling/kl | nats a token | estimate of the KL from the sampler to the learner | below 0.001 | above 0.01: a correction, or more bits; above `rollout.mismatch_limit` a run takes a finer format by itself
sampling/effective_sample_size | share | how many of the tokens count, if each is weighted by its ratio | above 0.95 | the same
sampling/masked_fraction | share | tokens that `loss.correction` dropped | 0 without a correction, else below 0.05 | a wider `loss.correction_range` or `loss.sequence_range`, or more bits
rollout/quantization | text | the format that the sampler's weights have; only with `rollout.quantization` | the one that was asked for | –
rollout/fallback | text | why the run went back to full precision | is not there | [quantization](quantization.md)

# Ranks
ranks/number | count | with several ranks, how many there are | constant | –
ranks/rollout_seconds/{name} | seconds | sampling of the rank with this number | alike for all ranks | one is always longer: its machine is slower, or does something else as well
ranks/slowest | rank | the rank that sampled longest | changes | always the same: as above
ranks/rollout_skew | seconds | from the fastest rank's end of sampling to the slowest one's | small beside `time/rollout` | large: completions of very different length, or unlike machines
ranks/waiting_seconds | seconds | rank 0's wait for slower ranks | about `ranks/rollout_skew` | the same
ranks/reducing_seconds | seconds | summing gradients over ranks | small beside `time/learner` | a faster network, or more rows on each rank
fault | text | why a rank failed and with it the run | is not there | [many devices](many-devices.md)

# Time and memory
step_time | seconds | from one update to the next, without evaluations; the sum of the parts below but `time/eval` | steady; the first is longer, since it compiles | look at which part grew
tokens_per_second | tokens/s | sampled tokens over `time/rollout` | steady; falls as completions get longer | falls by half at equal lengths: look at `memory/swap_gb`, and for other programs
tokens_per_second/step | tokens/s | sampled tokens over `step_time`: the rate of the whole | below `tokens_per_second` | far below it: the largest of the parts below says why
time/rollout | seconds | sampling, for all batch steps of the update | the largest part for long completions | more completions at a time (`optim.batch_size`, `rollout.max_batch`), shorter ones (`rollout.max_new_tokens`), `rollout.quantization`
time/reward | seconds | the reward functions | below a tenth of `step_time` | faster or `async` rewards, fewer questions to a judge
time/learner | seconds | log-probabilities and gradients | grows with tokens and parameters | without `system.grad_checkpoint`, if memory allows; a larger `system.micro_batch_tokens`; adapters only (`model.tune`)
time/update | seconds | the optimizer's step | small beside the rollout | adapters only (`model.tune`), more batch steps an update (`optim.gradient_accumulation_steps`)
time/sync | seconds | making the sampler's weights from the learner's | near 0; longer with `rollout.quantization` | a larger `loss.sync_every`, a sampler without quantization
time/checkpoint | seconds | writing checkpoints, while training waits | 0 but for the updates after one was written | a larger `checkpoint.every`, a faster disk
time/elapsed | seconds | since the run began, including time before a resume | rises | –
time/rest | seconds | time in no other part: logs, batches, the display | near 0 | fewer other programs on this machine; a faster disk, if completions are logged
time/eval | seconds | one evaluation | – | fewer `eval.samples`, a larger `eval.every`
memory/active_gb | 10⁹ bytes | what MLX holds now | steady | rises from update to update: a reward keeps arrays
memory/peak_gb | 10⁹ bytes | the most that MLX has held since the run's start | below 90 % of the memory | [memory](memory.md) names the keys that lower it
memory/swap_gb | 10⁹ bytes | what the whole system has moved to the disk | near 0 | everything becomes slow: a smaller batch; see [memory](memory.md)
nonfinite | names | metrics of this line that were NaN or infinite, which JSON cannot hold | is not there | a reward that gave no value at all has a mean of NaN; else see `update_skipped`
"""
_NO_NUMBERS = ("text", "true", "names")  # units of what a condition cannot compare


@attrs.frozen
class Metric:
    """A line of the table."""

    section: str  # the heading above it
    name: str  # {name}: a reward's
    unit: str
    meaning: str
    normal: str
    otherwise: str


def _read_table() -> dict[str, Metric]:
    metrics: dict[str, Metric] = {}
    for part in _TABLE.split("\n# ")[1:]:
        section, *lines = part.strip().splitlines()
        for line in filter(None, lines):
            metric = Metric(section, *line.split(" | "))
            metrics[metric.name] = metric
    return metrics


METRICS = _read_table()
"""name -> Metric, in the order of the page."""

COMPARABLE = tuple(
    m.name for m in METRICS.values() if m.unit not in _NO_NUMBERS and "{" not in m.name
)
"""Names that a condition of `stop.when` may use, besides `rewards/NAME/mean`, `rewards/NAME/std`."""
