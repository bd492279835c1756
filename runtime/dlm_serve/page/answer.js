// One answer while it denoises, and afterwards: its canvas, its figures and its passes.

import { ApiError, stream } from "./api.js";
import { Canvas } from "./canvas.js";

const REPLAY_MS = 350; // between two passes of a replay
const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export class Answer {
  /** The element to put into the page. */
  element;
  /** The text as far as it is known. */
  text = "";

  #canvas;
  #snapshots = [];
  #timer = 0;
  #frame = 0;
  #parts;

  /** `before` and `after` are the texts around a gap; empty for the answer of a chat. */
  constructor(before = "", after = "") {
    const template = document.getElementById("answer-template");
    this.element = template.content.firstElementChild.cloneNode(true);
    const find = (selector) => this.element.querySelector(selector);
    this.#parts = {
      progress: find("progress"), error: find(".error"), figures: find(".figures"),
      timeline: find(".timeline"), replay: find("button"), range: find("input"),
      output: find("output"),
    };
    this.#canvas = new Canvas(find(".canvas"), before, after);
    this.#parts.range.addEventListener("input", () => {
      this.#pause();
      this.#showPass(Number(this.#parts.range.value));
    });
    this.#parts.replay.addEventListener("click", () => this.#timer ? this.#pause() : this.#play());
  }

  /** Show masks before the first pass. */
  start(content) {
    this.#canvas.draw(content, content, true);
  }

  /**
   * Send a request and follow its stream. Returns true if the answer is complete. If it is not,
   * the text is the last snapshot, and an error is shown unless the reader stopped the request.
   */
  async run(path, body, signal) {
    this.element.setAttribute("aria-busy", "true");
    const began = performance.now();
    let first = null;
    let usage = null;
    let isComplete = false;
    const live = setInterval(() => this.#figure({ passes: this.#snapshots.length, total: performance.now() - began }), 100);
    try {
      for await (const chunk of stream(path, body, signal)) {
        usage = chunk.usage ?? usage;
        const content = chunk.choices[0]?.delta?.content ?? chunk.choices[0]?.text;
        if (chunk.diffusion_meta === undefined) continue;
        first ??= performance.now() - began;
        this.#snapshots.push(content);
        this.#parts.progress.value = chunk.diffusion_meta.diffusion_progress;
        this.text = content;
        this.#draw();
      }
      isComplete = true;
    } catch (error) {
      if (error.name !== "AbortError") this.fail(error);
    } finally {
      clearInterval(live);
      cancelAnimationFrame(this.#frame);
      this.element.removeAttribute("aria-busy");
    }
    const total = performance.now() - began;
    this.#parts.progress.hidden = true;
    if (isComplete) {
      this.#canvas.settle(this.text);
      this.#figure({ passes: usage.denoising_passes, tokens: usage.completion_tokens, first, total });
      if (this.#snapshots.length > 1) this.#offerPasses();
    } else {
      this.#figure({ passes: this.#snapshots.length, total });
    }
    return isComplete;
  }

  /** Show an error as text. */
  fail(error) {
    const { error: place, progress } = this.#parts;
    progress.hidden = true;
    place.hidden = false;
    const isNamed = !error.param || error.message.startsWith(error.param);
    place.textContent = isNamed ? error.message : `${error.param}: ${error.message}`;
    if (!(error instanceof ApiError)) throw error;
  }

  /** Draw the newest snapshot in the browser's next frame. */
  #draw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = requestAnimationFrame(() =>
      this.#canvas.draw(this.#snapshots.at(-1), this.#snapshots.at(-2), true));
  }

  #figure({ passes, tokens, first, total }) {
    const rows = [[passes, passes === 1 ? "pass" : "passes"]];
    if (tokens !== undefined) {
      rows.push([tokens, tokens === 1 ? "token" : "tokens"]);
      rows.push([number.format((1e3 * tokens) / total), "tokens/s"]);
    }
    if (first) rows.push([`${Math.round(first)} ms`, "to the first pass"]);
    rows.push([`${Math.round(total)} ms`, "in total"]);
    this.#parts.figures.replaceChildren(...rows.map(([value, name]) => {
      const row = document.createElement("div");
      const [term, definition] = ["dt", "dd"].map((tag) => document.createElement(tag));
      [term.textContent, definition.textContent] = [name, value];
      row.append(term, definition);
      return row;
    }));
  }

  // ---- The passes of a finished answer ----

  #offerPasses() {
    const { timeline, range } = this.#parts;
    timeline.hidden = false;
    range.max = this.#snapshots.length;
    range.value = range.max;
    this.#name(this.#snapshots.length);
  }

  #showPass(pass) {
    const [before, content] = [this.#snapshots[pass - 2], this.#snapshots[pass - 1]];
    if (pass === this.#snapshots.length) this.#canvas.settle(this.text);
    else this.#canvas.draw(content, before, false);
    this.#parts.range.value = pass;
    this.#name(pass);
  }

  #name(pass) {
    const said = `Pass ${pass} of ${this.#snapshots.length}`;
    this.#parts.output.textContent = said;
    this.#parts.range.setAttribute("aria-valuetext", said);
  }

  #play() {
    this.#parts.replay.textContent = "Pause";
    const last = this.#snapshots.length;
    let pass = Number(this.#parts.range.value) % last;
    const next = () => {
      pass += 1;
      this.#showPass(pass);
      if (pass === last) this.#pause();
    };
    next();
    if (pass < last) this.#timer = setInterval(next, REPLAY_MS);
  }

  #pause() {
    clearInterval(this.#timer);
    this.#timer = 0;
    this.#parts.replay.textContent = "Replay";
  }
}
