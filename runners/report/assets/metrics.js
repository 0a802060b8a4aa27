// Which metric is shown where, what it is, and what to look for.

const one = (name, more) => ({ name, ...more });

const GROUPS = [
  { title: "Learning", charts: [
    { id: "reward", title: "Reward", series: [one("reward", { spread: "reward_std" })], wide: true,
      help: "Mean of the combined reward of an update's completions. The band is one standard deviation within a group to each side." },
    { id: "em", title: "Exact match", unit: "%", series: [one("em", { interval: "em_subset" })], wide: true, sparse: true,
      help: "Share of held-out problems with the right answer, decoded greedily. Bars are Wilson's 95 % intervals." },
  ] },
  { title: "Rewards", rewards: true, charts: [
    { id: "penalty", title: "Length penalty", series: [one("length_penalty")],
      help: "Mean of what loss.overlong adds to the reward, at most 0." },
    { id: "flat", title: "Groups without variance", unit: "%", series: [one("frac_reward_zero_std")],
      help: "Share of prompts whose completions all got the same reward: nothing is learned from them. Near 100 % training stands still." },
  ] },
  { title: "Policy", charts: [
    { id: "entropy", title: "Entropy", unit: "nats", series: [one("entropy")],
      help: "Mean entropy of the sampled tokens' distributions. Towards 0 completions hardly differ any more." },
    { id: "kl", title: "KL to the reference", unit: "nats", series: [one("kl")],
      help: "Mean divergence from the starting model, a token. It is logged where loss.beta is above 0." },
    { id: "clip", title: "Clipped tokens", unit: "%", series: [one("clip_ratio/low_mean", { label: "low" }), one("clip_ratio/high_mean", { label: "high" }), one("cispo_clip_ratio", { label: "cispo" })],
      help: "Share of tokens whose ratio was clipped, below and above. With one update for each rollout it is 0." },
    { id: "ratio", title: "Ratio π_θ / π_old", series: [one("ratio/mean", { label: "mean", low: "ratio/min", high: "ratio/max" })],
      help: "Importance ratio of the tokens: mean, and the range from smallest to largest." },
  ] },
  { title: "Sampler against learner", charts: [
    { id: "difference", title: "Difference of log-probs", unit: "nats", series: [one("sampling/sampling_logp_difference/mean", { label: "mean" }), one("sampling/sampling_logp_difference/max", { label: "max" })],
      help: "How far the sampler's log-probs are from the learner's for the same tokens. Large with a quantized or truncated sampler." },
    { id: "is", title: "Importance ratio of the sampler", series: [one("sampling/importance_sampling_ratio/mean", { label: "mean", low: "sampling/importance_sampling_ratio/min", high: "sampling/importance_sampling_ratio/max" })],
      help: "π_old / μ: mean, and the range from smallest to largest. 1 where sampler and learner agree." },
    { id: "ess", title: "Effective sample size", unit: "%", series: [one("sampling/effective_sample_size")],
      help: "Share of the tokens that the weighted ones are worth. 100 % where sampler and learner agree." },
    { id: "masked", title: "Masked by the correction", unit: "%", series: [one("sampling/masked_fraction")],
      help: "Share of tokens that loss.correction leaves out." },
    { id: "skl", title: "KL of the sampler", unit: "nats", series: [one("sampling/kl")],
      help: "Divergence between sampler and learner, a token (k3)." },
  ] },
  { title: "Completions", charts: [
    { id: "length", title: "Length", unit: "tokens", series: [one("completions/mean_length", { label: "mean", low: "completions/min_length", high: "completions/max_length" })],
      help: "Tokens of a completion: mean, and the range from shortest to longest." },
    { id: "cut", title: "Cut off at the length limit", unit: "%", series: [one("completions/clipped_ratio")],
      help: "Share of completions that reached rollout.max_new_tokens. If it rises, raise the limit or punish length." },
  ] },
  { title: "Optimizer", charts: [
    { id: "loss", title: "Loss", series: [one("loss")], help: "Near 0 by construction; it need not fall." },
    { id: "grad", title: "Gradient norm", series: [one("grad_norm")], help: "Before clipping. Peaks are updates that optim.max_grad_norm made smaller." },
    { id: "rate", title: "Learning rate", series: [one("learning_rate")], help: "As the schedule gave it to the update." },
  ] },
  { title: "Speed and memory", charts: [
    { id: "tps", title: "Tokens sampled a second", unit: "tokens/s", series: [one("tokens_per_second", { label: "of the rollout" }), one("tokens_per_second/step", { label: "of the whole step" })], help: "Tokens drawn, over the time of the rollout, and over that of the whole step." },
    { id: "parts", title: "Where the time goes", unit: "s", stacked: true, series: [one("time/rollout", { label: "rollout" }), one("time/reward", { label: "rewards" }), one("time/learn", { label: "learning" }), one("time/learner", { label: "learner" }), one("time/update", { label: "update" }), one("time/sync", { label: "sync" }), one("time/checkpoint", { label: "saving" }), one("time/rest", { label: "rest" })],
      help: "Seconds of an update: sampling, rewards, gradients, the optimizer, syncs, saving, and the rest." },
    { id: "memory", title: "Memory", unit: "GB", series: [one("memory/peak_gb", { label: "peak" }), one("memory/active_gb", { label: "active" }), one("memory/swap_gb", { label: "swap" })],
      help: "MLX's memory: the peak since the last update, what is in use now, and what the system has swapped out." },
  ] },
];

// Never a chart of its own: axes, parts of others.
const SILENT = new Set(["update", "batch_step", "epoch", "num_tokens", "em_subset", "time/eval", "time/elapsed", "step_time", "update_skipped", "reward_std", "clip_ratio/region_mean", "bad_updates"]);

// The charts of these runs: the known ones that have numbers, then a chart for every other metric.
function chartGroups(runs) {
  const names = new Set(runs.flatMap((run) => Object.keys(run.columns)));
  const used = new Set(SILENT);
  const rewards = [...names].filter((name) => /^rewards\/.*\/mean$/.test(name)).map((name) => name.slice(8, -5));
  const groups = [];
  for (const group of GROUPS) {
    const charts = group.rewards ? [...rewards.map(rewardChart), ...group.charts] : group.charts;
    for (const chart of charts) for (const each of chart.series)
      for (const key of ["name", "spread", "interval", "low", "high"]) if (each[key]) used.add(each[key]);
    const filled = charts.map((chart) => ({ ...chart, series: chart.series.filter((each) => names.has(each.name) || (each.name === "time/learn" && names.has("step_time") && !names.has("time/learner"))) }));
    const found = filled.filter((chart) => chart.series.length);
    if (found.length) groups.push({ title: group.title, charts: found });
  }
  const others = [...names].filter((name) => !used.has(name)).sort();
  if (others.length)
    groups.push({ title: "Other metrics", charts: others.map((name) => ({ id: `other-${name}`, title: visible(name), series: [one(name)], help: "Logged by a reward, or by a part of the run." })) });
  return groups;
}

function rewardChart(name) {
  return { id: `reward-${name}`, title: visible(name), series: [one(`rewards/${name}/mean`, { spread: `rewards/${name}/std` })],
    help: "Mean of this function's own values, before its weight. The band is one standard deviation to each side." };
}

// A metric's values by line; the learner's time is what the other parts leave of a step.
function valuesOf(run, name) {
  if (name !== "time/learn") return run.column(name);
  const parts = ["time/rollout", "time/reward", "time/checkpoint"].map((part) => run.column(part));
  return run.column("step_time").map((total, i) => (total === null ? null : Math.max(total - parts.reduce((sum, part) => sum + (part[i] ?? 0), 0), 0)));
}

// Kinds of events, in the order of the legend.
const KINDS = {
  warning: { label: "notes and warnings", sign: "!" },
  skipped: { label: "skipped updates", sign: "×" },
  resume: { label: "resumes", sign: "↻" },
  end: { label: "ends", sign: "■" },
  sync: { label: "syncs", sign: "⇄" },
  checkpoint: { label: "checkpoints", sign: "◆" },
  evaluation: { label: "evaluations", sign: "○" },
};

// All events of a run: of its diary, and those that its metrics tell of.
function eventsOf(run) {
  if (run.cached.has("events")) return run.cached.get("events");
  const found = [];
  for (const event of run.facts.events) {
    const kind = kindOf(event);
    if (kind) found.push({ kind, update: event.update ?? 0, time: event.time, text: textOf(event), rows: event.rows });
  }
  const updates = run.column("update");
  run.column("update_skipped").forEach((skipped, i) => {
    if (skipped) found.push({ kind: "skipped", update: updates[i], text: "the update was skipped: its numbers were not finite" });
  });
  const sizes = run.column("em_subset");
  run.column("em").forEach((share, i) => {
    if (share === null) return;
    const of = sizes[i] ? ` of ${sizes[i]} problems` : "";
    found.push({ kind: "evaluation", update: updates[i] ?? 0, text: `exact match ${percentText(share)}${of}` });
  });
  found.sort((a, b) => a.update - b.update);
  run.cached.set("events", found);
  return found;
}

function kindOf(event) {
  if (event.event === "start") return event.resumed ? "resume" : null;
  if (event.event === "end") return "end";
  if (event.event === "sync") return "sync";
  return /(^|: )saved /.test(event.text ?? "") ? "checkpoint" : "warning";
}

function textOf(event) {
  if (event.event === "start") return "the run was resumed";
  if (event.event === "end") return [event.state, event.text].filter(Boolean).join(": ");
  return event.text ?? event.event;
}
