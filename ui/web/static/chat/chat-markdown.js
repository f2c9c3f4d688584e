// Markdown of answers: tables, code with colors and a copy button, and formulas. Libraries load when first needed.
// Raw HTML is shown as text, and images as links: an answer loads nothing from anywhere.

const loading = new Map();

function library(name) {
  if (!loading.has(name)) {
    loading.set(name, new Promise((done, failed) => {
      const script = document.createElement("script");
      script.src = `/admin/static/vendor/${name}`;
      script.onload = done;
      script.onerror = () => failed(new Error(`${name} did not load`));
      document.head.append(script);
    }));
  }
  return loading.get(name);
}

let made = null;

async function parser() {
  if (made) return made;
  await library("markdown-it.min.js");
  made = window.markdownit({ html: false, linkify: true, breaks: false });
  made.renderer.rules.image = (tokens, index) => {
    const escape = made.utils.escapeHtml;
    const token = tokens[index];
    return `<a href="${escape(token.attrGet("src"))}" target="_blank" rel="noopener noreferrer">${escape(token.content || "image")}</a>`;
  };
  for (const cell of ["th_open", "td_open"]) {
    made.renderer.rules[cell] = (tokens, index) => {
      const align = /text-align:(\w+)/.exec(tokens[index].attrGet("style") ?? "")?.[1];
      return `<${tokens[index].tag}${align ? ` class="${align}"` : ""}>`; // the page's policy forbids inline styles
    };
  }
  made.renderer.rules.link_open = (tokens, index, options, env, self) => {
    tokens[index].attrSet("target", "_blank");
    tokens[index].attrSet("rel", "noopener noreferrer");
    return self.renderToken(tokens, index, options);
  };
  made.inline.ruler.before("escape", "formula", formula);
  made.renderer.rules.formula = (tokens, index) => {
    const { content, block } = tokens[index];
    return `<${block ? "div" : "span"} class="formula" data-block="${block ? 1 : 0}">${made.utils.escapeHtml(content)}</${block ? "div" : "span"}>`;
  };
  return made;
}

const FENCES = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];

// Inline rule of markdown-it: a formula between fences. A lone dollar sign before a blank or a number is money.
function formula(state, silent) {
  for (const [open, close, block] of FENCES) {
    if (!state.src.startsWith(open, state.pos)) continue;
    const start = state.pos + open.length;
    const end = state.src.indexOf(close, start);
    if (end < 0 || end >= state.posMax + close.length) continue;
    const text = state.src.slice(start, end);
    if (open === "$" && (/^\s|\s$|^$/.test(text) || /\n/.test(text) || /^\d/.test(state.src.slice(end + 1)))) continue;
    if (!silent) {
      const token = state.push("formula", "", 0);
      token.content = text.trim();
      token.block = block;
    }
    state.pos = end + close.length;
    return true;
  }
  return false;
}

// Fills `element` with `text` as Markdown. `done`: the text is whole, so that colors, formulas and buttons pay.
export async function showMarkdown(element, text, done) {
  let found;
  try {
    found = await parser();
  } catch {
    element.textContent = text; // a build without the libraries
    element.classList.add("plain");
    return;
  }
  element.innerHTML = found.render(text);
  if (done) await Promise.all([colors(element), formulas(element)]).catch(() => {});
  for (const block of element.querySelectorAll("pre")) addCopyButton(block);
}

function addCopyButton(block) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "small copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(block.querySelector("code").textContent);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  block.append(button);
}

async function colors(element) {
  const blocks = [...element.querySelectorAll("pre code[class^='language-']")];
  if (!blocks.length) return;
  await library("highlight.min.js");
  for (const block of blocks) {
    const language = block.className.replace("language-", "");
    if (window.hljs.getLanguage(language)) window.hljs.highlightElement(block);
  }
}

async function formulas(element) {
  const found = [...element.querySelectorAll(".formula")];
  if (!found.length) return;
  await library("katex.min.js");
  for (const each of found) {
    const options = { output: "mathml", displayMode: each.dataset.block === "1", throwOnError: false };
    window.katex.render(each.textContent, each, options);
  }
}
