// One streamed answer, and how fast it came.

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

// Speed and tokens of an answer, as a list of texts.
export function measure(seen) {
  const seconds = (seen.last - seen.first) / 1000;
  const tokens = seen.usage?.completion_tokens;
  const cached = seen.usage?.prompt_tokens_details?.cached_tokens ?? 0;
  const parts = [];
  const wait = seen.first - seen.begun;
  if (seen.first) parts.push(`first token ${wait < 1000 ? `${Math.round(wait)} ms` : `${(wait / 1000).toFixed(1)} s`}`);
  if (tokens > 1 && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
  if (seen.usage) parts.push(`${seen.usage.prompt_tokens} in (${cached} cached), ${tokens} out`);
  if (seen.reason) parts.push(`finish reason: ${seen.reason}`);
  if (seen.seed !== undefined) parts.push(`seed ${seen.seed}`);
  return parts;
}

function measureLine(seen) {
  const parts = measure(seen);
  const line = document.createElement("p");
  line.className = "measure";
  line.append(parts.join(" · "));
  if (seen.id) {
    const link = document.createElement("a");
    link.href = `/admin/requests/${encodeURIComponent(seen.id)}`;
    link.textContent = "request";
    line.append(parts.length ? " · " : "", link);
  }
  return line;
}

// What is known of an answer while it streams: times in milliseconds, usage, the request's id.
export const begun = () => ({ begun: performance.now(), first: 0, last: 0, usage: null, reason: "", id: "", seed: undefined, calls: [] });

// Puts a piece of a tool call where it belongs.
function gather(calls, piece) {
  calls[piece.index] ??= { id: "", name: "", arguments: "" };
  const call = calls[piece.index];
  call.id ||= piece.id ?? "";
  call.name ||= piece.function?.name ?? "";
  call.arguments += piece.function?.arguments ?? "";
}

// Streams one answer: `say` takes each piece of text, `think` each of thoughts. Returns the whole text.
export async function streamAnswer(request, seen, say, think) {
  const response = await fetch(request);
  if (!response.ok) throw new Error((await response.json()).error.message);
  seen.answered = true;
  let whole = "";
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices?.[0];
    const text = choice?.delta?.content ?? choice?.text ?? "";
    const thought = choice?.delta?.reasoning_content ?? "";
    for (const piece of choice?.delta?.tool_calls ?? []) gather(seen.calls, piece);
    if (text || thought) {
      seen.first ||= performance.now();
      seen.last = performance.now();
    }
    if (thought) think(thought);
    if (text) {
      whole += text;
      say(text);
    }
    seen.id ||= event.id ?? "";
    seen.seed = event.seed ?? seen.seed;
    seen.reason = choice?.finish_reason ?? seen.reason;
    seen.usage = event.usage ?? seen.usage;
  }
  return whole;
}

// The same for a page that shows each answer with a line about its speed, which `told` takes however it ends.
// Returns the text and the tool calls.
export async function answerOf(request, say, told, think = () => {}) {
  const seen = begun();
  try {
    const text = await streamAnswer(request, seen, say, think);
    return { text, calls: seen.calls.filter(Boolean) };
  } finally {
    if (seen.answered) told(measureLine(seen));
  }
}
