// Recordings: the switch of a world's recording, the list of recorded episodes, and the controls of a replay.

import {Stream} from "./client.js";
import {$, pause, replaceKeepingFocus, works, write} from "./dom.js";
import {acted, amount, bests, branch, element, moment, players, reason, steps} from "./episodes.js";
import {request, textTensor} from "./wire.js";

const NOTHING = "This server records nothing. Start it with --record FOLDER, in Python record=\"FOLDER\", to keep every episode.";
const GATEWAY = "A gateway keeps no recordings. Start the server itself with --web --record FOLDER, and open its own page.";
const NO_WORLD = "No world is shown that can be recorded. Press Play, or choose one on the left.";

export class Recordings {
  #page;
  #listing = null; // the stream that reads the list
  #stream = null; // the stream that controls a replay
  #shown = null; // the name of the replay's world
  #wanted = null; // the next value to write
  /** @type {(value?: any) => void} */
  #wake = () => {};
  #dragging = false;
  #found = {episodes: [], reading: false, problem: ""}; // the list as last received
  #said = null; // {name, text}: the last announcement about a world's recording
  #idle = false; // true if episodes without a player are listed
  #state = null;

  // The world of a replay, which the list of worlds may not contain yet.
  expected = null;

  // page: {token(), server(), selected(), playing(), select(name), leave(), tell(text), announce(text), retract(text)}
  constructor(page) {
    this.#page = page;
    $("record").onclick = () => this.#switch();
    $("replays").onclick = () => this.#open();
    $("replays").onpointerenter = $("replays").onfocus = () => this.#prepare();
    $("recordings-idle").onclick = () => {
      this.#idle = !this.#idle;
      this.#list(this.#found);
    };
    $("recordings-order").onchange = () => this.#list(this.#found);
    $("recordings-close").onclick = () => $("recordings").close();
    $("recordings").onclose = () => this.#listing?.close();
    $("player-play").onclick = () => this.#steer({paused: !this.#state?.paused});
    $("player-speed").onchange = () => this.#steer({speed: Number($("player-speed").value)});
    $("player-seek").oninput = () => {
      this.#dragging = true;
      this.#place(Number($("player-seek").value));
      this.#steer({position: Number($("player-seek").value)});
    };
    $("player-seek").onchange = () => (this.#dragging = false);
    $("player-close").onclick = () => {
      page.leave();
      $("replays").focus(); // the controls are hidden, and have lost the focus
    };
    document.addEventListener("keydown", (event) => {
      if (event.key !== " " || !this.#state || document.querySelector("dialog[open]")) return;
      if (works(event, "BUTTON") && event.target !== $("player-seek")) return;
      event.preventDefault();
      this.#steer({paused: !this.#state.paused});
    });
  }

  #world(name) {
    return this.#page.server().worlds.find((world) => world.name === name);
  }

  // The world of the switch: one's own while playing in it.
  #target() {
    const playing = this.#page.playing();
    return this.#world(playing?.own ? playing.name : this.#page.selected());
  }

  // Show the last state from the server.
  update() {
    const {records, servers} = this.#page.server();
    const world = this.#target();
    const on = world?.recording === true;
    if (this.#said && this.#said.name !== world?.name) { // another world's recording has its own state
      this.#page.retract(this.#said.text);
      this.#said = null;
    }
    const nothing = records ? "" : servers ? GATEWAY : NOTHING;
    const obstacle = nothing || (typeof world?.recording !== "boolean" ? NO_WORLD : "");
    for (const name of ["record", "replays"]) $(name).classList.toggle("off", Boolean(nothing)); // on narrow screens they would be in the way
    $("record").hidden = Boolean(world?.replay);
    $("record").disabled = Boolean(obstacle);
    $("record").setAttribute("aria-pressed", String(on));
    $("record-text").textContent = on ? "Recording" : "Record";
    $("record").title = obstacle || (on ? "Episodes of this world are recorded. Press to stop." : "Record the episodes of this world that begin from now on.");
    $("replays").disabled = Boolean(nothing);
    $("replays").title = nothing || "Watch a recorded episode again.";
    if (this.#world(this.expected)) this.expected = null;
    const replay = this.#page.playing() ? null : this.#world(this.#page.selected())?.replay;
    const name = replay ? this.#page.selected() : null;
    if (name !== this.#shown) this.#follow(name, replay);
  }

  async #switch() {
    const {name, recording} = this.#target();
    const stream = new Stream(this.#page.token());
    try {
      await stream.ask(request.join(name, {role: textTensor("spectator")}));
      await stream.ask(request.write("world.recording", textTensor(recording ? "off" : "on")));
      const world = this.#world(name);
      if (world) world.recording = !recording;
      const text = recording ? "Recording is off: what is played now is not kept." : "Recording is on: the next episode is kept.";
      this.#said = {name, text};
      this.#page.announce(text);
      this.update();
    } catch (error) {
      this.#page.tell(error.message.split("\n")[0]);
    } finally {
      stream.close();
    }
  }

  // The list

  // Reading the list takes the server a second or more, so it begins when somebody is likely to open the list.
  async #prepare() {
    const stream = new Stream(this.#page.token());
    await stream.property("server.recordings").catch(() => {}); // opening the list shows the error
    stream.close();
  }

  async #open() {
    this.#idle = false;
    $("recordings").showModal();
    this.#list({...this.#found, reading: true}); // the previous list, until there is a newer one
    const stream = (this.#listing = new Stream(this.#page.token()));
    try {
      while ($("recordings").open) {
        const found = JSON.parse(await stream.property("server.recordings"));
        this.#list(found);
        if (!found.reading) return;
        await pause(200);
      }
    } catch (error) {
      if (error.code !== 1) this.#list({...this.#found, reading: false, problem: error.message.split("\n")[0]});
    } finally {
      stream.close();
    }
  }

  #list(found) {
    this.#found = found;
    const {episodes, reading, problem, files} = found;
    const all = episodes.filter((episode) => episode.steps > 0);
    const idle = all.filter((episode) => !acted(episode));
    const kept = all.filter(acted);
    const best = bests(kept);
    if ($("recordings-order").value === "best") kept.sort((one, other) => (other.return ?? -Infinity) - (one.return ?? -Infinity));
    if (this.#idle) kept.push(...idle); // episodes without a player come last, in any order
    const words = kept.length ? "Choose one to watch it again." : idle.length ? "Nobody has acted in an episode yet." : "No episode has been recorded yet.";
    const sought = files ? `${files} file${files === 1 ? "" : "s"} of recordings` : "the recordings";
    write($("recordings-hint"), problem || (reading ? `Reading ${sought}…` : words));
    $("recordings-progress").hidden = !reading;
    $("recordings-idle").hidden = !idle.length;
    $("recordings-idle").setAttribute("aria-expanded", String(this.#idle));
    write($("recordings-idle"), `${this.#idle ? "Hide" : "Show"} ${idle.length} ${idle.length === 1 ? "episode" : "episodes"} in which nobody acted`);
    replaceKeepingFocus($("recordings-list"), "episode", kept.map((episode) => {
      const button = document.createElement("button");
      button.dataset.episode = episode.episode;
      button.disabled = Boolean(episode.obstacle);
      const who = element("span", "", "who");
      who.append(...players(episode.players));
      if (episode.incomplete) who.append(element("span", "incomplete", "chip"));
      button.append(
        element("b", episode.environment, best.get(episode.environment) === episode ? "best" : ""),
        element("span", amount(episode.return), "return"),
        who,
        element("small", [steps(episode.steps), moment(episode.began), branch(episode.parent)].filter(Boolean).join(" · ")),
      );
      if (episode.obstacle) button.append(element("small", reason(episode.obstacle), "obstacle"));
      button.onclick = () => this.#show(episode.episode);
      const item = document.createElement("li");
      item.append(button);
      return item;
    }));
  }

  async #show(episode) {
    this.#listing?.close(); // reading the list again would clear the choice
    $("recordings-hint").textContent = "Preparing the replay…";
    $("recordings-progress").hidden = false;
    for (const button of $("recordings-list").querySelectorAll("button")) button.disabled = true;
    const stream = new Stream(this.#page.token());
    try {
      const {world} = await stream.ask(request.create({replay: textTensor(episode)}));
      this.expected = world;
      const server = JSON.parse(await stream.property("server.web"));
      $("recordings").close();
      this.#page.select(world, server);
      $("player-play").focus();
    } catch (error) {
      $("recordings-hint").textContent = error.message.split("\n")[0];
      $("recordings-progress").hidden = true;
      for (const button of $("recordings-list").querySelectorAll("button")) button.disabled = false;
    } finally {
      stream.close();
    }
  }

  // The controls of a replay

  async #follow(name, replay) {
    this.#stream?.close();
    this.#stream = this.#state = this.#wanted = null;
    this.#shown = name;
    $("player").hidden = !name;
    if (!name) return;
    const facts = [`return ${amount(replay.return)}`, moment(replay.began), branch(replay.parent)].filter(Boolean);
    $("player-about").replaceChildren(...players(replay.players), element("small", facts.join(" · ")));
    $("player-seek").max = String(replay.length);
    this.#dragging = false;
    this.#place(0);
    const stream = (this.#stream = new Stream(this.#page.token()));
    try {
      await stream.ask(request.join(name, {role: textTensor("spectator")}));
      while (this.#stream === stream) {
        await this.#write(stream);
        this.#tell(JSON.parse(await stream.property("world.replay")));
        await Promise.race([pause(150), new Promise((resolve) => (this.#wake = resolve))]);
      }
    } catch (error) {
      if (error.code !== 1 && error.code !== 14) this.#page.tell(error.message.split("\n")[0]);
    } finally {
      stream.close();
      if (this.#stream === stream) this.#stream = this.#shown = this.#state = null;
    }
  }

  async #write(stream) {
    const wanted = this.#wanted;
    this.#wanted = null;
    if (!wanted) return;
    try {
      await stream.ask(request.write("world.replay", textTensor(JSON.stringify(wanted))));
    } catch (error) {
      if (!stream.open) throw error;
      this.#page.tell(error.message.split("\n")[0]); // this token may only watch
    }
  }

  #steer(wanted) {
    this.#wanted = {...this.#wanted, ...wanted};
    this.#wake();
  }

  #place(position) {
    const most = Number($("player-seek").max);
    $("player-seek").value = String(position);
    $("player-seek").style.setProperty("--done", `${most ? (100 * position) / most : 0}%`);
    $("player-seek").setAttribute("aria-valuetext", `step ${position} of ${most}`);
    $("player-position").textContent = `${position} / ${most}`;
  }

  #tell(state) {
    if (!this.#stream) return;
    this.#state = state;
    $("player-play").dataset.icon = state.paused ? "play" : "pause";
    $("player-play").setAttribute("aria-label", state.paused ? "Play" : "Pause");
    $("player").classList.toggle("seeking", state.seeking);
    if (document.activeElement !== $("player-speed")) $("player-speed").value = String(state.speed);
    if (!this.#dragging && !this.#wanted && !state.seeking) this.#place(state.position);
  }
}
