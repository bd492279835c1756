// Draws one canvas: decided text, and a cell for each undecided position.

/** Stands for an undecided position in the snapshots of the API. */
export const MARK = "░";
const FRESH_MS = 700; // as long as the animation `settle` of page.css

/**
 * Split a snapshot into pieces `{text, kind}`. The kind is "masks", "old" for text that the
 * snapshot before has too, or "new".
 *
 * A snapshot does not say which token came from which position. The decided runs of the one before
 * are therefore searched from left to right. If the same text stands in several places, this may
 * mark the wrong one as new; the text itself is never affected.
 */
export function piecesOf(content, before) {
  const pieces = [];
  let at = 0;
  const add = (text, kind) => {
    if (text) pieces.push({ text, kind });
  };
  const addChanged = (text) => {
    for (const run of text.match(/░+|[^░]+/gu) ?? []) add(run, run[0] === MARK ? "masks" : "new");
  };
  for (const run of (before ?? "").match(/[^░]+/gu) ?? []) {
    const found = content.indexOf(run, at);
    if (found < 0) continue;
    addChanged(content.slice(at, found));
    add(run, "old");
    at = found + run.length;
  }
  addChanged(content.slice(at));
  return pieces;
}

/** A canvas in an element, with the text before and after it if it is a gap. */
export class Canvas {
  #element;
  #around;
  #born = new Map(); // the time at which each new text appeared

  constructor(element, before = "", after = "") {
    this.#element = element;
    this.#around = [before, after];
  }

  /** Draw a snapshot. New text fades in if `isLive`, and stays marked otherwise. */
  draw(content, before, isLive) {
    const now = performance.now();
    const nodes = piecesOf(content, before).flatMap(({ text, kind }) => {
      if (kind === "masks") return Array.from(text, () => made("span", "mask"));
      if (kind === "old" && !isLive) return [document.createTextNode(text)];
      const born = kind === "new" ? now : this.#born.get(text);
      if (isLive && (born === undefined || now - born > FRESH_MS)) {
        return [document.createTextNode(text)];
      }
      this.#born.set(text, born);
      const node = made("span", isLive ? "fresh" : "new", text);
      // The element is new, so its animation goes on from where the last one was.
      if (isLive) node.style.animationDelay = `${born - now}ms`;
      return [node];
    });
    this.#show(nodes);
  }

  /** Draw the final text. */
  settle(text) {
    const isFill = this.#around.some(Boolean);
    this.#show(text ? [isFill ? made("span", "new", text) : document.createTextNode(text)] : []);
  }

  #show(nodes) {
    const [before, after] = this.#around.map((text) => (text ? [made("span", "given", text)] : []));
    this.#element.replaceChildren(...before, ...nodes, ...after);
  }
}

function made(tag, name, text = "") {
  const node = document.createElement(tag);
  node.className = name;
  node.textContent = text;
  return node;
}
