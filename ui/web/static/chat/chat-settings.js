// Settings of a conversation: model, system prompt, sampling, schema of the answer; and presets of them.

import { element, find } from "./chat-elements.js";

const PATH = "/admin/api/chat/presets";

export class Settings {
  // `call`: sends to the admin API. `report`: shows an error.
  constructor(page, call, report) {
    Object.assign(this, { page, call, report, presets: {} });
    find("preset").addEventListener("change", () => this.choose(find("preset").value));
    find("save-preset").addEventListener("click", () => this.guard(() => this.save()));
    find("delete-preset").addEventListener("click", () => this.guard(() => this.remove()));
    find("schema").addEventListener("input", () => this.check());
    this.guard(() => this.load());
  }

  async guard(work) {
    try {
      await work();
    } catch (error) {
      this.report(error.message);
    }
  }

  read() {
    const parameters = {};
    for (const field of this.page.querySelectorAll("[data-number]")) {
      const number = Number(field.value);
      if (field.value.trim() && Number.isFinite(number)) parameters[field.name] = number;
    }
    return { model: find("model").value, system: find("system").value.trim(), parameters, schema: find("schema").value.trim() };
  }

  // Fields of the request. Throws where the schema is no JSON.
  body({ parameters, schema }) {
    if (!schema) return parameters;
    const problem = problemOf(schema);
    if (problem) throw new Error(problem);
    return { ...parameters, response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema), strict: true } } };
  }

  show({ model, system, parameters, schema }) {
    if (model && [...find("model").options].some((option) => option.value === model)) find("model").value = model;
    find("system").value = system;
    find("schema").value = schema ?? "";
    for (const field of this.page.querySelectorAll("[data-number]")) field.value = parameters[field.name] ?? "";
    this.check();
  }

  check() {
    const problem = problemOf(find("schema").value.trim());
    find("schema").setAttribute("aria-invalid", String(Boolean(problem)));
    find("schema-problem").textContent = problem;
  }

  async load(chosen = "") {
    this.presets = (await this.call("GET", PATH)).presets;
    const names = Object.keys(this.presets);
    find("preset").replaceChildren(...["", ...names].map((name) => Object.assign(element("option", "", name || "none"), { value: name })));
    find("preset").value = chosen;
    find("delete-preset").disabled = !chosen;
  }

  choose(name) {
    find("delete-preset").disabled = !name;
    if (name) this.show({ ...this.presets[name], model: "" });
  }

  async save() {
    const name = prompt("Name of the preset. An existing preset of this name is replaced.", find("preset").value)?.trim();
    if (!name) return;
    const { system, parameters, schema } = this.read();
    await this.call("PUT", `${PATH}/${encodeURIComponent(name)}`, { system, parameters, schema });
    await this.load(name);
  }

  async remove() {
    const name = find("preset").value;
    if (!name || !confirm(`Delete the preset "${name}"?`)) return;
    await this.call("DELETE", `${PATH}/${encodeURIComponent(name)}`);
    await this.load();
  }
}

function problemOf(text) {
  if (!text) return "";
  try {
    const read = JSON.parse(text);
    return read && typeof read === "object" && !Array.isArray(read) ? "" : "A JSON schema is an object: { … }.";
  } catch (error) {
    return `The JSON schema is not valid JSON: ${error.message}`;
  }
}
