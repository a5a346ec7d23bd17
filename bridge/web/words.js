// The texts of the page: its status, problems and announcements.

import {$} from "./dom.js";
import {draw} from "./draw.js";
import {state} from "./state.js";

export function say(kind, text) {
  state.status = {kind, text};
  draw();
}

// Show a problem for eight seconds. One that lasts is shown until the next call.
let told = 0;

export function tell(text, lasts = false) {
  clearTimeout(told);
  state.message = text;
  draw();
  if (text && !lasts) told = setTimeout(() => tell(null), 8000);
}

export function announce(text) {
  $("announcement").textContent = text;
}

export async function askForToken(problem) {
  $("token-problem").textContent = problem;
  const dialog = $("ask-token");
  if (!dialog.open) dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, {once: true}));
  state.token = $("token").value.trim();
  sessionStorage.setItem("token", state.token);
}

export function badge(text, live) {
  state.badge = {text, live};
  draw();
}

export function myName() {
  let name = localStorage.getItem("name");
  if (!name) localStorage.setItem("name", (name = `person ${Math.floor(Math.random() * 9000 + 1000)}`));
  return name;
}
