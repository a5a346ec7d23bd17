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

// keyboard: of the world that is played, or null.
export function openHelp(keyboard) {
  const entries = keyboard?.legend() ?? [];
  $("help-hint").textContent = keyboard
    ? "Keys of this world. Below the picture each can be changed: choose it, then press another key."
    : "Press Play: the keys of the world are shown here and below the picture.";
  const rows = entries.map(([keys, meaning]) => row(keys.map(signOf), meaning));
  $("help-keys").replaceChildren(...rows, ...OWN_KEYS.map(([key, meaning]) => row([key], meaning)));
  if (!$("help").open) $("help").showModal();
}

// Fingers always get the buttons. Who uses a switch or a screen reader at a computer with a mouse asks for them.
function showButtons(shown) {
  $("pad").classList.toggle("shown", shown);
  local.setItem("buttons", shown ? "1" : "");
}

// The whole stage, not the picture alone: its buttons and messages must stay in reach.
function toggleFullscreen() {
  const done = document.fullscreenElement ? document.exitFullscreen() : $("stage").requestFullscreen();
  done.catch(() => {}); // the browser said no; the page is as it was
}

// open(): opens the help for what is played now.
export function startHelp(open) {
  $("pad-shown").checked = local.getItem("buttons") === "1";
  showButtons($("pad-shown").checked);
  $("pad-shown").onchange = () => showButtons($("pad-shown").checked);
  $("help-open").onclick = open;
  $("help-close").onclick = () => $("help").close();
  $("fullscreen").hidden = !document.fullscreenEnabled; // no iPhone has it for a page
  $("fullscreen").onclick = toggleFullscreen;
}
