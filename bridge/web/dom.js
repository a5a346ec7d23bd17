// Small tools for the document.

/** @returns {any} the element of an id: which kind it is, index.html says */
export const $ = (id) => document.getElementById(id);

/** @returns {Promise<void>} after some milliseconds */
export const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

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
