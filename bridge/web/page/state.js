// The one state of the page, and what is asked of it. It draws nothing (draw.js does), and asks no server.

import {session} from "./dom.js";

// The token and an invitation come in the fragment, which no server sees, and the token stays in this tab.
const fragment = new URLSearchParams(location.hash.slice(1));
if (fragment.size) history.replaceState(null, "", location.pathname + location.search);
if (fragment.has("token")) session.setItem("token", fragment.get("token"));
const invitation = fragment.has("world") || fragment.has("seat") ? {world: fragment.get("world"), seat: fragment.get("seat")} : null;

// The seat that this tab had before it was reloaded; an invitation is newer.
function storedSeat() {
  if (invitation) session.removeItem("seat");
  return JSON.parse(session.getItem("seat") ?? "null");
}

// Before the server has said anything.
/** @type {any} */
const nothing = {worlds: [], realtime: false};

export const state = {
  token: session.getItem("token") ?? "",
  invitation, // {world, seat} of the link that was opened, until the person has chosen
  server: nothing, // what the server said last of its worlds
  connected: false,
  status: {kind: "", text: "connecting…"}, // of the connection, in words
  message: null, // a problem
  /** @type {{text: string, button: string, waits: boolean} | null} */
  offer: null, // of a seat that was left; `waits`: whether the person has accepted it
  badge: null, // {text, live, mine}: what the person is in the world that is looked at
  selected: invitation?.world ?? storedSeat()?.world ?? null, // the name of the world that is looked at
  selectedServer: undefined, // behind a gateway: the name of its server
  lost: false, // whether that server is
  lossless: new Set(), // names of worlds and servers that have no JPEG
  blind: new Set(), // names of worlds that draw nothing, and of servers whose new worlds draw nothing
  watching: null, // the Stream, or the Lobby, of what is looked at
  joining: null, // the Stream that has asked for a seat
  playing: null, // the seat of the person: {stream, keyboard, own, title, name, …}
  wanted: storedSeat(), // {world, seat, takesOver}: taken again after a lost connection or a reload; null: nothing
  /** @type {{world: string, seat: string, player: string, until: number} | null} */
  gaveBack: null, // the seat that the person gave back last, while the server may still say that the person has it
  comingBackUntil: 0, // while somebody comes back, a seat that is taken may still be the own one
  frames: {arrived: [], bytes: 0, skipped: 0, newest: null, steps: []},
  trip: 0, // milliseconds of the last round trip that waited for no world
  latencies: [], // milliseconds from keys to their pictures
  waitingKeys: [], // {at, frame}: keys whose effect is not painted yet
  returns: [], // of the episodes that ended while the page looked on
  episodes: 0, // how many had ended when the last of them was noted
};

// Take what the server says of its worlds.
export function learn(server) {
  state.server = server;
  // A program is there before anybody has looked at it: the first who does so has its world made.
  if (server.one_world && server.called && !server.worlds.length) server.worlds.push({name: "", title: server.title, seats: {}, viewers: 0, fps: server.fps, lanes: null});
  if (!state.gaveBack) return;
  // An answer may be older than the end of the person's stream: who presses Play at once plays, and takes over from nobody.
  const {world, seat, player, until} = state.gaveBack;
  const {seats = {}, players = {}} = worldOf(world) ?? {};
  if (performance.now() > until || (seats[seat] && players[seat] !== player)) state.gaveBack = null;
  else if (seats[seat]) seats[seat] = false;
}

// Remember through a lost connection and a reload which seat the person has; null: none any more.
export function want(seat) {
  state.wanted = seat;
  seat ? session.setItem("seat", JSON.stringify(seat)) : session.removeItem("seat");
}

// The secret by which this tab gets its seat back.
export function seatKey() {
  if (!session.getItem("seat key")) session.setItem("seat key", crypto.getRandomValues(new Uint32Array(4)).join("-"));
  return session.getItem("seat key");
}

// How pictures of a world, or of new worlds of a server, come.
export function kindOf(name) {
  return state.lossless.has(name) ? "png" : "jpeg";
}

// True once the server has said what it serves.
export function isKnown() {
  return state.server !== nothing;
}

// The server of a world; without a gateway there is one.
export function serverOf(world) {
  return state.server.servers?.find(({name}) => name === world?.server) ?? state.server;
}

// The first world that is no replay: those are looked at only by those who choose them.
export function firstWorld() {
  const shown = state.server.worlds.filter((world) => !world.replay);
  return shown.find((world) => world.server === state.selectedServer) ?? shown[0];
}

export function worldOf(name) {
  return state.server.worlds.find((world) => world.name === name);
}

// The lanes from whose agent one may take over: where there is one.
/** @returns {[string, boolean][]} */
export function laneSeats(world) {
  if (!Object.values(world.seats).some(Boolean)) return [];
  return Array.from({length: Math.min(world.lanes, 1024)}, (_, lane) => [`lane ${lane}`, true]);
}

// The title of an environment, without the packages of a module's name.
export function short(title) {
  return /^[\w.]+$/.test(title) ? title.split(".").at(-1) : title;
}
