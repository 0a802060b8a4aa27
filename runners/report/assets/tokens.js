// A completion's text: what cannot be seen spelt out, matches marked, tokens shaded, turns apart.

const MOST_SHOWN = 20000; // characters, until all are asked for
const SHADES = { none: "no shading", logp: "log-probability", moved: "what the update moved" };

const decodedBytes = (text) => (text === null || text === undefined ? null : bytesOf(text));

// Each token's characters, log-prob, whether it is masked, and how far it moved, in nats.
function tokensOf(known) {
  return (known.tokens ??= readTokens(known.cells));
}

function readTokens(cells) {
  const [characters, logp, masked, moved] = cells.map(decodedBytes);
  const tokens = [];
  let long = 0;
  for (const byte of characters) {
    long += byte;
    if (byte === 255) continue;
    const i = tokens.length;
    tokens.push({ characters: long, logp: logp ? -logp[i] / 16 : null, masked: Boolean(masked?.[i]), moved: moved ? ((moved[i] << 24) >> 24) / 64 : null });
    long = 0;
  }
  return tokens;
}

function shadeOf(token, mode) {
  if (token.masked) return { class: "masked", title: "not counted in the loss" };
  if (mode === "moved" && token.moved !== null) {
    const size = Math.min(Math.abs(token.moved) / 0.5, 1);
    return { class: token.moved < 0 ? "fell" : "rose", strength: size, title: `log-prob ${token.moved < 0 ? "−" : "+"}${Math.abs(token.moved).toFixed(3)}` };
  }
  if (mode === "logp" && token.logp !== null) {
    const edge = token.logp <= -15.9 ? "at most " : "";
    return { class: "unlikely", strength: Math.min(-token.logp / 4, 1), title: `log-prob ${edge}${token.logp.toFixed(2)}, probability ${edge}${percentText(Math.exp(token.logp))}` };
  }
  return { class: "", title: "" };
}

// The text as spans of its tokens. What is in front of them was given; what is behind has no token.
function shaded(text, known, mode) {
  const characters = Array.from(text);
  const pieces = [];
  let at = known.given;
  if (at) pieces.push(h("span", { class: "given", title: "given, not sampled" }, visible(characters.slice(0, at).join(""))));
  for (const token of tokensOf(known)) {
    const end = at + token.characters;
    const piece = characters.slice(at, end).join("");
    at = end;
    const shade = shadeOf(token, mode);
    if (!piece) continue;
    const span = h("span", { class: `token ${shade.class}`, title: shade.title }, visible(piece));
    if (shade.strength !== undefined) span.style.setProperty("--strength", shade.strength.toFixed(3));
    pieces.push(span);
  }
  if (at < characters.length) pieces.push(h("span", { class: "given", title: "of no token" }, visible(characters.slice(at).join(""))));
  return pieces;
}

// Text with the places that match marked.
function marked(text, pattern) {
  if (!pattern) return [visible(text)];
  const pieces = [];
  let at = 0;
  for (const found of text.matchAll(pattern)) {
    if (!found[0]) continue;
    pieces.push(visible(text.slice(at, found.index)), h("mark", null, visible(found[0])));
    at = found.index + found[0].length;
    if (pieces.length > 2000) break;
  }
  pieces.push(visible(text.slice(at)));
  return pieces;
}

// A block of text; a long one in part, with a button for the rest.
function textBlock(text, { pattern = null, known = null, mode = "none" } = {}) {
  const block = h("div", { class: "text", dir: "auto" });
  const fill = (whole) => {
    const part = whole || text.length <= MOST_SHOWN ? text : text.slice(0, MOST_SHOWN);
    const hasTokens = known && (mode !== "none" || tokensOf(known).some((token) => token.masked));
    block.replaceChildren(...(hasTokens && part === text ? shaded(text, known, mode) : marked(part, pattern)));
    if (part !== text)
      block.append(h("button", { type: "button", class: "more", onclick: () => fill(true) }, `Show all ${text.length.toLocaleString("en")} characters`));
  };
  fill(false);
  return block;
}

// A completion of several turns, or null. Shaded, it is cut where sampled tokens follow given ones; else it is read as messages.
function conversationBlock(text, known, { pattern = null, mode = "none" } = {}) {
  const { messages, turns } = text.more;
  const isChat = Array.isArray(messages) && messages.length > 1;
  const isCut = Array.isArray(turns) && turns.length > 1 && turns.every((turn) => Number.isInteger(turn?.characters) && Number.isInteger(turn.tokens));
  if (isCut && (!isChat || (known && mode !== "none"))) return stretchesBlock(text.completion, turns, known, { pattern, mode });
  return isChat ? messagesBlock(messages, { pattern }) : null;
}

function turnBlock(role, isSampled, ...content) {
  return h("div", { class: `turn ${isSampled ? "sampled" : "observed"}` }, h("div", { class: "role" }, visible(role).slice(0, 40)), content);
}

// What was said, as the chat's messages: who speaks, the text, the calls.
function messagesBlock(messages, { pattern }) {
  return h("div", { class: "turns" }, messages.map((message) => {
    const role = typeof message?.role === "string" ? message.role : "unknown";
    const calls = Array.isArray(message?.tool_calls) ? message.tool_calls : [];
    const content = typeof message?.content === "string" ? message.content : JSON.stringify(message?.content ?? message, null, 1);
    const name = typeof message?.name === "string" ? `${role} ${message.name}` : role;
    return turnBlock(name, role === "assistant",
      content || !calls.length ? textBlock(content, { pattern }) : null,
      calls.map((call) => textBlock(callText(call), { pattern })));
  }));
}

function callText(call) {
  const { name, arguments: given } = call?.function ?? {};
  return typeof name === "string" ? `${name}(${typeof given === "string" ? given : JSON.stringify(given ?? {})})` : JSON.stringify(call);
}

// The same as it was tokens: stretches that were sampled, and those that were given.
function stretchesBlock(completion, turns, known, { pattern, mode }) {
  const characters = Array.from(completion);
  let [at, token] = [0, 0];
  return h("div", { class: "turns" }, turns.map((turn, i) => {
    const piece = characters.slice(at, (at += turn.characters)).join("");
    const tokens = known && turn.sampled ? tokensOf(known).slice(token, token + turn.tokens) : null;
    token += turn.tokens;
    const name = `${turn.sampled ? "sampled" : "given"}, ${turn.tokens} ${turn.tokens === 1 ? "token" : "tokens"}`;
    return turnBlock(name, turn.sampled, textBlock(piece, { pattern, known: tokens && { tokens, given: i ? 0 : known.given }, mode }));
  }));
}

function shadeLegend(mode) {
  if (mode === "logp") return h("span", { class: "legend" }, "likely", h("i", { class: "scale unlikely" }), "unlikely");
  if (mode === "moved") return h("span", { class: "legend" }, "less likely now", h("i", { class: "scale moved" }), "more likely now");
  return null;
}
