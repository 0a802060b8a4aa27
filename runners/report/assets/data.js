// The page's data: deflated JSON, in the page itself or from the server that follows a run.
let live = {}; // pieces of a run that is followed, by name

const start = JSON.parse(document.getElementById("start").textContent);

async function inflated(stream) {
  const text = await new Response(stream.pipeThrough(new DecompressionStream("deflate"))).text();
  return JSON.parse(text);
}

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

// What was inflated last, by its name: texts are large, so only some are kept.
const kept = new Map();
const MOST_KEPT = 48;

function blob(at) {
  if (kept.has(at)) {
    const found = kept.get(at);
    kept.delete(at);
    kept.set(at, found);
    return found;
  }
  const found = load(at);
  kept.set(at, found);
  found.catch(() => kept.delete(at));
  if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value);
  return found;
}

async function load(at) {
  const own = document.getElementById(`blob-${at}`);
  if (own) return inflated(new Blob([bytesOf(own.textContent)]).stream());
  if (live[at]) return inflated(new Blob([bytesOf(live[at])]).stream());
  const answer = await fetch(at, { cache: "no-store" });
  if (!answer.ok) throw new Error(`${at}: ${answer.status}`);
  return inflated(answer.body);
}

const COLOURS = 8; // --series-0 … of page.css

// A run as the charts see it.
class Run {
  constructor(data, index) {
    this.index = index;
    this.shown = true;
    this.take(data);
  }

  take(data) {
    const { metrics, blobs, ...facts } = data;
    this.facts = facts;
    live = blobs ?? {};
    this.columns = Object.assign(Object.create(null), metrics.columns); // a metric may be named __proto__
    this.nonfinite = metrics.nonfinite;
    this.lines = metrics.lines;
    this.cached = new Map();
  }

  get name() {
    return this.label ?? this.facts.name;
  }

  get colour() {
    return this.index % COLOURS;
  }

  column(name) {
    return this.columns[name] ?? [];
  }

  // The last number of a metric, or null.
  last(name) {
    return this.column(name).findLast((value) => value !== null) ?? null;
  }

  first(name) {
    return this.column(name).find((value) => value !== null) ?? null;
  }

  // Whether a line is of an evaluation.
  isEvaluation(i) {
    return (this.column("em")[i] ?? this.column("eval/reward")[i] ?? null) !== null;
  }

  // Where each line stands on an axis: "update", "time" (hours) or "tokens".
  axis(kind) {
    if (this.cached.has(kind)) return this.cached.get(kind);
    const updates = this.column("update");
    let found = updates;
    if (kind === "time") found = this.hours();
    if (kind === "tokens") {
      let last = 0;
      found = Array.from({ length: this.lines }, (_, i) => (last = this.column("num_tokens")[i] ?? last));
    }
    this.cached.set(kind, found);
    return found;
  }

  hours() {
    const elapsed = this.column("time/elapsed");
    let total = 0;
    return Array.from({ length: this.lines }, (_, i) => {
      const part = (this.column("step_time")[i] ?? 0) + (this.column("time/eval")[i] ?? 0);
      total = elapsed[i] ?? total + part;
      return total / 3600;
    });
  }
}
