// Help on the keys, the choice of buttons for actions, and fullscreen.

import {$, local} from "./dom.js";
import {signOf} from "./keys.js";

const OWN_KEYS = [["?", "this help"], ["Esc", "stop playing, or leave fullscreen"]];

function row(keys, meaning) {
  const made = document.createElement("div");
  const named = document.createElement("dt");
  named.append(...keys.flatMap((key) => [Object.assign(document.createElement("kbd"), {textContent: key}), " "]));
  made.append(named, Object.assign(document.createElement("dd"), {textContent: meaning}));
  return made;
}

// keyboard: that of the played world, or null.
export function openHelp(keyboard) {
  const entries = keyboard?.legend() ?? [];
  $("help-hint").textContent = keyboard
    ? "Keys of this world. Below the picture each can be changed: choose it, then press another key."
    : "Press Play: the keys of the world are shown here and below the picture.";
  const rows = entries.map(([keys, meaning]) => row(keys.map(signOf), meaning));
  $("help-keys").replaceChildren(...rows, ...OWN_KEYS.map(([key, meaning]) => row([key], meaning)));
  if (!$("help").open) $("help").showModal();
}

// Touch screens always have the buttons. People with a mouse and a switch or screen reader can turn them on.
function showButtons(shown) {
  $("pad").classList.toggle("shown", shown);
  local.setItem("buttons", shown ? "1" : "");
}

// The whole stage, not only the picture: its buttons and messages must stay within reach.
function toggleFullscreen() {
  const done = document.fullscreenElement ? document.exitFullscreen() : $("stage").requestFullscreen();
  done.catch(() => {}); // the browser refused; the page is unchanged
}

// open(): opens the help for the played world.
export function startHelp(open) {
  $("pad-shown").checked = local.getItem("buttons") === "1";
  showButtons($("pad-shown").checked);
  $("pad-shown").onchange = () => showButtons($("pad-shown").checked);
  $("help-open").onclick = open;
  $("help-close").onclick = () => $("help").close();
  $("fullscreen").hidden = !document.fullscreenEnabled; // iPhones have no fullscreen mode for pages
  $("fullscreen").onclick = toggleFullscreen;
}
