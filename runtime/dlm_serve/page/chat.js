// The view "Chat": messages, and answers that denoise.

import { Answer } from "./answer.js";
import { SettingsError, note } from "./settings.js";

const $ = (id) => document.getElementById(id);

export class Chat {
  #settings;
  #running;
  #history = []; // the messages of complete answers
  #takesHistory = true;

  /** `running` is the one request that may run. */
  constructor(settings, running) {
    this.#settings = settings;
    this.#running = running;
    $("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    $("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    $("clear").addEventListener("click", () => {
      this.#running.stop();
      this.#history = [];
      $("exchanges").replaceChildren();
      $("empty").hidden = false;
      $("clear").hidden = true;
      $("message").focus();
    });
  }

  /** Say what the chosen model cannot do. */
  use(model) {
    const has = model?.supported_endpoints.includes("chat.completions") ?? false;
    this.#takesHistory = model?.takes_conversations ?? true;
    $("message").disabled = !has;
    let said = "";
    if (model && !has) said = "This model has no chat template. Use /v1/completions.";
    else if (!this.#takesHistory) said = "This model answers single messages. Earlier ones are not sent.";
    note("chat-note", said);
  }

  async #send() {
    const content = $("message").value;
    if (!content.trim() || this.#running.isBusy || $("message").disabled) return;
    let fields;
    try {
      fields = this.#settings.chat();
    } catch (error) {
      if (!(error instanceof SettingsError)) throw error;
      note("chat-note", error.message, true);
      return;
    }
    this.use(this.#settings.model);
    const asked = { role: "user", content };
    const messages = [...(this.#takesHistory ? this.#history : []), asked];
    const answer = new Answer();
    this.#append(content, answer);
    $("message").value = "";
    await this.#running.run(async (signal) => {
      const isComplete = await answer.run("v1/chat/completions", { ...fields, messages }, signal);
      if (isComplete) {
        this.#history.push(asked, { role: "assistant", content: answer.text });
        $("status").textContent = `The answer is: ${answer.text}`;
      } else if (!$("message").value) {
        $("message").value = content;
      }
      return answer;
    });
    answer.element.scrollIntoView({ block: "nearest" });
  }

  #append(content, answer) {
    const exchange = document.createElement("article");
    const asked = document.createElement("p");
    asked.className = "asked";
    asked.textContent = content;
    exchange.append(asked, answer.element);
    $("exchanges").append(exchange);
    $("empty").hidden = true;
    $("clear").hidden = false;
    exchange.scrollIntoView({ block: "end" });
  }
}
