// The entry point of the page. The loop below keeps the connection to the server, and polls its list of worlds.

import {startBar} from "./bar.js";
import {Refused, Stream, UNAUTHENTICATED, UNAVAILABLE} from "./client.js";
import {$, local, pause} from "./dom.js";
import {draw} from "./draw.js";
import {figures, note, showFigures, stall} from "./figures.js";
import {startInput} from "./input.js";
import {greet, startInvitations} from "./invite.js";
import {play, stop, takeOver} from "./playing.js";
import {firstWorld, learn, state, want, worldOf} from "./state.js";
import {match, recordings} from "./views.js";
import {watch} from "./watching.js";
import {askForToken, displayName, say, sentence, tell} from "./words.js";
import {nothing, select} from "./worlds.js";

const PATIENCE = 4000; // milliseconds
const SILENCE = 15_000; // milliseconds without a response after which the page reconnects
const SEAT_WAITS = 30_000; // milliseconds: the server's `seat_timeout`

// Request the list of worlds. Show a message if the response takes long: the connection may be dead without an error.
async function ask(stream) {
  const late = setTimeout(() => say("", "the server does not answer"), PATIENCE);
  const lost = setTimeout(() => stream.close(new Refused(UNAVAILABLE, "the connection was lost")), SILENCE);
  try {
    learn(JSON.parse(await stream.property("server.web")));
  } finally {
    clearTimeout(late);
    clearTimeout(lost);
  }
}

async function lobby() {
  let why = null; // the server's reason for ending the last connection
  for (let wait = 300; ; wait = Math.min(wait * 1.6, 4000)) {
    const stream = new Stream(state.token);
    try {
      await ask(stream);
      say("good", "connected");
      why = null;
      wait = 300;
      await arrive();
      for (;;) {
        draw();
        await pause(match.pace);
        const before = performance.now();
        await ask(stream);
        state.trip = performance.now() - before;
        say("good", state.server.draining ? "connected; the server is about to stop" : "connected");
        if (!state.playing) note("trip", `${state.trip.toFixed(1)} ms`);
        if (isLost()) continue;
        if (state.selected !== null && !worldOf(state.selected) && !state.playing && state.selected !== recordings.expected) nothing();
        if (state.watching || state.playing?.own) continue;
        if (state.selected === null && firstWorld()) select(firstWorld().name);
        else if (worldOf(state.selected)) watch(state.selected); // joining failed, or the world has only just begun
      }
    } catch (error) {
      stream.close();
      leave();
      if (error.code === UNAUTHENTICATED) {
        say("bad", "access denied");
        await askForToken(error.message);
        wait = 0;
      } else {
        say("bad", `${error.message}; trying again`);
        if (!error.message.startsWith("the connection was lost")) why = error.message;
        tell(`${sentence(why ?? error.message)} It is tried again.`, true);
      }
    }
    await pause(wait);
  }
}

// After connecting: watch the world that was watched before, or the first one.
async function arrive() {
  state.selected = state.wanted?.world ?? state.selected;
  if (!worldOf(state.selected)) state.selected = firstWorld()?.name ?? null;
  state.connected = true;
  tell(null);
  if (state.selected !== null) select(state.selected);
  greet();
  if (state.wanted?.takesOver && !worldOf(state.wanted.world)) {
    want(null);
    tell("The world in which you took over is gone.");
  } else if (state.wanted) comeBack();
}

// Take the person's former seat again.
function comeBack() {
  state.comingBackUntil = performance.now() + SEAT_WAITS;
  state.wanted.takesOver ? takeOver(state.wanted.seat) : play(state.wanted.seat);
}

// True while the server of the watched world is lost. Its worlds return with it, and other servers' worlds are still shown.
function isLost() {
  const home = state.server.servers?.find(({name}) => name === state.selectedServer);
  if (home?.problem && !worldOf(state.selected)) {
    state.lost = true;
    state.watching?.close();
    state.watching = null;
    tell(`${home.problem} It is tried again.`, true);
    return true;
  }
  if (state.lost) {
    state.lost = false;
    state.blind.clear(); // a restarted server may render
    tell(null);
    if (state.wanted && !state.playing && worldOf(state.selected)) comeBack();
  }
  return false;
}

function leave() {
  state.watching?.close();
  state.watching = null;
  match.left();
  state.joining?.close();
  if (state.playing) {
    state.playing.stream.close();
    state.playing = null;
  }
  state.connected = false;
  draw();
}

$("name").value = local.getItem("name") ?? "";
$("name").onchange = () => local.setItem("name", ($("name").value = displayName($("name").value)));
$("play").onclick = () => (state.playing ? stop() : $("play").textContent === "Take over" ? takeOver() : play());
$("seat").onchange = $("env").onchange = draw;
$("begin").onclick = () => play();
$("lanes").onchange = () => state.selected !== null && watch(state.selected);
startInput();
startBar();
startInvitations();
// An invitation or a token was opened in this tab: for a new fragment, the browser does not reload the page.
window.addEventListener("hashchange", () => location.hash.includes("=") && location.reload());
setInterval(figures, 1000);
setInterval(showFigures, 250);
setInterval(stall, 250);
lobby();
