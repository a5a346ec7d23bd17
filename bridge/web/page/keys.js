// The keys that are held, and the action that they select.

const NAMES = {ArrowLeft: "left", ArrowRight: "right", ArrowUp: "up", ArrowDown: "down", " ": "space", Enter: "return"};
const SIGNS = {left: "←", right: "→", up: "↑", down: "↓", space: "space", return: "↵"};

export function nameOf(event) {
  return NAMES[event.key] ?? event.key.toLowerCase();
}

export function signOf(name) {
  return SIGNS[name] ?? name.toUpperCase();
}

export class Keyboard {
  // controls: the value of the property `world.controls`.
  constructor(controls) {
    this.controls = controls;
    this.storedAs = `chosen keys ${JSON.stringify(controls)}`; // computed before any key is changed
    this.shipped = this.chosen;
    this.held = new Set();
    this.pressed = new Set(); // keys pressed since take()
    this.strength = new Map(); // held keys that a stick or the mouse presses partially: 0 to 1
  }

  // Why the world cannot be played with keys; null if it can.
  get nothing() {
    return this.controls.kind === "none" ? this.controls.why : null;
  }

  // All keys with an effect.
  get names() {
    if (this.controls.kind === "discrete") return [...new Set(this.controls.keys.flatMap((entry) => entry.keys))];
    if (this.controls.kind === "box") return this.controls.axes.flatMap((axis) => [axis.less, axis.more]).filter(Boolean);
    return [];
  }

  // Arrows act as W, A, S and D if those have an effect and arrows do not.
  meant(name) {
    const letter = {left: "a", right: "d", up: "w", down: "s"}[name];
    const letters = this.uses("a") && this.uses("d"); // otherwise they are letters of action names
    return letter && letters && !this.uses(name) && this.uses(letter) ? letter : name;
  }

  uses(name) {
    return this.names.includes(name);
  }

  // The keys of each entry of the legend, with the person's choices.
  get chosen() {
    return this.legend().map(([keys]) => keys);
  }

  // The keys for buttons: `directions`, [place, name], from left to right, and the `others`.
  spatial() {
    const {names, shipped: before} = this;
    const alone = this.chosen.map((keys, position) => [keys[0], before[position][0]]).filter((_, position) => before[position].length === 1);
    const renamed = new Map(alone);
    const places = [["left", "a"], ["up", "w"], ["down", "s"], ["right", "d"]];
    const shipped = new Map(names.map((name) => [renamed.get(name) ?? name, name])); // a chosen key takes the place of the original one
    const letters = !shipped.has("left") && shipped.has("a") && shipped.has("d");
    const directions = places.flatMap(([place, letter]) => {
      if (shipped.has(place)) return [[place, shipped.get(place)]];
      return letters && shipped.has(letter) ? [[place, shipped.get(letter)]] : [];
    });
    const placed = directions.map(([, name]) => name);
    return {directions, others: names.filter((name) => !placed.includes(name))};
  }

  // The effect of holding no key, as text. `rate`: in a world that waits for keys, the steps per second of a held key.
  resting(rate) {
    const {controls} = this;
    if (rate) return `no key: the world waits; held: ${Number(rate.toFixed(1))} steps a second`;
    if (controls.kind === "discrete") return `no key: ${this.#called(controls.neutral)}`;
    return controls.kind === "box" ? `no key: ${controls.neutral.map((value) => Number(value.toFixed(3))).join(", ")}` : "";
  }

  // True if an environment that can wait for a key should: no action is known to do nothing.
  get needsKey() {
    return this.controls.kind === "discrete" && this.controls.idle === false;
  }

  get holds() {
    return this.names.some((name) => this.held.has(name));
  }

  // The keys that select the action: those that are held or, if none is, those tapped since the last call. A tap can be shorter
  // than a frame, or than a request.
  take() {
    const held = this.names.filter((name) => this.held.has(name));
    const keys = new Set(held.length ? held : this.pressed);
    this.pressed.clear();
    return keys;
  }

  #called(action) {
    const name = this.controls.names?.[action - this.controls.start]?.toLowerCase().replace(/^(up|down|left|right): /, ""); // which chose the key
    return name ?? `action ${action}`;
  }

  // The action for the largest set of held keys, as flat numbers.
  action(held = this.held) {
    const {controls} = this;
    if (controls.kind === "discrete") {
      let best = null;
      for (const entry of controls.keys) {
        if (entry.keys.every((key) => held.has(key)) && (!best || entry.keys.length > best.keys.length)) best = entry;
      }
      return [best ? best.action : controls.neutral];
    }
    const action = [...controls.neutral];
    for (const {index, less, more} of controls.axes ?? []) {
      if (held.has(less) === held.has(more)) continue;
      const [name, end] = held.has(less) ? [less, controls.low[index]] : [more, controls.high[index]];
      action[index] += (end - action[index]) * (this.strength.get(name) ?? 1);
    }
    return action;
  }

  // The ends of the axes that have keys: [axis, "less" or "more"].
  #ends() {
    return this.controls.axes.flatMap((axis) => ["less", "more"].filter((end) => axis[end]).map((end) => [axis, end]));
  }

  // [keys, effect], for the legend.
  legend() {
    const {controls} = this;
    if (controls.kind === "discrete") {
      return controls.keys.map((entry) => [entry.keys, this.#called(entry.action)]);
    }
    if (controls.kind === "box") {
      return this.#ends().map(([axis, end]) => [[axis[end]], `${axis.name}: ${controls[end === "less" ? "low" : "high"][axis.index]}`]);
    }
    return [];
  }

  // The effect of a single key, as text; empty: none.
  word(name) {
    return this.legend().find(([keys]) => keys.length === 1 && keys[0] === name)?.[1] ?? "";
  }

  // The same for screen readers.
  meaning(name) {
    const word = this.word(name);
    return word ? `${word} (${name})` : name;
  }

  // Change the key of an entry of the legend; an entry that had that key gets the other one. Combinations of keys change
  // accordingly, and can have keys of their own.
  assign(position, name) {
    const [before, ...others] = this.chosen[position];
    const swapped = (key) => (key === before ? name : key === name ? before : key);
    this.restore(this.chosen.map((keys, at) => (!others.length ? keys.map(swapped) : at === position ? [name] : keys)));
  }

  // Apply stored choices from `chosen`.
  restore(chosen) {
    const {controls} = this;
    const ends = controls.kind === "box" ? this.#ends() : [];
    chosen.forEach((keys, position) => {
      if (controls.kind === "discrete") controls.keys[position].keys = keys;
      else {
        const [axis, end] = ends[position];
        axis[end] = keys[0];
      }
    });
  }
}
