// The one state of the page, and what is asked of it. It draws nothing (draw.js does), and asks no server.

// The token comes in the fragment, which no server sees, and stays in this tab.
function takeToken() {
  const found = new URLSearchParams(location.hash.slice(1)).get("token");
  if (found !== null) {
    sessionStorage.setItem("token", found);
    history.replaceState(null, "", location.pathname + location.search);
  }
  return sessionStorage.getItem("token") ?? "";
}

// Before the server has said anything.
/** @type {any} */
const nothing = {worlds: [], realtime: false};

export const state = {
  token: takeToken(),
  server: nothing, // what the server said last of its worlds
  connected: false,
  status: {kind: "", text: "connecting…"}, // of the connection, in words
  message: null, // a problem
  badge: null, // {text, live}: what the person is in the world that is looked at
  selected: null, // the name of the world that is looked at
  selectedServer: undefined, // behind a gateway: the name of its server
  lost: false, // whether that server is
  lossless: new Set(), // names of worlds and servers that have no JPEG
  blind: new Set(), // names of worlds that draw nothing, and of servers whose new worlds draw nothing
  watching: null, // the Stream, or the Lobby, of what is looked at
  playing: null, // the seat of the person: {stream, keyboard, own, title, name, …}
  wantsToPlay: false, // true through a lost connection: the seat is taken again
  frames: {arrived: [], bytes: 0, skipped: 0, newest: null, steps: []},
  latencies: [], // milliseconds from keys to their pictures
  waitingKeys: [], // {at, frame}: keys whose effect is not painted yet
  returns: [], // of the episodes that ended while the page looked on
  episodes: 0, // how many had ended when the last of them was noted
};

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
