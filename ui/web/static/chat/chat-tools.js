// Tools of MCP servers in the chat: the servers, what a model is offered, and the calls of an answer.

import { button, element, find, folded } from "./chat-elements.js";

const PATH = "/admin/api/chat/servers";
const NAME = /[^A-Za-z0-9_-]/g;

export class Tools {
  // `call`: sends to the admin API. `report`: shows an error. `onChange` is called when servers are listed anew.
  constructor(call, report) {
    Object.assign(this, { call, report, servers: [], tools: new Map() });
    find("add-server").addEventListener("submit", (event) => (event.preventDefault(), this.guard(() => this.add())));
    for (const each of find("add-server").elements.kind) each.addEventListener("change", () => this.showKind());
    this.guard(() => this.load());
  }

  async guard(work) {
    try {
      await work();
    } catch (error) {
      this.report(error.message);
    }
  }

  // ---------------------------------------------------------------- servers

  async load() {
    const { servers, commands_allowed, user } = await this.call("GET", PATH);
    Object.assign(this, { servers, user });
    find("servers").replaceChildren(...servers.map((each) => this.drawServer(each)));
    find("no-servers").hidden = servers.length > 0;
    find("run-as").textContent = user;
    find("commands-off").hidden = commands_allowed;
    find("commands-on").hidden = !commands_allowed;
    this.showKind();
    const allowed = servers.filter((each) => each.allowed).length;
    find("tools-summary").textContent = allowed ? `Tools: ${allowed} MCP server${allowed > 1 ? "s" : ""} allowed` : "Tools";
    this.onChange?.();
  }

  showKind() {
    const kind = find("add-server").elements.kind.value;
    for (const part of find("add-server").querySelectorAll("[data-kind]")) part.hidden = part.dataset.kind !== kind;
  }

  drawServer(server) {
    const line = element("li", "tool-server");
    const allow = Object.assign(element("input"), { type: "checkbox", checked: server.allowed });
    allow.addEventListener("change", () => this.guard(() => this.change(server, { allowed: allow.checked })));
    const label = element("label", "allow");
    label.append(allow, ` Allow ${server.name}`);
    const where = element("p", "quiet where", placeOf(server, this.user));
    const list = folded("server-tools", "Its tools");
    list.addEventListener("toggle", () => list.open && this.guard(() => this.drawTools(server, list)));
    const remove = button("Remove", () => this.guard(() => this.remove(server)), `Remove ${server.name}`);
    line.append(label, remove, where, ...(server.allowed ? [list] : []));
    return line;
  }

  async drawTools(server, list) {
    const found = await this.toolsOf(server);
    const rows = found.map((tool) => {
      const trust = Object.assign(element("input"), { type: "checkbox", checked: server.trusted.includes(tool.name) });
      trust.addEventListener("change", () => this.guard(() => this.trust(server, tool.name, trust.checked)));
      const label = element("label", "allow");
      label.append(trust, ` Always allow ${tool.name}`);
      const row = element("li");
      row.append(label, element("p", "quiet", `${tool.changes ? "" : "Only reads. "}${tool.description}`));
      return row;
    });
    const table = element("ul");
    table.append(...rows);
    list.replaceChildren(list.firstElementChild, table);
  }

  async add() {
    const fields = find("add-server").elements;
    const body = { allowed: true };
    if (fields.kind.value === "url") {
      body.url = fields.url.value.trim();
      if (fields.authorization.value.trim()) body.headers = { Authorization: fields.authorization.value.trim() };
    } else {
      body.command = [fields.program.value.trim(), ...fields.arguments.value.split("\n").map((each) => each.trim()).filter(Boolean)];
      body.environment = Object.fromEntries(fields.variables.value.split("\n").filter((each) => each.includes("=")).map((each) => [each.slice(0, each.indexOf("=")).trim(), each.slice(each.indexOf("=") + 1)]));
      body.confirmed = fields.confirmed.checked;
    }
    const name = fields.name.value.trim();
    await this.call("PUT", `${PATH}/${encodeURIComponent(name)}`, body);
    find("add-server").reset();
    this.tools.delete(name);
    this.report("");
    await this.load();
  }

  async change(server, body) {
    Object.assign(server, await this.call("POST", `${PATH}/${server.name}`, body));
    this.tools.delete(server.name);
    await this.load();
  }

  async trust(server, tool, trusted) {
    Object.assign(server, await this.call("POST", `${PATH}/${server.name}`, { trust: { [tool]: trusted } }));
  }

  async remove(server) {
    if (!confirm(`Remove the MCP server "${server.name}"?`)) return;
    await this.call("DELETE", `${PATH}/${server.name}`);
    this.tools.delete(server.name);
    await this.load();
  }

  async toolsOf(server, signal) {
    if (!this.tools.has(server.name)) {
      const { tools } = await this.call("POST", `${PATH}/${server.name}/tools`, {}, signal);
      this.tools.set(server.name, tools);
    }
    return this.tools.get(server.name);
  }

  // ---------------------------------------------------------------- what a model is offered

  // Tools of allowed servers as the API takes them, and what failed. `names` leads back from a function's name.
  async offer(signal) {
    const offered = { tools: [], names: new Map(), problems: [] };
    await Promise.all(this.servers.filter((each) => each.allowed).map(async (server) => {
      try {
        for (const tool of await this.toolsOf(server, signal)) {
          const name = `${server.name}__${tool.name}`.replace(NAME, "_").slice(0, 64);
          if (offered.names.has(name)) continue;
          offered.names.set(name, { server, tool: tool.name });
          offered.tools.push({ type: "function", function: { name, description: tool.description.slice(0, 4000), parameters: tool.parameters } });
        }
      } catch (error) {
        if (error.name === "AbortError") throw error;
        offered.problems.push(error.message);
      }
    }));
    return offered;
  }

  // ---------------------------------------------------------------- calls

  // Runs the calls of one turn, each after a yes where its tool is not trusted. `redraw` shows what changed.
  async run(calls, offered, redraw, signal) {
    for (const call of calls) {
      const target = offered.names.get(call.name);
      let given;
      try {
        given = JSON.parse(call.arguments || "{}");
      } catch {
        given = null;
      }
      if (!target || given === null || typeof given !== "object" || Array.isArray(given)) {
        Object.assign(call, { state: "failed", result: target ? "The arguments are not a JSON object." : `There is no tool ${call.name}.` });
      } else if (!target.server.trusted.includes(target.tool) && !(await this.confirmed(call, target, redraw, signal))) {
        Object.assign(call, { state: "refused", result: "The user refused this call." });
      } else {
        await this.carryOut(call, target, given, redraw, signal);
      }
      redraw();
    }
  }

  async confirmed(call, target, redraw, signal) {
    const said = await new Promise((decide, fail) => {
      signal.addEventListener("abort", () => fail(new DOMException("Stopped", "AbortError")), { once: true });
      Object.assign(call, { state: "asks", where: placeOf(target.server, this.user), decide });
      redraw();
    });
    delete call.decide;
    if (said === "always") await this.trust(target.server, target.tool, true);
    return said !== "no";
  }

  async carryOut(call, target, given, redraw, signal) {
    call.state = "runs";
    redraw();
    try {
      const body = { tool: target.tool, arguments: given };
      const { text, failed } = await this.call("POST", `${PATH}/${target.server.name}/call`, body, signal);
      Object.assign(call, { state: failed ? "failed" : "done", result: text });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      Object.assign(call, { state: "failed", result: error.message });
    }
  }
}

const placeOf = (server, user) => (server.url ? `Its arguments are sent to ${server.host}.` : `Runs on this box as ${user}: ${server.command.map(quoted).join(" ")}`);

const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

const STATES = { asks: "asks", runs: "runs …", done: "done", failed: "failed", refused: "refused" };

// One call, folded unless it waits for a decision.
export function drawCall(call) {
  const made = folded("tool-call", "", Boolean(call.decide));
  made.dataset.state = call.state;
  made.firstElementChild.append(element("span", `state ${call.state === "failed" ? "failed" : call.state === "done" ? "ready" : ""}`, STATES[call.state]), ` ${call.server || call.name} · ${call.tool || "?"}`);
  made.append(element("pre", "", pretty(call.arguments)));
  if (call.decide) {
    const line = element("div", "do");
    line.append(
      button("Allow once", () => call.decide("once"), "Run this call", "main"),
      button("Always allow", () => call.decide("always"), `Run ${call.tool} without asking from now on`, "small"),
      button("Refuse", () => call.decide("no"), "Do not run it", "small"),
    );
    made.append(element("p", "quiet", call.where), line);
  }
  if (call.result) made.append(element("p", "quiet", "Result"), element("pre", "", call.result));
  return made;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text || "{}"), null, 2);
  } catch {
    return text;
  }
}
