"""Lists every metric that a run logs, in a table for docs/metrics.md, `stop.when` and the report.

To add a metric, add a line here and the code that puts it into an update's dict. The columns are the name in
training_log.jsonl, the unit, the meaning, normal values, and what to do about other values. Headings start
with "#".
"""

import attrs

_TABLE = """
# Place in the run
update | count | optimizer updates so far; 0 is before training | rises by 1 | –
batch_step | count | rollouts so far | `optim.gradient_accumulation_steps` × `update`, or less with `optim.num_iterations` or `optim.minibatches` | –
epoch | passes | passes over the training data so far | rises to `optim.num_epochs`, unless `optim.max_steps` ends the run earlier | –
num_tokens | tokens | completion tokens sampled so far, used or not, plus tokens of the reference completions used in supervised updates | rises | –

# Success
em | share, 0 to 1 | exact match: share of held-out problems whose greedy completion has the right answer | rises over many updates. With 200 problems, an uncertainty of ±0.07 is normal (95 %, at 0.5) | compare runs with `grpo eval`, which reports intervals. If `reward` rises but `em` does not, the model may earn a reward without a right answer: read `completions.jsonl`
eval/reward | your rewards' | weighted sum of the run's rewards for the greedy completions of the held-out problems (mean) | rises | see `em`; without reference answers, evaluations are compared by this value
eval/reward_std | your rewards' | standard deviation of that weighted sum over the problems | – | –
eval/rewards/{name} | your reward's | mean of one reward function over the held-out problems | rises for the rewards you care about | see `rewards/{name}/mean`
eval/truncated | share | share of held-out completions that were cut off at the length limit | below 0.1 | raise `rollout.max_new_tokens`
em_subset | problems | number of problems used for `em` and `eval/reward` | `eval.samples`, or all held-out problems | –

worse | text | which measurement is below its best value by more than chance, and the likeliest cause | absent | [troubleshooting](troubleshooting.md#a-run-that-becomes-worse)
eval/loss | nats per token | with [supervised updates](cold-start.md#supervised-updates): cross-entropy of the tokens of the held-out reference completions | falls; rises again when the model overfits | lower `sft.learning_rate` or `sft.epochs`
eval/perplexity | – | exp(`eval/loss`) | falls | see `eval/loss`

# Rewards
reward | your rewards' | mean over completions of the weighted sum of rewards, including the length penalty; advantages are computed from this sum | rises, with noise from update to update | if it is flat for hundreds of updates: a higher `optim.learning_rate`, more `rollout.num_generations`, or easier prompts. If it falls: a lower learning rate
reward_std | your rewards' | standard deviation of `reward` within a group, averaged over groups | above 0; falls slowly as the model improves | 0: there is no gradient; see the next row
frac_reward_zero_std | share | share of groups without a gradient, because all completions have the same reward | below 0.5 at the start; near 1 at the end of the quickstart, when its problems have become easy | if it is near 1 early: easier or harder prompts, a higher `rollout.temperature`, more `rollout.num_generations`, or `loss.dynamic_sampling = true`
rewards/{name}/mean | your reward's | mean of one reward function, before its weight is applied | rises for the rewards you care about | if it rises while the others fall: change `reward.weights`, or look for reward hacking in `completions.jsonl`
rewards/{name}/std | your reward's | standard deviation of that reward over all completions of the update | above 0 | 0: the function returns the same value for all completions; `grpo check` shows why
programs/ended | share | with `answer.form = "code"`: share of programs that were stopped at the time limit (`answer.program_seconds`) | below 0.05; each of them occupies a core for two seconds of `time/reward` | if it rises: read these completions; most contain an infinite loop
length_penalty | your rewards' | mean penalty on long completions (`loss.overlong`), included in `reward` | 0, or slightly negative | if it is strongly negative, completions reach the limit: raise `rollout.max_new_tokens`

# Completions
completions/mean_length | tokens | mean length of completions | steady, or changes slowly | if it rises while `em` does not: a length penalty, or `loss.preset = "dr_grpo"`. If it falls to a few tokens, a reward favours short texts
completions/min_length | tokens | length of the shortest completion | above 1 | 1: completions end immediately; read them in `completions.jsonl`
completions/max_length | tokens | length of the longest completion | below `rollout.max_new_tokens` | –
completions/clipped_ratio | share | share of completions that were cut off at `rollout.max_new_tokens` | below 0.1 | a larger limit, `rollout.stop`, or `loss.mask_truncated_completions = true`
dynamic_sampling/resampled_groups | groups | groups that were replaced because all their rewards were equal | below the number of prompts in a batch step | if there are many in every step: easier or harder prompts
dynamic_sampling/tokens_per_used_token | ratio | sampled tokens per token used for training | 1 to 3 | if it is higher, most samples are discarded: easier or harder prompts, or a lower `loss.max_resample`
groups/taught | share | share of all sampled groups that have a gradient, because their rewards differ | 0.3 to 0.9 | near 0: [curriculum](cold-start.md#prompts-by-pass-rate), [warm-up](cold-start.md), or easier prompts
groups/tokens_per_taught | tokens | sampled tokens per group that has a gradient; absent if no group has one | a few times `rollout.num_generations` × `completions/mean_length` | if it rises: `data.curriculum = "adaptive"`, or `rollout.first_stage`
groups/pass_rate/new | share, 0 to 1 | with `data.curriculum`: pass rate on prompts that had not been measured before | – | –
groups/pass_rate/hard | share, 0 to 1 | pass rate on prompts whose first measured pass rate was below 0.25 | rises over many updates | flat while `medium` rises: these prompts are too hard
groups/pass_rate/medium | share, 0 to 1 | pass rate on prompts whose first measured pass rate was between 0.25 and 0.75 | rises | flat: the model does not learn from the prompts that it could learn most from
groups/pass_rate/easy | share, 0 to 1 | pass rate on prompts whose first measured pass rate was 0.75 or more | near 1 | if it falls, the model forgets: a lower `optim.learning_rate`
groups/share/new | share, 0 to 1 | with `data.curriculum`: share of groups whose prompt had not been measured before | falls once most prompts have been measured | –
groups/share/hard | share, 0 to 1 | share of groups whose prompt's first measured pass rate was below 0.25 | below `medium` with `adaptive`, unless nearly all prompts are hard | –
groups/share/medium | share, 0 to 1 | share of groups whose prompt's first measured pass rate was between 0.25 and 0.75 | the largest share with `adaptive` | –
groups/share/easy | share, 0 to 1 | share of groups whose prompt's first measured pass rate was 0.75 or more | see `hard` | –

# Turns and tools
tools/call_frequency | calls | mean number of tool calls per completion | above 0 once the model uses the tools | show the format of a call in the system prompt, or reward calls
tools/failure_frequency | share | share of calls that raised an error, timed out or named an unknown tool | falls | read the observations in `completions.jsonl`, which the model also sees
tools/timeouts | count | calls that took longer than `env.timeout` | 0 | a faster service, or a longer timeout
tools/cut_observations | count | observations truncated to `env.max_observation_tokens` | 0, or few | return less text, or raise the limit
turns/mean | turns | mean number of turns per completion | below `env.max_turns` | if it is at the limit, conversations do not end by themselves: check their end condition
turns/max | turns | number of turns in the longest conversation | at most `env.max_turns` | –
eval/success | share, 0 to 1 | with [env]: share of held-out episodes that succeed; in a successful episode, the environment's own reward is at least 1 or, without `get_reward`, the answer equals the reference answer | rises over many updates | compare runs with `grpo eval`, which reports intervals
eval/turns | turns | mean number of turns per held-out episode | as in training | –
eval/tool_calls | calls | mean number of tool calls per held-out episode | as in training | –
eval/failed_calls | calls | mean number of calls per held-out episode that raised an error or named an unknown tool | falls | read the conversations in the [report](report.md)

# The learner
loss | – | the value whose gradient is computed | near 0, positive or negative: with one update per rollout, positive and negative advantages cancel, so it does not show progress. In [supervised updates](cold-start.md#supervised-updates), it is the cross-entropy in nats per token, and falls | `null`: see `update_skipped`
grad_norm | – | norm of the gradient before it is clipped to `optim.max_grad_norm` | the same order of magnitude throughout the run; 0 if no group has a gradient | if it grows tenfold and stays there: a lower `optim.learning_rate`
learning_rate | – | learning rate used for this update | follows `optim.schedule` | –
entropy | nats per token | mean entropy of the model's next-token distribution over completion tokens | falls slowly. Its level depends on the model and the data: below 0.1 for the quickstart | if it quickly falls to 0, completions become identical: a lower `optim.learning_rate`, a higher `loss.epsilon_high`, or `loss.entropy_coef`. If it quickly rises, training diverges: a lower learning rate
kl | nats per token | estimate of the KL from the policy to the starting model; only with `loss.beta` above 0 | rises slowly from 0 | above 1: a lower `optim.learning_rate`, or a higher `loss.beta`
teacher/kl | nats per token | with [teacher]: KL from the student to its teacher on the student's completions; exact with `teacher.form = "loss"`, otherwise the mean of log π − log μ | falls | flat: a higher `optim.learning_rate` or `teacher.weight`. Below 0 for many updates: the sampler's weights differ from the learner's
update_skipped | true | this update was skipped because it contained NaN or infinite values | absent | a lower `optim.learning_rate`; see [faults](troubleshooting.md#training)
bad_updates | count | number of skipped updates so far | absent | see `update_skipped`

# Experts
experts/max_load | ratio | number of tokens of a layer's most used expert, divided by the layer's mean per expert; the maximum over layers | 1.5 to 4; higher with few tokens | if it rises over many updates, the router collapses: `loss.router_aux_coef = 0.001`, or adapters that do not train the router
experts/unused | share | share of experts that no token used, averaged over layers | 0 with many tokens; much higher with few tokens and many experts | if it rises over many updates: see `experts/max_load`
experts/balance | – | the value that `loss.router_aux_coef` multiplies: 1 if the load is even, at most experts / experts per token | 1 to 1.5 | if it rises over many updates: see `experts/max_load`

# Clipping and ratios
clip_ratio/low_mean | share | share of tokens with a negative advantage and a ratio below 1 − `loss.epsilon_low` | 0 with one update per rollout, otherwise below 0.2 for token ratios | if it is higher: a lower `optim.learning_rate`, or a lower `optim.num_iterations` or `optim.minibatches`
clip_ratio/high_mean | share | share of tokens with a positive advantage and a ratio above 1 + `loss.epsilon_high` | see `clip_ratio/low_mean` | see `clip_ratio/low_mean`
clip_ratio/region_mean | share | sum of `clip_ratio/low_mean` and `clip_ratio/high_mean` | see `clip_ratio/low_mean`; higher with GSPO's narrow range | see `clip_ratio/low_mean`
cispo_clip_ratio | share | with `loss.preset = "cispo"`, instead of the three metrics above: share of tokens whose weight is capped | below 0.1 | see `clip_ratio/low_mean`
ratio/min | ratio | smallest ratio of the policy's probability of a token to the old policy's | 1 with one update per rollout | values near 0 or above 10 for single tokens are harmless if `ratio/mean` stays near 1
ratio/mean | ratio | mean of that ratio over all tokens | 0.9 to 1.1 | a lower `optim.learning_rate`, or a smaller `loss.sync_every`
ratio/max | ratio | largest value of that ratio | 1 with one update per rollout | see `ratio/min`

# Sampler against learner
sampling/sampling_logp_difference/mean | nats | mean absolute difference between the sampler's and the learner's log-probability of a token | about 1e-6 in float32, 1e-3 to 0.02 in bfloat16, up to 0.1 with quantized rollouts or truncated sampling | more bits for `rollout.quantization`
sampling/sampling_logp_difference/max | nats | largest absolute difference between these log-probabilities | in bfloat16, single tokens may differ by 1 or more | matters only if the mean is also high
sampling/importance_sampling_ratio/min | ratio | smallest ratio of the learner's probability of a token to the sampler's | 1 in float32 | `loss.correction = "token_truncate"`
sampling/importance_sampling_ratio/mean | ratio | mean of that ratio over all tokens | 0.95 to 1.05 | `loss.correction = "token_truncate"`
sampling/importance_sampling_ratio/max | ratio | largest value of that ratio | 1 in float32, a few in bfloat16 | `loss.correction = "token_truncate"`
sampling/kl | nats per token | estimate of the KL from the sampler to the learner | below 0.001 | above 0.01: a correction, or more bits; above `rollout.mismatch_limit`, the run switches to a finer format automatically
sampling/effective_sample_size | share | effective sample size as a share of all tokens, with each token weighted by its ratio | above 0.95 | see `sampling/kl`
sampling/masked_fraction | share | share of tokens excluded by `loss.correction` | 0 without a correction, otherwise below 0.05 | a wider `loss.correction_range` or `loss.sequence_range`, or more bits
rollout/quantization | text | format of the sampler's weights; only with `rollout.quantization` | the format in the config | –
rollout/fallback | text | why the sampler returned to full precision | absent | [quantization](quantization.md)

# Rollouts ahead
staleness/mean | updates | with `rollout.max_staleness`: number of updates between sampling a completion and learning from it, averaged over completions | `rollout.max_staleness`, but less at the start | –
staleness/max | updates | the same number for the oldest completion | at most `rollout.max_staleness` | –
staleness/tokens | updates | the same number, averaged over tokens | about the same as `staleness/mean` | if it is very different, long completions are older or younger than short ones
time/ahead | seconds | time that sampling and scoring took in parallel with training, including their waits for the previous batch | close to the total time for sampling and scoring | if it is small and `time/rollout` is large, the learner is faster than the sampler; increase `rollout.max_staleness`

# Ranks
ranks/number | count | number of ranks, if there is more than one | constant | –
ranks/rollout_seconds/{name} | seconds | time that the rank with this number spent sampling | similar for all ranks | if one rank always takes longer, its machine is slower or runs other programs
ranks/slowest | rank | the rank that took longest to sample | varies | if the same rank is always slowest, its machine is slower or is running other programs
ranks/rollout_skew | seconds | time from when the fastest rank finishes sampling until the slowest one does | small compared with `time/rollout` | if it is large, completions differ greatly in length, or the machines differ
ranks/waiting_seconds | seconds | time that rank 0 waited for slower ranks | about the same as `ranks/rollout_skew` | see `ranks/rollout_skew`
ranks/reducing_seconds | seconds | time spent summing gradients over ranks | small compared with `time/learner` | a faster network, or more completions per rank
fault | text | why a rank failed and ended the run | absent | [many devices](many-devices.md)

# Time and memory
step_time | seconds | time from one update to the next, without evaluations; the sum of the parts below, except `time/eval` | steady; the first is longer because it includes compiling | find the part that grew
tokens_per_second | tokens/s | sampled tokens divided by `time/rollout` | steady; falls as completions get longer | if it falls by half at equal lengths: check `memory/swap_gb`, and look for other programs
tokens_per_second/step | tokens/s | overall throughput: sampled tokens divided by `step_time` | below `tokens_per_second` | if it is far below, the largest of the parts below is the cause
time/rollout | seconds | time spent sampling, summed over all batch steps of the update | the largest part if completions are long | more completions in parallel (`optim.batch_size`, `rollout.max_batch`), shorter completions (`rollout.max_new_tokens`), or `rollout.quantization`
time/reward | seconds | time spent in the reward functions | below a tenth of `step_time` | faster or `async` rewards, or fewer calls to a judge
time/learner | seconds | time spent computing log-probabilities and gradients | grows with tokens and parameters | `system.grad_checkpoint = false`, if memory allows; a larger `system.micro_batch_tokens`; training only adapters (`model.tune`)
time/update | seconds | time spent in the optimizer's step | small compared with the rollout | training only adapters (`model.tune`), or more batch steps per update (`optim.gradient_accumulation_steps`)
time/sync | seconds | time spent copying the learner's weights to the sampler, including quantization | near 0; longer with `rollout.quantization` | a larger `loss.sync_every`, or a sampler without quantization
time/checkpoint | seconds | time spent writing checkpoints, while training waits | 0, except in updates after a checkpoint was written | a larger `checkpoint.every`, or a faster disk
time/elapsed | seconds | time since the run began, including the time before it was resumed | rises | –
time/rest | seconds | time that is not part of any other row: logs, batches, the display | near 0 | fewer other programs on this machine; a faster disk, if completions are logged
time/eval | seconds | time spent on one evaluation | – | fewer `eval.samples`, or a larger `eval.every`
memory/active_gb | 10⁹ bytes | memory that MLX currently uses | steady | if it rises from update to update, a reward function keeps arrays
memory/peak_gb | 10⁹ bytes | peak of the memory used by MLX since the start of the run | below 90 % of the memory | [memory](memory.md) names the keys that lower it
power/low_power | 0 or 1 | whether macOS is in low-power mode, checked every half minute | 0 | turn it off: `sudo pmset -a lowpowermode 0`
power/thermal_pressure | 0 to 4 | macOS's thermal pressure, read every half minute: nominal, moderate, heavy, trapping or sleeping | 0 | from 2 on, the machine computes more slowly: cool it, or close other programs
memory/swap_gb | 10⁹ bytes | memory that the whole system has swapped out to disk | near 0 | everything becomes slow: a smaller batch; see [memory](memory.md)
nonfinite | names | metrics of this log entry that are NaN or infinite, which JSON cannot represent | absent | a reward that never returned a value has a mean of NaN; otherwise, see `update_skipped`
"""
_NO_NUMBERS = ("text", "true", "names")  # units of metrics that a condition cannot compare


@attrs.frozen
class Metric:
    """One metric: a row in the table of metrics."""

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

ENDED_PROGRAMS = "programs/ended"
"""The only metric that the rewards log."""

COMPARABLE = tuple(
    m.name for m in METRICS.values() if m.unit not in _NO_NUMBERS and "{" not in m.name
)
"""Names that a condition of `stop.when` can use, in addition to `rewards/NAME/mean` and `rewards/NAME/std`."""
