// What every page does in the browser: follow the tab's visibility, copy, ask before what cannot be undone.

let pressed = false;
const held = new Map();

function say(state, text) {
  const asOf = document.getElementById("as-of"); // looked up each time: the head is swapped as well
  if (!asOf) return;
  asOf.dataset.state = state;
  asOf.textContent = text;
}

// A piece that is swapped between press and release would swallow the click, and one with selected text the
// selection: it is held until after.
document.addEventListener("pointerdown", () => (pressed = true), true);
for (const name of ["pointerup", "pointercancel"]) {
  document.addEventListener(name, () => setTimeout(release, 50), true);
}
document.addEventListener("htmx:sseBeforeMessage", (event) => {
  held.delete(event.target);
  if (!pressed && !hasSelection(event.target)) return;
  event.preventDefault();
  held.set(event.target, event.detail.data);
});

function release() {
  pressed = false;
  for (const [piece, html] of held) {
    if (hasSelection(piece)) continue;
    held.delete(piece);
    window.htmx.swap(piece, html, { swapStyle: "innerHTML" });
  }
}

function hasSelection(piece) {
  const selection = getSelection();
  return !selection.isCollapsed && selection.containsNode(piece, true);
}

document.addEventListener("selectionchange", () => {
  if (!pressed && held.size) release();
});

let watch = 0;
let since = "";
document.addEventListener("htmx:sseOpen", () => {
  clearInterval(watch);
  [watch, since] = [0, ""];
  say("live", "live");
});
document.addEventListener("htmx:sseError", lose);

function lose() {
  since ||= new Date().toLocaleTimeString();
  say("lost", `no answer since ${since}: trying again`);
  watch ||= setInterval(lookAgain, 2000);
}

// The extension waits up to a minute between two attempts: a daemon that is back is noticed sooner.
async function lookAgain() {
  if ((await isBack()) && watch && !document.hidden) renew();
}

// Whether the daemon answers. A page whose session ended with the daemon goes to the sign-in.
export async function isBack() {
  const answer = await fetch(location.href, { redirect: "manual" }).catch(() => null);
  if (answer?.type === "opaqueredirect") location.reload();
  return Boolean(answer?.ok);
}

const renew = () => window.htmx.ajax("GET", location.href, { target: "#live", select: "#live", swap: "outerHTML" });

document.addEventListener("htmx:sendError", () => {
  if (document.querySelector("[sse-connect]")) return lose();
  const told = Object.assign(document.createElement("p"), { className: "failure", textContent: "The daemon does not answer. Start it with llmbox up, then try again." });
  document.getElementById("said").replaceChildren(told);
});

// A hidden tab costs nothing: its stream is closed. Back in view, the live part is fetched anew.
document.addEventListener("visibilitychange", () => {
  const live = document.querySelector("[sse-connect]");
  if (!live || !window.htmx) return;
  if (document.hidden) {
    window.htmx.trigger(live, "htmx:beforeCleanupElement");
    say("paused", "paused");
  } else {
    renew();
  }
});

// A name that is cut off is told in full to whoever points at it.
document.addEventListener("mouseover", (event) => {
  const cell = event.target.closest?.(".scroll :is(td, th), a.id, .stats :is(strong, small)");
  if (cell && cell.scrollWidth > cell.clientWidth) cell.title = cell.textContent.trim();
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const source = document.getElementById(button.dataset.copy);
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(source.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(source);
    button.textContent = "Selected: copy it";
  }
  setTimeout(() => (button.textContent = label), 2000);
});

document.addEventListener("submit", (event) => {
  const question = event.target.dataset.confirm;
  if (question && !confirm(question)) event.preventDefault();
});

// A slider writes into the field that it stands for.
document.addEventListener("input", (event) => {
  const field = document.getElementById(event.target.dataset.for ?? "");
  if (field) field.value = event.target.value;
}, true);

// On a phone the pages are a strip: the one that is open is in view.
const here = document.querySelector(".side nav [aria-current]");
if (here) here.closest("nav").scrollLeft = here.offsetLeft - 24;
