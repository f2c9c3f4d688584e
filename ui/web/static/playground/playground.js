// The playground: what the form says, sent to one model or to two, through the API that every client uses.

import { answerOf } from "./playground-answer.js";
import { asCurl, asJavaScript, asPython } from "./playground-calls.js";
import { VECTORS, textsOf, vectorsOf } from "./playground-vectors.js";

const form = document.getElementById("playground");
let stopper = null;

class Pane {
  constructor(element) {
    this.element = element;
    this.talk = element.querySelector(".talk");
    this.select = form.elements[element.dataset.pane];
    this.clear();
  }

  get model() {
    return this.select.value;
  }

  clear() {
    this.messages = [];
    this.called = []; // tool calls of the last answer, each with the field for its result
    this.talk.innerHTML = '<p class="empty">Nothing asked yet.</p>';
  }

  keep(turn, said, content, calls) {
    const made = calls.map(({ id, ...called }) => ({ id, type: "function", function: called }));
    this.messages = [...said, { role: "assistant", content, ...(made.length && { tool_calls: made }) }];
    for (const { field } of this.called) field.readOnly = true;
    this.called = calls.map((call) => this.drawCall(turn, call));
  }

  // The conversation so far belongs to the model that had it.
  forget(model) {
    if (this.had && this.had !== model) this.clear();
    this.had = model;
  }

  turn(role, text) {
    this.talk.querySelector(".empty")?.remove();
    const turn = document.createElement("div");
    turn.className = `turn ${role}`;
    turn.append(paragraph("who", role === "user" ? "You" : this.model), paragraph("what", text));
    this.talk.append(turn);
    this.talk.scrollTop = this.talk.scrollHeight;
    return turn;
  }

  // The conversation with a question; after tool calls their results come first, and may be all that is sent.
  said(question) {
    const results = this.called.map(({ id, field }) => ({ role: "tool", tool_call_id: id, content: field.value }));
    const asks = question || !results.length ? [{ role: "user", content: question }] : [];
    return [...this.messages, ...results, ...asks];
  }

  body(question) {
    if (form.elements.kind.value === "embeddings") return [VECTORS, { model: this.model, input: textsOf(question) }];
    const made = { model: this.model, ...parameters() };
    if (form.elements.kind.value === "completion") return ["/v1/completions", { ...made, prompt: question }];
    const system = form.elements.system.value.trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...this.said(question)];
    return ["/v1/chat/completions", { ...made, ...structure(), messages }];
  }

  // Shows a tool call with a field for its result.
  drawCall(turn, { id, name, arguments: given }) {
    const made = document.createElement("div");
    made.className = "tool-call";
    const code = document.createElement("code");
    code.textContent = `${name}(${given})`;
    const label = document.createElement("label");
    const field = document.createElement("textarea");
    field.rows = 2;
    label.append(`Result of ${name}, sent with the next message`, field);
    made.append(code, label);
    turn.append(made);
    return { id, field };
  }

  async ask(question, signal) {
    this.forget(this.model);
    const [path, body] = this.body(question);
    const said = this.said(question);
    if (question) this.turn("user", question);
    const turn = this.turn("answer", "");
    this.talk.setAttribute("aria-busy", "true");
    try {
      if (path === VECTORS) {
        turn.append(...(await vectorsOf(post(path, body, signal), body.input)));
        return true;
      }
      const request = post(path, { ...body, stream: true, stream_options: { include_usage: true } }, signal);
      const into = (find) => (text) => {
        const following = this.talk.scrollHeight - this.talk.scrollTop - this.talk.clientHeight < 40;
        find().textContent += text;
        if (following) this.talk.scrollTop = this.talk.scrollHeight;
      };
      const what = turn.querySelector(".what");
      const say = into(() => what);
      const think = into(() => thoughts(turn, what));
      const { text, calls } = await answerOf(request, say, (line) => turn.append(line), think);
      if (body.messages) this.keep(turn, said, text, calls);
      return true;
    } catch (error) {
      const stopped = error.name === "AbortError";
      turn.append(paragraph(stopped ? "quiet" : "failure", stopped ? "Stopped." : error.message));
      return stopped;
    } finally {
      this.talk.removeAttribute("aria-busy");
      this.talk.scrollTop = this.talk.scrollHeight;
    }
  }
}

function post(path, body, signal) {
  const headers = { "Content-Type": "application/json", "X-CSRF-Token": form.dataset.csrf };
  return new Request(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

// Made with the first thought; closed, they take one line.
function thoughts(turn, what) {
  if (!turn.querySelector(".thoughts")) {
    const made = document.createElement("details");
    made.className = "thoughts";
    made.innerHTML = "<summary>Thoughts</summary><p></p>";
    what.before(made);
  }
  return turn.querySelector(".thoughts p");
}

function paragraph(kind, text) {
  const made = document.createElement("p");
  made.className = kind;
  made.textContent = text;
  return made;
}

function parameters() {
  const made = {};
  for (const field of form.querySelectorAll("[data-number]")) {
    const text = field.value.trim();
    if (text) made[field.name] = Number.isNaN(Number(text)) ? text : Number(text); // the API says what is wrong with it
  }
  const stop = form.elements.stop.value.split("\n").filter(Boolean);
  return stop.length ? { ...made, stop } : made;
}

// A field's JSON; undefined where it is empty or is none, which the field then says.
function jsonOf(field) {
  field.setCustomValidity("");
  if (!field.value.trim()) return undefined;
  try {
    return JSON.parse(field.value);
  } catch (error) {
    field.setCustomValidity(`This is not JSON: ${error.message}`);
    return undefined;
  }
}

// What the answer must look like, and the tools that it may call. A bare function is one of OpenAI's tools too.
function structure() {
  const schema = jsonOf(form.elements.schema);
  const tools = jsonOf(form.elements.tools);
  const made = {};
  if (schema !== undefined) made.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  if (tools !== undefined) made.tools = [tools].flat().map((each) => (each?.function || each?.type ? each : { type: "function", function: each }));
  return made;
}

function busy(is) {
  document.getElementById("send").hidden = is;
  document.getElementById("stop").hidden = !is;
  if (!is) form.elements.prompt.focus();
}

// What the first model can do stays to choose from.
function allowedKind(model) {
  const kinds = [...form.elements.kind.options];
  const can = { chat: model.chat === "1", completion: model.writes === "1", embeddings: model.vectors === "1" };
  for (const kind of kinds) kind.disabled = !can[kind.value];
  if (!can[form.elements.kind.value]) form.elements.kind.value = kinds.find((kind) => !kind.disabled)?.value ?? "completion";
  return form.elements.kind.value;
}

function show(panes) {
  const other = form.elements.other.value !== "";
  panes[1].element.hidden = !other;
  document.getElementById("panes").classList.toggle("two", other);
  const kind = allowedKind(panes[0].select.selectedOptions[0].dataset);
  for (const each of form.querySelectorAll(".chat-only")) each.hidden = kind === "completion";
  if (kind !== "chat") for (const each of form.querySelectorAll("[data-json]")) each.setCustomValidity("");
  form.elements.prompt.required = !panes.some((pane) => pane.called.length);
  form.querySelector(".parameters").hidden = kind === "embeddings";
  form.elements.prompt.placeholder = kind === "embeddings" ? "Texts to compare, one per line" : "Ask something";
  const [path, body] = panes[0].body(form.elements.prompt.value || "Hello");
  document.getElementById("curl").textContent = asCurl(form.dataset.url, path, body);
  document.getElementById("python").textContent = asPython(form.dataset.url, path, body);
  document.getElementById("javascript").textContent = asJavaScript(form.dataset.url, path, body);
}

async function send(panes) {
  if (stopper) return;
  stopper = new AbortController();
  busy(true);
  const question = form.elements.prompt.value;
  const asked = panes.filter((pane) => pane.model);
  const fine = await Promise.all(asked.map((pane) => pane.ask(question, stopper.signal)));
  stopper = null;
  if (fine.some(Boolean)) form.elements.prompt.value = ""; // what nobody took can be sent again
  busy(false);
  show(panes);
}

if (form) {
  const panes = [...form.querySelectorAll("[data-pane]")].map((element) => new Pane(element));
  const narrow = matchMedia("(max-width: 1100px)");
  form.querySelector(".parameters").open = !narrow.matches;
  form.addEventListener("input", () => show(panes));
  form.addEventListener("submit", (event) => (event.preventDefault(), send(panes)));
  form.elements.prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && stopper?.abort());
  document.getElementById("stop").addEventListener("click", () => stopper?.abort());
  document.getElementById("clear").addEventListener("click", () => {
    for (const pane of panes) pane.clear();
    show(panes);
  });
  show(panes);
}
