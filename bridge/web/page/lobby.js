// A PERLERT lobby behind a gateway: its clients, taking a slot with a name, being ready, the run played with keys, and its
// result.

import {Stream} from "./client.js";
import {$, pause, replaceKeepingFocus} from "./dom.js";
import {Keyboard} from "./keys.js";
import {Numbers} from "./observations.js";
import {request, tensor, textTensor, values} from "./wire.js";

const BOOL = 9;
const RUNS = ["joining", "playing"];

// The text of an action in PERLERT's form.
function textOf(keyboard) {
  return keyboard.action(keyboard.take()).map((value) => (Number.isInteger(value) ? String(value) : value.toFixed(6))).join(",");
}

function element(kind, text, more = {}) {
  return Object.assign(document.createElement(kind), {textContent: text, ...more});
}

// The page's functions for a lobby: {token, panel, name, begin(stream, keyboard), end(), badge(text, live), announce(text),
// result(number), tell(text)}; `begin` returns an object whose `changed` and `wake` report keys.
export class Lobby {
  #page;
  #world;
  #stream = null;
  #wanted = null; // the requested slot
  #ready = null; // the readiness to send: true or false
  #numbers = new Numbers();
  #playing = null;
  #shown = "";
  #over = false;
  #told = 0;
  closed = false;

  constructor(world, page) {
    this.#world = world;
    this.#page = page;
    this.#page.panel.className = "lobby";
    this.#page.panel.replaceChildren();
    this.#page.panel.hidden = false;
  }

  close() {
    this.closed = true;
    this.#stream?.close();
    this.#stopPlaying();
  }

  // Show the lobby and take part in it until it is left; rejects like the stream.
  async run() {
    while (!this.closed) {
      const slot = this.#wanted;
      const stream = (this.#stream = new Stream(this.#page.token));
      const given = slot === null ? {role: textTensor("spectator")}
        : {role: textTensor("player"), agent: textTensor(slot), name: textTensor(this.#page.name())};
      try {
        const joined = await stream.ask(request.join(this.#world, given));
        await this.#steps(stream, joined, slot);
      } catch (error) {
        if (slot === null || error.code !== 3) {
          if (this.closed || error.code === 1) continue;
          throw error;
        }
        this.#wanted = null; // the name is invalid
        this.#page.tell(error.message.split("\n")[0]);
      } finally {
        stream.close();
        this.#stopPlaying();
      }
    }
  }

  #take(slot) {
    this.#wanted = slot;
    this.#ready = null;
    this.#stream.close();
  }

  async #steps(stream, joined, slot) {
    const uid = Object.fromEntries([...joined.observations].map(([name, spec]) => [name, spec.uid]));
    const wanted = Object.values(uid);
    await stream.ask(request.step([], wanted));
    while (!this.closed && this.#wanted === slot) {
      const actions = [];
      if (slot !== null && this.#ready !== null) {
        actions.push([joined.actions.get("ready").uid, tensor([this.#ready], BOOL, [])]);
        this.#ready = null;
      }
      if (this.#playing?.keyboard.names.length) {
        this.#playing.changed = null;
        actions.push([joined.actions.get("action").uid, textTensor(textOf(this.#playing.keyboard))]);
      }
      const answer = await stream.ask(request.step(actions, wanted));
      const read = (name) => values(answer.observations.get(uid[name]))[0];
      const state = JSON.parse(read("lobby"));
      this.#show(state, {observation: read("observation"), step: read("step"), total: read("return"), over: Boolean(read("over"))});
      // Poll fast when ready, to show the start at once and not a third of a second into the run.
      const soon = this.#playing || state.slots.some(({key, ready}) => ready && key === state.mine);
      const wait = soon ? 1000 / Math.min(state.fps ?? 30, 30) : 300;
      const woken = new Promise((resolve) => {
        this.#wake = resolve;
        if (this.#playing) this.#playing.wake = resolve;
      });
      if (!this.#playing || this.#playing.changed === null) await Promise.race([pause(wait), woken]);
    }
  }

  /** @type {(value?: any) => void} */
  #wake = () => {};

  #stopPlaying() {
    if (this.#playing) this.#page.end();
    this.#playing = null;
  }

  #show(state, run) {
    const {panel} = this.#page;
    const runs = RUNS.includes(state.state) && state.mine !== null;
    if (runs && !this.#playing && state.controls) this.#playing = this.#page.begin(this.#stream, new Keyboard(state.controls));
    else if (!runs) this.#stopPlaying();
    if (run.over && !this.#over && run.step !== this.#told) {
      this.#page.result(run.total);
      this.#page.announce(`The run is over. Return ${run.total.toFixed(2)} after step ${run.step}.`);
      this.#told = run.step;
    }
    this.#over = run.over;
    if (!run.over) this.#told = -1;
    this.#page.badge(runs ? `playing ${state.mine}` : state.mine !== null ? `you are ${state.mine}` : "watching", runs);
    const shown = JSON.stringify([state.slots, state.state, state.mine, state.said, state.waits, run.over && run.total]);
    if (shown !== this.#shown) {
      this.#shown = shown;
      this.#draw(panel, state, run);
    }
    const box = panel.querySelector(".numbers");
    if (box && run.observation) {
      let name = "observation";
      const named = new Map();
      for (const item of run.observation.split(",")) {
        const colon = item.lastIndexOf(":");
        if (colon >= 0) name = item.slice(0, colon);
        named.set(name, [...(named.get(name) ?? []), item.slice(colon + 1)]);
      }
      this.#numbers.show(box, [...named]);
    }
  }

  #draw(panel, state, run) {
    const title = element("h3", `Lobby ${state.lobby}`);
    const table = document.createElement("table");
    table.append(...state.slots.map((slot) => this.#row(slot, state)));
    const parts = [title, table];
    if (state.mine === null) {
      const label = element("label", "Your name ");
      const input = Object.assign(document.createElement("input"), {value: this.#page.name(), maxLength: 20, size: 18, id: "lobby-name"});
      input.onchange = () => this.#page.rename(input.value.trim());
      label.append(input);
      parts.push(label);
    } else if (!RUNS.includes(state.state)) {
      const own = state.slots.find(({key}) => key === state.mine);
      const isReady = own?.ready && state.state !== "over";
      const button = element("button", isReady ? "Not ready" : run.over ? "Play again" : "Ready", {className: "primary", id: "lobby-ready"});
      button.dataset.slot = "ready";
      button.onclick = () => {
        this.#ready = !isReady;
        this.#wake();
      };
      const leave = element("button", "Leave", {id: "lobby-leave"});
      leave.onclick = () => this.#take(null);
      const bar = element("p", "");
      bar.append(button, " ", leave);
      parts.push(bar);
    }
    if (run.over) parts.push(element("p", `The run is over: return ${run.total.toFixed(2)} after step ${run.step}.`, {className: "result"}));
    const words = state.said || (this.#wanted !== null || state.mine !== null ? state.waits : "");
    if (words && !RUNS.includes(state.state)) parts.push(element("p", words, {className: "note"}));
    if (RUNS.includes(state.state)) parts.push(element("p", "PERLERT carries no pictures: here are the numbers that the agent sees.", {className: "note"}));
    parts.push(element("div", "", {className: "numbers"}));
    replaceKeepingFocus(panel, "slot", parts);
  }

  #row(slot, state) {
    const row = document.createElement("tr");
    const who = slot.key === state.mine ? "you" : slot.open ? "open" : slot.name || "taken";
    row.append(element("th", slot.key), element("td", who), element("td", slot.open ? "" : slot.ready ? "ready" : "not ready"));
    const cell = document.createElement("td");
    if (slot.open && state.mine === null && this.#wanted === null) {
      const button = element("button", slot.kind === "spectator" ? "Watch" : "Register");
      button.dataset.slot = slot.key;
      button.onclick = () => {
        const field = $("lobby-name");
        if (field) this.#page.rename(field.value.trim());
        if (slot.kind === "spectator") this.#ready = true;
        this.#take(slot.key);
      };
      cell.append(button);
    }
    row.append(cell);
    return row;
  }
}
