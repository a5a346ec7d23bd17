// Keys and buttons: which are held, and which keys the person has chosen.

import {$, local, works} from "./dom.js";
import {draw} from "./draw.js";
import {openHelp, startHelp} from "./help.js";
import {nameOf} from "./keys.js";
import {stop} from "./playing.js";
import {state} from "./state.js";
import {startSticks} from "./sticks.js";
import {announce} from "./words.js";

const MOST_PRESSES = 4;

let choosing = null; // the legend's entry that gets the next pressed key

// Chosen keys are stored in this browser, for all worlds with the same controls.
export function recall(keyboard) {
  choosing = null; // the entry belonged to another world
  const stored = local.getItem(keyboard.storedAs);
  if (stored) keyboard.restore(JSON.parse(stored));
  if (!keyboard.names.length) announce(keyboard.controls.why ?? "");
}

export function chooseKey(position, meaning) {
  choosing = position;
  announce(`Press a key for: ${meaning}. Escape leaves it as it is.`);
}

function choose(event) {
  const {keyboard} = state.playing;
  const name = nameOf(event);
  if (["control", "alt", "meta"].includes(name)) return; // keys pressed with them are the browser's
  event.preventDefault();
  if (name !== "escape" && name !== "tab") keyboard.assign(choosing, name);
  local.setItem(keyboard.storedAs, JSON.stringify(keyboard.chosen));
  choosing = null;
  announce("");
  $("stage").focus({preventScroll: true}); // the next Space or Enter is for the world
  draw();
}

const fingers = new Map(); // the button below each finger

// A finger that slides to another button presses that one.
function finger(event) {
  const down = event.type === "pointerdown";
  const before = fingers.get(event.pointerId);
  if (!down && before === undefined) return;
  event.preventDefault();
  if (down) $("pad").setPointerCapture(event.pointerId);
  const lifted = event.type === "pointerup" || event.type === "pointercancel";
  const below = lifted ? null : down ? event.target : document.elementFromPoint(event.clientX, event.clientY);
  const name = below?.closest?.("#pad button")?.dataset.key ?? "";
  if (name === before) return;
  lifted ? fingers.delete(event.pointerId) : fingers.set(event.pointerId, name);
  if (before && ![...fingers.values()].includes(before)) hold(before, false);
  if (name) hold(name, true);
}

// strength: how far a stick or the mouse presses the key, 0 to 1.
export function hold(name, down, strength = 1) {
  if (!state.playing) return;
  const {held, pressed, strength: strengths} = state.playing.keyboard;
  down && strength < 1 ? strengths.set(name, strength) : strengths.delete(name);
  if (held.has(name) === down) return;
  down ? held.add(name) : held.delete(name);
  if (down && strength === 1) pressed.add(name); // a stick at rest may deviate for a moment
  if (down && state.playing.presses && state.playing.presses.length < MOST_PRESSES) state.playing.presses.push(state.playing.keyboard.action(new Set([name])));
  state.playing.changed ??= performance.now();
  state.playing.wake();
  for (const sign of document.querySelectorAll(`[data-key="${CSS.escape(name)}"]`)) {
    sign.classList.toggle("held", down);
    if (sign.matches("#pad button")) sign.setAttribute("aria-pressed", String(down));
  }
}

const down = new Map(); // the key for each pressed place on the keyboard: with Shift pressed meanwhile, its release has another name

// The world's key that was pressed. If the layout has no Latin letters, or digits only with Shift: the key in that place.
function named(event) {
  const {keyboard} = state.playing;
  const name = keyboard.meant(nameOf(event));
  const place = /^(?:Key|Digit)(.)$/.exec(event.code)?.[1].toLowerCase();
  return place && !keyboard.uses(name) && !/^[a-z]$/i.test(event.key) && keyboard.uses(place) ? place : name;
}

function isTyping(event) {
  return works(event) || document.querySelector("dialog[open]") !== null;
}

function release() {
  if (state.playing) [...state.playing.keyboard.held].forEach((name) => hold(name, false));
}

function help() {
  release(); // the dialog receives the key's release, not the page
  openHelp(state.playing?.keyboard ?? null);
}

export function startInput() {
  for (const kind of ["pointerdown", "pointermove", "pointerup", "pointercancel"]) $("pad").addEventListener(kind, finger);
  // A screen reader, a switch or the Enter key clicks without a pointer, and cannot hold: a second click releases.
  // In a turn-based world each press is one step, so a click needs no release.
  $("pad").addEventListener("click", (event) => {
    const name = event.target.closest("button")?.dataset.key;
    if (event.detail !== 0 || !state.playing || name === undefined) return; // finger() has handled a finger's click
    hold(name, !state.playing.keyboard.held.has(name));
    if (state.playing.presses) hold(name, false);
  });
  document.addEventListener("keydown", (event) => {
    if (choosing !== null && state.playing && !isTyping(event)) return choose(event);
    if (event.key === "?" && !isTyping(event) && !state.playing?.keyboard.uses("?")) return help();
    if (!state.playing || isTyping(event) || event.ctrlKey || event.metaKey || event.altKey) return;
    const name = named(event);
    if (name === "escape") stop();
    else if (state.playing.keyboard.uses(name)) {
      event.preventDefault();
      if (event.code) down.set(event.code, name); // on-screen keyboards may send no code
      hold(name, true);
    }
  });
  document.addEventListener("keyup", (event) => {
    if (state.playing) hold(down.get(event.code) ?? named(event), false);
    down.delete(event.code);
  });
  window.addEventListener("blur", release);
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.addEventListener("close", () => state.playing && $("stage").focus({preventScroll: true})); // not the button that opened it: Enter is for the world
  }
  startHelp(help);
  startSticks();
}
