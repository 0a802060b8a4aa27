// Numbers and texts for people, and elements to show them in. Texts only ever become text nodes.

function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name === "colour") element.style.setProperty("--colour", `var(--series-${value})`);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

const byId = (id) => document.getElementById(id);

// Up to four significant digits, "–" for nothing.
function numberText(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6) return countText(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size >= 1e-3) return String(Number(value.toPrecision(4)));
  return value.toExponential(2).replace("e-", "e−");
}

// A tick of an axis, with the digits that tell it from the next one, which is `step` away.
function tickText(tick, step) {
  const size = Math.max(Math.abs(tick), step);
  if (tick === 0) return "0";
  if (size < 1e-3) {
    const power = Math.floor(Math.log10(Math.abs(tick)) + 1e-9);
    return `${(tick / 10 ** power).toFixed(decimals(step / 10 ** power))}e${power}`.replaceAll("-", "−");
  }
  const [unit, letter] = size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : size >= 1e4 ? [1e3, "k"] : [1, ""];
  return `${(tick / unit).toFixed(decimals(step / unit))}${letter}`.replace("-", "−");
}

// How many decimals a number has, at most six.
function decimals(number) {
  let digits = 0;
  while (digits < 6 && Math.abs(number * 10 ** digits - Math.round(number * 10 ** digits)) > 1e-6 * number * 10 ** digits) digits++;
  return digits;
}

function countText(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))}${letter}`;
  return String(Math.round(value));
}

const percentText = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`);

function durationText(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (number) => String(number).padStart(2, "0");
  return hours ? `${hours} h ${two(minutes)} min` : minutes ? `${minutes} min ${two(rest)} s` : `${rest} s`;
}

function dateText(seconds) {
  if (!seconds) return "–";
  const date = new Date(seconds * 1000);
  return date.toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}

function valueText(value) {
  if (value === undefined) return "–";
  return typeof value === "string" ? value : JSON.stringify(value);
}

// Wilson's interval of a share of n, 95 %.
function wilson(share, n) {
  if (share === null || !n) return null;
  const z = 1.959964;
  const centre = (share + (z * z) / (2 * n)) / (1 + (z * z) / n);
  const half = (z / (1 + (z * z) / n)) * Math.sqrt((share * (1 - share)) / n + (z * z) / (4 * n * n));
  return [Math.max(centre - half, 0), Math.min(centre + half, 1)];
}

// Control characters and what turns the direction of text are spelt out, so that a text cannot hide a part.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff\ud800-\udfff]/g;

function visible(text) {
  return text.isWellFormed?.() ?? true ? text.replace(UNSEEN, spelt) : text.replace(/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, spelt).replace(UNSEEN, spelt);
}

function spelt(character) {
  const code = character.charCodeAt(0);
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  if (code === 0x7f) return "\u2421";
  return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

// An icon-free button that is pressed or not.
function toggle(label, pressed, act, attributes) {
  const button = h("button", { type: "button", class: "toggle", "aria-pressed": String(pressed), ...attributes }, label);
  button.addEventListener("click", () => {
    const now = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(now));
    act(now);
  });
  return button;
}

function choice(options, chosen, act, attributes) {
  const select = h("select", { ...attributes, onchange: () => act(select.value) },
    options.map(([value, label]) => h("option", { value, selected: value === chosen }, label)));
  return select;
}

function remembered(name, fallback) {
  try {
    return localStorage.getItem(`grpo-report-${name}`) ?? fallback;
  } catch {
    return fallback; // some browsers keep nothing for files
  }
}

function remember(name, value) {
  try {
    localStorage.setItem(`grpo-report-${name}`, value);
  } catch {
    // nothing is kept then
  }
}
