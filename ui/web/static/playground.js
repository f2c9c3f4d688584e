// Chat and raw completion against the real API, as any client would speak to it.

const form = document.getElementById("playground");
const talk = document.getElementById("talk");
const messages = [];
let stopper = null;

const numbers = { temperature: Number, max_tokens: Number, seed: Number };

function body() {
  const fields = new FormData(form);
  const made = { model: fields.get("model"), stream: true, stream_options: { include_usage: true } };
  for (const [name, read] of Object.entries(numbers)) {
    const text = fields.get(name).trim();
    if (text) made[name] = read(text);
  }
  const prompt = fields.get("prompt");
  if (fields.get("kind") === "completion") return ["/v1/completions", { ...made, prompt }];
  const system = fields.get("system").trim();
  const said = [...messages, { role: "user", content: prompt }];
  return ["/v1/chat/completions", { ...made, messages: system ? [{ role: "system", content: system }, ...said] : said }];
}

function showCall() {
  const [path, made] = body();
  const json = JSON.stringify(made, null, 2).replaceAll("'", "'\\''");
  document.getElementById("call").textContent =
    `curl -N ${form.dataset.url}${path} \\\n  -H 'Content-Type: application/json' \\\n  -d '${json}'`;
}

function add(role, text) {
  talk.querySelector(".empty")?.remove();
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  const who = document.createElement("p");
  who.className = "who";
  who.textContent = role === "user" ? "You" : form.elements.model.value;
  const what = document.createElement("p");
  what.className = "what";
  what.textContent = text;
  turn.append(who, what);
  talk.append(turn);
  talk.scrollTop = talk.scrollHeight;
  return turn;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function measure(turn, seen) {
  const seconds = (seen.last - seen.first) / 1000;
  const tokens = seen.usage?.completion_tokens;
  const cached = seen.usage?.prompt_tokens_details?.cached_tokens ?? 0;
  const parts = [];
  if (seen.first) parts.push(`first token ${Math.round(seen.first - seen.begun)} ms`);
  if (tokens > 1 && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens / s`);
  if (seen.usage) parts.push(`${seen.usage.prompt_tokens} in (${cached} cached), ${tokens} out`);
  if (seen.reason) parts.push(`ended by ${seen.reason}`);
  const line = document.createElement("p");
  line.className = "measure";
  line.textContent = parts.join(" · ");
  turn.append(line);
}

async function read(response, turn) {
  const what = turn.querySelector(".what");
  const seen = { begun: form.begun, first: 0, last: 0, usage: null, reason: "" };
  try {
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices?.[0];
      const text = choice?.delta?.content ?? choice?.text ?? "";
      if (text) {
        seen.first ||= performance.now();
        seen.last = performance.now();
        what.textContent += text;
        talk.scrollTop = talk.scrollHeight;
      }
      seen.reason = choice?.finish_reason ?? seen.reason;
      seen.usage = event.usage ?? seen.usage;
    }
  } finally {
    measure(turn, seen);
  }
  return what.textContent;
}

async function ask() {
  const [path, made] = body();
  const question = form.elements.prompt.value;
  add("user", question);
  const turn = add("answer", "");
  stopper = new AbortController();
  busy(true);
  form.begun = performance.now();
  try {
    const response = await fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-CSRF-Token": form.dataset.csrf },
      body: JSON.stringify(made),
      signal: stopper.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    form.elements.prompt.value = "";
    const answer = await read(response, turn);
    if (made.messages) messages.push({ role: "user", content: question }, { role: "assistant", content: answer });
  } catch (error) {
    const line = document.createElement("p");
    line.className = error.name === "AbortError" ? "quiet" : "failure";
    line.textContent = error.name === "AbortError" ? "Stopped." : error.message;
    turn.append(line);
  } finally {
    busy(false);
  }
}

function busy(is) {
  document.getElementById("send").hidden = is;
  document.getElementById("stop").hidden = !is;
  if (!is) form.elements.prompt.focus();
}

if (form) {
  const kind = () => {
    const chat = form.elements.model.selectedOptions[0].dataset.chat === "1";
    form.elements.kind.options[0].disabled = !chat;
    if (!chat) form.elements.kind.value = "completion";
    form.querySelector(".system").hidden = form.elements.kind.value === "completion";
  };
  form.addEventListener("input", () => (kind(), showCall()));
  form.addEventListener("submit", (event) => (event.preventDefault(), ask()));
  form.elements.prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  document.getElementById("stop").addEventListener("click", () => stopper?.abort());
  document.getElementById("clear").addEventListener("click", () => {
    messages.length = 0;
    talk.replaceChildren();
    showCall();
  });
  kind();
  showCall();
}
