// A run's completions: numbers of all rows in typed columns, texts a part at a time, and a list that draws only what is seen.

class Rows {
  constructor(run) {
    this.run = run;
    this.parts = []; // {key, rows, numbers, spec}
    this.count = 0;
  }

  // Loads the numbers of the parts that are new. Resolves to whether anything was.
  async open(progress) {
    const specs = this.run.facts.completions.parts;
    let changed = this.parts.length > specs.length;
    this.parts.length = Math.min(this.parts.length, specs.length);
    for (let i = 0; i < specs.length; i++) {
      const key = String(specs[i].numbers);
      if (this.parts[i]?.key === key) continue;
      const numbers = await load(specs[i].numbers);
      this.parts[i] = { key, numbers, rows: specs[i].rows, spec: specs[i] };
      changed = true;
      progress?.((i + 1) / specs.length);
    }
    if (changed) this.join();
    return changed;
  }

  join() {
    this.offsets = [];
    this.count = 0;
    for (const part of this.parts) {
      this.offsets.push(this.count);
      this.count += part.rows;
    }
    const gather = (get, Kind) => {
      const column = new Kind(this.count);
      this.parts.forEach((part, i) => {
        const values = get(part.numbers);
        for (let row = 0; row < part.rows; row++) column[this.offsets[i] + row] = values?.[row] ?? NaN;
      });
      return column;
    };
    for (const name of ["reward", "advantage", "penalty"]) this[name] = gather((n) => n[name], Float64Array);
    for (const name of ["update", "step", "group", "prompt", "tokens", "finished"]) this[name] = gather((n) => n[name], Int32Array);
    this.names = [...new Set(this.parts.flatMap((part) => Object.keys(part.numbers.rewards)))];
    this.rewards = Object.fromEntries(this.names.map((name) => [name, gather((n) => n.rewards[name], Float64Array)]));
    this.hasPenalty = this.parts.some((part) => part.numbers.penalty);
    this.groups = []; // first row and number of rows of each
    for (let row = 0; row < this.count; row++) {
      if (row === 0 || this.group[row] !== this.group[row - 1]) this.groups.push({ first: row, size: 0 });
      this.groups.at(-1).size++;
    }
    this.formats = this.names.filter((name) => /format/i.test(name)).map((name) => {
      let top = -Infinity;
      for (const value of this.rewards[name]) if (value > top) top = value;
      return { values: this.rewards[name], top };
    });
  }

  partOf(row) {
    let [low, high] = [0, this.offsets.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.offsets[middle] <= row) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  // A row's texts: at once if its part is there, else a promise.
  async text(row) {
    const part = this.partOf(row);
    const texts = await blob(this.parts[part].spec.texts);
    const at = row - this.offsets[part];
    return { asked: texts.asked[texts.of[at]], completion: texts.completion[at], more: texts.more[String(at)] ?? {} };
  }

  wrongFormat(row) {
    return this.formats.some(({ values, top }) => values[row] < top);
  }

  // Rows with a text that matches, as a set. `stop` says whether nobody wants them any more.
  async search(matches, where, progress, stop) {
    const found = new Set();
    for (let part = 0; part < this.parts.length; part++) {
      if (stop()) return null;
      const texts = await load(this.parts[part].spec.texts);
      const asked = texts.asked.map(([prompt, ...others]) => (where !== "completion" && matches(prompt)) || (where === "all" && others.some(matches)));
      for (let row = 0; row < this.parts[part].rows; row++)
        if (asked[texts.of[row]] || (where !== "prompt" && matches(texts.completion[row]))) found.add(this.offsets[part] + row);
      progress((part + 1) / this.parts.length);
    }
    return found;
  }
}

const TALLEST = 8e6; // pixels that every browser can scroll

// A list of very many rows of one height, of which only those on the screen exist.
class VirtualList {
  constructor(height, render, act) {
    this.height = height;
    this.render = render;
    this.act = act;
    this.count = 0;
    this.chosen = -1;
    this.filler = h("div", { class: "filler" });
    this.element = h("div", { class: "list", role: "listbox", tabindex: "0", "aria-label": "Completions" }, this.filler);
    this.element.addEventListener("scroll", () => this.draw());
    this.element.addEventListener("keydown", (event) => this.key(event));
    this.element.addEventListener("click", (event) => {
      const row = event.target.closest("[data-index]");
      if (row) this.choose(Number(row.dataset.index));
    });
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  show(count, chosen = -1) {
    this.count = count;
    this.chosen = chosen;
    this.filler.style.height = `${Math.min(count * this.height, TALLEST)}px`;
    this.draw(true);
  }

  get first() {
    const room = this.element.clientHeight;
    const whole = this.count * this.height;
    const most = Math.max(Math.min(whole, TALLEST) - room, 1);
    return whole <= TALLEST ? this.element.scrollTop / this.height : (this.element.scrollTop / most) * (this.count - room / this.height);
  }

  draw() {
    const seen = Math.ceil(this.element.clientHeight / this.height) + 1;
    const first = Math.max(Math.floor(this.first) - 3, 0);
    const last = Math.min(first + seen + 6, this.count);
    const top = this.element.scrollTop - (this.first - first) * this.height;
    const rows = [];
    for (let i = first; i < last; i++) {
      const row = this.render(i);
      row.dataset.index = i;
      row.id = `row-${i}`;
      row.setAttribute("role", "option");
      row.setAttribute("aria-selected", String(i === this.chosen));
      row.setAttribute("aria-posinset", i + 1);
      row.setAttribute("aria-setsize", this.count);
      row.style.top = `${top + (i - first) * this.height}px`;
      row.style.height = `${this.height}px`;
      rows.push(row);
    }
    this.filler.replaceChildren(...rows);
  }

  key(event) {
    const page = Math.max(Math.floor(this.element.clientHeight / this.height) - 1, 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -this.count, End: this.count };
    if (!(event.key in steps) || !this.count) return;
    event.preventDefault();
    this.choose(Math.min(Math.max(this.chosen + steps[event.key], 0), this.count - 1));
  }

  choose(index) {
    this.chosen = index;
    const seen = this.element.clientHeight / this.height;
    if (index < this.first || index > this.first + seen - 1) {
      const whole = this.count * this.height;
      const at = Math.max(index - seen / 2, 0);
      this.element.scrollTop = whole <= TALLEST ? at * this.height : (at / (this.count - seen)) * (TALLEST - this.element.clientHeight);
    }
    this.draw();
    this.element.setAttribute("aria-activedescendant", `row-${index}`);
    this.act(index);
  }
}
