// The world that is watched.

import {$} from "./dom.js";
import {draw} from "./draw.js";
import {firstWorld, learn, serverOf, state, worldOf} from "./state.js";
import {watch} from "./watching.js";

// Poll at once, after a change.
export async function refresh(stream) {
  if (stream) learn(JSON.parse(await stream.property("server.web")));
  draw();
}

// The watched world has ended.
export function nothing() {
  state.selected = null;
  state.watching?.close();
  state.watching = null;
  state.badge = null;
  $("panel").hidden = true;
  draw();
}

// The environment of which Play creates a world; none: it joins the world that is shown.
export function chosenEnvironment() {
  return (serverOf(worldOf(state.selected)).environments ?? []).length > 1 ? $("env").value : "";
}

// Watch the first world if the watched one has ended or was left.
export function selectFirst() {
  nothing();
  if (firstWorld()) select(firstWorld().name);
}

export function select(name) {
  state.selected = name;
  state.selectedServer = worldOf(name)?.server;
  draw();
  watch(name);
}
