// Which metric is shown where, what it is, and what to look for.

const one = (name, more) => ({ name, ...more });
const chart = (id, title, unit, series, more) => ({ id, title, unit, series, ...more });
const lines = (table, prefix = "") => Object.entries(table).map(([label, name]) => one(`${prefix}${name}`, { label }));

const BANDS = { new: "new", hard: "hard", medium: "medium", easy: "easy" };

const GROUPS = [
  { title: "Learning", charts: [
    chart("reward", "Reward", "", [one("reward", { spread: "reward_std" })], { wide: true }),
    chart("em", "Exact match", "%", [one("em", { interval: "em_subset" })], { wide: true, sparse: true }),
    chart("held", "Held-out reward", "", [one("eval/reward", { spread: "eval/reward_std" })], { wide: true, sparse: true, unless: "em" }),
    chart("gold", "Held-out loss of reference completions", "nats per token", [one("eval/loss")], { sparse: true }),
  ] },
  { title: "Rewards", rewards: true, charts: [
    chart("held", "Held-out reward", "", [one("eval/reward", { spread: "eval/reward_std" })], { sparse: true, where: "em" }),
    chart("penalty", "Length penalty", "", [one("length_penalty")]),
    chart("flat", "Groups without variance", "%", [one("frac_reward_zero_std")]),
    chart("taught", "Share of groups with a gradient", "%", [one("groups/taught")]),
    chart("price", "Tokens per group with a gradient", "tokens", [one("groups/tokens_per_taught")]),
    chart("difficulty", "Pass rate by difficulty", "%", lines(BANDS, "groups/pass_rate/")),
    chart("drawn", "Sampled groups by difficulty", "%", lines(BANDS, "groups/share/")),
  ] },
  { title: "Policy", charts: [
    chart("entropy", "Entropy", "nats", [one("entropy")]),
    chart("kl", "KL to the reference", "nats", [one("kl")]),
    chart("clip", "Clipped tokens", "%", lines({ low: "clip_ratio/low_mean", high: "clip_ratio/high_mean", cispo: "cispo_clip_ratio" })),
    chart("ratio", "Ratio π_θ / π_old", "", [one("ratio/mean", { low: "ratio/min", high: "ratio/max" })]),
  ] },
  { title: "Sampler and learner", charts: [
    chart("difference", "Difference of log-probs", "nats", lines({ mean: "mean", max: "max" }, "sampling/sampling_logp_difference/")),
    chart("is", "Importance ratio of the sampler", "", [one("sampling/importance_sampling_ratio/mean", { low: "sampling/importance_sampling_ratio/min", high: "sampling/importance_sampling_ratio/max" })]),
    chart("ess", "Effective sample size", "%", [one("sampling/effective_sample_size")]),
    chart("masked", "Masked by the correction", "%", [one("sampling/masked_fraction")]),
    chart("skl", "KL of the sampler", "nats", [one("sampling/kl")]),
  ] },
  { title: "Completions", charts: [
    chart("length", "Length", "tokens", [one("completions/mean_length", { low: "completions/min_length", high: "completions/max_length" })]),
    chart("cut", "Cut off at the length limit", "%", [one("completions/clipped_ratio")]),
  ] },
  { title: "Optimizer", charts: [
    chart("loss", "Loss", "", [one("loss")]),
    chart("grad", "Gradient norm", "", [one("grad_norm")]),
    chart("rate", "Learning rate", "", [one("learning_rate")]),
  ] },
  { title: "Speed and memory", charts: [
    chart("tps", "Tokens sampled per second", "tokens/s", lines({ "of the rollout": "tokens_per_second", "of the whole step": "tokens_per_second/step" })),
    chart("parts", "Time of an update, by part", "s", lines({ rollout: "rollout", rewards: "reward", learner: "learner", update: "update", sync: "sync", saving: "checkpoint", rest: "rest" }, "time/"), { stacked: true }),
    chart("memory", "Memory", "GB", lines({ peak: "peak_gb", active: "active_gb", swap: "swap_gb" }, "memory/")),
  ] },
];

// What a chart's metrics are, as the table of all metrics has it.
const MEANINGS = new Map(Object.entries(start.metrics));

function helpOf(chart) {
  return chart.series.map((each) => {
    const known = MEANINGS.get(each.name.replace(/^rewards\/.*\/(?=mean$|std$)/, "rewards/{name}/"));
    const label = each.label ? `${each.label}: ` : "";
    return known ? `${label}${known.replaceAll("`", "")}.` : "Logged by a reward or by a part of the run.";
  }).join(" ");
}

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
    for (const { series } of charts) for (const each of series)
      for (const key of ["name", "spread", "interval", "low", "high"]) if (each[key]) used.add(each[key]);
    const filled = charts.map((chart) => ({ ...chart, series: chart.series.filter((each) => names.has(each.name)) }));
    const found = filled.filter((each) => each.series.length && (!each.where || names.has(each.where)) && !(each.unless && names.has(each.unless)));
    if (found.length) groups.push({ title: group.title, charts: found });
  }
  const others = [...names].filter((name) => !used.has(name)).sort();
  if (others.length)
    groups.push({ title: "Other metrics", charts: others.map((name) => ({ id: `other-${name}`, title: visible(name), series: [one(name)] })) });
  return groups;
}

function rewardChart(name) {
  return chart(`reward-${name}`, visible(name), "", [one(`rewards/${name}/mean`, { spread: `rewards/${name}/std` })]);
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
    if (kind) found.push({ kind, update: event.update ?? 0, time: event.time, text: textOf(event) });
  }
  const updates = run.column("update");
  run.column("update_skipped").forEach((skipped, i) => {
    if (skipped) found.push({ kind: "skipped", update: updates[i], text: "the update was skipped: its numbers were not finite" });
  });
  const sizes = run.column("em_subset");
  for (let i = 0; i < run.lines; i++) if (run.isEvaluation(i)) {
    const share = run.column("em")[i] ?? null;
    const of = sizes[i] ? ` of ${sizes[i]} problems` : "";
    found.push({ kind: "evaluation", update: updates[i] ?? 0, text: share === null ? `held-out reward ${numberText(run.column("eval/reward")[i])}` : `exact match ${percentText(share)}${of}` });
  }
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
