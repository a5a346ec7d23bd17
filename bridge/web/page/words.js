// The texts of the page: its status, problems and announcements.

import {$, local, session} from "./dom.js";
import {draw} from "./draw.js";
import {state} from "./state.js";

export function say(kind, text) {
  state.status = {kind, text};
  draw();
}

// Show a problem for eight seconds. A lasting one is shown until the next call.
let told = 0;

export function tell(text, lasts = false) {
  clearTimeout(told);
  withdraw();
  state.message = text;
  draw();
  if (text && !lasts) told = setTimeout(() => tell(null), 8000);
}

// Offer a seat that is kept for its former player for some seconds: `take` is called when it is free.
let offered = 0;

export function offer(seat, seconds, take) {
  tell(null);
  const until = performance.now() + 1000 * seconds;
  /** @type {{text: string, button: string, waits: boolean}} */
  const made = {text: "", button: "", waits: false};
  state.offer = made;
  const show = () => {
    const left = Math.ceil((until - performance.now()) / 1000);
    made.text = left > 0 ? `${seat} was left, and is kept for ${left} s for who had it.` : `${seat} is free now.`;
    made.button = made.waits ? "Waiting…" : left > 0 ? "Take it then" : "Take it";
    draw();
    if (left > 0) return;
    clearInterval(offered);
    if (made.waits) take();
  };
  $("offer").onclick = () => {
    made.waits = true;
    if (performance.now() < until) show();
    else take();
  };
  offered = setInterval(show, 500);
  show();
}

function withdraw() {
  clearInterval(offered);
  state.offer = null;
}

// aloud: true if screen readers should announce it.
export function announce(text, aloud = true) {
  $("announcement").setAttribute("aria-live", aloud ? "polite" : "off");
  $("announcement").textContent = text;
}

// Remove an announcement that is out of date, if it is the one shown.
export function retract(text) {
  if ($("announcement").textContent === text) announce("");
}

// A server's message as a sentence, with a capital and a full stop.
export function sentence(text) {
  return text.replace(/^the /, "The ").replace(/\.?$/, ".");
}

export async function askForToken(problem) {
  $("token-problem").textContent = problem.split(";")[0]; // the rest is for programs
  const dialog = $("ask-token");
  if (!dialog.open) dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, {once: true}));
  state.token = $("token").value.trim();
  session.setItem("token", state.token);
}

// live: true if it describes what the person does now. mine: true if the person has the seat; then narrow bars show it, too.
export function badge(text, live, mine = live) {
  state.badge = {text, live, mine};
  draw();
}

// A name without invisible characters, such as direction marks.
function visible(name) {
  return name.replace(/\p{C}/gu, "").replace(/\s+/gu, " ").trim();
}

// The person's name as player, in the server's form.
export function displayName(text) {
  return visible(text).slice(0, 32);
}

// The kind and the name of a player: "person Ann" for "person:Ann", and "person 5457" for "person:person 5457".
export function called(player) {
  const [kind, given = ""] = player.split(/:(.*)/s);
  const name = visible(given);
  return !name || name === kind || name.startsWith(`${kind} `) ? name || kind : `${kind} ${name}`;
}

export function myName() {
  let name = local.getItem("name");
  if (!name) local.setItem("name", (name = `person ${Math.floor(Math.random() * 9000 + 1000)}`));
  return name;
}
