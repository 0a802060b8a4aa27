// The page's beginning: loads, draws, switches between its parts, and follows a run that goes on.

const TABS = ["overview", "completions", "problems", "config"];
let runs = [];
const shownRuns = () => runs.filter((run) => run.shown);
const panels = { completions: null, problems: null }; // made when first opened
let tab = "overview";

function drawAll() {
  const shown = shownRuns();
  const [first] = shown.length ? shown : runs;
  const several = runs.length > 1;
  byId("title").textContent = visible(several ? `${runs.length} runs` : first.name);
  byId("state").replaceChildren(several ? "" : badge(first.facts.state));
  drawTiles(byId("tiles"), shown.length > 1 || several ? shown : [first]);
  drawCharts(byId("charts"), shown);
  drawEvents(byId("events"), shown);
  drawAbout(byId("about"), shown);
}

function drawRuns() {
  byId("runs").replaceChildren(...(runs.length < 2 ? [] : runs.map((run) => toggle([h("i", { "aria-hidden": "true" }), visible(run.name)], run.shown, (on) => {
    run.shown = on;
    drawAll();
  }, { class: "chip", colour: run.colour }))));
}

function drawTools() {
  const smooth = h("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: String(view.smooth), id: "smooth", oninput: () => {
    view.smooth = Number(smooth.value);
    remember("smooth", smooth.value);
    drawCharts(byId("charts"), shownRuns());
  } });
  byId("tools").replaceChildren(
    h("label", { class: "field" }, "over", choice(Object.entries(AXES), view.axis, (axis) => {
      view.axis = axis;
      view.zoom = null;
      remember("axis", axis);
      drawCharts(byId("charts"), shownRuns());
      byId("all").hidden = true;
    }, { id: "axis" })),
    h("label", { class: "field" }, "smoothing", smooth),
    h("button", { type: "button", id: "all", hidden: true, onclick: () => setZoom(null) }, "Show all"),
    h("span", { class: "spring" }),
    h("details", { class: "menu" }, h("summary", null, "Events in the charts"), h("div", null, Object.entries(KINDS).map(([kind, { label, sign }]) => {
      const box = h("input", { type: "checkbox", checked: view.kinds.has(kind), onchange: () => {
        if (box.checked) view.kinds.add(kind); else view.kinds.delete(kind);
        for (const chart of drawn.values()) chart.plot?.redraw(false);
      } });
      return h("label", null, box, h("span", { style: { color: `var(--event-${kind})` } }, sign), label);
    }))));
}

// The parts that show one run at a time choose it in a list of their own.
function openPanel(name) {
  const place = byId(name);
  if (name === "config") return drawConfig(place, shownRuns());
  if (name === "overview" || panels[name]) return undefined;
  const Kind = name === "completions" ? Browser : Problems;
  const body = h("div", { class: "panel" });
  const open = (run) => { panels[name] = new Kind(body, run); return panels[name].opened; };
  const failed = (error) => body.replaceChildren(h("p", { class: "warning" }, `This part cannot be shown: ${error.message}`));
  place.replaceChildren(runs.length > 1 ? h("label", { class: "field" }, "run ", choice(runs.map((run, i) => [String(i), visible(run.name)]), "0", (i) => open(runs[Number(i)]).catch(failed))) : "", body);
  return open(runs[0]).then(() => place.setAttribute("data-ready", ""), failed);
}

function go(name) {
  tab = TABS.includes(name) ? name : "overview";
  for (const each of TABS) {
    const button = byId(`tab-${each}`);
    button.setAttribute("aria-selected", String(each === tab));
    button.tabIndex = each === tab ? 0 : -1;
    byId(each).hidden = each !== tab;
  }
  openPanel(tab);
  if (location.hash.slice(1) !== tab) history.replaceState(null, "", `#${tab}`);
}

function listen() {
  byId("tabs").addEventListener("click", (event) => event.target.id.startsWith("tab-") && go(event.target.id.slice(4)));
  byId("tabs").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    go(TABS[(TABS.indexOf(tab) + step + TABS.length) % TABS.length]);
    byId(`tab-${tab}`).focus();
  });
  addEventListener("hashchange", () => go(location.hash.slice(1)));
  addEventListener("keydown", (event) => {
    const isTyping = event.target.closest?.("input, select, textarea");
    if (event.key === "/" && !isTyping) {
      event.preventDefault();
      go("completions");
      byId("query")?.focus();
    }
  });
  byId("theme").addEventListener("click", () => {
    const now = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    useTheme(now === "dark" ? "light" : "dark");
    remember("theme", document.documentElement.dataset.theme);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawCharts(byId("charts"), shownRuns()));
}

function useTheme(name) {
  if (name === "light" || name === "dark") document.documentElement.dataset.theme = name;
  if (runs.length) drawCharts(byId("charts"), shownRuns());
}

// Runs of one name get numbers.
function label(found) {
  const counts = new Map();
  for (const run of found) {
    const name = run.facts.name;
    counts.set(name, (counts.get(name) ?? 0) + 1);
    if (found.filter((other) => other.facts.name === name).length > 1) run.label = `${name} ${counts.get(name)}`;
  }
}

// Asks the server every second for what is new.
async function follow(run) {
  const sign = byId("live");
  const set = (text, state) => { sign.hidden = !text; sign.textContent = text; sign.dataset.state = state; };
  for (;;) {
    try {
      const answer = await fetch(`data?${encodeURIComponent(run.facts.seen)}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(`${answer.status}`);
      if (answer.status === 200) {
        run.take(await inflated(answer.body));
        drawAll();
        for (const panel of Object.values(panels)) await panel?.refresh();
      }
      set(run.facts.state === "running" ? "live" : "", "on");
      document.documentElement.dataset.updates = String(run.last("update") ?? 0);
    } catch {
      const runs = run.facts.state === "running";
      set(runs ? "the server does not answer; trying again" : "", "off");
      if (runs) byId("state").replaceChildren(badge("unknown"));
      run.facts.seen = "";
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

async function begin() {
  useTheme(remembered("theme", ""));
  const first = await load(start.at);
  const found = first.runs ?? [first];
  runs = found.map((data, i) => new Run(data, i));
  label(runs);
  drawRuns();
  drawTools();
  drawAll();
  listen();
  go(location.hash.slice(1) || "overview");
  if (start.mode === "live") follow(runs[0]);
  document.documentElement.dataset.ready = "";
  byId("said").textContent = "The report is ready.";
}

begin().catch((error) => {
  byId("main").prepend(h("p", { class: "warning" }, `This report cannot be shown: ${error.message}. It requires a browser from 2023 or later.`));
  console.error(error);
});
