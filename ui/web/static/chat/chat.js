// The chat: a conversation as a tree, its branch on display, and answers streamed by the API of every client.

import { begun, measure, streamAnswer } from "../playground/playground-answer.js";
import { asCurl, asJavaScript, asPython } from "../playground/playground-calls.js";
import { Attachments } from "./chat-attach.js";
import { button, element, find, folded } from "./chat-elements.js";
import { showMarkdown } from "./chat-markdown.js";
import { Settings } from "./chat-settings.js";
import { Conversation, Store, asMessages, caller, newId } from "./chat-store.js";
import { Tools, drawCall } from "./chat-tools.js";

const REDRAW = 80; // milliseconds between two drawings of an answer that streams
const MOST_ROUNDS = 12; // turns of a model with calls of tools, before it must answer

const page = find("chat");
let talk = new Conversation();
let stopper = null;

// ---------------------------------------------------------------- what is sent

const canCall = (model) => [...find("model").options].some((each) => each.value === model && each.dataset.tools);

const canSee = (model) => [...find("model").options].some((each) => each.value === model && each.dataset.images);

function bodyOf(branch, model) {
  const { system, ...rest } = settings.read();
  const messages = branch.flatMap((message) => asMessages(message, canCall(model), canSee(model)));
  if (system) messages.unshift({ role: "system", content: system });
  return { model, ...settings.body(rest), messages };
}

function showToolUse() {
  find("no-tool-use").hidden = canCall(find("model").value) || !tools.servers.some((each) => each.allowed);
  find("no-tool-use").textContent = `${find("model").value} cannot call tools.`;
}

function report(text) {
  find("said").replaceChildren(...(text ? [element("p", "failure", text)] : []));
}

// ---------------------------------------------------------------- messages

const messages = find("messages");
const isAtEnd = () => messages.scrollHeight - messages.scrollTop - messages.clientHeight < 60;
const toEnd = () => (messages.scrollTop = messages.scrollHeight);

let rendering = []; // Markdown that makes the messages longer once it is there

function draw() {
  rendering = [];
  messages.replaceChildren(...talk.branch().map((message) => (message.pair ? drawPair(message) : drawMessage(message))));
  if (!talk.messages.size) messages.append(drawWelcome());
  toEnd();
  Promise.all(rendering).then(toEnd);
}

const STARTERS = ["What can you do?", "Explain recursion with an example", "Plan a week of simple dinners", "Write a polite reminder about an invoice"];

// An empty conversation: what this is, and first questions, which go into the field and are not sent.
function drawWelcome() {
  const welcome = element("div", "welcome");
  welcome.append(element("h2", "", "What would you like to know?"), element("p", "quiet", "Conversations stay on this box."));
  const starters = element("div", "starters");
  for (const text of STARTERS) {
    const starter = element("button", "", text);
    starter.type = "button";
    starter.addEventListener("click", () => {
      find("prompt").value = text;
      find("prompt").focus();
    });
    starters.append(starter);
  }
  welcome.append(starters);
  return welcome;
}

// Two answers to one question; the conversation goes on from the one that is chosen.
function drawPair(message) {
  const both = element("section", "pair");
  both.setAttribute("aria-label", "Answers side by side");
  both.append(...talk.pairOf(message).map(drawMessage));
  return both;
}

function drawMessage(message) {
  const shown = element("article", `message ${message.role}`);
  shown.dataset.id = message.id;
  shown.append(element("p", "who", message.role === "user" ? "You" : message.model || "Assistant"));
  if (message.thoughts) shown.append(drawThoughts(message.thoughts));
  if (message.rounds?.length) shown.append(drawRounds(message));
  const what = element("div", "what");
  shown.append(what);
  if (message.role === "user") what.textContent = message.content;
  else rendering.push(showMarkdown(what, message.content, true));
  if (message.images?.length) shown.append(drawImages(message.images));
  shown.append(drawActions(message));
  return shown;
}

const withImages = (images) => (images?.length ? { images } : {});

function drawImages(images) {
  const made = element("div", "images");
  for (const [number, url] of images.entries()) {
    const shown = made.appendChild(element("img"));
    shown.src = url;
    shown.alt = `Attached image ${number + 1}`;
  }
  return made;
}

function drawThoughts(text, open = false) {
  const made = folded("thoughts", "Thoughts", open);
  made.append(element("p", "", text));
  return made;
}

function drawRounds({ rounds }) {
  const made = element("div", "rounds");
  for (const { content, calls } of rounds) {
    if (content) showMarkdown(made.appendChild(element("div", "what")), content, true);
    made.append(...calls.map(drawCall));
  }
  return made;
}

function drawActions(message) {
  const line = element("div", "actions");
  const all = talk.siblings(message);
  if (message.pair) line.append(...drawChoice(message));
  else if (all.length > 1) {
    const at = all.indexOf(message);
    const step = (by) => () => show(all[(at + by + all.length) % all.length]);
    line.append(button("‹", step(-1), "Previous version"), element("span", "", `${at + 1} of ${all.length}`), button("›", step(1), "Next version"));
  }
  line.append(button("Copy", () => navigator.clipboard.writeText(message.content)));
  if (message.role === "user") line.append(button("Edit", () => edit(message), "Edit", "link asks"));
  else line.append(button("Again", () => answer(message.parent), "Answer again", "link asks"), button("As code", () => showCall(message)));
  if (message.measure) line.append(element("span", "measure", message.measure));
  if (message.request) {
    const link = element("a", "measure", "request");
    link.href = `/admin/requests/${encodeURIComponent(message.request)}`;
    line.append(link);
  }
  return line;
}

function drawChoice(message) {
  if (talk.branch().includes(message)) return [element("span", "state ready", "Chosen")];
  return [button("Continue with this", () => show(message), `Continue with the answer of ${message.model}`)];
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
    const made = talk.add("user", field.value, message.parent, withImages(message.images));
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
  const body = bodyOf(before.slice(0, before.findIndex((each) => each.parent === message.parent)), message.model);
  const made = element("div", "call");
  for (const [name, write] of Object.entries({ curl: asCurl, Python: asPython, JavaScript: asJavaScript })) {
    const text = write(page.dataset.url, "/v1/chat/completions", body);
    made.append(element("p", "who", name), button("Copy", () => navigator.clipboard.writeText(text), `Copy the call in ${name}`), element("pre", "", text));
  }
  shown.append(made);
}

// ---------------------------------------------------------------- answers

async function answer(parent) {
  if (stopper) return;
  talk.leaf = parent;
  const chosen = settings.read();
  Object.assign(talk, chosen);
  const asked = talk.branch();
  const models = [chosen.model, find("other").value].filter(Boolean);
  const pair = models.length > 1 ? newId() : "";
  const all = models.map((model) => talk.add("assistant", "", parent, { thoughts: "", model, measure: "", request: "", rounds: [], pair }));
  talk.leaf = all[0].id;
  draw();
  stopper = new AbortController();
  busy(true);
  const mine = talk; // another one may be opened before the end
  await Promise.all(all.map((made) => answerInto(mine, made, asked, parent)));
  stopper = null;
  busy(false);
  await save(mine);
}

async function answerInto(mine, made, asked, parent) {
  const shown = messages.querySelector(`[data-id="${made.id}"]`);
  const drawing = startDrawing(shown, made);
  const problems = [];
  try {
    const offered = canCall(made.model) ? await tools.offer(stopper.signal) : { tools: [], names: new Map(), problems: [] };
    problems.push(...offered.problems);
    await converse(made, asked, offered, () => redrawRounds(shown, made));
  } catch (error) {
    if (error.name !== "AbortError") problems.push(error.message);
  }
  clearInterval(drawing);
  for (const call of made.rounds.flatMap((round) => round.calls)) delete call.decide;
  if (problems.length && !made.content && !made.thoughts && !made.rounds.length) {
    mine.messages.delete(made.id); // nothing was said: the question stays, and can be sent again
    if (mine.leaf === made.id) mine.leaf = mine.pairOf(made).find((each) => each !== made)?.id ?? parent;
  }
  finish(shown, made, mine.messages.has(made.id), problems);
}

// Turns of the model: an answer, or calls whose results it gets with the next turn.
async function converse(made, asked, offered, redraw) {
  const usage = { input: 0, output: 0 };
  for (;;) {
    const seen = begun();
    const headers = { "Content-Type": "application/json", "X-CSRF-Token": page.dataset.csrf };
    const sent = { ...bodyOf([...asked, made], made.model), stream: true, stream_options: { include_usage: true } };
    if (!made.rounds.length) sent.messages.pop(); // it has said nothing yet
    if (offered.tools.length) sent.tools = offered.tools;
    const request = new Request("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(sent), signal: stopper.signal });
    try {
      await streamAnswer(request, seen, (text) => (made.content += text), (text) => (made.thoughts += text));
    } finally {
      usage.input += seen.usage?.prompt_tokens ?? 0;
      usage.output += seen.usage?.completion_tokens ?? 0;
      made.request = seen.id;
      made.measure = [...measure({ ...seen, seed: undefined, reason: seen.reason === "stop" ? "" : seen.reason }), ...costOf(made.model, usage)].join(" · ");
    }
    const calls = seen.calls.filter(Boolean);
    if (!calls.length) return;
    if (seen.reason === "length") throw new Error("The answer reached its token limit within a tool call, so no tool was run. Ask for less at once, or load the model with a larger context.");
    if (made.rounds.length >= MOST_ROUNDS) throw new Error(`The model called tools ${MOST_ROUNDS} times without an answer. Ask it to continue.`);
    for (const call of calls) {
      const target = offered.names.get(call.name);
      Object.assign(call, { id: call.id || newId(), server: target?.server.name ?? "", tool: target?.tool ?? call.name, state: "asks", result: "" });
    }
    made.rounds.push({ content: made.content, calls });
    made.content = "";
    await tools.run(calls, offered, redraw, stopper.signal);
  }
}

// What an answer cost, where its model has a price.
function costOf(model, { input, output }) {
  const price = prices[model];
  if (!price || !(input + output)) return [];
  const cost = (input * price[0] + output * price[1]) / 1e6;
  return [`${cost && cost < 0.0001 ? "< 0.0001" : cost.toFixed(4)} ${page.dataset.currency}`];
}

function redrawRounds(shown, made) {
  const following = isAtEnd();
  const drawn = drawRounds(made);
  const old = shown.querySelector(".rounds");
  if (old) old.replaceWith(drawn);
  else shown.querySelector(".what").before(drawn);
  shown.querySelector(":scope > .what").textContent = made.content;
  if (following) toEnd();
}

// Draws what has come, while the reader's place is kept.
function startDrawing(shown, made) {
  let drawn = -1;
  let thought = -1;
  const what = shown.querySelector(":scope > .what");
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

function finish(shown, made, kept, problems) {
  const following = isAtEnd();
  const drawn = kept ? drawMessage(made) : element("article", "message assistant");
  drawn.append(...problems.map((problem) => element("p", "failure", problem)));
  shown.replaceWith(drawn);
  if (following) Promise.all(rendering).then(toEnd);
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
  if (attachments.reading) return report("A file is still being read. Send again once it is attached.");
  const { texts, images } = attachments.take();
  const made = talk.add("user", [...texts, text].join("\n\n"), talk.leaf, withImages(images));
  if (talk.title.startsWith("File ")) talk.title = text.split("\n")[0].slice(0, 80);
  find("prompt").value = "";
  report("");
  await answer(made.id);
}

// ---------------------------------------------------------------- conversations

const call = page && caller(page.dataset.csrf);
const store = page && new Store(call);
const settings = page && new Settings(page, call, report);
const tools = page && new Tools(call, report);
const blind = () => (canSee(find("model").value) ? "" : `${find("model").value} cannot read images`);
const attachments = page && new Attachments(page.dataset.csrf, blind);
const prices = page && JSON.parse(page.dataset.prices);

async function save(saved = talk) {
  try {
    await store.save(saved.id, saved.asBody());
    await drawHistory();
  } catch (error) {
    report(`The conversation could not be saved: ${error.message}`);
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
  settings.show(talk);
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
  if (!confirm(`Delete "${row.title}" permanently?`)) return;
  await store.remove(row.id);
  if (row.id === talk.id) startNew();
  await drawHistory();
}

function startNew() {
  stopper?.abort();
  talk = new Conversation(undefined, settings.read());
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
  const close = (event) => document.querySelectorAll(".menu[open]").forEach((menu) => event.composedPath().includes(menu) && event.key !== "Escape" || (menu.open = false));
  document.addEventListener("click", close);
  find("prompt").addEventListener("focus", close);
  document.addEventListener("keydown", (event) => event.key === "Escape" && (stopper?.abort(), close(event)));
  find("new").addEventListener("click", startNew);
  find("prompt").addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    if (files.length) event.preventDefault();
    attachments.add(files);
  });
  find("files").addEventListener("change", async (event) => (await attachments.add([...event.target.files]), (event.target.value = "")));
  find("model").addEventListener("change", showToolUse);
  tools.onChange = showToolUse;
  find("export").addEventListener("click", (event) => event.target.dataset.export && exportAs(event.target.dataset.export));
  let waiting = 0;
  find("search").addEventListener("input", () => (clearTimeout(waiting), (waiting = setTimeout(drawHistory, 200))));
  const wanted = location.hash.slice(1);
  draw();
  if (wanted) load(wanted).catch(() => startNew());
  else drawHistory();
}
