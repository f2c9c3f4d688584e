// Files attached to a question: texts are read here, the text of a PDF comes from this box.

import { button, element, find } from "./chat-elements.js";

const LARGEST_TEXT = 400_000; // bytes
const LARGEST_PDF = 20_000_000;

export class Attachments {
  constructor(csrf) {
    this.csrf = csrf;
    this.all = [];
    this.reading = 0;
  }

  async add(files) {
    for (const file of files) {
      const entry = { name: file.name, content: "", note: "is read …", problem: "" };
      this.all.push(entry);
      this.reading += 1;
      this.draw();
      try {
        Object.assign(entry, await (isPdf(file) ? this.pdf(file) : text(file)));
      } catch (error) {
        entry.problem = error.message;
      }
      this.reading -= 1;
      this.draw();
    }
    this.all = this.all.filter((each) => !each.problem); // shown until the next change
  }

  async pdf(file) {
    if (file.size > LARGEST_PDF) throw new Error("larger than 20 MB");
    const headers = { "X-CSRF-Token": this.csrf, "Content-Type": "application/pdf" };
    const answer = await fetch("/admin/api/chat/pdf", { method: "POST", headers, body: file });
    const read = await answer.json();
    if (!answer.ok) throw new Error(read.error.message);
    return { content: read.text, note: `${read.read_pages} of ${read.pages} pages` };
  }

  // Texts to put before the question; the list is empty then.
  take() {
    const texts = this.all.map(({ name, content }) => `File ${name}:\n\`\`\`\n${content}\n\`\`\``);
    this.all = [];
    this.draw();
    return texts;
  }

  draw() {
    find("attached").replaceChildren(...this.all.map((each) => {
      const words = each.problem ? `: ${each.problem}` : each.note ? ` (${each.note})` : "";
      const line = element("li", each.problem ? "failure" : "", each.name + words);
      if (each.content) line.append(" ", button("Remove", () => ((this.all = this.all.filter((other) => other !== each)), this.draw()), `Remove ${each.name}`));
      return line;
    }));
  }
}

const isPdf = (file) => file.type === "application/pdf" || file.name.toLowerCase().endsWith(".pdf");

async function text(file) {
  if (file.size > LARGEST_TEXT) throw new Error("larger than 400 kB");
  const content = await file.text();
  if (!content || content.includes("\u0000") || content.includes("\uFFFD")) throw new Error("not a text");
  return { content, note: "" };
}
