// The texts of the page: its status, problems and announcements.

import {$, local, session} from "./dom.js";
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

// aloud: whether a screen reader says it too.
export function announce(text, aloud = true) {
  $("announcement").setAttribute("aria-live", aloud ? "polite" : "off");
  $("announcement").textContent = text;
}

export async function askForToken(problem) {
  $("token-problem").textContent = problem.split(";")[0]; // the rest is for programs
  const dialog = $("ask-token");
  if (!dialog.open) dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, {once: true}));
  state.token = $("token").value.trim();
  session.setItem("token", state.token);
}

export function badge(text, live) {
  state.badge = {text, live};
  draw();
}

export function myName() {
  let name = local.getItem("name");
  if (!name) local.setItem("name", (name = `person ${Math.floor(Math.random() * 9000 + 1000)}`));
  return name;
}
