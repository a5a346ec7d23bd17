// The state of the page, and functions that read it. It does not draw (draw.js does), and sends no requests.

import {session} from "./dom.js";

// The token and an invitation are in the fragment, which is not sent to servers; the token is stored in this tab.
const fragment = new URLSearchParams(location.hash.slice(1));
if (fragment.size) history.replaceState(null, "", location.pathname + location.search);
if (fragment.has("token")) session.setItem("token", fragment.get("token"));
const invitation = fragment.has("world") || fragment.has("seat") ? {world: fragment.get("world"), seat: fragment.get("seat")} : null;

// The seat of this tab before it was reloaded; an invitation is newer.
function storedSeat() {
  if (invitation) session.removeItem("seat");
  return JSON.parse(session.getItem("seat") ?? "null");
}

// Before the first response of the server.
/** @type {any} */
const nothing = {worlds: [], realtime: false};

export const state = {
  token: session.getItem("token") ?? "",
  invitation, // {world, seat} of the opened link, until the person has chosen
  server: nothing, // the server's last list of worlds
  connected: false,
  status: {kind: "", text: "connecting…"}, // of the connection, as text
  message: null, // a problem
  /** @type {{text: string, button: string, waits: boolean} | null} */
  offer: null, // a kept seat to offer; `waits`: the person has accepted it
  badge: null, // {text, live, mine}: the person's part in the watched world
  selected: invitation?.world ?? storedSeat()?.world ?? null, // the name of the watched world
  selectedServer: undefined, // behind a gateway: the name of its server
  lost: false, // true while that server is lost
  lossless: new Set(), // names of worlds and servers without JPEG
  blind: new Set(), // names of worlds without pictures, and of servers whose new worlds have none
  watching: null, // the Stream, or the Lobby, that is watched
  joining: null, // the Stream that has requested a seat
  playing: null, // the person's seat: {stream, keyboard, own, title, name, …}
  wanted: storedSeat(), // {world, seat, takesOver}: taken again after a lost connection or a reload; null: none
  /** @type {{world: string, seat: string, player: string, until: number} | null} */
  gaveBack: null, // the last seat that the person gave back, while the server may still list the person in it
  comingBackUntil: 0, // while the person comes back, an occupied seat may still be their own
  frames: {arrived: [], bytes: 0, skipped: 0, newest: null, steps: []},
  trip: 0, // milliseconds of the last round trip that did not wait for a world
  latencies: [], // milliseconds from a key to its picture
  waitingKeys: [], // {at, frame}: keys whose effect is not drawn yet
  returns: [], // of the episodes that ended while the page watched
  episodes: 0, // the number of ended episodes when the last one was noted
};

// Process the server's list of worlds.
export function learn(server) {
  state.server = server;
  // A program has no world before somebody watches it: the first viewer creates it.
  if (server.one_world && server.called && !server.worlds.length) server.worlds.push({name: "", title: server.title, seats: {}, viewers: 0, fps: server.fps, lanes: null});
  if (!state.gaveBack) return;
  // A response may be older than the end of the person's stream. Pressing Play at once must play, and not take over.
  const {world, seat, player, until} = state.gaveBack;
  const {seats = {}, players = {}} = worldOf(world) ?? {};
  if (performance.now() > until || (seats[seat] && players[seat] !== player)) state.gaveBack = null;
  else if (seats[seat]) seats[seat] = false;
}

// Store the person's seat, to survive a lost connection and a reload; null: none any more.
export function want(seat) {
  state.wanted = seat;
  seat ? session.setItem("seat", JSON.stringify(seat)) : session.removeItem("seat");
}

// The secret with which this tab gets its seat back.
export function seatKey() {
  if (!session.getItem("seat key")) session.setItem("seat key", crypto.getRandomValues(new Uint32Array(4)).join("-"));
  return session.getItem("seat key");
}

// The picture format of a world, or of a server's new worlds.
export function kindOf(name) {
  return state.lossless.has(name) ? "png" : "jpeg";
}

// True after the first response of the server.
export function isKnown() {
  return state.server !== nothing;
}

// The server of a world; without a gateway there is only one.
export function serverOf(world) {
  return state.server.servers?.find(({name}) => name === world?.server) ?? state.server;
}

// The first world that is not a replay: replays are only shown when chosen.
export function firstWorld() {
  const shown = state.server.worlds.filter((world) => !world.replay);
  return shown.find((world) => world.server === state.selectedServer) ?? shown[0];
}

export function worldOf(name) {
  return state.server.worlds.find((world) => world.name === name);
}

// The lanes that can be taken over: those with an agent.
/** @returns {[string, boolean][]} */
export function laneSeats(world) {
  if (!Object.values(world.seats).some(Boolean)) return [];
  return Array.from({length: Math.min(world.lanes, 1024)}, (_, lane) => [`lane ${lane}`, true]);
}

// The title of an environment, without its module's packages.
export function short(title) {
  return /^[\w.]+$/.test(title) ? title.split(".").at(-1) : title;
}
