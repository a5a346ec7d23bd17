// Key presses in a person's own world that waits for them: each is a step, and a held key repeats.

import {pause} from "./dom.js";
import {state} from "./state.js";
import {announce} from "./words.js";

export const TURNS = 4; // the steps per second of a held key, if the environment has no rate

// Milliseconds after which a held key repeats, when a tap would be over: the time of two steps, within these bounds.
const REPEAT_SOONEST = 300;
const REPEAT_LATEST = 500;
const OTHERS_TURN = 300; // milliseconds for which a person sees the own move before the next one

// The action of the next key press in a person's own world that stands still otherwise, because no action does nothing there. A
// press is one step, however long it takes; a held key repeats at the rate of play, as in real time. null: nobody plays any
// more.
export async function nextPress(play) {
  const patience = Math.min(REPEAT_LATEST, Math.max(REPEAT_SOONEST, 2000 / play.rate));
  // Counted from when the last press was due, so that the time of its step does not slow the rate down.
  let again = play.repeats ? Math.max(performance.now(), play.again + 1000 / play.rate) : performance.now() + patience;
  while (state.playing === play) {
    if (play.allowed && !play.allowed.some(Boolean)) { // it is another player's turn: the person's action is ignored
      play.repeats = false; // a held key is not an answer to the other player's move
      await pause(OTHERS_TURN);
      return play.keyboard.action(new Set());
    }
    play.repeats = !play.presses.length;
    const action = play.presses.shift() ?? (play.keyboard.holds && performance.now() >= again ? play.keyboard.action() : null);
    if (action && isAllowed(play, action)) {
      play.again = again;
      return action;
    }
    if (!play.keyboard.holds) again = performance.now() + patience;
    const left = again - performance.now();
    await Promise.race([pause(left > 0 ? Math.min(50, left) : 50), new Promise((resolve) => (play.wake = resolve))]);
  }
  return null;
}

// True if the environment's `action_mask`, as in board games, allows an action.
function isAllowed(play, [action]) {
  const allowed = !play.allowed || Boolean(play.allowed[action - play.keyboard.controls.start]);
  announce(allowed ? "" : "That is not allowed now.");
  return allowed;
}
