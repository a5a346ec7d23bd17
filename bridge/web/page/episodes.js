// Recorded episodes as text and chips.

import {called} from "./words.js";

const IDLE = "default"; // the player of steps without an action

export function element(kind, text, name = "") {
  const made = document.createElement(kind);
  made.textContent = text;
  made.className = name;
  return made;
}

// The players as chips; people are highlighted.
export function players(names) {
  const shown = names.filter((name) => name !== IDLE);
  if (!shown.length) return [element("span", "nobody", "chip")];
  return shown.map((name) => element("span", called(name), name.startsWith("person") ? "chip on" : "chip"));
}

// True if somebody acted in an episode: a real-time world continues, and is recorded, while its player does nothing.
export function acted({players: names}) {
  return names.some((name) => name !== IDLE);
}

export function moment(seconds) {
  return new Date(seconds * 1000).toLocaleString([], {dateStyle: "medium", timeStyle: "short"});
}

// The episode that a branch continues; empty: it began with a reset.
export function branch(parent) {
  if (!parent) return "";
  return parent.episode ? `branch of ${parent.episode} at step ${parent.step}` : "branch of an episode that was not recorded";
}

export function steps(count) {
  return `${count} ${count === 1 ? "step" : "steps"}`;
}

// Why an episode cannot be shown, as a sentence.
export function reason(obstacle) {
  if (obstacle.includes("no reset with a seed")) return "It cannot be shown: it began without a seed, and was recorded without frames and observations.";
  return `It cannot be shown: ${obstacle.replace(/^\S+ cannot be \w+: /, "")}`;
}

// For each environment that was played more than once, the episode with the highest return.
export function bests(episodes) {
  const found = new Map();
  for (const episode of episodes) {
    const others = episodes.some((other) => other !== episode && other.environment === episode.environment);
    if (others && episode.return !== null && episode.return > (found.get(episode.environment)?.return ?? -Infinity)) found.set(episode.environment, episode);
  }
  return found;
}

export function amount(value) {
  return value === null ? "–" : Number(value.toFixed(2)).toString();
}
