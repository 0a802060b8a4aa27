// The head of the page: what the run is, how it went, what it ran on, and what happened.

const STATES = {
  running: ["running", "good"], finished: ["finished", "good"], stopped: ["stopped", "warn"],
  failed: ["failed", "bad"], interrupted: ["ended without a message", "bad"], empty: ["no log yet", "warn"], unknown: ["running when last seen", "warn"],
};

const badge = (state) => h("span", { class: `badge ${STATES[state]?.[1] ?? "warn"}` }, STATES[state]?.[0] ?? state);

function tile(label, value, more, attributes) {
  return h("div", { class: "tile", ...attributes }, h("div", { class: "label" }, label), h("div", { class: "value" }, value), h("div", { class: "more" }, more ?? ""));
}

// What an evaluation is judged by: exact match, or the held-out reward where there are no gold answers.
function headline(run) {
  const name = run.last("em") === null && run.last("eval/reward") !== null ? "eval/reward" : "em";
  const text = name === "em" ? percentText : numberText;
  const after = run.last(name);
  const range = name === "em" ? wilson(after, run.last("em_subset")) : null;
  return tile(name === "em" ? "Exact match" : "Held-out reward", after === null ? "–" : text(after), after === null ? "not measured" : [
    run.column(name).filter((value) => value !== null).length > 1 ? `from ${text(run.first(name))}` : "",
    range ? h("span", { class: "whole", title: "Wilson's 95 % interval" }, `${(100 * range[0]).toFixed(1)} – ${percentText(range[1])}`) : ""]);
}

function drawTiles(place, runs) {
  if (runs.length !== 1) return place.replaceChildren(comparison(runs));
  const [run] = runs;
  const updates = run.last("update") ?? 0;
  const planned = run.facts.updates;
  const hours = run.axis("time").at(-1) ?? 0;
  const best = Math.max(...run.column("reward").filter((value) => value !== null));
  place.replaceChildren(
    headline(run),
    tile("Reward", numberText(run.last("reward")), `first ${numberText(run.first("reward"))} · best ${Number.isFinite(best) ? numberText(best) : "–"}`),
    tile("Updates", planned ? [numberText(updates), h("small", null, ` / ${numberText(planned)}`)] : numberText(updates),
      planned ? h("progress", { max: planned, value: updates, "aria-label": "Updates done" }) : ""),
    tile("Time", durationText(hours * 3600), run.last("step_time") === null ? "" : `last update ${numberText(run.last("step_time"))} s`),
    tile("Tokens sampled", countText(run.last("num_tokens")), run.last("tokens_per_second") === null ? "" : `last update ${countText(run.last("tokens_per_second"))}/s`),
    tile("Peak memory", run.last("memory/peak_gb") === null ? "–" : `${Number(Math.max(...run.column("memory/peak_gb")).toPrecision(3))} GB`, run.last("memory/swap_gb") ? `${numberText(run.last("memory/swap_gb"))} GB swapped out` : ""),
  );
}

// Several runs: a row each.
function comparison(runs) {
  const head = ["run", "state", "exact match", "reward", "updates", "time", "tokens", "tokens/s", "peak memory"];
  return h("div", { class: "scroll wide" }, h("table", { class: "facts compare" },
    h("thead", null, h("tr", null, head.map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", null, runs.map((run) => {
      const range = wilson(run.last("em"), run.last("em_subset"));
      return h("tr", null,
        h("th", { scope: "row" }, h("span", { class: "chip", colour: run.colour }, h("i"), visible(run.name))),
        h("td", null, badge(run.facts.state)),
        h("td", null, percentText(run.last("em")), range ? h("small", null, ` ${percentText(range[0])}–${percentText(range[1])}`) : ""),
        h("td", null, numberText(run.last("reward"))), h("td", null, numberText(run.last("update"))),
        h("td", null, durationText((run.axis("time").at(-1) ?? 0) * 3600)), h("td", null, countText(run.last("num_tokens"))),
        h("td", null, countText(run.last("tokens_per_second"))),
        h("td", null, run.last("memory/peak_gb") === null ? "–" : `${Number(Math.max(...run.column("memory/peak_gb")).toPrecision(3))} GB`));
    }))));
}

function factTable(rows) {
  return h("table", { class: "facts" }, h("tbody", null, rows.map(([name, value]) => h("tr", null, h("th", { scope: "row" }, name), h("td", null, visible(String(value)))))));
}

function drawAbout(place, runs) {
  place.replaceChildren(...runs.map((run) => {
    const { about, machine, versions } = run.facts;
    const shown = Object.entries(about).filter(([name]) => name !== "run");
    if (!shown.length) for (const key of ["model.path", "data.source", "loss.preset"]) if (run.facts.config[key]) shown.push([key, run.facts.config[key]]);
    const parts = [
      h("div", null, h("h3", null, "Run"), factTable([["started", dateText(run.facts.started)], ...shown, ["folder", run.facts.folder]])),
      Object.keys(machine).length ? h("div", null, h("h3", null, "Machine"), factTable(Object.entries(machine).map(([name, value]) => [name.replace("memory_gb", "memory, GB"), value]))) : null,
      Object.keys(versions).length ? h("div", null, h("h3", null, "Versions"), factTable(Object.entries(versions))) : null,
    ];
    return h("div", { class: "about" }, runs.length > 1 ? h("h3", { class: "run" }, h("span", { class: "chip", colour: run.colour }, h("i"), visible(run.name))) : null, h("div", { class: "columns" }, parts));
  }));
}

function drawEvents(place, runs) {
  const rows = runs.flatMap((run) => eventsOf(run).filter((event) => event.kind !== "evaluation").map((event) => ({ run, ...event })));
  const most = 400;
  const count = rows.length;
  place.replaceChildren(h("h2", null, "Events"), count === 0 ? h("p", { class: "empty" }, "No events were recorded.") :
    h("div", { class: "scroll events" }, h("table", { class: "facts" }, h("tbody", null, rows.slice(-most).reverse().map((event) => h("tr", null,
      h("td", { class: "sign", style: { color: `var(--event-${event.kind})` }, title: KINDS[event.kind].label }, KINDS[event.kind].sign),
      runs.length > 1 ? h("td", null, h("span", { class: "chip", colour: event.run.colour }, h("i"), visible(event.run.name))) : null,
      h("td", { class: "number" }, `update ${event.update ?? "–"}`),
      h("td", null, visible(event.text)))))),
    count > most ? h("p", { class: "empty" }, `The newest ${most} of ${count} events.`) : null));
}

// The config: what differs from the defaults, or between the runs, first.
function drawConfig(place, runs) {
  const several = runs.length > 1;
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.facts.config)))];
  const value = (run, key) => valueText(run.facts.config[key]) || '""';
  const isDifferent = (key) => (several ? new Set(runs.map((run) => value(run, key))).size > 1 : runs[0].facts.different.includes(key));
  const different = keys.filter(isDifferent);
  const query = h("input", { type: "search", placeholder: "Search keys and values", "aria-label": "Search the config" });
  const body = h("tbody");
  const fill = () => {
    const wanted = query.value.toLowerCase();
    const all = wanted || byId("config-all")?.getAttribute("aria-pressed") === "true";
    const chosen = (all ? keys : different).filter((key) => `${key} ${runs.map((run) => value(run, key)).join(" ")}`.toLowerCase().includes(wanted));
    body.replaceChildren(...chosen.map((key) => h("tr", { class: different.includes(key) ? "different" : null }, h("th", { scope: "row" }, key), runs.map((run) => h("td", null, visible(value(run, key)))))));
    if (!chosen.length) body.append(h("tr", null, h("td", { colspan: String(runs.length + 1), class: "empty" }, several ? "The configs are the same." : "All keys have their default values.")));
  };
  query.addEventListener("input", fill);
  place.replaceChildren(
    h("div", { class: "bar" }, query, toggle("All keys", false, fill, { id: "config-all" }),
      h("span", { class: "muted" }, several ? `${different.length} keys differ between the runs` : `${different.length} of ${keys.length} keys differ from the defaults`)),
    h("div", { class: "scroll" }, h("table", { class: "facts config" }, h("thead", null, h("tr", null, h("th", null, "key"), runs.map((run) => h("th", null, several ? h("span", { class: "chip", colour: run.colour }, h("i"), visible(run.name)) : "value")))), body)));
  fill();
}
