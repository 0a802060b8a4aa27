// Held-out problems: what became right or wrong between two evaluations.

const REWARDED = { all: "all", gained: "reward rose", lost: "reward fell", same: "same reward" }; // without gold answers
const CHANGES = { all: "all", gained: "wrong → right", lost: "right → wrong", wrong: "still wrong", right: "still right" };

class Problems {
  constructor(place, run) {
    this.place = place;
    this.run = run;
    this.filter = { change: "all", query: "" };
    this.list = new VirtualList(64, (index) => this.item(index), (index) => this.choose(index));
    this.list.element.setAttribute("aria-label", "Held-out problems");
    this.detail = h("div", { class: "detail", tabindex: "-1" });
    this.bar = h("div", { class: "bar filters" });
    this.opened = this.refresh();
  }

  async refresh() {
    const found = this.run.facts.evaluations;
    if (!found.length) {
      this.place.replaceChildren(h("p", { class: "empty" }, "There are no held-out completions: no evaluation yet, or log.completions is false."));
      return;
    }
    const last = this.evaluations?.length;
    this.evaluations = found;
    if (!last) {
      this.before = 0;
      this.after = found.length - 1;
      this.place.replaceChildren(this.bar, h("div", { class: "split" }, this.list.element, this.detail));
    } else if (this.after === last - 1 && found.length > last) this.after = found.length - 1;
    else if (found.length === last && this.shown) return;
    await this.open();
  }

  async open() {
    const [a, b, first] = await Promise.all([this.before, this.after, 0].map((i) => blob(this.evaluations[Math.min(i, this.evaluations.length - 1)].at)));
    this.shown = { a, b, problems: first.problems };
    const options = this.evaluations.map(({ update }, i) => [String(i), `update ${update}`]);
    const pick = (name) => choice(options, String(this[name]), (value) => { this[name] = Number(value); this.open(); }, { "aria-label": name === "before" ? "Earlier evaluation" : "Later evaluation" });
    const counts = this.counts();
    const changes = choice(Object.entries(this.changes).map(([name, label]) => [name, `${label} (${counts[name]})`]), this.filter.change, (value) => { this.filter.change = value; this.apply(); }, { "aria-label": "Which problems", id: "filter-change" });
    const query = h("input", { type: "search", placeholder: "Search problems", "aria-label": "Search problems", value: this.filter.query, oninput: (event) => { this.filter.query = event.target.value; this.apply(); } });
    this.count = h("span", { class: "muted", role: "status" });
    this.bar.replaceChildren("from", pick("before"), "to", pick("after"), changes, query, this.count);
    this.apply();
  }

  changeOf(i) {
    const { a, b } = this.shown;
    if (b.correct[i] === null) return b.reward[i] > a.reward[i] ? "gained" : b.reward[i] < a.reward[i] ? "lost" : "same";
    return a.correct[i] ? (b.correct[i] ? "right" : "lost") : b.correct[i] ? "gained" : "wrong";
  }

  get changes() {
    return this.shown.b.correct.includes(null) ? REWARDED : CHANGES;
  }

  counts() {
    const found = { all: this.shown.problems.length, gained: 0, lost: 0, wrong: 0, right: 0, same: 0 };
    for (let i = 0; i < found.all; i++) found[this.changeOf(i)]++;
    return found;
  }

  apply() {
    const wanted = this.filter.query.toLowerCase();
    const { a, b, problems } = this.shown;
    this.items = [];
    for (let i = 0; i < problems.length; i++) {
      const fits = this.filter.change === "all" || this.changeOf(i) === this.filter.change;
      if (fits && (!wanted || [...problems[i], a.completion[i], b.completion[i]].some((text) => text?.toLowerCase().includes(wanted)))) this.items.push(i);
    }
    this.count.textContent = `${this.items.length} of ${problems.length} problems`;
    this.list.show(this.items.length);
    if (!this.items.length) this.detail.replaceChildren(h("p", { class: "empty" }, "No problem matches these filters."));
    else if (!matchMedia("(max-width: 800px)").matches) this.list.choose(0);
  }

  item(index) {
    const i = this.items[index];
    const change = this.changeOf(i);
    return h("div", { class: "item" }, h("div", { class: "head" }, h("span", { class: "muted" }, `problem ${i + 1}`), h("span", { class: `flag ${change}` }, this.changes[change])), h("div", { class: "snippet", dir: "auto" }, visible(this.shown.problems[i][0].slice(0, 240).replace(/\s+/g, " "))));
  }

  choose(index) {
    const i = this.items[index];
    const { a, b, problems } = this.shown;
    const card = (update, piece) => {
      const right = piece.correct[i] === null ? "" : piece.correct[i] ? "right" : "wrong";
      return h("article", { class: "card" },
        h("div", { class: "head" }, h("b", null, `update ${update}`), right ? h("span", { class: `flag ${right}` }, right) : "",
          (piece.reward[i] ?? null) === null ? "" : h("span", { class: "muted" }, `reward ${numberText(piece.reward[i])}`)),
        textBlock(piece.completion[i] ?? ""),
        piece.extracted[i] ? h("div", { class: "muted" }, "extracted answer: ", visible(piece.extracted[i]).slice(0, 200)) : "");
    };
    this.detail.replaceChildren(
      h("button", { type: "button", class: "back", onclick: () => { this.place.classList.remove("open"); this.list.element.focus(); } }, "← back to the list"),
      h("div", { class: "asked" }, h("h3", null, `Problem ${i + 1}`), promptBlock(problems[i])),
      h("div", { class: "cards" }, card(this.evaluations[this.before].update, a), this.before === this.after ? null : card(this.evaluations[this.after].update, b)));
    if (matchMedia("(max-width: 800px)").matches) { this.place.classList.add("open"); this.detail.focus({ preventScroll: true }); }
  }
}
