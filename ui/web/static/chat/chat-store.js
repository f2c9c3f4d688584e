// Conversations on the box: a tree of messages each, read and saved by the admin API.

const PATH = "/admin/api/conversations";

// A function that sends to the admin API and returns what it answers, or throws its error.
export const caller = (csrf) => async (method, path, body, signal) => {
  const headers = { "X-CSRF-Token": csrf, "Content-Type": "application/json" };
  const answer = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal });
  const read = await answer.json();
  if (!answer.ok) throw new Error(read.error.message);
  return read;
};

export class Store {
  constructor(call) {
    this.call = call;
  }

  list = async (text) => (await this.call("GET", `${PATH}?text=${encodeURIComponent(text)}`)).conversations;
  get = (id) => this.call("GET", `${PATH}/${id}`);
  save = (id, conversation) => this.call("PUT", `${PATH}/${id}`, conversation);
  remove = (id) => this.call("DELETE", `${PATH}/${id}`);
}

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export class Conversation {
  constructor(id = newId(), saved = {}) {
    this.id = id;
    this.title = saved.title ?? "";
    this.model = saved.model ?? "";
    this.system = saved.system ?? "";
    this.parameters = saved.parameters ?? {};
    this.schema = saved.schema ?? "";
    this.messages = new Map((saved.messages ?? []).map((message) => [message.id, message]));
    this.leaf = saved.leaf ?? "";
  }

  add(role, content, parent = this.leaf, more = {}) {
    const message = { id: newId(), parent, role, content, ...more };
    this.messages.set(message.id, message);
    this.leaf = message.id;
    if (!this.title) this.title = content.trim().split("\n")[0].slice(0, 80) || "Untitled";
    return message;
  }

  // Messages from the first to the leaf.
  branch() {
    const found = [];
    for (let at = this.messages.get(this.leaf); at; at = this.messages.get(at.parent)) found.unshift(at);
    return found;
  }

  siblings = (message) => [...this.messages.values()].filter((each) => each.parent === message.parent && each.role === message.role);

  // Show the branch through `message`, down to its newest end.
  choose(message) {
    let at = message;
    for (;;) {
      const children = [...this.messages.values()].filter((each) => each.parent === at.id);
      if (!children.length) break;
      at = children.at(-1);
    }
    this.leaf = at.id;
  }

  // Both answers of a comparison, or the message alone.
  pairOf = (message) => (message.pair ? [...this.messages.values()].filter((each) => each.pair === message.pair) : [message]);

  asBody() {
    const { title, model, system, parameters, schema, leaf } = this;
    return { title, model, system, parameters, schema, leaf, messages: [...this.messages.values()].map(asSaved) };
  }

  asMarkdown() {
    const said = this.branch().map((each) => `## ${each.role === "user" ? "You" : each.model || "Assistant"}\n\n${each.content}\n`);
    return [`# ${this.title}\n`, ...(this.system ? [`> ${this.system.replaceAll("\n", "\n> ")}\n`] : []), ...said].join("\n");
  }
}

function asSaved(message) {
  if (!message.rounds?.length) return message;
  const rounds = message.rounds.map(({ content, calls }) => ({
    content,
    calls: calls.map(({ id, name, server, tool, arguments: given, result, state }) => ({ id, name, server, tool, arguments: given, result: result ?? "", state: ["done", "refused"].includes(state) ? state : "failed" })),
  }));
  return { ...message, rounds };
}

// Messages of the API that say what a message of the conversation says: its calls, their results, its text.
// `withCalls`: the model knows calls; `sees`: it takes images. Another one gets the text alone.
export function asMessages({ role, content, rounds, images }, withCalls, sees) {
  if (images?.length && sees) {
    return [{ role, content: [...images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: content }] }];
  }
  if (!rounds?.length || !withCalls) return [{ role, content }];
  const found = rounds.flatMap((round) => [
    { role, content: round.content || null, tool_calls: round.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: isJson(call.arguments) ? call.arguments : "{}" } })) },
    ...round.calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result || "There is no result." })),
  ]);
  return content ? [...found, { role, content }] : found;
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}
