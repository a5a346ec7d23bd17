// Watching a world: its pictures, its observations if it does not render, or a lobby.

import {Stream} from "./client.js";
import {$, local, pause} from "./dom.js";
import {draw} from "./draw.js";
import {note, showFigures} from "./figures.js";
import {recall} from "./input.js";
import {Lobby} from "./lobby.js";
import {drawsNothing, lacksJpeg, Observations} from "./observations.js";
import {stopped} from "./playing.js";
import {kindOf, state, want, worldOf} from "./state.js";
import {intTensor, request, textTensor, values} from "./wire.js";
import {announce, badge, myName, tell} from "./words.js";

const MOST_AHEAD = 8;

function lanesWanted() {
  const text = $("lanes").value.trim();
  if (!text) return null;
  const lanes = text.split(",").flatMap((part) => {
    const [first, last = first] = part.split("-").map(Number);
    return Number.isInteger(first) && last >= first && last - first < 64 ? Array.from({length: last - first + 1}, (_, i) => first + i) : [];
  });
  if (!lanes.length) tell("Expected numbers of lanes, such as 0-15 or 1,4: all are shown.");
  return lanes.length ? lanes : null;
}

let shown = null; // the name of the world whose picture and figures are shown

// Clear what is shown of the previous world.
export function clear(name) {
  state.frames = {arrived: [], bytes: 0, skipped: 0, newest: null, steps: []};
  if (name === shown) return;
  shown = name;
  state.returns.length = 0;
  const canvas = $("canvas");
  canvas.getContext("2d").clearRect(0, 0, canvas.width, canvas.height);
  $("frame").classList.remove("pictured");
  for (const id of ["age", "viewers", "last-return"]) note(id, "–");
  note("episodes", "");
  showFigures(); // at once, because another world is selected now
}

export async function watch(name) {
  state.watching?.close();
  const world = worldOf(name);
  $("panel").hidden = true;
  clear(name);
  if (world?.kind === "perlert") return visit(name);
  if (world?.waiting && !state.playing) {
    state.watching = null;
    return;
  }
  const stream = (state.watching = new Stream(state.token));
  if (!state.playing) badge(worldOf(name)?.replay ? "replay" : "watching", false);
  if (state.blind.has(name)) return observe(name, stream);
  const given = {role: textTensor("spectator"), frame: textTensor(kindOf(name))};
  const lanes = lanesWanted();
  if (lanes) given.lanes = intTensor(lanes);
  try {
    const {observations} = await join(stream, name, given);
    const sent = performance.now();
    await stream.controls;
    // As many pending requests as a round trip has frames: distant servers give as many pictures as near ones.
    const ahead = Math.max(1, Math.min(MOST_AHEAD, Math.ceil(((performance.now() - sent) * 60) / 1000)));
    const [frame, figures] = [observations.get("frame").uid, observations.get("watch").uid];
    const step = request.step([], [frame, figures]);
    const asked = [];
    const ask = () => {
      asked.push(stream.askUntilItGoesOn(step));
      asked.at(-1).catch(() => {});
    };
    for (let i = 0; i < ahead; i++) ask();
    while (state.watching === stream) {
      const answer = await asked.shift();
      ask();
      show(answer.observations.get(frame), answer.observations.get(figures));
    }
  } catch (error) {
    stream.close();
    if (state.watching === stream) {
      state.watching = null;
      if (drawsNothing(error) || lacksJpeg(error)) {
        (lacksJpeg(error) ? state.lossless : state.blind).add(name);
        watch(name);
      } else if (error.code !== 14 && error.code !== 1 && !state.message) tell(error.message.split("\n")[0]);
    }
  }
}

// Join as a spectator, and request the key mapping for a takeover. After the first Step, in a world that stands still, the
// response would take seconds.
function join(stream, name, given) {
  const joining = stream.ask(request.join(name, given));
  stream.controls = joining.then(() => stream.property("world.controls")).then(JSON.parse).catch(() => ({}));
  return joining;
}

// Watching a world without pictures.
async function observe(name, stream) {
  try {
    const joined = await join(stream, name, {role: textTensor("spectator"), wait: textTensor("next_frame")});
    if (state.watching !== stream) return;
    const seen = new Observations(joined, $("canvas"), $("panel"));
    while (state.watching === stream) {
      const answer = await stream.askUntilItGoesOn(request.step([], seen.uids));
      if (state.watching !== stream) return;
      seen.show(answer);
      await pause(40);
    }
  } catch (error) {
    stream.close();
    if (state.watching === stream) {
      state.watching = null;
      if (error.code !== 14 && error.code !== 1 && !state.message) tell(error.message.split("\n")[0]);
    }
  }
}

// A PERLERT lobby instead of a picture.
async function visit(name) {
  if (state.playing || state.joining) { // somewhere else
    want(null);
    state.joining = null; // the seat is given back when it has been taken
    state.playing?.stream.leave();
    stopped();
  }
  const lobby = (state.watching = new Lobby(name, {
    token: state.token, badge, announce, tell,
    panel: $("panel"),
    name: () => myName().replaceAll(" ", "-"),
    rename: (text) => text && local.setItem("name", text),
    result: (total) => {
      state.returns.push(total);
      note("last-return", total.toFixed(2));
    },
    begin: (stream, keyboard) => {
      state.playing = {stream, keyboard, own: false, name, changed: null, wake: () => {}};
      recall(keyboard);
      draw();
      $("stage").focus({preventScroll: true});
      return state.playing;
    },
    end: stopped,
  }));
  try {
    await lobby.run();
  } catch (error) {
    if (state.watching === lobby) {
      state.watching = null;
      if (error.code !== 14) tell(error.message.split("\n")[0]);
    }
  } finally {
    lobby.close();
  }
}

// A picture has arrived: only the newest is drawn.
export function show(pictureBytes, figureBytes) {
  const data = values(pictureBytes);
  const [number, steps, age, cost, viewers, episodes, last, mean] = values(figureBytes);
  note("viewers", String(viewers));
  if (episodes > 0) {
    const several = Number.isNaN(last); // several agents have separate returns, in a table
    if (!several && (!state.returns.length || state.episodes !== episodes)) state.returns.push(last);
    state.episodes = episodes;
    if (state.returns.length > 200) state.returns.shift();
    note("last-return", several ? "" : last.toFixed(Math.abs(last) < 100 ? 2 : 0));
    note("episodes", `${episodes} episode${episodes === 1 ? "" : "s"}${several ? "" : `, mean ${mean.toFixed(2)}`}`);
  }
  if (!data.length) return;
  const now = performance.now();
  if (state.frames.newest) state.frames.skipped += 1;
  state.frames.arrived.push(now);
  state.frames.bytes += data.length;
  state.frames.steps.push([now, steps]);
  while (state.frames.arrived[0] < now - 2000) state.frames.arrived.shift();
  while (state.frames.steps[0][0] < now - 2000) state.frames.steps.shift();
  state.frames.newest = {data: data.slice(), number, steps, age, cost, at: now};
  if (!decoding) paintNewest();
}

let decoding = false;

// Draw the newest picture, and newer ones that arrived during decoding. Without `requestAnimationFrame`: decoding would begin
// in one frame, and drawing happen in the next one, so the whole page was drawn twice for each picture.
async function paintNewest() {
  decoding = true;
  try {
    while (state.frames.newest) {
      const {frames} = state;
      const picture = frames.newest;
      frames.newest = null;
      const bitmap = await createImageBitmap(new Blob([picture.data]));
      if (state.frames === frames) paint(picture, bitmap); // otherwise another world is watched now
      bitmap.close();
    }
  } finally {
    decoding = false;
  }
}

function paint(picture, bitmap) {
  const canvas = $("canvas");
  if (canvas.width !== bitmap.width || canvas.height !== bitmap.height) {
    canvas.width = bitmap.width;
    canvas.height = bitmap.height;
    canvas.classList.toggle("small", bitmap.width <= 320);
    $("frame").style.setProperty("--ratio", String(bitmap.width / bitmap.height));
  }
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  $("frame").classList.add("pictured");
  const now = performance.now();
  canvas.dataset.pictures = String(Number(canvas.dataset.pictures ?? 0) + 1);
  // The way from the server took about half a round trip.
  note("age", `${(picture.age * 1000 + state.trip / 2 + now - picture.at).toFixed(0)} ms`);
  while (state.waitingKeys.length && state.waitingKeys[0].frame <= picture.steps) {
    state.latencies.push(now - state.waitingKeys.shift().at);
    if (state.latencies.length > 120) state.latencies.shift();
  }
}
