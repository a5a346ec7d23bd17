// Draws the page from its state, in one function. Pictures and figures, which change many times a second, are drawn when they
// arrive.

import {$, replaceKeepingFocus, write} from "./dom.js";
import {chooseKey} from "./input.js";
import {signOf} from "./keys.js";
import {drawMosaic} from "./mosaic.js";
import {firstWorld, isKnown, laneSeats, serverOf, short, state, worldOf} from "./state.js";
import {match, recordings} from "./views.js";
import {called, myName, tell} from "./words.js";
import {chosenEnvironment, select} from "./worlds.js";

const MOST_CHIPS = 8; // the most seats of a world that the list of worlds names

// Draw what has changed. Called after each change of the state.
export function draw() {
  drawWords();
  drawWorlds();
  drawSeats();
  drawEnvironments();
  drawPlay();
  drawLegend();
  drawMosaic();
  recordings.update();
  match.show(worldOf(state.selected)?.match ?? null, state.playing?.inMatch ? state.playing.seat : null);
}

function drawWords() {
  const {status, message, offer, badge, playing, selected, server} = state;
  const world = worldOf(selected);
  write($("status-text"), status.text);
  document.querySelector(".dot").className = `dot ${status.kind}`;
  $("problem").hidden = !message && !offer;
  write($("message"), message ?? offer?.text ?? "");
  $("offer").hidden = Boolean(message) || !offer;
  write($("offer"), offer?.button ?? "");
  $("offer").disabled = Boolean(offer?.waits);
  $("badge").hidden = !badge;
  write($("badge"), badge?.text ?? "");
  $("badge").className = ["badge", badge?.live && "live", badge?.mine && "mine"].filter(Boolean).join(" ");
  write($("stage-title"), short(playing?.own ? playing.title : world?.title ?? server.title ?? ""));
  // Nobody plays, and there is nothing to see.
  const unseen = world?.waits_for?.length === 0 && state.blind.has(selected) && !world.begun;
  const idle = selected === null ? !firstWorld() : world?.waiting || unseen;
  $("empty").hidden = Boolean(playing || state.wanted || !idle || !isKnown());
  const uncalled = isUncalled();
  if (server.title) write($("empty-text"), `${short(world?.waiting ? world.title : server.title)} ${uncalled ? "has not begun" : "is ready"}.`);
  write($("empty-why"), uncalled ? "Its program has not called exchange() yet." : "Nobody is playing. Take the seat yourself, or start an agent and watch.");
  $("begin").hidden = uncalled;
}

// True if a program with a loop of its own has not called `exchange` yet.
function isUncalled() {
  const home = serverOf(worldOf(state.selected));
  return Boolean(home.one_world && !home.called && !home.realtime);
}

function chip(text, on) {
  const element = document.createElement("span");
  element.className = on ? "chip on" : "chip";
  element.textContent = text;
  return element;
}

// A rate as text. A program's rate is measured, so its last digits would change all the time.
function rate(fps) {
  return fps < 20 ? Number(fps.toFixed(1)) : Math.round(fps);
}

// True if a list already shows this content; it is not replaced then, because somebody may be pressing it.
function isShown(list, text) {
  const same = list.dataset.shown === text;
  list.dataset.shown = text;
  return same;
}

// Chips for the seats: who has each. For many seats, only the occupied ones and their number. A single seat is shown without
// its name.
function seatChips({seats, players = {}, taken_over_by: people = []}) {
  const all = Object.entries(seats);
  const taken = (seat) => "● " + [all.length > 1 ? seat : "", players[seat] ? called(players[seat]) : all.length > 1 ? "" : seat].filter(Boolean).join(": ");
  const few = all.length > MOST_CHIPS ? all.filter(([, taken]) => taken) : all;
  const chips = few.slice(0, MOST_CHIPS).map(([seat, isTaken]) => chip(isTaken ? taken(seat) : `○ ${seat}`, isTaken));
  if (all.length > MOST_CHIPS) chips.push(chip(`${few.length} of ${all.length} seats taken`, false));
  return [...chips, ...people.slice(0, MOST_CHIPS).map((name) => chip(`${called(`person:${name}`)} takes over`, true))];
}

function drawWorlds() {
  const list = $("worlds");
  const worlds = state.server.worlds.map((world) => ({...world, returns: null, match: world.match?.seats.map((one) => one.taken_by)}));
  const current = worldOf(state.playing?.name)?.name ?? state.selected; // a person in a world of their own watches that world
  const text = JSON.stringify([worlds, state.server.servers, current]);
  if (isShown(list, text)) return;
  replaceKeepingFocus(list, "world", [...state.server.worlds.map((world) => {
    const button = document.createElement("button");
    button.dataset.world = world.name;
    button.setAttribute("aria-current", String(world.name === current));
    const name = document.createElement("b");
    name.textContent = short(world.title);
    name.title = world.title;
    const about = document.createElement("small");
    const fps = world.fps ?? (world.waiting ? serverOf(world).fps : null);
    const place = world.server === undefined ? world.name.slice(0, 14) : world.name.replace(/(world-.{4}).*/, "$1…").replace(/\/$/, "");
    const kind = world.kind === "perlert" ? "PERLERT" : fps ? `${rate(fps)} fps` : "lock-step";
    const parts = world.replay
      ? ["replay", `${world.replay.length} step${world.replay.length === 1 ? "" : "s"}`]
      : [kind, world.lanes ? `${world.lanes} lanes` : "", place];
    about.textContent = parts.filter(Boolean).join(" · ");
    const who = document.createElement("div");
    who.className = "who";
    if (world.recording) who.append(chip("● rec", false));
    who.append(...seatChips(world));
    if (world.viewers) who.append(chip(`${world.viewers} watching`, false));
    button.append(name, about, who);
    button.onclick = () => {
      tell(null);
      select(world.name);
    };
    const item = document.createElement("li");
    item.append(button);
    return item;
  }), ...(state.server.servers ?? []).filter(({problem}) => problem).map(({name, problem}) => {
    const item = document.createElement("li");
    item.className = "lost";
    item.append(Object.assign(document.createElement("b"), {textContent: name}), Object.assign(document.createElement("small"), {textContent: problem}));
    return item;
  })]);
  $("no-worlds").hidden = state.server.worlds.length > 0;
}

function drawSeats() {
  const world = worldOf(state.selected);
  const lanes = world?.lanes ?? 0;
  const seats = lanes > 1 ? laneSeats(world) : Object.entries(world?.seats ?? {});
  $("name-label").hidden = !serverOf(world).match || state.playing !== null;
  $("seat-kind").textContent = lanes > 1 ? "Take over" : "Seat";
  $("seat-label").hidden = seats.length < 2 || state.playing !== null || Boolean(world?.match) || world?.kind === "perlert";
  $("lanes-label").hidden = !(lanes > 1);
  if (isShown($("seat"), JSON.stringify(seats))) return;
  const before = $("seat").value;
  $("seat").replaceChildren(...seats.map(([seat, taken]) => new Option(taken && lanes <= 1 ? `${seat} (taken)` : seat, seat)));
  const free = seats.find(([, taken]) => !taken)?.[0];
  $("seat").value = seats.some(([seat]) => seat === before) ? before : free ?? seats[0]?.[0] ?? "";
}

// The environments of a server that has several. The first choice is the world that is shown, if any.
function drawEnvironments() {
  const world = worldOf(state.selected);
  const ids = serverOf(world).environments ?? [];
  const list = !world || world.waiting ? ids : ["", ...ids];
  $("env-label").hidden = ids.length < 2 || state.playing !== null;
  if (isShown($("env"), JSON.stringify(list))) return;
  $("env").replaceChildren(...list.map((id) => new Option(id ? short(id) : "this world", id)));
}

// The button takes a free seat, or takes over from the player of an occupied one. Lanes have an agent, or can only be watched.
function drawPlay() {
  const world = worldOf(state.selected);
  const lanes = (world?.lanes ?? 0) > 1;
  const makes = !state.playing && Boolean(chosenEnvironment());
  const full = !state.playing && !makes && world?.match && Object.values(world.seats).every(Boolean);
  const person = state.playing || makes ? null : world?.taken_over?.[$("seat").value];
  const taken = state.connected && !makes && (lanes || world?.seats[$("seat").value] === true);
  const refused = Boolean(taken && person && person !== myName()); // the person's own name: the list may be older than the end of their takeover
  write($("play"), state.playing ? (state.playing.takesOver ? "Give back" : "Stop") : !taken ? "Play" : world.match ? "Full" : refused ? "Taken" : "Take over");
  $("play").title = refused ? `${called(`person:${person}`)} has taken over: wait until they give back` : "";
  $("play").classList.toggle("stop", state.playing !== null);
  $("play").disabled = !state.connected || !isKnown() || Boolean(full) || refused || (!state.playing && isUncalled());
  $("play").hidden = !state.playing && !makes && (Boolean(world?.replay) || world?.kind === "perlert" || (lanes && !laneSeats(world).length));
}

function drawLegend() {
  const {keyboard = null, rate: held, takesOver} = state.playing ?? {};
  const entries = keyboard?.legend() ?? [];
  const resting = takesOver ? "no key: the agent acts" : keyboard?.resting(held);
  if (isShown($("legend"), JSON.stringify([entries, resting]))) return;
  $("legend").replaceChildren(...entries.map(([keys, meaning], position) => {
    const button = document.createElement("button");
    button.title = "Choose another key";
    for (const key of keys) {
      const sign = document.createElement("kbd");
      sign.textContent = signOf(key);
      sign.dataset.key = key;
      button.append(sign);
    }
    button.append(meaning);
    button.onclick = () => chooseKey(position, meaning);
    return button;
  }));
  if (entries.length && resting) $("legend").append(Object.assign(document.createElement("span"), {className: "hint", textContent: resting}));
  drawPad(keyboard);
}

// On-screen buttons: directions arranged like a cross, the others beside them.
function drawPad(keyboard) {
  $("pad").hidden = !keyboard?.names.length;
  if (!keyboard) return;
  const {directions, others} = keyboard.spatial();
  const button = (name, place) => {
    const element = document.createElement("button");
    element.textContent = place ? signOf(place) : keyboard.word(name) || signOf(name); // a letter means nothing on a touch screen
    element.dataset.key = name;
    element.setAttribute("aria-label", keyboard.meaning(name));
    element.setAttribute("aria-pressed", "false");
    if (place) element.style.gridArea = place;
    return element;
  };
  const group = (kind, buttons) => {
    const element = document.createElement("div");
    element.className = kind;
    element.append(...buttons);
    return element;
  };
  const cross = group("cross", directions.map(([place, name]) => button(name, place)));
  cross.classList.toggle("flat", !directions.some(([place]) => place === "up" || place === "down"));
  $("pad").replaceChildren(...(directions.length ? [cross] : []), ...(others.length ? [group("rest", others.map((name) => button(name)))] : []));
}
