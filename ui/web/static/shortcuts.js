// Keyboard: g and a letter goes to a page, / searches, ? lists the keys, Ctrl+K or ⌘K opens commands. And the theme.

const links = [...document.querySelectorAll(".side nav a")];
const isApple = navigator.platform.startsWith("Mac") || navigator.platform.startsWith("iP");
const chord = isApple ? "⌘K" : "Ctrl K";
let leader = 0;
let models = null;

const page = (link) => ({ label: link.textContent.trim(), kind: "page", keys: `g ${link.dataset.key}`, run: () => link.click() });

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// ---------------------------------------------------------------- theme

const THEMES = ["system", "light", "dark"];
const theme = () => document.documentElement.dataset.theme ?? "system";

function setTheme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  document.cookie = `llmbox_theme=${name}; path=/admin; max-age=31536000; samesite=strict`; // the server writes it into pages
  document.querySelector("meta[name=color-scheme]").content = name === "system" ? "light dark" : name;
  describeTheme();
  document.dispatchEvent(new Event("llmbox:theme"));
}

function describeTheme() {
  const button = document.getElementById("theme");
  button.setAttribute("aria-label", `Theme: ${theme()}`);
  button.title = `Theme: ${theme()}`;
}

// ---------------------------------------------------------------- dialogs

function open(dialog) {
  if (document.querySelector("dialog[open]")) return;
  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.showModal();
}

function showKeys() {
  const rows = [
    [chord, "Commands and models"],
    ["/", "Search this page"],
    ["?", "This list"],
    ...links.map((link) => [`g ${link.dataset.key}`, link.textContent.trim()]),
    ["Esc", "Close"],
  ];
  const list = element("dl", { className: "rows" }, ...rows.map(([keys, what]) => element("div", {}, element("dt", {}, what), element("dd", {}, ...keys.split(" ").map((key) => element("kbd", {}, key))))));
  const close = element("button", { type: "button", className: "small", onclick: () => dialog.close() }, "Close");
  const dialog = element("dialog", { className: "keys-help", ariaLabel: "Keyboard shortcuts" }, element("h2", {}, "Keyboard shortcuts"), list, close);
  open(dialog);
}

// ---------------------------------------------------------------- commands

async function send(path, fields) {
  const token = JSON.parse(document.body.getAttribute("hx-headers"))["X-CSRF-Token"];
  const answer = await fetch(path, { method: "POST", headers: { "HX-Request": "true", "X-CSRF-Token": token }, body: new URLSearchParams(fields) });
  document.getElementById("said").innerHTML = await answer.text(); // a fragment that the server has escaped
}

async function findModels() {
  const [loaded, disk] = await Promise.all(["models", "disk"].map((path) => fetch(`/admin/api/${path}`).then((answer) => (answer.ok ? answer.json() : { models: [] }))));
  const inMemory = new Set(loaded.models.map((each) => each.name));
  return [
    ...loaded.models.map(({ name }) => ({ label: `Unload ${name}`, kind: "model", run: () => confirm(`Unload ${name}? Its open requests end with an error.`) && send("/admin/models/unload", { model: name }) })),
    ...disk.models.map((each) => each.ref ?? each.name).filter((name) => !inMemory.has(name)).map((name) => ({ label: `Load ${name}`, kind: "model", run: () => send("/admin/models/load", { model: name }) })),
    ...disk.models.map((each) => each.ref ?? each.name).map((name) => ({ label: `Show ${name}`, kind: "model", run: () => location.assign(`/admin/models/show?ref=${encodeURIComponent(name)}`) })),
  ];
}

function commands() {
  const go = (label, href) => ({ label, kind: "command", run: () => location.assign(href) });
  return [
    ...links.map(page),
    go("Discover and download models", "/admin/models/discover"),
    go("Failed requests", "/admin/requests?status=errors"),
    go("Create a key", "/admin/keys#add-title"),
    go("Prices and latency targets", "/admin/settings#usage.prices"),
    go("Run the checks", "/admin/system?checks=1"),
    go("Daemon log", "/admin/system#log-title"),
    go("First steps", "/admin/first-run"),
    ...THEMES.map((name) => ({ label: `Theme: ${name}`, kind: "command", run: () => setTheme(name) })),
    { label: "Keyboard shortcuts", kind: "command", keys: "?", run: showKeys },
  ];
}

function openPalette() {
  let all = [...commands(), ...(models ?? [])];
  let shown = [];
  let at = 0;
  const input = element("input", { type: "search", placeholder: "Pages, commands, models", autocomplete: "off" });
  const list = element("ul", { id: "commands" });
  for (const [name, value] of Object.entries({ role: "combobox", "aria-expanded": "true", "aria-controls": "commands", "aria-label": "Command" })) input.setAttribute(name, value);
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", "Commands");
  const dialog = element("dialog", { className: "palette", ariaLabel: "Commands" }, input, list);

  function draw() {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    shown = all.filter((each) => words.every((word) => `${each.label} ${each.kind}`.toLowerCase().includes(word))).slice(0, 12);
    at = Math.min(at, Math.max(0, shown.length - 1));
    list.replaceChildren(...shown.map((each, index) => {
      const item = element("li", { id: `command-${index}`, onclick: () => choose(index) }, element("span", {}, each.label), element("small", {}, each.keys ?? each.kind));
      item.setAttribute("role", "option");
      item.setAttribute("aria-selected", String(index === at));
      return item;
    }));
    if (!shown.length) list.replaceChildren(element("li", { className: "quiet", role: "option" }, "Nothing matches."));
    input.setAttribute("aria-activedescendant", shown.length ? `command-${at}` : "");
    document.getElementById(`command-${at}`)?.scrollIntoView({ block: "nearest" });
  }

  function choose(index) {
    const chosen = shown[index];
    if (!chosen) return;
    dialog.close();
    dialog.remove();
    chosen.run();
  }

  input.addEventListener("input", () => ((at = 0), draw()));
  input.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) at = (at + step + shown.length) % Math.max(1, shown.length);
    if (event.key === "Enter") choose(at);
    if (!step && event.key !== "Enter") return;
    event.preventDefault();
    draw();
  });
  open(dialog);
  draw();
  findModels().then((found) => {
    models = found;
    all = [...commands(), ...found];
    draw();
  }, () => {});
}

// ---------------------------------------------------------------- keys

function search() {
  const field = document.querySelector("[data-search], input[type=search]");
  if (field) field.focus();
  else openPalette();
}

document.addEventListener("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && !event.altKey && event.key.toLowerCase() === "k") {
    event.preventDefault();
    openPalette();
    return;
  }
  const isTyping = event.target.closest?.("input, textarea, select, [contenteditable], dialog");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const goes = Date.now() - leader < 1500 && links.find((link) => link.dataset.key === event.key);
  leader = event.key === "g" ? Date.now() : 0;
  const run = goes ? () => goes.click() : { "?": showKeys, "/": search }[event.key];
  if (!run) return;
  event.preventDefault();
  run();
});

document.getElementById("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]));
document.getElementById("palette").addEventListener("click", openPalette);
document.getElementById("palette").title = `Commands (${chord})`;
document.querySelector(".tools").hidden = false;
describeTheme();
