// The form's request for a terminal and for a program.

const ofTheClient = new Set([
  "model", "messages", "prompt", "input", "response_format", "tools", "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop",
]);

// Numbers, texts and lists are the same in Python; these three words are not.
const words = { true: "True", false: "False", null: "None" };
const python = (value) =>
  JSON.stringify(value, null, 4).replaceAll("\n", "\n    ").replace(/"(?:[^"\\]|\\.)*"|true|false|null/g, (part) => words[part] ?? part);

export function asCurl(url, path, body) {
  const streams = !path.endsWith("/embeddings");
  const json = JSON.stringify(streams ? { ...body, stream: true } : body, null, 2).replaceAll("'", "'\\''");
  return `curl ${streams ? "-N " : ""}${url}${path} \\
  -H "Authorization: Bearer $LLMBOX_API_KEY" \\
  -H 'Content-Type: application/json' \\
  -d '${json}'`;
}

export function asPython(url, path, body) {
  const given = Object.entries(body).filter(([name]) => ofTheClient.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !ofTheClient.has(name)));
  const lines = given.map(([name, value]) => `    ${name}=${python(value)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${python(extra)},`);
  const call = path.endsWith("/embeddings") ? vectorsCall(lines) : streamedCall(path.includes("chat"), lines);
  return `import os

from openai import OpenAI

client = OpenAI(base_url="${url}/v1", api_key=os.environ["LLMBOX_API_KEY"])
${call}`;
}

export function asJavaScript(url, path, body) {
  const given = (value) => JSON.stringify(value, null, 2);
  const begin = `import OpenAI from "openai";

const client = new OpenAI({ baseURL: "${url}/v1", apiKey: process.env.LLMBOX_API_KEY });
`;
  if (path.endsWith("/embeddings")) {
    return `${begin}const answer = await client.embeddings.create(${given({ ...body, encoding_format: "float" })});
for (const each of answer.data) console.log(each.embedding.length, each.embedding.slice(0, 3));`;
  }
  const chat = path.includes("chat");
  return `${begin}const stream = await client.${chat ? "chat.completions" : "completions"}.create(${given({ ...body, stream: true })});
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.${chat ? "delta?.content" : "text"} ?? "");`;
}

function vectorsCall(lines) {
  return `answer = client.embeddings.create(
${lines.join("\n")}
)
for each in answer.data:
    print(len(each.embedding), each.embedding[:3])`;
}

function streamedCall(chat, lines) {
  return `stream = client.${chat ? "chat.completions" : "completions"}.create(
${lines.join("\n")}
    stream=True,
)
for chunk in stream:
    print(${chat ? 'chunk.choices[0].delta.content or ""' : "chunk.choices[0].text"}, end="", flush=True)`;
}
