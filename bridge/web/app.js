// The page: which worlds there are, the picture of one, the seat in it, and figures.

import {Stream, UNAUTHENTICATED} from "./client.js";
import {request, textTensor, intTensor, tensor, values} from "./wire.js";
import {Keyboard, nameOf, signOf} from "./keys.js";
import {line} from "./charts.js";
import {Lobby} from "./lobby.js";
import {MatchView, displayName} from "./match.js";
import {Observations, drawsNothing, lacksJpeg} from "./observations.js";
import {Recordings} from "./recordings.js";

const $ = (id) => document.getElementById(id);
const RUNNING = 1;
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// The token comes in the fragment, which no server sees, and stays in this tab.
function takeToken() {
  const found = new URLSearchParams(location.hash.slice(1)).get("token");
  if (found !== null) {
    sessionStorage.setItem("token", found);
    history.replaceState(null, "", location.pathname + location.search);
  }
  return sessionStorage.getItem("token") ?? "";
}

let token = takeToken();
let server = {worlds: [], realtime: false};
let selected = null; // the name of a world
let selectedServer; // behind a gateway: the name of its server
let lost = false; // whether that server is
const lossless = new Set(); // names of worlds and servers that have no JPEG
const blind = new Set(); // names of worlds that draw nothing, and of servers whose new worlds draw nothing
let watching = null; // a Stream
let playing = null; // {stream, world, keyboard, own}
let wantsToPlay = false;
let frames = {arrived: [], bytes: 0, skipped: 0, newest: null, steps: []};
const latencies = [];
const waitingKeys = []; // {at, frame}: keys whose effect is not painted yet
const returns = [];

const recordings = new Recordings({
  token: () => token,
  server: () => server,
  selected: () => selected,
  playing: () => playing,
  select: (name, newer) => {
    if (playing) stop();
    server = newer;
    select(name);
  },
  leave: () => {
    nothing();
    if (firstWorld()) select(firstWorld().name);
    else showWorlds();
  },
  tell,
  announce,
});

const match = new MatchView({
  sit: (seat) => play(seat),
  ready: async (value) => {
    try {
      await playing?.stream.ask(request.write("world.ready", intTensor(Number(value))));
      await refresh(playing?.stream);
    } catch (error) {
      if (error.code !== 1) tell(error.message);
    }
  },
  announce: (text) => announce(text),
});

// Words

function say(state, text) {
  $("status-text").textContent = text;
  document.querySelector(".dot").className = `dot ${state}`;
}

// Show a problem for eight seconds. One that lasts is shown until the next call.
let told = 0;

function tell(text, lasts = false) {
  const box = $("message");
  clearTimeout(told);
  box.hidden = !text;
  box.textContent = text ?? "";
  if (text && !lasts) told = setTimeout(() => tell(null), 8000);
}

function announce(text) {
  $("announcement").textContent = text;
}

async function askForToken(problem) {
  $("token-problem").textContent = problem;
  const dialog = $("ask-token");
  if (!dialog.open) dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, {once: true}));
  token = $("token").value.trim();
  sessionStorage.setItem("token", token);
}

// Worlds

async function lobby() {
  for (let wait = 300; ; wait = Math.min(wait * 1.6, 4000)) {
    const stream = new Stream(token);
    try {
      server = JSON.parse(await stream.property("server.web"));
      say("good", "connected");
      wait = 300;
      await arrive();
      for (;;) {
        showWorlds();
        await pause(match.pace);
        const before = performance.now();
        server = JSON.parse(await stream.property("server.web"));
        say("good", server.draining ? "connected; the server is about to stop" : "connected");
        if (!playing) $("trip").textContent = `${(performance.now() - before).toFixed(1)} ms`;
        if (isLost()) continue;
        if (selected !== null && !worldOf(selected) && !playing && selected !== recordings.expected) nothing();
        recordings.update();
        if (watching || playing?.own) continue;
        if (selected === null && firstWorld()) select(firstWorld().name);
        else if (worldOf(selected)) watch(selected); // it failed, or the world has only begun
      }
    } catch (error) {
      stream.close();
      leave();
      if (error.code === UNAUTHENTICATED) {
        say("bad", "not let in");
        await askForToken(error.message);
        wait = 0;
      } else {
        say("bad", `${error.message}; trying again`);
        tell(error.message.startsWith("the connection was lost") ? "The connection was lost. It is tried again." : error.message, true);
      }
    }
    await pause(wait);
  }
}

// Ask at once, after something was done.
async function refresh(stream) {
  if (stream) server = JSON.parse(await stream.property("server.web"));
  showWorlds();
}

// After a connection was made: look at what was looked at before, or at the first world.
async function arrive() {
  const known = server.worlds.some((world) => world.name === selected);
  if (!known) selected = firstWorld()?.name ?? null;
  $("play").disabled = false;
  tell(null);
  $("empty-text").textContent = `${server.title} is ready.`;
  if (selected !== null) select(selected);
  else $("empty").hidden = wantsToPlay;
  if (wantsToPlay) play();
}

// How pictures of a world, or of new worlds of a server, come.
function kindOf(name) {
  return lossless.has(name) ? "png" : "jpeg";
}

// The server of a world; without a gateway there is one.
function serverOf(world) {
  return server.servers?.find(({name}) => name === world?.server) ?? server;
}

// Whether the server of the world that was looked at is lost; its worlds come back with it, and others go on.
function isLost() {
  const home = server.servers?.find(({name}) => name === selectedServer);
  if (home?.problem && !worldOf(selected)) {
    lost = true;
    watching?.close();
    watching = null;
    tell(`${home.problem} It is tried again.`, true);
    return true;
  }
  if (lost) {
    lost = false;
    blind.clear(); // it may draw now
    tell(null);
    if (wantsToPlay && !playing && worldOf(selected)) play();
  }
  return false;
}

function leave() {
  watching?.close();
  watching = null;
  match.left();
  if (playing) {
    playing.stream.close();
    playing = null;
  }
  $("play").disabled = true;
}

// The title of an environment, without the packages of a module's name.
function short(title) {
  return /^[\w.]+$/.test(title) ? title.split(".").at(-1) : title;
}

// The world that was looked at is gone.
function nothing() {
  selected = null;
  watching?.close();
  watching = null;
  $("badge").hidden = $("panel").hidden = true;
  $("stage-title").textContent = "";
  $("empty").hidden = firstWorld() !== undefined;
  recordings.update();
}

// The first world that is no replay: those are looked at only by those who choose them.
function firstWorld() {
  const shown = server.worlds.filter((world) => !world.replay);
  return shown.find((world) => world.server === selectedServer) ?? shown[0];
}

function chip(text, on) {
  const element = document.createElement("span");
  element.className = on ? "chip on" : "chip";
  element.textContent = text;
  return element;
}

function showWorlds() {
  const list = $("worlds");
  match.show(worldOf(selected)?.match ?? null, playing?.seat ?? null);
  $("name-label").hidden = !serverOf(worldOf(selected)).match || playing !== null;
  const text = JSON.stringify([server.worlds, server.servers, selected], (key, value) => (key === "match" ? undefined : value));
  if (list.dataset.shown === text) return;
  list.dataset.shown = text;
  const focused = document.activeElement?.dataset?.world;
  list.replaceChildren(...server.worlds.map((world) => {
    const button = document.createElement("button");
    button.dataset.world = world.name;
    button.setAttribute("aria-current", String(world.name === selected));
    const name = document.createElement("b");
    name.textContent = short(world.title);
    name.title = world.title;
    const about = document.createElement("small");
    const fps = world.fps ?? (world.waiting ? serverOf(world).fps : null);
    const place = world.server === undefined ? world.name.slice(0, 14) : world.name.replace(/(world-.{4}).*/, "$1…").replace(/\/$/, "");
    const kind = world.kind === "perlert" ? "PERLERT" : fps ? `${fps} fps` : "lock-step";
    const parts = world.replay
      ? ["replay", `${world.replay.length} step${world.replay.length === 1 ? "" : "s"}`]
      : [kind, world.lanes ? `${world.lanes} lanes` : "", place];
    about.textContent = parts.filter(Boolean).join(" · ");
    const who = document.createElement("div");
    who.className = "who";
    if (world.recording) who.append(chip("● rec", false));
    const named = Object.fromEntries(world.match?.seats.map((one) => [one.seat, one.taken_by]) ?? []);
    who.append(...Object.entries(world.seats).map(([seat, taken]) => chip(taken ? `● ${named[seat] || seat}` : `○ ${seat}`, taken)));
    if (world.viewers) who.append(chip(`${world.viewers} watching`, false));
    button.append(name, about, who);
    button.onclick = () => {
      tell(null);
      select(world.name);
    };
    const item = document.createElement("li");
    item.append(button);
    return item;
  }), ...(server.servers ?? []).filter(({problem}) => problem).map(({name, problem}) => {
    const item = document.createElement("li");
    item.className = "lost";
    item.append(Object.assign(document.createElement("b"), {textContent: name}), Object.assign(document.createElement("small"), {textContent: problem}));
    return item;
  }));
  if (focused !== undefined) list.querySelector(`[data-world="${CSS.escape(focused)}"]`)?.focus();
  $("no-worlds").hidden = server.worlds.length > 0;
  showSeats();
}

function worldOf(name) {
  return server.worlds.find((world) => world.name === name);
}

function showSeats() {
  const lanes = worldOf(selected)?.lanes ?? 0;
  const seats = lanes > 1 ? laneSeats(worldOf(selected)) : Object.entries(worldOf(selected)?.seats ?? {});
  const several = seats.length > 1;
  $("seat-kind").textContent = lanes > 1 ? "Take over" : "Seat";
  $("seat-label").hidden = !several || playing !== null || Boolean(worldOf(selected)?.match) || worldOf(selected)?.kind === "perlert";
  const options = seats.map(([seat, taken]) => {
    return new Option(taken && lanes <= 1 ? `${seat} (taken)` : seat, seat);
  });
  const before = $("seat").value;
  $("seat").replaceChildren(...options);
  const free = seats.find(([, taken]) => !taken)?.[0];
  $("seat").value = seats.some(([seat]) => seat === before) ? before : free ?? seats[0]?.[0] ?? "";
  offer();
  $("lanes-label").hidden = !(lanes > 1);
}

// The lanes from whose agent one may take over: where there is one.
function laneSeats(world) {
  if (!Object.values(world.seats).some(Boolean)) return [];
  return Array.from({length: Math.min(world.lanes, 1024)}, (_, lane) => [`lane ${lane}`, true]);
}

// The environments of a server of several; the first choice is to play in the world that is shown, where there is one.
function showEnvironments() {
  const world = worldOf(selected);
  const ids = serverOf(world).environments ?? [];
  const list = !world || world.waiting ? ids : ["", ...ids];
  $("env-label").hidden = ids.length < 2 || playing !== null;
  if ($("env").dataset.shown === JSON.stringify(list)) return;
  $("env").dataset.shown = JSON.stringify(list);
  $("env").replaceChildren(...list.map((id) => new Option(id ? short(id) : "this world", id)));
}

// The environment of which Play makes a world; none: it joins the one that is shown.
function chosenEnvironment() {
  return (serverOf(worldOf(selected)).environments ?? []).length > 1 ? $("env").value : "";
}

// What the button does: it takes a free seat, or takes over from whoever has it. Lanes have an agent, or are looked at.
function offer() {
  recordings.update();
  showEnvironments();
  if (playing) return;
  if (chosenEnvironment()) {
    $("play").textContent = "Play";
    $("play").hidden = $("play").disabled = false;
    return;
  }
  const world = worldOf(selected);
  const lanes = (world?.lanes ?? 0) > 1;
  const taken = lanes || world?.seats[$("seat").value] === true;
  if (world?.match) $("play").disabled = Object.values(world.seats).every(Boolean);
  $("play").textContent = !taken ? "Play" : world?.match ? "Full" : "Take over";
  $("play").hidden = Boolean(world?.replay) || world?.kind === "perlert" || (lanes && !laneSeats(world).length);
}

function select(name) {
  selected = name;
  selectedServer = worldOf(name)?.server;
  $("stage-title").textContent = short(worldOf(name)?.title ?? server.title);
  $("empty").hidden = true;
  showWorlds();
  showSeats();
  watch(name);
}

// Watching

const MOST_AHEAD = 8;

function lanesWanted() {
  const text = $("lanes").value.trim();
  if (!text) return null;
  const lanes = text.split(",").flatMap((part) => {
    const [first, last = first] = part.split("-").map(Number);
    return Number.isInteger(first) && last >= first && last - first < 64 ? Array.from({length: last - first + 1}, (_, i) => first + i) : [];
  });
  return lanes.length ? lanes : null;
}

async function watch(name) {
  watching?.close();
  const world = worldOf(name);
  $("panel").hidden = true;
  if (world?.kind === "perlert") return visit(name);
  $("empty").hidden = !(world?.waiting && !playing);
  if (world?.waiting && !playing) {
    watching = null;
    $("empty-text").textContent = `${short(world.title)} is ready.`;
    return;
  }
  const stream = (watching = new Stream(token));
  frames = {arrived: [], bytes: 0, skipped: 0, newest: null, steps: []};
  returns.length = 0;
  if (!playing) badge(worldOf(name)?.replay ? "replay" : "watching", false);
  if (blind.has(name)) return observe(name, stream);
  const given = {role: textTensor("spectator"), frame: textTensor(kindOf(name))};
  const lanes = lanesWanted();
  if (lanes) given.lanes = intTensor(lanes);
  try {
    const {observations} = await stream.ask(request.join(name, given));
    const sent = performance.now();
    await stream.property("world.name");
    // As many requests on their way as a round trip has frames: far away, pictures come as often as nearby.
    const ahead = Math.max(1, Math.min(MOST_AHEAD, Math.ceil(((performance.now() - sent) * 60) / 1000)));
    const [frame, figures] = [observations.get("frame").uid, observations.get("watch").uid];
    const step = request.step([], [frame, figures]);
    const asked = [];
    const ask = () => {
      asked.push(stream.ask(step));
      asked.at(-1).catch(() => {});
    };
    for (let i = 0; i < ahead; i++) ask();
    while (watching === stream) {
      const answer = await asked.shift();
      ask();
      show(answer.observations.get(frame), answer.observations.get(figures));
    }
  } catch (error) {
    stream.close();
    if (watching === stream) {
      watching = null;
      if (drawsNothing(error) || lacksJpeg(error)) {
        (lacksJpeg(error) ? lossless : blind).add(name);
        watch(name);
      } else if (error.code !== 14 && error.code !== 1) tell(error.message.split("\n")[0]);
    }
  }
}

// Watching where there are no pictures.
async function observe(name, stream) {
  try {
    const joined = await stream.ask(request.join(name, {role: textTensor("spectator"), wait: textTensor("next_frame")}));
    if (watching !== stream) return;
    const seen = new Observations(joined, $("canvas"), $("panel"));
    while (watching === stream) {
      const answer = await stream.ask(request.step([], seen.uids));
      if (watching !== stream) return;
      seen.show(answer);
      await pause(40);
    }
  } catch (error) {
    stream.close();
    if (watching === stream) {
      watching = null;
      if (error.code !== 14 && error.code !== 1) tell(error.message.split("\n")[0]);
    }
  }
}

// A lobby of PERLERT, in place of a picture.
async function visit(name) {
  $("empty").hidden = true;
  if (playing) { // somewhere else
    wantsToPlay = false;
    playing.stream.close();
    stopped();
  }
  const lobby = (watching = new Lobby(name, {
    token, badge, announce, tell,
    panel: $("panel"),
    name: () => myName().replaceAll(" ", "-"),
    rename: (text) => text && localStorage.setItem("name", text),
    result: (total) => {
      returns.push(total);
      $("last-return").textContent = total.toFixed(2);
    },
    begin: (stream, keyboard) => {
      playing = {stream, keyboard, own: false, name, changed: null, wake: () => {}};
      recall(keyboard);
      showLegend();
      $("stage").focus();
      return playing;
    },
    end: stopped,
  }));
  try {
    await lobby.run();
  } catch (error) {
    if (watching === lobby) {
      watching = null;
      if (error.code !== 14) tell(error.message.split("\n")[0]);
    }
  } finally {
    lobby.close();
  }
}

function badge(text, live) {
  $("badge").hidden = false;
  $("badge").textContent = text;
  $("badge").className = live ? "badge live" : "badge";
}

// A picture has come: the newest is painted, others are left out.
function show(pictureBytes, figureBytes) {
  const data = values(pictureBytes);
  const [number, steps, age, cost, viewers, episodes, last, mean] = values(figureBytes);
  $("viewers").textContent = String(viewers);
  if (episodes > 0) {
    if (!returns.length || returns.episodes !== episodes) returns.push(last);
    returns.episodes = episodes;
    if (returns.length > 200) returns.shift();
    const several = Object.keys(worldOf(selected)?.returns ?? {}).length > 1; // each has a return of its own
    $("last-return").textContent = several ? "" : last.toFixed(Math.abs(last) < 100 ? 2 : 0);
    $("episodes").textContent = `${episodes} episode${episodes === 1 ? "" : "s"}${several ? "" : `, mean ${mean.toFixed(2)}`}`;
  }
  if (!data.length) return;
  const now = performance.now();
  if (frames.newest) frames.skipped += 1;
  frames.arrived.push(now);
  frames.bytes += data.length;
  frames.steps.push([now, steps]);
  while (frames.arrived[0] < now - 2000) frames.arrived.shift();
  while (frames.steps[0][0] < now - 2000) frames.steps.shift();
  if (!frames.newest) requestAnimationFrame(paint);
  frames.newest = {data: data.slice(), number, steps, age, cost, at: now};
}

async function paint() {
  const picture = frames.newest;
  frames.newest = null;
  if (!picture) return;
  const bitmap = await createImageBitmap(new Blob([picture.data]));
  const canvas = $("canvas");
  if (canvas.width !== bitmap.width || canvas.height !== bitmap.height) {
    canvas.width = bitmap.width;
    canvas.height = bitmap.height;
    canvas.classList.toggle("small", bitmap.width <= 320);
    $("frame").style.setProperty("--ratio", String(bitmap.width / bitmap.height));
  }
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  bitmap.close();
  const now = performance.now();
  canvas.dataset.pictures = String(Number(canvas.dataset.pictures ?? 0) + 1);
  $("age").textContent = `${(picture.age * 1000 + now - picture.at).toFixed(0)} ms`;
  while (waitingKeys.length && waitingKeys[0].frame <= picture.steps) {
    latencies.push(now - waitingKeys.shift().at);
    if (latencies.length > 120) latencies.shift();
  }
}

// Each seat's return, where several act: of the last episode, and the mean.
function seatReturns() {
  const found = Object.entries(worldOf(selected)?.returns ?? {});
  const several = found.length > 1;
  $("returns-graph").hidden = several;
  $("seat-returns").hidden = !several;
  if (!several) return;
  $("last-return").textContent = "";
  $("episodes").textContent = $("episodes").textContent.replace(/, mean.*/, "");
  $("seat-returns-rows").replaceChildren(...found.map(([seat, [last, mean]]) => {
    const row = document.createElement("tr");
    row.append(Object.assign(document.createElement("th"), {scope: "row", textContent: seat}));
    row.append(...[last, mean].map((value) => Object.assign(document.createElement("td"), {textContent: value.toFixed(2)})));
    return row;
  }));
}

// Taking over: while keys are held their action stands in for the agent's.

async function takeOver() {
  tell(null);
  const stream = new Stream(token);
  const world = worldOf(selected);
  try {
    // The world waits for a person's eyes. The stream of the pictures is in it already, so it can ask for the rate.
    const {fps} = watching ? JSON.parse(await watching.property("world.controls")) : {};
    const given = {role: textTensor("takeover"), name: textTensor(myName()), pace: tensor([Math.max(1, fps || DEFAULT_FPS)], DOUBLE, [])};
    const seat = $("seat").value;
    if ((world.lanes ?? 0) > 1) given.lane = tensor([Number(seat.slice(5))], 5, []);
    else if (Object.keys(world.seats).length > 1) given.agent = textTensor(seat);
    const joined = await stream.ask(request.join(selected, given));
    const keyboard = new Keyboard(JSON.parse(await stream.property("world.controls")));
    playing = {stream, keyboard, own: false, takesOver: true, name: selected, changed: null, wake: () => {}};
    recall(keyboard);
    $("play").textContent = "Give back";
    $("play").classList.add("stop");
    badge(`ready to take over from ${seat}: hold a key`, true);
    showLegend();
    showSeats();
    $("stage").focus();
    const play = playing;
    const wanted = ["acting", "steps", "seconds_left"].map((name) => joined.observations.get(name).uid);
    await stream.ask(request.step([], wanted));
    while (playing === play) {
      const actions = keyboard.holds ? [...joined.actions.values()].map((spec) => [spec.uid, actionTensor(keyboard.action(), spec)]) : [];
      const changed = play.changed;
      play.changed = null;
      const sent = performance.now();
      const answer = await stream.ask(request.step(actions, wanted));
      const acting = values(answer.observations.get(wanted[0]))[0] === 1;
      $("trip").textContent = `${(performance.now() - sent).toFixed(1)} ms`;
      const left = Math.ceil(values(answer.observations.get(wanted[2]))[0]);
      const gone = worldOf(play.name)?.seats?.[seat] === false;
      badge(gone ? `${seat} has left: nothing moves until it is back` : acting ? `you act for ${seat}` : left > SOON ? `${seat} acts: hold a key` : `hold a key, or ${seat} goes on without you in ${left} s`, acting && !gone);
      if (changed !== null) waitingKeys.push({at: changed, frame: values(answer.observations.get(wanted[1]))[0] + 1});
      if (play.changed === null) await Promise.race([pause(100), new Promise((resolve) => (play.wake = resolve))]);
    }
  } catch (error) {
    if (error.code !== 1) tell(error.message.split("\n")[0]);
  } finally {
    stream.close();
    if (playing?.stream === stream || !playing) stopped();
  }
}

function seed() {
  return crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;
}

function myName() {
  let name = localStorage.getItem("name");
  if (!name) localStorage.setItem("name", (name = `person ${Math.floor(Math.random() * 9000 + 1000)}`));
  return name;
}

$("name").value = localStorage.getItem("name") ?? "";
$("name").onchange = () => localStorage.setItem("name", ($("name").value = displayName($("name").value)));

// Playing

const DOUBLE = 2;
const DEFAULT_FPS = 30;
const SOON = 15; // seconds before a seat is given back at which the page begins to count
// In a turn-based world: milliseconds after which a key that stays down repeats, the rate, and how many presses wait.
const REPEAT_AFTER = 500;
const REPEATS = 4;
const MOST_PRESSES = 4;

function actionTensor(flat, spec) {
  return tensor(spec.dtype === 1 || spec.dtype === 2 ? flat : flat.map(Math.round), spec.dtype, spec.shape);
}

async function play(chosen) {
  wantsToPlay = true;
  tell(null);
  const stream = new Stream(token);
  const world = worldOf(selected);
  const home = serverOf(world);
  const own = !home.realtime; // a world that waits for its agent: one of our own
  const sees = !blind.has(home.name ?? "");
  let env = chosenEnvironment();
  const ids = home.environments ?? [];
  if (own && !env && ids.length > 1) env = ids.find((id) => id === world?.title) ?? ids[0];
  try {
    let name = selected ?? "";
    const wanted = {...(env && {env_id: textTensor(env)}), ...(env && sees && {render_mode: textTensor("rgb_array")}), ...(home !== server && {server: textTensor(home.name)})};
    if (own || env) name = (await stream.ask(request.create(wanted))).world;
    const given = !own ? {role: textTensor("player")} : sees ? {frame: textTensor(kindOf(home.name ?? ""))} : {};
    let seat = chosen ?? $("seat").value;
    if (!own && !env && Object.keys(world?.seats ?? {}).length > 1 && seat) given.agent = textTensor(seat);
    given.player = textTensor(`person:${myName()}`);
    const joined = await stream.ask(request.join(name, given));
    // A recording of what begins with a seed can be replayed.
    if (!home.match && (own || env || !(world?.begun ?? false))) await stream.ask(request.reset({seed: tensor([seed()], 5, [])}));
    const keyboard = new Keyboard(JSON.parse(await stream.property("world.controls")));
    if (keyboard.nothing !== null) throw new Error(`This world cannot be played here: ${keyboard.nothing}.`);
    const fps = (own ? keyboard.controls.fps : env ? home.fps : world?.fps ?? home.fps) || DEFAULT_FPS;
    if (env) await refresh(stream);
    if (home.match) {
      seat = await stream.property("world.agent");
      await refresh(stream);
    }
    playing = {stream, keyboard, own, name, seat: home.match ? seat : null, changed: null, wake: () => {}};
    if (own && keyboard.needsKey) playing.presses = [];
    showWorlds();
    recall(keyboard);
    $("play").textContent = "Stop";
    $("play").classList.add("stop");
    badge(own ? "playing your own world" : home.match ? `you are ${seat}` : seat && given.agent ? `playing ${seat}` : "playing", true);
    showLegend();
    showSeats();
    $("stage").focus();
    $("empty").hidden = true;
    if (own) $("stage-title").textContent = short(env || home.title);
    if (own) {
      watching?.close();
      watching = null;
      $("panel").hidden = true;
    } else if (!watching || env) select(name);
    await (home.match ? rounds : steps)(playing, joined, fps);
  } catch (error) {
    if (own && sees && (drawsNothing(error) || lacksJpeg(error))) {
      (lacksJpeg(error) ? lossless : blind).add(home.name ?? "");
      setTimeout(play);
    } else if (error.code !== 1) {
      const lost = error.code === 14;
      if (!lost) wantsToPlay = false;
      tell(error.message.split("\n")[0], !lost); // why it cannot be played stays until the person does something else
    }
  } finally {
    stream.close();
    if (playing?.stream === stream || !playing) stopped();
  }
}

// The rounds of a match, one after the other; between them the person says when to go on.
async function rounds(play, joined, fps) {
  for (let round = 0; playing === play; ) {
    const next = await match.begins(round);
    if (next === null || playing !== play) return;
    round = next;
    try {
      await steps(play, joined, fps);
    } catch (error) {
      if (error.code !== 9 && error.code !== 13) throw error; // the round is over, or was broken off
    }
  }
}

// The action of the next press of a key, in a world of one's own that stands still without: no action does nothing
// there. A press is one step, however long it takes; a key that stays down repeats slowly. null: nobody plays any more.
async function nextPress(play) {
  let again = performance.now() + (play.repeats ? 1000 / REPEATS : REPEAT_AFTER);
  while (playing === play) {
    play.repeats = !play.presses.length;
    if (!play.repeats) return play.presses.shift();
    if (!play.keyboard.holds) again = performance.now() + REPEAT_AFTER;
    else if (performance.now() >= again) return play.keyboard.action();
    await Promise.race([pause(50), new Promise((resolve) => (play.wake = resolve))]);
  }
  return null;
}

async function steps(play, joined, fps) {
  const uids = Object.fromEntries([...joined.observations].map(([name, spec]) => [name, spec.uid]));
  const names = ["reward", "terminated", "truncated", "timing", "frame", "watch"].filter((name) => name in uids && !(name === "frame" && !play.own));
  const seen = play.own && !("frame" in uids) ? new Observations(joined, $("canvas"), $("panel")) : null;
  const wanted = [...names.map((name) => uids[name]), ...(seen?.uids ?? [])];
  let total = 0, running = false, episode = 0, due = performance.now();
  while (playing === play) {
    const action = running && play.presses ? await nextPress(play) : play.keyboard.action();
    if (playing !== play) return;
    const actions = [...joined.actions.values()].map((spec) => [spec.uid, actionTensor(action, spec)]);
    const changed = play.changed;
    play.changed = null;
    const sent = performance.now();
    const answer = await play.stream.ask(request.step(running ? actions : [], wanted));
    const now = performance.now();
    const read = (name) => values(answer.observations.get(uids[name]));
    $("trip").textContent = `${(now - sent).toFixed(1)} ms`;
    if ("timing" in uids) {
      const timing = read("timing");
      if (changed !== null && running) waitingKeys.push({at: changed, frame: timing[6] + 1});
      $("dropped").textContent = String(timing[11]);
    }
    if (play.own) {
      if (changed !== null && running) waitingKeys.push({at: changed, frame: -1});
      if (seen) seen.show(answer);
      else show(answer.observations.get(uids.frame), answer.observations.get(uids.watch));
    }
    total += running ? read("reward")[0] : 0;
    if (answer.state !== RUNNING) {
      if (play.seat) return;
      episode += 1;
      announce(`Episode ${episode} ended. Return ${total.toFixed(2)}.`);
      total = 0;
      play.presses?.splice(0);
    }
    running = answer.state === RUNNING;
    // A world of one's own has waited meanwhile: it has nothing to catch up with.
    due = Math.max(due + 1000 / fps, play.own ? now : now - 100);
    // A key that changes is sent at once; else one message a frame, with all keys that are held.
    const early = play.own ? new Promise(() => {}) : new Promise((resolve) => (play.wake = resolve));
    if (!play.presses && (play.changed === null || play.own)) await Promise.race([pause(Math.max(0, due - performance.now())), early]);
  }
}

function stop() {
  wantsToPlay = false;
  match.left();
  const {stream, name, own} = playing;
  playing = null;
  stream.close();
  stopped();
  if (own) {
    nothing();
    if (server.worlds.length) select(server.worlds[0].name);
  } else select(name);
}

function stopped() {
  playing = null;
  $("play").textContent = "Play";
  $("play").classList.remove("stop");
  $("legend").replaceChildren();
  $("pad").hidden = true;
  waitingKeys.length = 0;
  if (selected === null) $("badge").hidden = true;
  else badge(worldOf(selected)?.replay ? "replay" : "watching", false);
  showSeats();
}

// Keys

function recall(keyboard) {
  const stored = localStorage.getItem(`keys ${JSON.stringify(keyboard.controls).length} ${selected ?? ""}`);
  if (stored) JSON.parse(stored).forEach((name, position) => name && keyboard.assign(position, name));
}

function showLegend() {
  const {keyboard, own, takesOver} = playing;
  const entries = keyboard.legend();
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
    button.onclick = () => {
      announce(`Press a key for: ${meaning}`);
      document.addEventListener("keydown", (event) => {
        event.preventDefault();
        event.stopImmediatePropagation();
        keyboard.assign(position, nameOf(event));
        const names = keyboard.legend().map(([[key]]) => key);
        localStorage.setItem(`keys ${JSON.stringify(keyboard.controls).length} ${selected ?? ""}`, JSON.stringify(names));
        announce("");
        button.blur();
        showLegend();
      }, {once: true, capture: true});
    };
    return button;
  }));
  const resting = takesOver ? "no key: the agent acts" : keyboard.resting(own && keyboard.needsKey);
  if (entries.length && resting) $("legend").append(Object.assign(document.createElement("span"), {className: "hint", textContent: resting}));
  if (!entries.length) announce(keyboard.controls.why ?? "");
  showPad(keyboard);
}

// The buttons for fingers: directions where they lie, the others beside them.
const fingers = new Map(); // the button below each finger

function showPad(keyboard) {
  const {directions, others} = keyboard.spatial();
  const button = (name, place) => {
    const element = document.createElement("button");
    element.textContent = signOf(name);
    element.dataset.key = name;
    element.tabIndex = -1;
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
  $("pad").hidden = !keyboard.names.length;
  $("pad").replaceChildren(...(directions.length ? [cross] : []), ...(others.length ? [group("rest", others.map((name) => button(name)))] : []));
}

// A finger that slides to the next button presses that one.
function finger(event) {
  const down = event.type === "pointerdown";
  const before = fingers.get(event.pointerId);
  if (!down && before === undefined) return;
  event.preventDefault();
  if (down) $("pad").setPointerCapture(event.pointerId);
  const lifted = event.type === "pointerup" || event.type === "pointercancel";
  const below = lifted ? null : down ? event.target : document.elementFromPoint(event.clientX, event.clientY);
  const name = below?.closest?.("#pad button")?.dataset.key ?? "";
  if (name === before) return;
  lifted ? fingers.delete(event.pointerId) : fingers.set(event.pointerId, name);
  if (before && ![...fingers.values()].includes(before)) hold(before, false);
  if (name) hold(name, true);
}

for (const kind of ["pointerdown", "pointermove", "pointerup", "pointercancel"]) $("pad").addEventListener(kind, finger);

function hold(name, down) {
  if (!playing) return;
  const {held} = playing.keyboard;
  if (held.has(name) === down) return;
  down ? held.add(name) : held.delete(name);
  if (down && playing.presses && playing.presses.length < MOST_PRESSES) playing.presses.push(playing.keyboard.action(new Set([name])));
  playing.changed ??= performance.now();
  playing.wake();
  for (const sign of document.querySelectorAll(`[data-key="${CSS.escape(name)}"]`)) sign.classList.toggle("held", down);
}

function isTyping(event) {
  return ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName) || document.querySelector("dialog[open]") !== null;
}

document.addEventListener("keydown", (event) => {
  if (!playing || isTyping(event) || event.ctrlKey || event.metaKey || event.altKey) return;
  const name = playing.keyboard.meant(nameOf(event));
  if (name === "escape") stop();
  else if (playing.keyboard.uses(name)) {
    event.preventDefault();
    hold(name, true);
  }
});
document.addEventListener("keyup", (event) => playing && hold(playing.keyboard.meant(nameOf(event)), false));
window.addEventListener("blur", () => playing && [...playing.keyboard.held].forEach((name) => hold(name, false)));
$("play").onclick = () => (playing ? stop() : $("play").textContent === "Take over" ? takeOver() : play());
$("seat").onchange = $("env").onchange = offer;
$("begin").onclick = () => play();
$("lanes").onchange = () => selected !== null && watch(selected);

// Figures

function figures() {
  const now = performance.now();
  const {arrived, steps} = frames;
  const seconds = arrived.length > 1 ? (arrived.at(-1) - arrived[0]) / 1000 : 0;
  $("rate").textContent = seconds && now - arrived.at(-1) < 2000 ? ((arrived.length - 1) / seconds).toFixed(1) : "0";
  if (steps.length > 1) {
    const span = (steps.at(-1)[0] - steps[0][0]) / 1000;
    $("steps").textContent = span ? ((steps.at(-1)[1] - steps[0][1]) / span).toFixed(span < 1 ? 1 : 0) : "–";
  }
  $("data").textContent = `${((frames.bytes * 8) / 1e6).toFixed(2)} Mbit/s`;
  frames.bytes = 0;
  if (!playing) $("dropped").textContent = String(frames.skipped);
  const sorted = [...latencies].sort((one, other) => one - other);
  $("latency").dataset.all = latencies.map((value) => value.toFixed(1)).join(" ");
  $("latency").textContent = sorted.length ? `${sorted[sorted.length >> 1].toFixed(0)} ms` : "–";
  line($("latency-graph"), latencies, {limit: 50, least: 0});
  line($("returns-graph"), returns);
  seatReturns();
}

// A world in real time goes on by itself: where no picture comes, it stands still, or the connection does.
function stall() {
  const world = worldOf(selected);
  const runs = world?.fps && watching && !lost && !world.replay && !world.waiting && (world.match?.state ?? "running") === "running";
  const last = frames.arrived.at(-1) ?? Infinity;
  const seconds = (performance.now() - last) / 1000;
  const stalls = Boolean(runs) && seconds >= Math.max(1, 2 / world.fps);
  if (stalls && $("stall").hidden) announce("No new picture comes.");
  $("stall").hidden = !stalls;
  if (stalls) $("stall").textContent = `No picture for ${Math.floor(seconds)} s: the world stands still, or the connection does`;
}

setInterval(figures, 1000);
setInterval(stall, 250);
lobby();
