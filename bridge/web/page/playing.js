// The person's seat: playing, matches, taking over, and giving the seat back.

import {Stream} from "./client.js";
import {$, pause} from "./dom.js";
import {draw} from "./draw.js";
import {note} from "./figures.js";
import {recall} from "./input.js";
import {Keyboard} from "./keys.js";
import {drawsNothing, lacksJpeg, Observations} from "./observations.js";
import {nextPress, TURNS} from "./presses.js";
import {kindOf, learn, seatKey, serverOf, state, want, worldOf} from "./state.js";
import {match} from "./views.js";
import {clear, show} from "./watching.js";
import {request, tensor, textTensor, values} from "./wire.js";
import {announce, badge, myName, offer, tell} from "./words.js";
import {chosenEnvironment, refresh, select, selectFirst} from "./worlds.js";

const RUNNING = 1;
const FULL = 8; // RESOURCE_EXHAUSTED: the seat is occupied

const KEPT = /free in (\d+(?:\.\d+)?) s\b/; // the part of a refusal that says for how long a seat is kept

const DOUBLE = 2;
const DEFAULT_FPS = 30;
const SOON = 15; // seconds before the seat is given back at which the countdown is shown
const KNOWN_WITHIN = 30_000; // milliseconds within which the server reports that a seat was given back
const QUIET = 5000; // the least milliseconds between two announced ends of episodes

// Taking over: while keys are held, their action replaces the agent's.

export async function takeOver(chosen) {
  if (state.joining) return; // a double click
  tell(null);
  announce("");
  const stream = (state.joining = new Stream(state.token));
  const world = worldOf(state.selected);
  try {
    // The world slows down for the person. The stream of pictures has joined it already, and has requested the rate.
    const {fps: own} = (await state.watching?.controls) ?? {};
    const fps = serverOf(world).play_fps ?? own;
    const given = {role: textTensor("takeover"), name: textTensor(myName()), pace: tensor([Math.max(1, fps || DEFAULT_FPS)], DOUBLE, [])};
    const seat = chosen ?? $("seat").value;
    want({world: state.selected, seat, takesOver: true});
    given.seat_key = textTensor(seatKey());
    if ((world.lanes ?? 0) > 1) given.lane = tensor([Number(seat.slice(5))], 5, []);
    else if (Object.keys(world.seats).length > 1) given.agent = textTensor(seat);
    const joined = await stream.ask(request.join(state.selected, given));
    const keyboard = new Keyboard(JSON.parse(await stream.property("world.controls")));
    if (state.joining !== stream) return; // the person has done something else meanwhile
    state.joining = null;
    state.playing = {stream, keyboard, own: false, takesOver: true, name: state.selected, changed: null, wake: () => {}};
    recall(keyboard);
    const hold = matchMedia("(pointer: coarse)").matches ? "hold a button" : "hold a key"; // phones have no keys
    badge(`ready to take over from ${seat}: ${hold}`, true);
    $("stage").focus({preventScroll: true});
    const play = state.playing;
    const wanted = ["acting", "steps", "seconds_left"].map((name) => joined.observations.get(name).uid);
    await stream.ask(request.step([], wanted));
    let last = new Set();
    while (state.playing === play) {
      // A key that was released and pressed again must be reported in between, or the server would see a held key.
      if ([...keyboard.pressed].some((key) => last.has(key))) await stream.ask(request.step([], wanted));
      const keys = last = keyboard.take();
      const actions = keys.size ? [...joined.actions.values()].map((spec) => [spec.uid, actionTensor(keyboard.action(keys), spec)]) : [];
      const changed = play.changed;
      play.changed = null;
      const sent = performance.now();
      const answer = await stream.ask(request.step(actions, wanted));
      const acting = values(answer.observations.get(wanted[0]))[0] === 1;
      note("trip", `${(performance.now() - sent).toFixed(1)} ms`);
      const left = Math.ceil(values(answer.observations.get(wanted[2]))[0]);
      const gone = worldOf(play.name)?.seats?.[seat] === false;
      badge(gone ? `${seat} has left: nothing moves until it is back` : acting ? `you act for ${seat}` : left > SOON ? `${seat} acts: ${hold}` : `${hold}, or ${seat} goes on without you in ${left} s`, acting && !gone, true);
      if (changed !== null) state.waitingKeys.push({at: changed, frame: values(answer.observations.get(wanted[1]))[0] + 1});
      if (play.changed === null) await Promise.race([pause(100), new Promise((resolve) => (play.wake = resolve))]);
    }
  } catch (error) {
    if (error.code === FULL && isComingBack()) setTimeout(() => state.wanted?.takesOver && takeOver(chosen), 1000);
    else if (error.code !== 1 && error.code !== 14) {
      want(null);
      if (error.code === FULL) refused(error, chosen ?? $("seat").value, takeOver);
      else tell(error.message.split("\n")[0]);
    }
  } finally {
    stream.leave();
    if (state.joining === stream) state.joining = null;
    if (state.playing?.stream === stream || !state.playing) stopped();
  }
}

// True if an occupied seat may be the person's own, whose lost connection the server has not noticed yet.
function isComingBack() {
  return state.wanted !== null && performance.now() < state.comingBackUntil;
}

// Tell why a seat is occupied. A seat that is kept for its former player is offered when it becomes free: the server says when.
function refused(error, seat, take, words = "") {
  const [, seconds] = KEPT.exec(error.message) ?? [];
  if (seconds) offer(seat ? `The seat ${seat}` : "The seat", Number(seconds), () => take(seat));
  else tell(words || error.message.split("\n")[0], true);
}

function seed() {
  return crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;
}

function actionTensor(flat, spec) {
  return tensor(spec.dtype === 1 || spec.dtype === 2 ? flat : flat.map(Math.round), spec.dtype, spec.shape);
}

export async function play(chosen) {
  if (state.joining) return; // a double click
  tell(null);
  announce("");
  const stream = (state.joining = new Stream(state.token));
  const world = worldOf(state.selected);
  const home = serverOf(world);
  const waits = !home.realtime; // a lock-step world waits for its agent
  const own = waits && !home.one_world; // so the person gets their own world
  const sees = !state.blind.has(home.name ?? "");
  let env = chosenEnvironment();
  const ids = home.environments ?? [];
  if (own && !env && ids.length > 1) env = ids.find((id) => id === world?.title) ?? ids[0];
  try {
    let name = state.selected ?? "";
    const wanted = {...(env && {env_id: textTensor(env)}), ...(env && sees && {render_mode: textTensor("rgb_array")}), ...(home !== state.server && {server: textTensor(home.name)})};
    if (own || env) name = (await stream.ask(request.create(wanted))).world;
    const given = !own ? {role: textTensor("player")} : sees ? {frame: textTensor(kindOf(home.name ?? ""))} : {};
    let seat = chosen ?? $("seat").value;
    want({world: own ? null : state.selected, seat, takesOver: false});
    if (!own && !env) given.seat_key = textTensor(seatKey());
    if (!own && !env && Object.keys(world?.seats ?? {}).length > 1 && seat) given.agent = textTensor(seat);
    given.player = textTensor(`person:${myName()}`);
    const joined = await stream.ask(request.join(name, given));
    // A recording that begins with a seed can be replayed. A game with a single world begins a round for its player.
    if (!home.match && (own || env || home.one_world || !(world?.begun ?? false))) await stream.ask(request.reset({seed: tensor([seed()], 5, [])}));
    const keyboard = new Keyboard(JSON.parse(await stream.property("world.controls")));
    if (keyboard.nothing !== null) throw new Error(`This world cannot be played here: ${keyboard.nothing}.`);
    const fps = (waits ? home.play_fps ?? keyboard.controls.fps : env ? home.fps : world?.fps ?? home.fps) || DEFAULT_FPS;
    if (env) await refresh(stream);
    if (home.match) {
      seat = await stream.property("world.agent");
      await refresh(stream);
    }
    if (state.joining !== stream) return; // the person has done something else meanwhile
    state.joining = state.gaveBack = null;
    state.playing = {stream, keyboard, own, waits, name, title: env || home.title, seat, inMatch: Boolean(home.match), changed: null, wake: () => {}};
    if (waits && keyboard.needsKey) Object.assign(state.playing, {presses: [], rate: home.play_fps ?? keyboard.controls.fps ?? TURNS});
    recall(keyboard);
    badge(own ? "playing your own world" : home.match ? `you are ${seat}` : seat && given.agent ? `playing ${seat}` : "playing", true);
    $("stage").focus({preventScroll: true});
    if (own) {
      state.watching?.close();
      state.watching = null;
      clear(null);
      $("panel").hidden = true;
    } else if (!state.watching || env) select(name);
    await (home.match ? rounds : steps)(state.playing, joined, fps);
  } catch (error) {
    if (own && sees && (drawsNothing(error) || lacksJpeg(error))) {
      (lacksJpeg(error) ? state.lossless : state.blind).add(home.name ?? "");
      setTimeout(play);
    } else if (error.code === FULL && isComingBack()) setTimeout(() => state.wanted && !state.playing && play(chosen), 1000);
    else if (error.code !== 1) {
      const unreachable = error.code === 14;
      if (!unreachable) want(null);
      if (error.code === FULL && !own && !env) refused(error, chosen ?? $("seat").value, play, home.match ? "" : "Somebody else has the seat already.");
      else tell(error.message.split("\n")[0], !unreachable); // a reason why it cannot be played stays until the person does something else
    }
  } finally {
    stream.leave();
    if (state.joining === stream) state.joining = null;
    if (state.playing?.stream === stream || !state.playing) stopped();
  }
}

// The rounds of a match, one after the other; before each, the person says when to go on.
async function rounds(play, joined, fps) {
  for (let round = 0; state.playing === play; ) {
    const next = await match.begins(round);
    if (next === null || state.playing !== play) return;
    round = next;
    try {
      await steps(play, joined, fps);
    } catch (error) {
      if (error.code !== 9 && error.code !== 13) throw error; // the round has ended, or was cut off
    }
  }
}

async function steps(play, joined, fps) {
  const uids = Object.fromEntries([...joined.observations].map(([name, spec]) => [name, spec.uid]));
  const mask = play.presses ? "observation.action_mask" : ""; // in real time there are no turns
  const names = ["reward", mask, "terminated", "truncated", "timing", "frame", "watch"].filter((name) => name in uids && !(name === "frame" && !play.own));
  const seen = play.own && !("frame" in uids) ? new Observations(joined, $("canvas"), $("panel")) : null;
  const wanted = [...names.map((name) => uids[name]), ...(seen?.uids ?? [])];
  let total = 0, running = false, episode = 0, due = performance.now(), quietUntil = 0;
  while (state.playing === play) {
    const action = running && play.presses ? await nextPress(play) : play.keyboard.action(play.keyboard.take());
    if (state.playing !== play) return;
    const actions = [...joined.actions.values()].map((spec) => [spec.uid, actionTensor(action, spec)]);
    const changed = play.changed;
    play.changed = null;
    const sent = performance.now();
    const answer = await play.stream.askUntilItGoesOn(request.step(running ? actions : [], wanted));
    if (state.playing !== play) return; // the page shows another world now
    const now = performance.now();
    const read = (name) => values(answer.observations.get(uids[name]));
    note("trip", `${(now - sent).toFixed(1)} ms`);
    if ("timing" in uids) {
      const timing = read("timing");
      if (changed !== null && running) state.waitingKeys.push({at: changed, frame: timing[6] + 1});
      note("dropped", String(timing[11]));
    }
    if (play.own) {
      if (changed !== null && running) state.waitingKeys.push({at: changed, frame: -1});
      if (seen) seen.show(answer);
      else show(answer.observations.get(uids.frame), answer.observations.get(uids.watch));
    }
    total += running ? read("reward")[0] : 0;
    if (answer.state !== RUNNING) {
      if (play.inMatch) return;
      episode += 1;
      announce(`Episode ${episode} ended. Return ${total.toFixed(2)}.`, now > quietUntil); // some episodes end several times a second
      if (now > quietUntil) quietUntil = now + QUIET;
      total = 0;
      play.presses?.splice(0);
      play.repeats = false; // a held key pauses, so that the person sees the beginning of the next episode
    }
    running = answer.state === RUNNING;
    if (mask in uids) play.allowed = running ? read(mask) : null;
    // A world in lock-step has waited, and has nothing to catch up with.
    due = Math.max(due + 1000 / fps, play.waits ? now : now - 100);
    // A changed key is sent at once; otherwise one message per frame, with all held keys.
    const early = play.waits ? new Promise(() => {}) : new Promise((resolve) => (play.wake = resolve));
    if (!play.presses && (play.changed === null || play.waits)) await Promise.race([pause(Math.max(0, due - performance.now())), early]);
  }
}

export function stop() {
  want(null);
  match.left();
  const {stream, name, own, takesOver, seat} = state.playing;
  state.playing = null;
  stream.leave();
  stopped();
  if (own) {
    state.server.worlds = state.server.worlds.filter((world) => world.name !== name); // the world ends with its only player
    selectFirst();
  } else {
    if (!takesOver) free(worldOf(name), seat);
    select(name);
  }
}

// Show a seat that was given back as free, before the server reports it.
function free(world, seat) {
  const given = seat || Object.keys(world?.seats ?? {})[0];
  if (!world || given === undefined) return;
  state.gaveBack = {world: world.name, seat: given, player: `person:${myName()}`, until: performance.now() + KNOWN_WITHIN};
  learn(state.server);
}

export function stopped() {
  state.playing = null;
  state.waitingKeys.length = 0;
  state.badge = state.selected === null ? null : {text: worldOf(state.selected)?.replay ? "replay" : "watching", live: false, mine: false};
  draw();
}
