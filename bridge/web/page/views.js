// The parts of the page that read and change its state: recordings and matches.

import {MatchView} from "./match.js";
import {play, stop} from "./playing.js";
import {Recordings} from "./recordings.js";
import {state} from "./state.js";
import {intTensor, request} from "./wire.js";
import {announce, retract, tell} from "./words.js";
import {refresh, select, selectFirst} from "./worlds.js";

export const recordings = new Recordings({
  token: () => state.token,
  server: () => state.server,
  selected: () => state.selected,
  playing: () => state.playing,
  select: (name, newer) => {
    if (state.playing) stop();
    state.server = newer;
    select(name);
  },
  leave: selectFirst,
  tell,
  announce,
  retract,
});

export const match = new MatchView({
  sit: (seat) => play(seat),
  ready: async (value) => {
    try {
      await state.playing?.stream.ask(request.write("world.ready", intTensor(Number(value))));
      await refresh(state.playing?.stream);
    } catch (error) {
      if (error.code !== 1) tell(error.message);
    }
  },
  announce: (text) => announce(text),
});
