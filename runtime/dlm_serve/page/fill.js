// The view "Fill": a part of a text is marked, becomes masks, and is written again.

import { countTokens } from "./api.js";
import { Answer } from "./answer.js";
import { MARK } from "./canvas.js";
import { SettingsError, note, whole } from "./settings.js";

const $ = (id) => document.getElementById(id);

export class Fill {
  #settings;
  #running;
  #before = ""; // the text before the last fill

  /** `running` is the one request that may run. */
  constructor(settings, running) {
    this.#settings = settings;
    this.#running = running;
    $("fill-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#fill();
    });
    $("text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.#fill();
      }
    });
    $("undo").addEventListener("click", () => {
      $("text").value = this.#before;
      $("undo").hidden = true;
      $("text").focus();
    });
  }

  /** Say what the chosen model cannot do. */
  use(model) {
    const can = model?.supported_endpoints.includes("fim.completions") ?? false;
    $("text").disabled = !can;
    note("fill-note", !model || can
      ? "" : "This model cannot fill a gap, because its denoiser does not see the text after it. Choose another model.");
  }

  async #fill() {
    const { value, selectionStart: start, selectionEnd: end } = $("text");
    if (this.#running.isBusy || $("text").disabled) return;
    const [before, marked, after] = [value.slice(0, start), value.slice(start, end), value.slice(end)];
    let fields, masks;
    try {
      fields = this.#settings.common();
      masks = whole($("masks"), "Masks");
      if (!marked && !masks) {
        throw new SettingsError("Select a part of the text, or enter a number of masks for a gap at the cursor.");
      }
    } catch (error) {
      if (!(error instanceof SettingsError)) throw error;
      note("fill-note", error.message, true);
      return;
    }
    this.use(this.#settings.model);
    fields.dlm = { ...fields.dlm, special_tokens: $("special").checked };
    const answer = new Answer(before, after);
    $("filled").replaceChildren(answer.element);
    $("text").readOnly = true;
    await this.#running.run(async (signal) => {
      try {
        masks ||= Math.max(1, await countTokens(fields.model, marked, fields.dlm.special_tokens, signal));
      } catch (error) {
        if (error.name !== "AbortError") answer.fail(error);
        return answer;
      }
      answer.start(MARK.repeat(masks));
      const body = { ...fields, prompt: before, suffix: after, dlm: { ...fields.dlm, new_tokens: masks } };
      if (await answer.run("v1/fim/completions", body, signal)) this.#write(value, start, end, answer.text);
      return answer;
    });
    $("text").readOnly = false;
  }

  /** Put the new text into the box and select it, so that it can be filled again. */
  #write(value, start, end, text) {
    this.#before = value;
    $("text").value = value.slice(0, start) + text + value.slice(end);
    $("text").setSelectionRange(start, start + text.length);
    $("text").focus();
    $("undo").hidden = false;
    $("status").textContent = `The gap was filled with: ${text}`;
  }
}
