// Elements of the chat page.

export const find = (id) => document.getElementById(id);

export function element(tag, kind, text = "") {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  made.textContent = text;
  return made;
}

export function button(label, act, title = label, kind = "link") {
  const made = element("button", kind, label);
  made.type = "button";
  made.title = title;
  made.addEventListener("click", act);
  return made;
}

// A folded part. `open` shows it.
export function folded(kind, title, open = false) {
  const made = element("details", kind);
  made.open = open;
  made.append(element("summary", "", title));
  return made;
}
