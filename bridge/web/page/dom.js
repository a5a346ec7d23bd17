// Helpers for the document.

/** @returns {any} the element of an id: which kind it is, index.html says */
export const $ = (id) => document.getElementById(id);

/** @returns {Promise<void>} after some milliseconds */
export const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// The browser's storage; where it is blocked, as with cookies, one that lasts as long as the page.
/** @returns {Pick<Storage, "getItem" | "setItem" | "removeItem">} */
function storage(kind) {
  try {
    return /** @type {any} */ (window)[kind];
  } catch {
    const kept = new Map();
    return {getItem: (key) => kept.get(key) ?? null, setItem: (key, value) => void kept.set(key, value), removeItem: (key) => void kept.delete(key)};
  }
}

export const local = storage("localStorage");
export const session = storage("sessionStorage");

// Change a text. The same again would be read aloud again, and have the page laid out again.
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// What is to stand in a list that somebody presses.
const waiting = new WeakMap();
const PRESSED = 50; // milliseconds from one look to the next whether a list is pressed still

// Replace what is in an element, and leave the focus on the button of the same data attribute. A list that is pressed is
// replaced once it is let go: a browser makes no click of a press and a release on two buttons, though they look the same.
export function replaceKeepingFocus(list, attribute, made) {
  const before = list.firstChild;
  waiting.set(list, made);
  const replace = () => {
    if (waiting.get(list) !== made || list.firstChild !== before) return; // the list shows something newer by now
    if (list.matches(":active")) {
      setTimeout(replace, PRESSED);
      return;
    }
    const focused = document.activeElement instanceof HTMLElement ? document.activeElement.dataset[attribute] : undefined;
    list.replaceChildren(...made);
    if (focused !== undefined) list.querySelector(`[data-${attribute}="${CSS.escape(focused)}"]`)?.focus();
  };
  replace();
}

// True if somebody types, or works a button, where a key is pressed.
export function works(event, ...kinds) {
  return event.target instanceof HTMLElement && ["INPUT", "SELECT", "TEXTAREA", ...kinds].includes(event.target.tagName);
}
