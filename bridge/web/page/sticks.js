// Gamepads, and the mouse for array actions: they press the world's keys; a stick may press them partially.

import {$} from "./dom.js";
import {hold} from "./input.js";
import {state} from "./state.js";

const DEAD = 0.15; // the largest deviation of a stick at rest
const HALF = 0.5; // the position from which a stick presses a key of a Discrete action
const CROSS = {left: 14, right: 15, up: 12, down: 13}; // buttons of the layout "standard"
const TRIGGERS = {up: 7, down: 6}; // gas and brake, if up and down are separate numbers
const PRESSED = new Set(); // keys that a gamepad holds
const DRAGGED = new Set(); // keys that the mouse holds

// How far a gamepad presses a direction: with its left stick, its cross, or a trigger.
function directionStrength(pad, place) {
  const [x = 0, y = 0] = pad.axes;
  const stick = {left: -x, right: x, up: -y, down: y}[place];
  const trigger = state.playing.keyboard.controls.kind === "box" ? pad.buttons[TRIGGERS[place]]?.value ?? 0 : 0;
  return Math.max(pad.buttons[CROSS[place]]?.pressed ? 1 : 0, trigger, stick);
}

// The right stick: the second pair of axes uses letters.
function letterStrength(pad, name) {
  const [, , x = 0, y = 0] = pad.axes;
  return {a: -x, d: x, w: -y, s: y}[name] ?? 0;
}

// The strength of each key, 0 to 1, from a gamepad.
function strengths(pad, keyboard) {
  const {directions, others} = keyboard.spatial();
  const isBox = keyboard.controls.kind === "box";
  const found = directions.map(([place, name]) => [name, directionStrength(pad, place)]);
  found.push(...others.map((name, index) => [name, isBox ? letterStrength(pad, name) : pad.buttons[index]?.pressed ? 1 : 0]));
  return new Map(found);
}

function press(held, name, strength, least) {
  const down = strength > least;
  if (down || held.has(name)) hold(name, down, Math.min(1, strength));
  down ? held.add(name) : held.delete(name);
}

function poll() {
  const pads = navigator.getGamepads().filter(Boolean);
  if (pads.length) requestAnimationFrame(poll);
  if (!state.playing?.keyboard) return PRESSED.clear();
  const {keyboard} = state.playing;
  const least = keyboard.controls.kind === "box" ? DEAD : HALF;
  const found = pads.map((pad) => strengths(pad, keyboard));
  // Any of several gamepads can press; without any, for example after unplugging, nothing is pressed.
  for (const name of keyboard.names) press(PRESSED, name, Math.max(0, ...found.map((each) => each.get(name) ?? 0)), least);
}

// While a mouse button is down, the distance from the middle of the picture is the position of the stick.
function drag(event) {
  const keyboard = state.playing?.keyboard;
  if (keyboard?.controls.kind !== "box" || (event.type !== "pointerdown" && !$("canvas").hasPointerCapture(event.pointerId))) return;
  event.preventDefault();
  if (event.type === "pointerdown") $("canvas").setPointerCapture(event.pointerId);
  const lifted = event.type === "pointerup" || event.type === "pointercancel";
  const {left, top, width, height} = $("canvas").getBoundingClientRect();
  const x = lifted ? 0 : (event.clientX - left) / width * 2 - 1;
  const y = lifted ? 0 : (event.clientY - top) / height * 2 - 1;
  const along = {left: -x, right: x, up: -y, down: y};
  for (const [place, name] of keyboard.spatial().directions) press(DRAGGED, name, along[place], lifted ? Infinity : DEAD);
}

export function startSticks() {
  window.addEventListener("gamepadconnected", () => requestAnimationFrame(poll));
  for (const kind of ["pointerdown", "pointermove", "pointerup", "pointercancel"]) $("canvas").addEventListener(kind, drag);
}
