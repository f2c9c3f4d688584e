// The test message of the first run: one streamed answer, in place.

import { answerOf } from "./playground/playground-answer.js";

const form = document.getElementById("ask");
const answer = document.getElementById("answer");
const measure = document.getElementById("measure");

form?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const { model, message } = Object.fromEntries(new FormData(form));
  const button = form.querySelector("button");
  button.disabled = true;
  answer.textContent = measure.textContent = "";
  answer.classList.remove("failure");
  const request = new Request("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-CSRF-Token": form.dataset.csrf },
    body: JSON.stringify({
      model,
      messages: [{ role: "user", content: message }],
      max_tokens: 1000, // thoughts come first
      stream: true,
      stream_options: { include_usage: true },
    }),
  });
  try {
    let thinking = false;
    const say = (text) => {
      if (thinking) answer.textContent = "";
      thinking = false;
      answer.append(text);
    };
    const think = () => {
      if (!answer.textContent) [answer.textContent, thinking] = ["Thinking …", true];
    };
    await answerOf(request, say, (line) => measure.replaceChildren(line), think);
  } catch (error) {
    answer.textContent = error.message;
    answer.classList.add("failure");
  }
  button.disabled = false;
});
