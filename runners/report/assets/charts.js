// Charts by uPlot: a shared cursor, a shared zoom, smoothing, spread, gaps and events.

const view = {
  axis: remembered("axis", "update"),
  smooth: Number(remembered("smooth", "0")),
  kinds: new Set(["warning", "skipped", "resume", "end", "sync"]),
  zoom: null, // [low, high] of the axis, null: all
  hidden: new Set(), // "chart id/series label"
};
const AXES = { update: "update", time: "hours", tokens: "tokens sampled" };
const USUAL = new Set(["sync", "checkpoint", "evaluation"]);
const drawn = new Map(); // chart id -> Chart

class Chart {
  constructor(spec, runs) {
    this.spec = spec;
    this.readout = h("div", { class: "readout" });
    this.canvas = h("div", { class: "canvas" });
    this.element = h("figure", { class: spec.wide ? "chart wide" : "chart", "data-chart": spec.id, tabindex: "0" },
      h("figcaption", null,
        h("span", { class: "title" }, spec.title),
        spec.unit ? h("span", { class: "unit" }, spec.unit) : null,
        h("details", { class: "help" }, h("summary", { "aria-label": `About ${spec.title}` }, "?"), h("p", null, helpOf(spec)))),
      this.readout, this.canvas);
    this.element.addEventListener("keydown", (event) => this.key(event));
    this.draw(runs);
  }

  get height() {
    return this.spec.wide ? 230 : 170;
  }

  // What is drawn of the runs: one entry for each line, with the columns that it takes of the data.
  draw(runs) {
    this.runs = runs;
    this.lines = [];
    const tables = [];
    const stacked = this.spec.stacked && runs.length === 1;
    let below = null;
    for (const run of runs) for (const each of this.spec.series) {
      const points = readings(run, each, this.spec);
      if (!points.x.length) continue;
      if (stacked) {
        points.y = points.y.map((value, i) => (value ?? 0) + (below?.[i] ?? 0));
        below = points.y;
      }
      const several = this.spec.series.length > 1;
      const colour = several && runs.length === 1 ? this.spec.series.indexOf(each) % COLOURS : run.colour;
      const label = several ? each.label : runs.length > 1 ? run.name : "";
      const dash = several && runs.length > 1 ? [[], [5, 4], [2, 3], [8, 3, 2, 3]][this.spec.series.indexOf(each) % 4] : [];
      this.lines.push({ run, each, label: several && runs.length > 1 ? `${run.name} ${label}` : label, colour, dash, points });
      tables.push([points.x, points.y, points.low, points.high, smoothed(points.y)]);
    }
    this.plot?.destroy();
    this.plot = null;
    this.canvas.replaceChildren();
    if (!tables.length) return;
    const data = uPlot.join(tables);
    this.raw = data;
    const style = getComputedStyle(document.documentElement);
    const ink = (name) => style.getPropertyValue(name).trim();
    const series = [{}];
    const bands = [];
    this.lines.forEach((line, i) => {
      const colour = ink(`--series-${line.colour}`);
      const at = 1 + 4 * i;
      const show = !view.hidden.has(`${this.spec.id}/${line.label}`);
      const faint = view.smooth > 0 && !stacked;
      const dots = this.spec.sparse || line.points.x.length < 3;
      series.push(
        { label: line.label, show, stroke: faint ? `${colour}55` : colour, width: 1.6, dash: line.dash, points: { show: dots, size: 6, fill: colour }, fill: stacked ? `${colour}40` : undefined, spanGaps: Boolean(this.spec.sparse) },
        { label: "low", show: show && !stacked, stroke: "transparent", width: 0, points: { show: false } },
        { label: "high", show: show && !stacked, stroke: "transparent", width: 0, points: { show: false } },
        { label: "smooth", show: show && faint, stroke: colour, width: 2, points: { show: false }, spanGaps: true },
      );
      if (!this.spec.sparse && line.points.hasBand && show) bands.push({ series: [at + 2, at + 1], fill: `${colour}22` });
      if (stacked && i > 0) bands.push({ series: [at, at - 4], fill: `${colour}40` });
    });
    if (stacked) for (let i = 1; i < this.lines.length; i++) series[1 + 4 * i].fill = undefined;
    const axis = { stroke: ink("--muted"), grid: { stroke: ink("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    this.plot = new uPlot({
      width: Math.max(this.canvas.clientWidth || this.element.clientWidth - 24, 120), height: this.height, series, bands,
      legend: { show: false },
      padding: [10, 18, 0, 0],
      cursor: {
        points: { size: 7 }, drag: { x: true, y: false },
        sync: { key: "all", setSeries: false, filters: { pub: (type) => !/mouse(down|up)/.test(type) } },
      },
      scales: {
        x: { time: false, range: (plot, low, high) => view.zoom ?? (low === high ? [low - 0.5, high + 0.5] : [low, high]) },
        y: { range: (plot, low, high) => this.rangeOf(low, high, stacked) },
      },
      axes: [
        { ...axis, size: 24, gap: 4, values: (plot, ticks, at, space, step) => ticks.map((tick) => (view.axis !== "update" ? tickText(tick, step) : tick % 1 ? "" : tickText(tick, Math.max(step, 1)))) },
        { ...axis, size: (plot, texts) => 16 + 6.6 * Math.max(4, ...(texts ?? []).map((text) => text.length)), gap: 6, values: (plot, ticks, at, space, step) => ticks.map((tick) => tickText(tick, step)) },
      ],
      hooks: {
        setCursor: [() => this.read()],
        setSelect: [(plot) => this.zoomed(plot)],
        draw: [(plot) => this.marks(plot, ink)],
      },
    }, data, this.canvas);
    this.plot.over.addEventListener("dblclick", () => setZoom(null));
    this.describe();
    this.read();
  }

  rangeOf(low, high, stacked) {
    if (low === null || high === null || !Number.isFinite(low) || !Number.isFinite(high)) return [0, 1];
    if (stacked) return [0, high * 1.08 || 1];
    if (low === high) return low === 0 ? [-0.1, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
    const least = 5e-4 * Math.abs(high + low) - (high - low); // what is nearly constant looks so
    if (least > 0) [low, high] = [low - least / 2, high + least / 2];
    const room = (high - low) * 0.08;
    return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  }

  zoomed(plot) {
    const { left, width } = plot.select;
    if (width < 6) return;
    setZoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  }

  // The values at the cursor, or the last ones; each is a button that hides its line.
  read() {
    if (!this.plot) return;
    const idx = this.plot.cursor.idx;
    const rows = this.lines.map((line, i) => {
      const column = this.raw[1 + 4 * i];
      const at = idx ?? column.findLastIndex((value) => value !== null && value !== undefined);
      const place = idx === null || idx === undefined ? at : nearestGiven(column, idx);
      let value = column[place] ?? null;
      if (value !== null && this.spec.stacked && this.runs.length === 1 && i > 0) value -= this.raw[1 + 4 * (i - 1)][place] ?? 0;
      const [low, high] = [this.raw[2 + 4 * i][place] ?? null, this.raw[3 + 4 * i][place] ?? null];
      const spread = low === null || low === high ? "" : line.each.spread ? ` ± ${numberText((high - low) / 2)}` : ` (${numberText(low)} – ${numberText(high)})`;
      return { line, text: `${numberText(value)}${spread}`, x: this.raw[0][place] };
    });
    const x = rows[0]?.x;
    const key = rows.map((row) => row.line.label).join("|");
    if (key !== this.readKey) {
      this.readKey = key;
      this.place = h("span", { class: "place" });
      this.chips = rows.map(({ line }) => {
        const id = `${this.spec.id}/${line.label}`;
        const value = h("b");
        const pressed = !view.hidden.has(id);
        const chip = this.lines.length === 1 ? h("span", { class: "chip", colour: line.colour }, value)
          : toggle([h("i", { "aria-hidden": "true" }), `${line.label} `, value], pressed, (on) => {
            if (on) view.hidden.delete(id); else view.hidden.add(id);
            this.draw(this.runs);
          }, { class: "chip", colour: line.colour });
        chip.style.setProperty("--colour", `var(--series-${line.colour})`);
        return { chip, value };
      });
      this.readout.replaceChildren(this.place, ...this.chips.map((each) => each.chip));
    }
    this.place.textContent = x === undefined || x === null ? "" : placeText(x);
    rows.forEach((row, i) => (this.chips[i].value.textContent = row.text));
    this.readEvents(idx);
  }

  readEvents(idx) {
    this.near?.remove();
    if (idx === null || idx === undefined || this.plot.cursor.left < 0) return;
    const near = this.marked?.filter((mark) => Math.abs(mark.left - this.plot.cursor.left) < 5) ?? [];
    if (!near.length || !this.plot.over.matches(":hover")) return;
    this.near = h("div", { class: "near" }, near.slice(0, 4).map((mark) => h("div", null, `${KINDS[mark.kind].sign} ${visible(mark.text).slice(0, 160)}`)));
    this.plot.over.append(this.near);
  }

  // Events as lines, intervals as bars, numbers that were not finite as crosses.
  marks(plot, ink) {
    const { ctx, bbox } = plot;
    this.element.dataset.low = numberText(plot.scales.y.min);
    const ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left - 5 * ratio, bbox.top - 10 * ratio, bbox.width + 10 * ratio, bbox.height + 10 * ratio);
    ctx.clip();
    this.marked = [];
    for (const run of this.runs) for (const event of eventsOf(run)) {
      if (!view.kinds.has(event.kind)) continue;
      const at = placeOf(run, event.update);
      if (at === null) continue;
      const x = plot.valToPos(at, "x", true);
      if (x < bbox.left - 1 || x > bbox.left + bbox.width + 1) continue;
      ctx.strokeStyle = ink(`--event-${event.kind}`);
      ctx.lineWidth = ratio;
      ctx.setLineDash(USUAL.has(event.kind) ? [] : [4 * ratio, 3 * ratio]);
      ctx.beginPath();
      // What is usual is a short line at the bottom, what is rare goes through.
      ctx.moveTo(x, USUAL.has(event.kind) ? bbox.top + bbox.height - 9 * ratio : bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      this.marked.push({ ...event, left: (x - bbox.left) / ratio });
    }
    ctx.setLineDash([]);
    this.lines.forEach((line, i) => {
      const colour = ink(`--series-${line.colour}`);
      if (this.spec.sparse && line.points.hasBand) for (let row = 0; row < this.raw[0].length; row++) {
        const [low, high] = [this.raw[2 + 4 * i][row], this.raw[3 + 4 * i][row]];
        if (low === null || low === undefined) continue;
        const x = plot.valToPos(this.raw[0][row], "x", true);
        const [top, bottom] = [plot.valToPos(high, "y", true), plot.valToPos(low, "y", true)];
        ctx.strokeStyle = colour;
        ctx.lineWidth = 1.5 * ratio;
        ctx.beginPath();
        for (const y of [top, bottom]) { ctx.moveTo(x - 4 * ratio, y); ctx.lineTo(x + 4 * ratio, y); }
        ctx.moveTo(x, top);
        ctx.lineTo(x, bottom);
        ctx.stroke();
      }
      ctx.strokeStyle = ink("--bad");
      ctx.lineWidth = 1.5 * ratio;
      for (const at of line.points.broken) {
        const x = plot.valToPos(at, "x", true);
        const y = bbox.top + bbox.height - 6 * ratio;
        ctx.beginPath();
        ctx.moveTo(x - 4 * ratio, y - 4 * ratio); ctx.lineTo(x + 4 * ratio, y + 4 * ratio);
        ctx.moveTo(x - 4 * ratio, y + 4 * ratio); ctx.lineTo(x + 4 * ratio, y - 4 * ratio);
        ctx.stroke();
      }
    });
    ctx.restore();
  }

  // The chart in words, for those who cannot see it.
  describe() {
    const parts = this.lines.map((line) => {
      const given = line.points.y.filter((value) => value !== null);
      if (!given.length) return `${line.label}: no numbers`;
      let [low, high] = [Infinity, -Infinity];
      for (const value of given) { low = Math.min(low, value); high = Math.max(high, value); }
      const broken = line.points.broken.length ? `, ${line.points.broken.length} not finite` : "";
      return `${line.label} from ${numberText(given[0])} to ${numberText(given.at(-1))}, smallest ${numberText(low)}, largest ${numberText(high)}${broken}`;
    });
    this.element.setAttribute("aria-label", `${this.spec.title}: ${parts.join("; ")}. Arrow keys move the cursor, plus and minus zoom, 0 shows all.`);
    const broken = this.lines.reduce((sum, line) => sum + line.points.broken.length, 0);
    this.warning?.remove();
    if (broken) {
      this.warning = h("span", { class: "broken" }, `${broken} not finite`);
      this.element.querySelector("figcaption .title").after(this.warning);
    }
  }

  key(event) {
    if (!this.plot || event.target !== this.element) return;
    const last = this.raw[0].length - 1;
    const idx = this.plot.cursor.idx ?? last;
    const [low, high] = [this.plot.scales.x.min, this.plot.scales.x.max];
    const middle = this.raw[0][idx] ?? (low + high) / 2;
    const acts = {
      ArrowLeft: () => this.moveTo(Math.max(idx - (event.shiftKey ? 10 : 1), 0)),
      ArrowRight: () => this.moveTo(Math.min(idx + (event.shiftKey ? 10 : 1), last)),
      Home: () => this.moveTo(0),
      End: () => this.moveTo(last),
      "+": () => setZoom([middle - (high - low) / 4, middle + (high - low) / 4]),
      "-": () => setZoom([middle - (high - low), middle + (high - low)]),
      0: () => setZoom(null),
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }

  moveTo(idx) {
    this.plot.setCursor({ left: this.plot.valToPos(this.raw[0][idx], "x"), top: this.height / 3 }, true, true);
  }

  resize() {
    const width = this.canvas.clientWidth;
    if (this.plot && width > 0 && Math.abs(width - this.plot.width) > 1) this.plot.setSize({ width, height: this.height });
  }
}

// A metric's readings on the chosen axis: x ascending, y with null for what is missing, low and high.
function readings(run, each, spec) {
  const values = run.column(each.name);
  const axis = run.axis(view.axis);
  const scale = spec.unit === "%" ? 100 : 1;
  const sparse = spec.sparse || values.filter((value) => value !== null).length * 2 < run.lines;
  const broken = new Set(run.nonfinite.filter(([, name]) => name === each.name).map(([line]) => line));
  const rows = [];
  for (let i = 0; i < run.lines; i++) {
    if (axis[i] === null || axis[i] === undefined || (!sparse && run.isEvaluation(i))) continue;
    if (values[i] !== null || broken.has(i) || !sparse) rows.push(i);
  }
  rows.sort((a, b) => axis[a] - axis[b] || a - b);
  const points = { x: [], y: [], low: [], high: [], broken: [], hasBand: false };
  for (const i of rows) {
    if (points.x.length && axis[i] === points.x.at(-1)) for (const name of ["x", "y", "low", "high"]) points[name].pop();
    const value = values[i] ?? null;
    const [low, high] = value === null ? [null, null] : spreadOf(run, each, i, value);
    points.x.push(axis[i]);
    points.y.push(value === null ? null : value * scale);
    points.low.push(low === null ? null : low * scale);
    points.high.push(high === null ? null : high * scale);
    if (broken.has(i)) points.broken.push(axis[i]);
    points.hasBand ||= low !== null;
  }
  return points;
}

function spreadOf(run, each, i, value) {
  if (each.spread) {
    const spread = run.column(each.spread)[i] ?? null;
    return spread === null ? [null, null] : [value - spread, value + spread];
  }
  if (each.interval) return wilson(value, run.column(each.interval)[i]) ?? [null, null];
  if (each.low) return [run.column(each.low)[i] ?? null, run.column(each.high)[i] ?? null];
  return [null, null];
}

// Exponential moving average, corrected for its start; it goes on over gaps.
function smoothed(values) {
  const keep = view.smooth;
  if (!keep) return values.map(() => null);
  let [sum, weight] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return sum / weight;
  });
}

function nearestGiven(column, idx) {
  for (let away = 0; away < column.length; away++)
    for (const at of [idx - away, idx + away]) if (column[at] !== null && column[at] !== undefined) return at;
  return idx;
}

const placeText = (x) => (view.axis === "update" ? `update ${Math.round(x)}` : view.axis === "tokens" ? `${countText(x)} tokens` : `${durationText(x * 3600)}`);

// Where an update stands on the chosen axis.
function placeOf(run, update) {
  if (view.axis === "update") return update;
  const updates = run.column("update");
  const at = updates.findIndex((value) => value !== null && value >= update);
  return run.axis(view.axis)[at < 0 ? run.lines - 1 : at] ?? null;
}

function setZoom(range) {
  view.zoom = range;
  for (const chart of drawn.values()) chart.plot?.setScale("x", range ? { min: range[0], max: range[1] } : { min: chart.raw[0][0], max: chart.raw[0].at(-1) });
  byId("all").hidden = !range;
}

// Draws what is new and takes away what has gone; charts far down wait until they are near the screen.
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting && entry.target.waiting) {
    entry.target.waiting();
    entry.target.waiting = null;
  }
}, { rootMargin: "600px" });
const sizes = new ResizeObserver(() => { for (const chart of drawn.values()) chart.resize(); });

function drawCharts(place, runs) {
  const groups = chartGroups(runs);
  const key = JSON.stringify(groups.map((group) => group.charts.map((chart) => [chart.id, chart.series.map((each) => each.name)])));
  if (place.dataset.key !== key) {
    place.dataset.key = key;
    drawn.clear();
    place.replaceChildren(...groups.map((group) => h("section", { class: "group" }, h("h2", null, group.title),
      h("div", { class: "charts" }, group.charts.map((spec) => slot(spec, runs))))));
    sizes.disconnect();
    sizes.observe(place);
  } else for (const chart of drawn.values()) chart.draw(runs);
}

function slot(spec, runs) {
  const empty = h("div", { class: spec.wide ? "chart wide" : "chart", style: { "min-height": spec.wide ? "290px" : "230px" } });
  empty.waiting = () => {
    const chart = new Chart(spec, shownRuns());
    drawn.set(spec.id, chart);
    empty.replaceWith(chart.element);
    chart.draw(shownRuns());
  };
  watcher.observe(empty);
  return empty;
}
