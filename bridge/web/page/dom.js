// Small tools for the document.

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

// Replace what is in an element, and leave the focus on the button of the same data attribute.
export function replaceKeepingFocus(list, attribute, made) {
  const focused = document.activeElement instanceof HTMLElement ? document.activeElement.dataset[attribute] : undefined;
  list.replaceChildren(...made);
  if (focused !== undefined) list.querySelector(`[data-${attribute}="${CSS.escape(focused)}"]`)?.focus();
}

// True if somebody types, or works a button, where a key is pressed.
export function works(event, ...kinds) {
  return event.target instanceof HTMLElement && ["INPUT", "SELECT", "TEXTAREA", ...kinds].includes(event.target.tagName);
}
