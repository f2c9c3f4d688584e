// Files attached to a question: texts are read here, the text of a PDF comes from this box, images are made small.

import { button, element, find } from "./chat-elements.js";

const LARGEST_TEXT = 400_000; // bytes
const LARGEST_PDF = 20_000_000;
const LARGEST_IMAGE = 20_000_000;
const LONGEST_SIDE = 1024; // pixels that are sent; the conversation keeps them
const MOST_IMAGES = 8; // of a message
const MOST_CHARACTERS = 700_000; // of an image that a conversation keeps (store/conversations.py)

export class Attachments {
  // `blind` says why the model on display cannot take an image; nothing if it can.
  constructor(csrf, blind) {
    this.csrf = csrf;
    this.blind = blind;
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
        Object.assign(entry, await (isImage(file) ? this.image(file) : isPdf(file) ? this.pdf(file) : text(file)));
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

  async image(file) {
    if (this.blind()) throw new Error(this.blind());
    if (this.all.filter((each) => each.image).length >= MOST_IMAGES) throw new Error(`more than ${MOST_IMAGES} images`);
    if (file.size > LARGEST_IMAGE) throw new Error("larger than 20 MB");
    return shrunk(file);
  }

  // Texts to put before the question, and images beside it; the list is empty then.
  take() {
    const texts = this.all.filter((each) => each.content).map(({ name, content }) => `File ${name}:\n\`\`\`\n${content}\n\`\`\``);
    const images = this.all.map((each) => each.image).filter(Boolean);
    this.all = [];
    this.draw();
    return { texts, images };
  }

  draw() {
    find("attached").replaceChildren(...this.all.map((each) => {
      const words = each.problem ? `: ${each.problem}` : each.note ? ` (${each.note})` : "";
      const line = element("li", each.problem ? "failure" : "", each.name + words);
      if (each.content || each.image) line.append(" ", button("Remove", () => ((this.all = this.all.filter((other) => other !== each)), this.draw()), `Remove ${each.name}`));
      return line;
    }));
  }
}

const isImage = (file) => file.type.startsWith("image/") && file.type !== "image/svg+xml";
const isPdf = (file) => file.type === "application/pdf" || file.name.toLowerCase().endsWith(".pdf");

async function shrunk(file) {
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error("not an image that this browser can read");
  });
  const scale = Math.min(1, LONGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = element("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const brush = canvas.getContext("2d");
  brush.fillStyle = "white"; // under what is transparent
  brush.fillRect(0, 0, canvas.width, canvas.height);
  brush.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  let image;
  for (const quality of [0.85, 0.7, 0.5, 0.3, 0.1]) {
    image = canvas.toDataURL("image/jpeg", quality);
    if (image.length <= MOST_CHARACTERS) break;
  }
  return { image, note: `${canvas.width} × ${canvas.height}` };
}

async function text(file) {
  if (file.size > LARGEST_TEXT) throw new Error("larger than 400 kB");
  const content = await file.text();
  if (!content || content.includes("\u0000") || content.includes("\uFFFD")) throw new Error("not a text");
  return { content, note: "" };
}
