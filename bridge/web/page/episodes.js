// Recorded episodes, in words and chips.

import {called} from "./words.js";

const IDLE = "default"; // who acts where there is no action of anybody

export function element(kind, text, name = "") {
  const made = document.createElement(kind);
  made.textContent = text;
  made.className = name;
  return made;
}

// Who acted, as chips: people stand out.
export function players(names) {
  const shown = names.filter((name) => name !== IDLE);
  if (!shown.length) return [element("span", "nobody", "chip")];
  return shown.map((name) => element("span", called(name), name.startsWith("person") ? "chip on" : "chip"));
}

// True if somebody acted in an episode: a world in real time goes on, and is recorded, while its player does nothing.
export function acted({players: names}) {
  return names.some((name) => name !== IDLE);
}

export function moment(seconds) {
  return new Date(seconds * 1000).toLocaleString([], {dateStyle: "medium", timeStyle: "short"});
}

// What an episode goes on from that did not begin with a reset; empty: it began with one.
export function branch(parent) {
  if (!parent) return "";
  return parent.episode ? `branch of ${parent.episode} at step ${parent.step}` : "branch of an episode that was not recorded";
}

export function steps(count) {
  return `${count} ${count === 1 ? "step" : "steps"}`;
}

// Why an episode cannot be watched again, in a sentence.
export function reason(obstacle) {
  if (obstacle.includes("no reset with a seed")) return "It cannot be shown: it began without a seed, and was recorded without frames and observations.";
  return `It cannot be shown: ${obstacle.replace(/^\S+ cannot be \w+: /, "")}`;
}

// The episode with the highest return of each environment that was played more than once.
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
