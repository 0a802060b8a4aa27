// The browser of completions: filters above, a list at the side, a prompt's group next to it.

const OPERATORS = { above: (a, b) => a >= b, below: (a, b) => a <= b };
const ORDERS = {
  run: ["as sampled", null],
  latest: ["latest first", (rows, a, b) => b - a],
  high: ["highest reward", (rows, a, b) => order(rows.reward[b], rows.reward[a])],
  low: ["lowest reward", (rows, a, b) => order(rows.reward[a], rows.reward[b])],
  long: ["longest", (rows, a, b) => rows.tokens[b] - rows.tokens[a]],
  advantage: ["highest advantage", (rows, a, b) => order(rows.advantage[b], rows.advantage[a])],
};

// Missing values come last.
function order(a, b) {
  if (Number.isNaN(a)) return Number.isNaN(b) ? 0 : 1;
  return Number.isNaN(b) ? -1 : a - b;
}

class Browser {
  constructor(place, run) {
    this.place = place;
    this.rows = new Rows(run);
    this.filter = { mode: "groups", query: "", regex: false, where: "all", from: null, to: null, key: "reward", side: "above", value: "", cut: false, wrong: false, varied: false, order: "latest" };
    this.asked = 0;
    this.found = null;
    this.list = new VirtualList(64, (index) => this.item(index), (index) => this.choose(index));
    this.detail = h("div", { class: "detail", tabindex: "-1", "aria-label": "Chosen group" });
    this.count = h("span", { class: "muted", role: "status" });
    this.progress = h("progress", { max: 1, value: 0, hidden: true, "aria-label": "Loading" });
    this.bar = h("div", { class: "bar filters" });
    place.replaceChildren(this.bar, h("div", { class: "bar" }, this.count, this.progress), h("div", { class: "split" }, this.list.element, this.detail));
    this.opened = this.refresh(true);
  }

  // Takes in what is new.
  async refresh(first = false) {
    this.progress.hidden = !first;
    const changed = await this.rows.open((share) => (this.progress.value = share));
    this.progress.hidden = true;
    if (first || (changed && !this.bar.childElementCount)) this.controls();
    if (first || changed) await this.apply(!first);
  }

  controls() {
    const { rows, filter } = this;
    if (!rows.count) return;
    const on = (name) => (value) => { filter[name] = value; this.apply(); };
    const number = (name, label) => h("input", { type: "number", step: "any", class: "short", "aria-label": label, placeholder: label, oninput: (event) => on(name)(event.target.value) });
    const query = h("input", { type: "search", id: "query", placeholder: "Search texts", "aria-label": "Search texts", title: "Press / to search", oninput: (event) => { clearTimeout(this.timer); this.timer = setTimeout(() => on("query")(event.target.value), 250); } });
    const keys = [["reward", "reward"], ["advantage", "advantage"], ["tokens", "length"], ...rows.names.map((name) => [`rewards/${name}`, name]), ...(rows.hasPenalty ? [["penalty", "length penalty"]] : [])];
    this.bar.replaceChildren(...[
      choice([["groups", "By prompt"], ["rows", "Single"]], filter.mode, on("mode"), { "aria-label": "Groups or single completions" }),
      query,
      choice([["all", "anywhere"], ["completion", "in completions"], ["prompt", "in prompts"]], filter.where, on("where"), { "aria-label": "Where to search" }),
      toggle(".*", false, on("regex"), { title: "Regular expression", "aria-label": "Regular expression" }),
      h("span", { class: "field" }, "updates", number("from", "from"), "–", number("to", "to")),
      h("span", { class: "field" }, choice(keys, filter.key, on("key"), { "aria-label": "Number to filter by", id: "filter-key" }),
        choice([["above", "≥"], ["below", "≤"]], filter.side, on("side"), { "aria-label": "At least or at most", id: "filter-side" }), number("value", "any")),
      toggle("cut off", false, on("cut"), { title: "Reached the length limit", id: "filter-cut" }),
      rows.formats.length ? toggle("wrong format", false, on("wrong"), { title: "A format reward is below its maximum", id: "filter-wrong" }) : null,
      toggle("rewards differ", false, on("varied"), { title: "Groups with a gradient" }),
      choice(Object.entries(ORDERS).map(([name, [label]]) => [name, label]), filter.order, on("order"), { "aria-label": "Order" }),
    ].filter(Boolean));
  }

  // Chooses the rows that the filters let through, and draws the list anew.
  async apply(keep = false) {
    const ask = ++this.asked;
    const { rows, filter } = this;
    if (!rows.count) return this.empty();
    let pattern = null;
    this.bar.querySelector("#query")?.removeAttribute("aria-invalid");
    if (filter.query) {
      try {
        pattern = new RegExp(filter.regex ? filter.query : filter.query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "gi");
      } catch {
        this.bar.querySelector("#query").setAttribute("aria-invalid", "true");
        this.count.textContent = "This is not a regular expression.";
        return;
      }
    }
    let texts = null;
    if (pattern) {
      const test = new RegExp(pattern.source, "i");
      this.progress.hidden = false;
      texts = await rows.search((text) => test.test(text), filter.where, (share) => (this.progress.value = share), () => ask !== this.asked);
      if (texts === null) return;
      this.progress.hidden = true;
    }
    this.pattern = pattern;
    const column = filter.key.startsWith("rewards/") ? rows.rewards[filter.key.slice(8)] : rows[filter.key];
    const [from, to, bound] = [filter.from, filter.to, filter.value].map((text) => (text === null || text === "" ? null : Number(text)));
    const passes = (row) =>
      (texts === null || texts.has(row)) && (from === null || rows.update[row] >= from) && (to === null || rows.update[row] <= to) &&
      (bound === null || OPERATORS[filter.side](column[row], bound)) && (!filter.cut || rows.finished[row] === 0) && (!filter.wrong || rows.wrongFormat(row));
    const items = [];
    this.passed = new Uint8Array(rows.count);
    let passed = 0;
    for (const group of rows.groups) {
      if (filter.varied && !varied(rows, group)) continue;
      let best = -1;
      for (let row = group.first; row < group.first + group.size; row++) if (passes(row)) {
        this.passed[row] = 1;
        passed++;
        if (filter.mode === "rows") items.push({ group, row });
        else if (best < 0 || (ORDERS[filter.order][1]?.(rows, row, best) ?? 1) < 0) best = row;
      }
      if (filter.mode === "groups" && best >= 0) items.push({ group, row: best });
    }
    const compare = ORDERS[filter.order][1];
    if (compare) items.sort((a, b) => compare(rows, a.row, b.row));
    this.items = items;
    const left = rows.run.facts.completions.left_out;
    this.count.textContent = `${passed.toLocaleString("en")} of ${rows.count.toLocaleString("en")} completions` + (filter.mode === "groups" ? ` in ${items.length.toLocaleString("en")} groups` : "") + (left ? `; those of ${left.toLocaleString("en")} updates are not on this page (grpo report --all)` : "");
    const before = keep && this.current ? items.findIndex((item) => item.group.first === this.current.group.first && (filter.mode === "groups" || item.row === this.current.row)) : -1;
    this.list.show(items.length, before);
    if (!items.length) { this.current = null; this.detail.replaceChildren(h("p", { class: "empty" }, "No completion matches these filters.")); }
    else if (before < 0 && !matchMedia("(max-width: 800px)").matches) this.list.choose(0);
    else if (before < 0) this.detail.replaceChildren();
  }

  empty() {
    this.count.textContent = "";
    this.list.show(0);
    const off = this.rows.run.facts.config["log.completions"] === false;
    this.detail.replaceChildren(h("p", { class: "empty" }, off ? "This run has no completions, because log.completions is false." : "No completions yet."));
  }

  item(index) {
    const { group, row } = this.items[index];
    const { rows } = this;
    const snippet = h("div", { class: "snippet", dir: "auto" }, "…");
    rows.text(row).then((text) => {
      const shown = this.filter.mode === "groups" ? text.asked[0] : text.completion;
      snippet.replaceChildren(visible(shown.slice(0, 240).replace(/\s+/g, " ")));
    }, () => (snippet.textContent = "(cannot be read)"));
    const head = this.filter.mode === "groups"
      ? [h("b", null, numberText(meanReward(rows, group))), dots(rows, group)]
      : [h("b", null, Number.isNaN(rows.reward[row]) ? "no reward" : numberText(rows.reward[row])), h("span", null, `A ${signed(rows.advantage[row])}`), h("span", null, `${rows.tokens[row]} tokens`), rows.finished[row] ? "" : h("span", { class: "flag" }, "cut off")];
    return h("div", { class: "item" }, h("div", { class: "head" }, h("span", { class: "muted" }, `update ${rows.update[row]}`), head), snippet);
  }

  choose(index) {
    this.current = this.items[index];
    this.showGroup();
    if (matchMedia("(max-width: 800px)").matches) { this.place.classList.add("open"); this.detail.scrollTop = 0; this.detail.focus({ preventScroll: true }); }
  }

  // The chosen group: its prompt, and its completions side by side, best reward first.
  async showGroup() {
    if (!this.current) return;
    const { rows, current } = this;
    const { group, row: chosen } = current;
    const members = Array.from({ length: group.size }, (_, i) => group.first + i).sort((a, b) => order(rows.reward[b], rows.reward[a]) || a - b);
    let texts;
    try {
      texts = await Promise.all(members.map((row) => rows.text(row)));
    } catch (error) {
      this.detail.replaceChildren(h("p", { class: "warning" }, `These completions cannot be read: ${error.message}`));
      return;
    }
    if (current !== this.current) return;
    const metrics = texts[0].more.metrics;
    this.detail.replaceChildren(
      h("button", { type: "button", class: "back", onclick: () => { this.place.classList.remove("open"); this.list.element.focus(); } }, "← back to the list"),
      h("div", { class: "asked" }, h("div", { class: "bar" }, h("h3", null, `Update ${rows.update[chosen]}`), h("span", { class: "muted" }, `batch step ${rows.step[chosen]} · group of ${group.size}`), h("span", { class: "spring" }), this.others(chosen)),
        promptBlock(texts[0].asked, this.pattern),
        metrics ? h("div", { class: "muted" }, "logged by rewards: ", Object.entries(metrics).map(([name, value]) => `${name} ${numberText(value)}`).join(" · ")) : null),
      h("div", { class: "cards" }, members.map((row, i) => this.card(row, texts[i], row === chosen && this.filter.mode === "rows"))));
  }

  card(row, text, isChosen) {
    const { rows } = this;
    const reward = rows.reward[row];
    const pairs = rows.names.map((name) => [name, rows.rewards[name][row]]);
    if (rows.hasPenalty) pairs.push(["length penalty", rows.penalty[row]]);
    const masked = rows.finished[row] === 0 && rows.run.facts.config["loss.mask_truncated_completions"] === true;
    return h("article", { class: `card${isChosen ? " chosen" : ""}${this.passed[row] ? "" : " dim"}` },
      h("div", { class: "head" }, h("b", { class: "reward", style: { "--share": String(shareOf(rows, row)) } }, Number.isNaN(reward) ? "no reward" : numberText(reward)),
        h("span", { class: rows.advantage[row] < 0 ? "minus" : rows.advantage[row] > 0 ? "plus" : "muted", title: "advantage" }, `A ${signed(rows.advantage[row])}`), h("span", { class: "muted" }, `${rows.tokens[row]} tokens`),
        rows.finished[row] ? "" : h("span", { class: "flag" }, "cut off"), masked ? h("span", { class: "flag" }, "masked") : "", rows.wrongFormat(row) ? h("span", { class: "flag" }, "format") : ""),
      h("div", { class: masked ? "all-masked" : null }, completionBlock(text, this.pattern)),
      h("table", { class: "parts" }, h("tbody", null, pairs.map(([name, value]) => h("tr", null, h("th", { scope: "row" }, visible(name)), h("td", null, Number.isNaN(value) ? "–" : numberText(value)))),
        Object.entries(text.more.extra ?? {}).map(([name, value]) => h("tr", null, h("th", { scope: "row" }, visible(name)), h("td", null, visible(valueText(value)).slice(0, 400)))))));
  }

  // The same prompt at other updates.
  others(row) {
    const { rows } = this;
    const same = rows.groups.filter((group) => rows.prompt[group.first] === rows.prompt[row]);
    if (same.length < 2) return null;
    const at = same.findIndex((group) => group.first === rows.groups.find((each) => row >= each.first && row < each.first + each.size)?.first);
    const go = (place, label, name) => h("button", { type: "button", disabled: !same[place], "aria-label": name, onclick: () => {
      this.current = { group: same[place], row: same[place].first };
      this.showGroup();
    } }, label);
    return h("span", { class: "bar" }, h("span", { class: "muted" }, `this prompt: ${at + 1} of ${same.length}`), go(at - 1, "‹", "Earlier"), go(at + 1, "›", "Later"));
  }
}

function varied(rows, group) {
  for (let row = group.first + 1; row < group.first + group.size; row++) if (rows.reward[row] !== rows.reward[group.first]) return true;
  return false;
}

function meanReward(rows, group) {
  let [sum, count] = [0, 0];
  for (let row = group.first; row < group.first + group.size; row++) if (!Number.isNaN(rows.reward[row])) { sum += rows.reward[row]; count++; }
  return count ? sum / count : NaN;
}

// Where a reward lies between the run's smallest and largest, 0 to 1.
function shareOf(rows, row) {
  if (rows.rangeOf !== rows.reward) {
    rows.rangeOf = rows.reward;
    [rows.lowest, rows.highest] = [Infinity, -Infinity];
    for (const value of rows.reward) { if (value < rows.lowest) rows.lowest = value; if (value > rows.highest) rows.highest = value; }
  }
  return rows.highest > rows.lowest && !Number.isNaN(rows.reward[row]) ? ((rows.reward[row] - rows.lowest) / (rows.highest - rows.lowest)).toFixed(3) : 0.5;
}

function dots(rows, group) {
  const members = Array.from({ length: Math.min(group.size, 32) }, (_, i) => group.first + i).sort((a, b) => order(rows.reward[b], rows.reward[a]));
  return h("span", { class: "dots", "aria-hidden": "true" }, members.map((row) => h("i", { class: Number.isNaN(rows.reward[row]) ? "none" : null, style: { "--share": String(shareOf(rows, row)) } })));
}

const signed = (value) => (Number.isNaN(value) ? "–" : `${value > 0 ? "+" : value < 0 ? "−" : ""}${numberText(Math.abs(value))}`);
