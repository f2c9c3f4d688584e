// The chat: a conversation as a tree, its branch on display, and answers streamed by the API of every client.

import { begun, measure, streamAnswer } from "../playground/playground-answer.js";
import { asCurl, asPython } from "../playground/playground-calls.js";
import { showMarkdown } from "./chat-markdown.js";
import { Conversation, Store } from "./chat-store.js";

const REDRAW = 80; // milliseconds between two drawings of an answer that streams
const LARGEST_FILE = 400_000; // bytes of an attached text

const page = document.getElementById("chat");
const find = (id) => document.getElementById(id);
let talk = new Conversation();
let stopper = null;
let attached = [];

function element(tag, kind, text = "") {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  made.textContent = text;
  return made;
}

function button(label, act, title = label) {
  const made = element("button", "link", label);
  made.type = "button";
  made.title = title;
  made.addEventListener("click", act);
  return made;
}

// ---------------------------------------------------------------- what is sent

function settings() {
  const parameters = {};
  for (const field of page.querySelectorAll("[data-number]")) {
    const number = Number(field.value);
    if (field.value.trim() && Number.isFinite(number)) parameters[field.name] = number;
  }
  return { model: find("model").value, system: find("system").value.trim(), parameters };
}

function bodyOf(branch) {
  const { model, system, parameters } = settings();
  const messages = branch.map(({ role, content }) => ({ role, content }));
  if (system) messages.unshift({ role: "system", content: system });
  return { model, ...parameters, messages };
}

function showSettings() {
  if (talk.model && [...find("model").options].some((option) => option.value === talk.model)) find("model").value = talk.model;
  find("system").value = talk.system;
  for (const field of page.querySelectorAll("[data-number]")) field.value = talk.parameters[field.name] ?? "";
}

// ---------------------------------------------------------------- messages

const messages = find("messages");
const isAtEnd = () => messages.scrollHeight - messages.scrollTop - messages.clientHeight < 60;
const toEnd = () => (messages.scrollTop = messages.scrollHeight);

function draw() {
  messages.replaceChildren(...talk.branch().map(drawMessage));
  if (!talk.messages.size) messages.append(element("p", "empty", "Ask something. Conversations stay on this box."));
  toEnd();
}

function drawMessage(message) {
  const shown = element("article", `message ${message.role}`);
  shown.dataset.id = message.id;
  shown.append(element("p", "who", message.role === "user" ? "You" : message.model || "Assistant"));
  if (message.thoughts) shown.append(drawThoughts(message.thoughts));
  const what = element("div", "what");
  shown.append(what);
  if (message.role === "user") what.textContent = message.content;
  else showMarkdown(what, message.content, true);
  shown.append(drawActions(message));
  return shown;
}

function drawThoughts(text, open = false) {
  const made = element("details", "thoughts");
  made.open = open;
  made.append(element("summary", "", "Thoughts"), element("p", "", text));
  return made;
}

function drawActions(message) {
  const line = element("div", "actions");
  const all = talk.siblings(message);
  if (all.length > 1) {
    const at = all.indexOf(message);
    const step = (by) => () => show(all[(at + by + all.length) % all.length]);
    line.append(button("‹", step(-1), "Previous version"), element("span", "", `${at + 1} of ${all.length}`), button("›", step(1), "Next version"));
  }
  line.append(button("Copy", () => navigator.clipboard.writeText(message.content)));
  if (message.role === "user") line.append(button("Edit", () => edit(message)));
  else line.append(button("Again", () => answer(message.parent), "Answer again"), button("As code", () => showCall(message)));
  if (message.measure) line.append(element("span", "measure", message.measure));
  if (message.request) {
    const link = element("a", "measure", "request");
    link.href = `/admin/requests/${encodeURIComponent(message.request)}`;
    line.append(link);
  }
  return line;
}

function show(message) {
  talk.choose(message);
  draw();
  save();
}

function edit(message) {
  const shown = messages.querySelector(`[data-id="${message.id}"] .what`);
  const field = element("textarea");
  field.value = message.content;
  field.rows = Math.min(12, message.content.split("\n").length + 1);
  const send = () => {
    if (stopper || !field.value.trim()) return;
    const made = talk.add("user", field.value, message.parent);
    answer(made.id);
  };
  const line = element("div", "do");
  const cancel = button("Cancel", draw);
  const go = element("button", "small", "Send");
  go.type = "button";
  go.addEventListener("click", send);
  line.append(go, cancel);
  field.addEventListener("keydown", (event) => isSend(event) && (event.preventDefault(), send()));
  shown.replaceChildren(field, line);
  field.focus();
}

function showCall(message) {
  const shown = messages.querySelector(`[data-id="${message.id}"]`);
  const old = shown.querySelector(".call");
  if (old) return old.remove();
  const before = talk.branch();
  const body = bodyOf(before.slice(0, before.indexOf(message)));
  const made = element("div", "call");
  for (const text of [asCurl, asPython]) made.append(element("pre", "", text(page.dataset.url, "/v1/chat/completions", body)));
  shown.append(made);
}

// ---------------------------------------------------------------- answers

async function answer(parent) {
  if (stopper) return;
  talk.leaf = parent;
  Object.assign(talk, settings());
  const asked = talk.branch();
  const made = talk.add("assistant", "", parent, { thoughts: "", model: talk.model, measure: "", request: "" });
  draw();
  stopper = new AbortController();
  busy(true);
  const shown = messages.querySelector(`[data-id="${made.id}"]`);
  const seen = begun();
  const drawing = startDrawing(shown, made);
  let problem = "";
  try {
    const headers = { "Content-Type": "application/json", "X-CSRF-Token": page.dataset.csrf };
    const body = JSON.stringify({ ...bodyOf(asked), stream: true, stream_options: { include_usage: true } });
    const request = new Request("/v1/chat/completions", { method: "POST", headers, body, signal: stopper.signal });
    await streamAnswer(request, seen, (text) => (made.content += text), (text) => (made.thoughts += text));
  } catch (error) {
    if (error.name !== "AbortError") problem = error.message;
  }
  clearInterval(drawing);
  made.measure = measure({ ...seen, seed: undefined, reason: seen.reason === "stop" ? "" : seen.reason }).join(" · ");
  made.request = seen.id;
  if (problem && !made.content && !made.thoughts) {
    talk.messages.delete(made.id); // nothing was said: the question stays, and can be sent again
    talk.leaf = parent;
  }
  stopper = null;
  busy(false);
  finish(shown, made, problem);
  await save();
}

// Draws what has come, while the reader's place is kept.
function startDrawing(shown, made) {
  let drawn = -1;
  let thought = -1;
  const what = shown.querySelector(".what");
  const step = async () => {
    const following = isAtEnd();
    if (made.thoughts.length !== thought) {
      thought = made.thoughts.length;
      if (thought && !shown.querySelector(".thoughts")) what.before(drawThoughts("", true));
      if (thought) shown.querySelector(".thoughts p").textContent = made.thoughts;
    }
    if (made.content.length !== drawn && made.content) {
      if (drawn <= 0 && shown.querySelector(".thoughts")) shown.querySelector(".thoughts").open = false;
      drawn = made.content.length;
      await showMarkdown(what, made.content, false);
    }
    if (following) toEnd();
  };
  return setInterval(step, REDRAW);
}

function finish(shown, made, problem) {
  const following = isAtEnd();
  const kept = talk.messages.has(made.id);
  const drawn = kept ? drawMessage(made) : element("article", "message assistant");
  if (problem) drawn.append(element("p", "failure", problem));
  shown.replaceWith(drawn);
  if (following) toEnd();
}

function busy(is) {
  find("send").hidden = is;
  find("stop").hidden = !is;
  messages.setAttribute("aria-busy", String(is));
  if (!is) find("prompt").focus();
}

async function send() {
  const text = find("prompt").value.trim();
  if (stopper || !text) return;
  const files = attached.map(({ name, content }) => `File ${name}:\n\`\`\`\n${content}\n\`\`\``);
  const made = talk.add("user", [...files, text].join("\n\n"), talk.leaf);
  if (talk.title.startsWith("File ")) talk.title = text.split("\n")[0].slice(0, 80);
  find("prompt").value = "";
  attached = [];
  drawAttached();
  await answer(made.id);
}

// ---------------------------------------------------------------- attached files

async function attach(files) {
  for (const file of files) {
    const content = file.size <= LARGEST_FILE ? await file.text() : "";
    const isText = content && !content.includes("\u0000") && !content.includes("\uFFFD");
    attached.push(isText ? { name: file.name, content } : { name: file.name, problem: file.size > LARGEST_FILE ? "larger than 400 kB" : "not a text" });
  }
  drawAttached();
  attached = attached.filter((each) => !each.problem);
}

function drawAttached() {
  find("attached").replaceChildren(...attached.map((each) => {
    const line = element("li", each.problem ? "failure" : "", each.problem ? `${each.name}: ${each.problem}` : each.name);
    if (!each.problem) line.append(" ", button("Remove", () => ((attached = attached.filter((other) => other !== each)), drawAttached())));
    return line;
  }));
}

// ---------------------------------------------------------------- conversations

const store = page && new Store(page.dataset.csrf);

async function save() {
  try {
    await store.save(talk.id, talk.asBody());
    await drawHistory();
  } catch (error) {
    find("said").replaceChildren(element("p", "failure", `The conversation is not saved: ${error.message}`));
  }
}

async function drawHistory() {
  const rows = await store.list(find("search").value.trim());
  find("conversations").replaceChildren(...rows.map(drawRow));
  if (!rows.length) find("conversations").append(element("li", "quiet", find("search").value ? "Nothing found." : "None yet."));
}

function drawRow(row) {
  const line = element("li");
  const open = button(row.title, () => load(row.id));
  open.className = "open";
  if (row.id === talk.id) open.setAttribute("aria-current", "true");
  line.append(open, button("Rename", () => rename(row)), button("Delete", () => remove(row)));
  return line;
}

async function load(id) {
  stopper?.abort();
  talk = new Conversation(id, await store.get(id));
  history.replaceState(null, "", `#${id}`);
  showSettings();
  draw();
  await drawHistory();
}

async function rename(row) {
  const title = prompt("New title", row.title)?.trim().slice(0, 200);
  if (!title) return;
  const renamed = row.id === talk.id ? talk : new Conversation(row.id, await store.get(row.id));
  renamed.title = title;
  await store.save(row.id, renamed.asBody());
  await drawHistory();
}

async function remove(row) {
  if (!confirm(`Delete "${row.title}" for good?`)) return;
  await store.remove(row.id);
  if (row.id === talk.id) startNew();
  await drawHistory();
}

function startNew() {
  stopper?.abort();
  const { model, system, parameters } = settings();
  talk = new Conversation(undefined, { model, system, parameters });
  history.replaceState(null, "", location.pathname);
  draw();
  find("prompt").focus();
}

function exportAs(kind) {
  const text = kind === "md" ? talk.asMarkdown() : JSON.stringify(talk.asBody(), null, 2);
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type: kind === "md" ? "text/markdown" : "application/json" }));
  link.download = `${talk.title.replace(/[^\p{L}\p{N} -]/gu, "").trim().slice(0, 60) || "conversation"}.${kind}`;
  link.click();
  URL.revokeObjectURL(link.href);
}

const isSend = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

if (page) {
  find("compose").addEventListener("submit", (event) => (event.preventDefault(), send()));
  find("prompt").addEventListener("keydown", (event) => isSend(event) && (event.preventDefault(), send()));
  find("stop").addEventListener("click", () => stopper?.abort());
  document.addEventListener("keydown", (event) => event.key === "Escape" && stopper?.abort());
  find("new").addEventListener("click", startNew);
  find("files").addEventListener("change", (event) => attach(event.target.files));
  find("export").addEventListener("click", (event) => event.target.dataset.export && exportAs(event.target.dataset.export));
  let waiting = 0;
  find("search").addEventListener("input", () => (clearTimeout(waiting), (waiting = setTimeout(drawHistory, 200))));
  const wanted = location.hash.slice(1);
  draw();
  if (wanted) load(wanted).catch(() => startNew());
  else drawHistory();
}
