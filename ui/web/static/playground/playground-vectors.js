// Vectors of texts, and how alike the texts are by them.

export const VECTORS = "/v1/embeddings";

export const textsOf = (prompt) => prompt.split("\n").filter((line) => line.trim());

// Vectors have length 1: their product is the cosine of the angle between them.
const similarity = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);

const start = (vector) => `${vector.slice(0, 3).map((x) => x.toFixed(3)).join(", ")}${vector.length > 3 ? ", …" : ""}`;

function row(tag, cells) {
  const made = document.createElement("tr");
  for (const text of cells) made.append(Object.assign(document.createElement(tag), { textContent: text }));
  return made;
}

function compared(texts, vectors) {
  const table = document.createElement("table");
  table.className = "vectors";
  const several = texts.length > 1;
  table.createTHead().append(row("th", ["Text", "Vector", ...(several ? ["Similarity"] : [])]));
  const rows = vectors.map((vector, i) =>
    row("td", [texts[i], start(vector), ...(several ? [similarity(vectors[0], vector).toFixed(4)] : [])]),
  );
  table.createTBody().append(...rows);
  return table;
}

// A table of the texts, and a line about what it took.
export async function vectorsOf(request, texts) {
  const begun = performance.now();
  const response = await fetch(request);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error.message);
  const vectors = answer.data.map((each) => each.embedding);
  const line = document.createElement("p");
  line.className = "measure";
  const took = Math.round(performance.now() - begun);
  const told = [`${vectors[0].length} dimensions`, `${answer.usage.prompt_tokens} tokens in`, `${took} ms`];
  if (texts.length > 1) told.push("similarity: cosine to the first text");
  line.textContent = told.join(" · ");
  return [compared(texts, vectors), line];
}
