// Presses of keys in a world of one's own that waits for them: each is a step, and a key that stays down repeats.

import {pause} from "./dom.js";
import {state} from "./state.js";
import {announce} from "./words.js";

export const TURNS = 4; // the steps a second of a key that stays down, where the environment names no rate

// Milliseconds after which such a key repeats: a tap is over by then. Two steps' time, within these bounds.
const REPEAT_SOONEST = 300;
const REPEAT_LATEST = 500;
const OTHERS_TURN = 300; // milliseconds for which a person sees the own move before the next one

// The action of the next press of a key, in a world of one's own that stands still without: no action does nothing
// there. A press is one step, however long it takes; a key that stays down repeats at the rate of play, as in real time.
// null: nobody plays any more.
export async function nextPress(play) {
  const patience = Math.min(REPEAT_LATEST, Math.max(REPEAT_SOONEST, 2000 / play.rate));
  // From when the last one was due: the time that its step took does not slow the rate down.
  let again = play.repeats ? Math.max(performance.now(), play.again + 1000 / play.rate) : performance.now() + patience;
  while (state.playing === play) {
    if (play.allowed && !play.allowed.some(Boolean)) { // it is another's turn: what the person's seat does counts for nothing
      play.repeats = false; // a key that is still down is no answer to the other's move
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

// True if the environment's `action_mask`, as board games have it, allows an action.
function isAllowed(play, [action]) {
  const allowed = !play.allowed || Boolean(play.allowed[action - play.keyboard.controls.start]);
  announce(allowed ? "" : "That is not allowed now.");
  return allowed;
}
