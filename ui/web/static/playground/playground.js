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
    this.talk.innerHTML = '<p class="empty">Nothing asked yet.</p>';
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

  body(question) {
    if (form.elements.kind.value === "embeddings") return [VECTORS, { model: this.model, input: textsOf(question) }];
    const made = { model: this.model, ...parameters() };
    if (form.elements.kind.value === "completion") return ["/v1/completions", { ...made, prompt: question }];
    const system = form.elements.system.value.trim();
    const said = [...this.messages, { role: "user", content: question }];
    if (system) said.unshift({ role: "system", content: system });
    return ["/v1/chat/completions", { ...made, messages: said }];
  }

  async ask(question, signal) {
    this.forget(this.model);
    const [path, body] = this.body(question);
    this.turn("user", question);
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
      const said = into(() => what);
      const thought = into(() => thoughts(turn, what));
      const answer = await answerOf(request, said, (line) => turn.append(line), thought);
      if (body.messages) this.messages.push({ role: "user", content: question }, { role: "assistant", content: answer });
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
  form.querySelector(".system").hidden = kind === "completion";
  form.querySelector(".parameters").hidden = kind === "embeddings";
  form.elements.prompt.placeholder = kind === "embeddings" ? "Texts to compare, one a line" : "Ask something";
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
