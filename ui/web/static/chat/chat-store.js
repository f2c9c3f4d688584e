// Conversations on the box: a tree of messages each, read and saved by the admin API.

const PATH = "/admin/api/conversations";

export class Store {
  constructor(csrf) {
    this.csrf = csrf;
  }

  async call(method, path, body) {
    const headers = { "X-CSRF-Token": this.csrf, "Content-Type": "application/json" };
    const answer = await fetch(PATH + path, { method, headers, body: body && JSON.stringify(body) });
    const read = await answer.json();
    if (!answer.ok) throw new Error(read.error.message);
    return read;
  }

  list = async (text) => (await this.call("GET", `?text=${encodeURIComponent(text)}`)).conversations;
  get = (id) => this.call("GET", `/${id}`);
  save = (id, conversation) => this.call("PUT", `/${id}`, conversation);
  remove = (id) => this.call("DELETE", `/${id}`);
}

const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export class Conversation {
  constructor(id = newId(), saved = {}) {
    this.id = id;
    this.title = saved.title ?? "";
    this.model = saved.model ?? "";
    this.system = saved.system ?? "";
    this.parameters = saved.parameters ?? {};
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

  asBody() {
    const { title, model, system, parameters, leaf } = this;
    return { title, model, system, parameters, leaf, messages: [...this.messages.values()] };
  }

  asMarkdown() {
    const said = this.branch().map((each) => `## ${each.role === "user" ? "You" : each.model || "Assistant"}\n\n${each.content}\n`);
    return [`# ${this.title}\n`, ...(this.system ? [`> ${this.system.replaceAll("\n", "\n> ")}\n`] : []), ...said].join("\n");
  }
}
