// The page of the server: which view is shown, and the one request that may run.

import { Chat } from "./chat.js";
import { Fill } from "./fill.js";
import { MARK } from "./canvas.js";
import { Settings } from "./settings.js";

const VIEWS = ["chat", "fill"];
const SPECIMEN = "Text ░░░░ comes into ░░░░░, a ░░░ tokens ░░ a ░░░░.";

/** One request at a time, which the reader may stop. */
class Running {
  #controller = null;

  get isBusy() {
    return this.#controller !== null;
  }

  stop() {
    this.#controller?.abort();
  }

  /** Run `work(signal)`. The buttons "Stop" replace the ones that start a request. */
  async run(work) {
    this.#controller = new AbortController();
    this.#show();
    try {
      await work(this.#controller.signal);
    } finally {
      this.#controller = null;
      this.#show();
    }
  }

  #show() {
    for (const form of document.querySelectorAll("main form")) {
      const [start, stop] = ["[type=submit]", ".stop"].map((name) => form.querySelector(name));
      const hadFocus = [start, stop].includes(document.activeElement);
      start.hidden = this.isBusy;
      stop.hidden = !this.isBusy;
      if (hadFocus) (this.isBusy ? stop : start).focus();
    }
  }
}

const running = new Running();
let chat, fill;
const settings = new Settings((model) => {
  chat?.use(model);
  fill?.use(model);
});
chat = new Chat(settings, running);
fill = new Fill(settings, running);

for (const button of document.querySelectorAll(".stop")) {
  button.addEventListener("click", () => running.stop());
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running.stop();
});

function showView() {
  const view = VIEWS.find((name) => location.hash === `#${name}`) ?? VIEWS[0];
  for (const part of document.querySelectorAll("[data-view]")) part.hidden = part.dataset.view !== view;
  for (const link of document.querySelectorAll("nav a[href^='#']")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

document.querySelector(".specimen").replaceChildren(
  ...SPECIMEN.match(/░|[^░]+/gu).map((text) => {
    const node = document.createElement("span");
    if (text === MARK) node.className = "mask";
    else node.textContent = text;
    return node;
  }),
);
addEventListener("hashchange", showView);
showView();
// On a phone, focus would open the keyboard.
if (matchMedia("(min-width: 64rem)").matches) document.getElementById("message").focus();
settings.load();
