// The figures beside the picture, and the notice that a world stands still.

import {line} from "./charts.js";
import {$, write} from "./dom.js";
import {state, worldOf} from "./state.js";
import {called} from "./words.js";

const texts = new Map(); // figures that were not drawn yet, by the id of their element

// Show a figure at the next call of `showFigures`. Each text that changes makes the browser lay out and draw the page. Doing so
// with each picture cost as much as the picture, and nobody reads thirty numbers per second.
export function note(id, text) {
  texts.set(id, text);
}

export function showFigures() {
  for (const [id, text] of texts) write($(id), text);
  texts.clear();
}

// The last and the mean return of each seat, if there are several.
function seatReturns() {
  const found = Object.entries(worldOf(state.selected)?.returns ?? {});
  const several = found.length > 1;
  $("returns-graph").hidden = several;
  $("seat-returns").hidden = !several;
  if (!several) return;
  $("seat-returns-rows").replaceChildren(...found.map(([seat, [last, mean]]) => {
    const row = document.createElement("tr");
    row.append(Object.assign(document.createElement("th"), {scope: "row", textContent: seat}));
    row.append(...[last, mean].map((value) => Object.assign(document.createElement("td"), {textContent: value?.toFixed(2) ?? "–"})));
    return row;
  }));
}

export function figures() {
  const now = performance.now();
  const {arrived, steps} = state.frames;
  const seconds = arrived.length > 1 ? (arrived.at(-1) - arrived[0]) / 1000 : 0;
  const comes = now - (arrived.at(-1) ?? -Infinity) < 2000; // otherwise the world stands still, or its state is unknown
  $("rate").textContent = seconds && comes ? ((arrived.length - 1) / seconds).toFixed(1) : "0";
  if (!comes) $("steps").textContent = "–";
  else if (steps.length > 1) {
    const span = (steps.at(-1)[0] - steps[0][0]) / 1000;
    const rate = (steps.at(-1)[1] - steps[0][1]) / span;
    $("steps").textContent = span ? rate.toFixed(span < 1 && rate < 100 ? 1 : 0) : "–";
  }
  $("data").textContent = `${((state.frames.bytes * 8) / 1e6).toFixed(2)} Mbit/s`;
  state.frames.bytes = 0;
  if (!state.playing) $("dropped").textContent = String(state.frames.skipped);
  const sorted = [...state.latencies].sort((one, other) => one - other);
  $("latency").dataset.all = state.latencies.map((value) => value.toFixed(1)).join(" ");
  $("latency").textContent = sorted.length ? `${sorted[sorted.length >> 1].toFixed(0)} ms` : "–";
  line($("latency-graph"), state.latencies, {limit: 50, least: 0});
  line($("returns-graph"), state.returns);
  seatReturns();
}

// The players for whom a program with a loop of its own waits, as text; null: it waits for nobody, or for this person.
function awaits({waits_for: awaited, seats, players, name}) {
  if (!awaited || !$("empty").hidden) return null;
  if (!awaited.length) return "The game waits for a player";
  const several = Object.keys(seats).length > 1;
  const own = state.playing?.name === name && !state.playing.takesOver;
  const others = awaited.filter((seat) => !(own && (!several || state.playing.seat === seat)));
  const who = (seat) => (players[seat] ? called(players[seat]) : "");
  const named = (seat) => (several ? [seat, who(seat)].filter(Boolean).join(": ") : who(seat) === "agent" ? "its agent" : who(seat));
  return others.length ? `The game waits for ${others.map(named).join(", ")}` : null;
}

// A world in real time keeps running: if no pictures arrive, the world or the connection is stalled. For a program with a loop
// of its own the server reports it, in lock-step too.
export function stall() {
  const world = worldOf(state.selected);
  const looks = state.watching && !state.lost && !world?.waiting;
  const still = Boolean(looks && world?.stands_still);
  const runs = world?.fps && looks && !world.replay && (world.match?.state ?? "running") === "running";
  const last = state.frames.arrived.at(-1) ?? Infinity;
  const seconds = (performance.now() - last) / 1000;
  const awaited = looks && world ? awaits(world) : null;
  const stalls = still || Boolean(awaited) || (Boolean(runs) && seconds >= Math.max(1, 2 / world.fps));
  // One sentence without the seconds for screen readers, which would read it again every second.
  $("stall").classList.toggle("on", stalls);
  const parts = awaited ? [awaited, "", ""] : still ? ["The game stands still: its program has paused, or hangs", "", ""]
    : stalls ? ["No picture", ` for ${Math.floor(seconds)} s`, ": the world stands still, or the connection does"] : ["", "", ""];
  ["stall-text", "stall-seconds", "stall-why"].forEach((id, at) => write($(id), parts[at]));
}
