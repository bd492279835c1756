// The settings: which model, how it decodes, and the key.

import { listModels, storeKey, storedKey } from "./api.js";

const $ = (id) => document.getElementById(id);

/** A setting has a value that no request can be sent with. */
export class SettingsError extends Error {}

/** The models that the server has, and the settings for the next request. */
export class Settings {
  #models = [];
  #onModel;

  /** `onModel` is called with the chosen model, or undefined, whenever that changes. */
  constructor(onModel) {
    this.#onModel = onModel;
    $("model").addEventListener("change", () => this.#choose());
    $("effort").addEventListener("change", () => this.#sum());
    $("schema").addEventListener("input", () => this.#mark("schema", ""));
    $("key").value = storedKey();
    $("key").addEventListener("change", () => {
      storeKey($("key").value.trim());
      this.load();
    });
    $("settings-form").addEventListener("submit", (event) => event.preventDefault());
    const wide = matchMedia("(min-width: 64rem)");
    const follow = () => { $("settings").open = wide.matches; };
    wide.addEventListener("change", follow);
    follow();
  }

  get model() {
    return this.#models.find((model) => model.id === $("model").value);
  }

  /** Ask the server for its models. If it needs a key, show the field for it. */
  async load() {
    this.#models = [];
    $("models-error").hidden = true;
    $("docs").hidden = storedKey() !== ""; // a link cannot send the key
    try {
      this.#models = await listModels();
    } catch (error) {
      if (error.status === 401) this.askForKey();
      $("models-error").hidden = false;
      const isFirst = error.status === 401 && !storedKey();
      $("models-error").textContent = isFirst ? "This server needs an API key." : error.message;
    }
    $("model").replaceChildren(...this.#models.map(({ id }) => new Option(id, id)));
    this.#choose();
  }

  askForKey() {
    $("docs").hidden = true;
    $("key-field").hidden = false;
    $("settings").open = true;
    $("key").focus();
  }

  /** Fields that all requests share. */
  common() {
    const fields = { model: this.model.id };
    if ($("effort").value) fields.reasoning_effort = $("effort").value;
    const passes = whole($("passes"), "Passes per block");
    if (passes) fields.dlm = { policy: { commit: "static", steps_per_block: passes } };
    return fields;
  }

  /** Fields of a chat. Throws SettingsError if the schema is not a JSON object. */
  chat() {
    const fields = this.common();
    const length = whole($("length"), "Longest answer");
    if (length) fields.max_completion_tokens = length;
    const text = $("schema").value.trim();
    if (text) {
      fields.response_format = {
        type: "json_schema",
        json_schema: { name: "answer", strict: true, schema: this.#schema(text) },
      };
    }
    return fields;
  }

  #schema(text) {
    let said;
    try {
      const schema = JSON.parse(text);
      if (schema !== null && typeof schema === "object" && !Array.isArray(schema)) return schema;
      said = "The schema must be a JSON object.";
    } catch (error) {
      said = `The schema is not valid JSON: ${error.message}`;
    }
    this.#mark("schema", said);
    $("settings").open = true;
    $("schema").focus();
    throw new SettingsError(said);
  }

  #mark(id, said) {
    $(id).setAttribute("aria-invalid", String(Boolean(said)));
    $(`${id}-error`).textContent = said;
    $(`${id}-error`).hidden = !said;
  }

  #choose() {
    const efforts = this.model?.effort_levels ?? [];
    const options = [["", "the model’s default"], ...efforts.map((level) => [level, level])];
    $("effort").replaceChildren(...options.map(([value, text]) => new Option(text, value)));
    $("effort").disabled = !efforts.length;
    $("effort-hint").textContent = efforts.length || !this.model
      ? "" : "This model has no effort levels. The command dlm-export effort adds them.";
    this.#sum();
    this.#onModel(this.model);
  }

  #sum() {
    $("summary").textContent = [$("model").value, $("effort").value].filter(Boolean).join(" · ");
  }
}

/** Show a note under a form. `isWrong` marks it as an error. */
export function note(id, text, isWrong = false) {
  $(id).textContent = text;
  $(id).classList.toggle("error", isWrong);
}

/** The positive whole number of a field; 0: the field is empty. */
export function whole(field, name) {
  if (field.checkValidity()) return Number(field.value);
  field.focus();
  throw new SettingsError(`${name} must be a whole number from ${field.min} to ${field.max}.`);
}
