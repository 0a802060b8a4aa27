// A run's texts: what cannot be seen spelt out, matches marked, conversations as messages.

const MOST_SHOWN = 20000; // characters, until all are asked for

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
function textBlock(text, pattern = null) {
  const block = h("div", { class: "text", dir: "auto" }, marked(text.slice(0, MOST_SHOWN), pattern));
  if (text.length > MOST_SHOWN)
    block.append(h("button", { type: "button", class: "more", onclick: () => block.replaceChildren(...marked(text, pattern)) }, `Show all ${text.length.toLocaleString("en")} characters`));
  return block;
}

// A prompt with the messages around it (roles and texts in turn), and the right answer.
function promptBlock([prompt, answer, ...context], pattern = null) {
  const others = context.length / 2;
  return [
    others ? h("details", { class: "context" }, h("summary", null, `${others} other ${others === 1 ? "message" : "messages"} of the prompt`),
      Array.from({ length: others }, (_, i) => [h("div", { class: "role" }, visible(context[2 * i])), textBlock(context[2 * i + 1], pattern)])) : null,
    h("div", { class: "role" }, "prompt"), textBlock(prompt, pattern),
    answer ? [h("div", { class: "role" }, "reference answer"), textBlock(answer, pattern)] : null,
  ];
}

// A completion: its text, or the messages of a conversation with who speaks, the text, the calls.
function completionBlock({ completion, more }, pattern) {
  if (!Array.isArray(more.messages) || more.messages.length < 2) return textBlock(completion, pattern);
  return h("div", { class: "turns" }, more.messages.map((message) => {
    const role = typeof message?.role === "string" ? message.role : "unknown";
    const calls = Array.isArray(message?.tool_calls) ? message.tool_calls : [];
    const content = typeof message?.content === "string" ? message.content : JSON.stringify(message?.content ?? message, null, 1);
    const name = typeof message?.name === "string" ? `${role} ${message.name}` : role;
    return h("div", { class: `turn ${role === "assistant" ? "sampled" : "observed"}` },
      h("div", { class: "role" }, visible(name).slice(0, 40)),
      content || !calls.length ? textBlock(content, pattern) : null,
      calls.map((call) => textBlock(callText(call), pattern)));
  }));
}

function callText(call) {
  const { name, arguments: given } = call?.function ?? {};
  return typeof name === "string" ? `${name}(${typeof given === "string" ? given : JSON.stringify(given ?? {})})` : JSON.stringify(call);
}
