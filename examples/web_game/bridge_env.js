// A web page as an environment: it dials a trainer, and serves an environment of the page. One file, no build step.
//
//   import {box, discrete, serve} from "./bridge_env.js";
//
//   serve("ws://localhost:6100", () => new Game(), {token: "a-secret"});
//
// and in Python: make_vec_remote("listen://127.0.0.1:6100", num_envs=1, token="a-secret").
//
// An environment is an object with
//   observationSpace, actionSpace   a space (`box`, `discrete`, `text`), or an object of them by name (but `reward`)
//   reset(seed)                     begins an episode, returns its first observation; `seed`: an integer or undefined
//   step(action)                    returns {observation, reward, terminated, truncated}
//   close()                         optional
// `reset` and `step` may return promises. Values of a `box` are arrays or typed arrays, flat, in C order; without
// dimensions they are numbers, like those of `discrete`. Values of several named spaces are objects.
//
// The page speaks dm_env_rpc over WebSocket: each binary message is one request or response in protobuf, encoded and
// decoded by hand. `proto/bridge/pb/dm_env_rpc.proto` of Gymnasium Bridge defines the messages, docs/protocol.md the
// rules.

const PATH = "/gymnasium-bridge/dial";
const SUBPROTOCOL = "dm_env_rpc.v1";
const FIRST_PAUSE = 100, LAST_PAUSE = 4_000; // milliseconds
const MAX_SIZE = 2 ** 26; // elements of a tensor: a peer may announce any shape

const RUNNING = 1, TERMINATED = 2, INTERRUPTED = 3;

// gRPC's status codes, for error responses.
const INVALID_ARGUMENT = 3, NOT_FOUND = 5, EXHAUSTED = 8, FAILED_PRECONDITION = 9, UNIMPLEMENTED = 12, INTERNAL = 13;

class Refusal extends Error {
  constructor(code, text) {
    super(text);
    this.code = code;
  }
}

// Spaces

// Data types: the number, which is also that of a tensor's field, and the array class if values have a fixed size.
const TYPES = {
  float32: {number: 1, Kind: Float32Array},
  float64: {number: 2, Kind: Float64Array},
  int8: {number: 3, Kind: Int8Array},
  int32: {number: 4},
  int64: {number: 5},
  uint8: {number: 6, Kind: Uint8Array},
  string: {number: 10},
};
const NUMBERED = Object.fromEntries(Object.entries(TYPES).map(([name, type]) => [type.number, name]));
NUMBERED[7] = NUMBERED[8] = NUMBERED[9] = "int64"; // uint32, uint64 and bool are read as integers, and not written

// Numbers from `low` to `high`, of any shape: [] is a single number. The bounds are numbers, for all elements.
export function box(low, high, shape, dtype = "float32") {
  if (!TYPES[dtype]) throw new TypeError(`expected a dtype out of ${Object.keys(TYPES).join(", ")}, got ${dtype}`);
  return {dtype, shape, low, high};
}

// An integer from 0 to n - 1.
export const discrete = (n) => box(0, n - 1, [], "int64");

// A text.
export const text = () => ({dtype: "string", shape: []});

const sizeOf = (shape) => shape.reduce((product, length) => product * length, 1);

// The parts of a space: only `observation`, or each named space; `uid` is the number in messages.
function parts(space, name) {
  if (space.dtype) return [{uid: 1, name, space}];
  return Object.entries(space).map(([key, part], index) => ({uid: index + 1, name: key, key, space: part}));
}

// Encoding of protobuf

function varints(values) {
  const out = [];
  for (const value of values) {
    let rest = BigInt.asUintN(64, BigInt(value));
    for (; rest > 127n; rest >>= 7n) out.push(Number(rest & 127n) | 128);
    out.push(Number(rest));
  }
  return Uint8Array.from(out);
}

function concat(pieces) {
  const out = new Uint8Array(pieces.reduce((size, piece) => size + piece.length, 0));
  let at = 0;
  for (const piece of pieces) {
    out.set(piece, at);
    at += piece.length;
  }
  return out;
}

// A message from [number, value] pairs: integers become varints, other values are bytes or text.
function message(...pairs) {
  return concat(pairs.flatMap(([number, value]) => {
    if (typeof value === "number") return [varints([number << 3, value])];
    const bytes = typeof value === "string" ? new TextEncoder().encode(value) : value;
    return [varints([(number << 3) | 2, bytes.length]), bytes];
  }));
}

// The message with the values of a tensor or of a bound.
function arrayOf(values, dtype) {
  const type = TYPES[dtype];
  if (dtype === "string") return message(...values.map((value) => [1, value]));
  if (!type.Kind) return message([1, varints(values)]);
  const array = values instanceof type.Kind ? values : new type.Kind(values);
  return message([1, new Uint8Array(array.buffer, array.byteOffset, array.byteLength)]);
}

function writeTensor(value, space, name) {
  const values = typeof value === "object" ? value : [value];
  if (values.length !== sizeOf(space.shape)) {
    throw new TypeError(`${name} has ${values.length} elements, and its space the shape [${space.shape}]`);
  }
  const array = [TYPES[space.dtype].number, arrayOf(values, space.dtype)];
  return space.shape.length ? message(array, [15, varints(space.shape)]) : message(array);
}

function writeSpec({name, space}) {
  const type = TYPES[space.dtype];
  const pairs = [[1, name], [2, varints(space.shape)], [3, type.number]];
  for (const [number, bound] of [[4, space.low], [5, space.high]]) {
    // The field numbers of a bound are those of a tensor, and 8.
    if (Number.isFinite(bound)) pairs.push([number, message([type.number + 8, arrayOf([bound], space.dtype)])]);
  }
  return message(...pairs);
}

// Decoding of protobuf

function varintAt(cursor) {
  let value = 0n;
  for (let shift = 0n; ; shift += 7n) {
    const byte = cursor.bytes[cursor.at++];
    if (byte === undefined || shift > 63n) throw new Refusal(INVALID_ARGUMENT, "the request cannot be read");
    value |= BigInt(byte & 127) << shift;
    if (byte < 128) return value;
  }
}

// The [number, value] pairs of a message: varints become bigints, other values bytes.
function* fields(bytes) {
  const cursor = {bytes, at: 0};
  while (cursor.at < bytes.length) {
    const key = Number(varintAt(cursor));
    const kind = key & 7;
    if (kind === 0) {
      yield [key >>> 3, varintAt(cursor)];
      continue;
    }
    const size = kind === 2 ? Number(varintAt(cursor)) : {1: 8, 5: 4}[kind];
    const start = cursor.at;
    cursor.at += size;
    if (!(cursor.at <= bytes.length)) throw new Refusal(INVALID_ARGUMENT, "the request cannot be read");
    yield [key >>> 3, bytes.subarray(start, cursor.at)];
  }
}

function all(bytes, wanted) {
  return [...fields(bytes)].filter(([number]) => number === wanted).map(([, value]) => value);
}

const last = (bytes, wanted) => all(bytes, wanted).at(-1);
const textOf = (bytes) => new TextDecoder().decode(bytes ?? new Uint8Array());

// Integers, packed or one by one.
function integers(parts) {
  const found = [];
  for (const part of parts) {
    if (typeof part === "bigint") found.push(part);
    for (const cursor = {bytes: part, at: 0}; cursor.at < part.length; ) found.push(varintAt(cursor));
  }
  return found.map((value) => Number(BigInt.asIntN(64, value)));
}

// The tensors of a map, by the name of a setting or the number of an action.
function tensorsOf(bytes, number, keyOf) {
  return new Map(all(bytes, number).map((entry) => [keyOf(last(entry, 1)), last(entry, 2) ?? new Uint8Array()]));
}

// The values of a tensor, the number of its type, and its shape. A single element fills a larger shape, and one
// negative length is computed from the number of elements.
function readTensor(bytes) {
  const shape = integers(all(bytes, 15));
  for (const [number, body] of fields(bytes)) {
    const dtype = NUMBERED[number];
    if (dtype === undefined) continue;
    const held = all(body, 1);
    let values;
    if (dtype === "string") values = held.map(textOf);
    else if (TYPES[dtype].Kind) values = [...new TYPES[dtype].Kind(concat(held).buffer)];
    else values = integers(held);
    const open = shape.findIndex((length) => length < 0);
    if (open >= 0) shape[open] *= values.length / sizeOf(shape);
    const size = sizeOf(shape);
    if (values.length === 1 && size > 1 && size <= MAX_SIZE) values = new Array(size).fill(values[0]);
    if (values.length !== size || shape.some((length) => length < 0)) {
      throw new Refusal(INVALID_ARGUMENT, `expected elements for the shape [${shape}], got ${values.length}`);
    }
    return {number, values, shape};
  }
  throw new Refusal(INVALID_ARGUMENT, "a tensor without values");
}

function readAction(bytes, {name, space}) {
  if (!bytes) throw new Refusal(INVALID_ARGUMENT, `expected the action ${name}`);
  const {number, values, shape} = readTensor(bytes);
  const wanted = `expected ${name} as ${space.dtype} of shape [${space.shape}]`;
  if (number !== TYPES[space.dtype].number) throw new Refusal(INVALID_ARGUMENT, `${wanted}, got another dtype`);
  if (String(shape) !== String(space.shape)) throw new Refusal(INVALID_ARGUMENT, `${wanted}, got the shape [${shape}]`);
  const {low = -Infinity, high = Infinity} = space;
  if (space.dtype !== "string" && !values.every((value) => value >= low && value <= high)) {
    throw new Refusal(INVALID_ARGUMENT, `expected ${name} from ${low} to ${high}, got ${values.slice(0, 9)}`);
  }
  return space.shape.length ? values : values[0];
}

// The settings of a request; unknown ones are refused by name.
function settingsOf(bytes, number, known) {
  const found = tensorsOf(bytes, number, textOf);
  for (const name of found.keys()) {
    if (name !== known) throw new Refusal(INVALID_ARGUMENT, `there is no setting ${name}; expected ${known ?? "none"}`);
  }
  return found;
}

function seedOf(bytes, number) {
  const tensor = settingsOf(bytes, number, "seed").get("seed");
  if (!tensor) return undefined;
  const text = String(readTensor(tensor).values[0]); // seeds of more than 64 bits come as texts
  if (!/^[0-9]{1,5000}$/.test(text)) throw new Refusal(INVALID_ARGUMENT, `expected a seed of 0 or more, got ${text}`);
  return Number(BigInt.asUintN(53, BigInt(text))); // the bits that a number holds exactly
}

// Worlds

// One environment, and the session that plays it, if any. With a clock it does not wait for actions.
class World {
  constructor(name, owner, env, fps) {
    // `owner` is the session that created it; null: that session has ended, and the world ends with its last player.
    Object.assign(this, {name, owner, env, fps, session: null});
    this.running = false; // true if a sequence of Steps has begun
    this.seed = undefined; // of the next episode
    this.reward = 0; // since the last answer
    this.state = RUNNING;
    this.interrupters = []; // called when the session has been told that its sequence is over
    this.actions = parts(env.actionSpace, "action");
    this.observations = parts(env.observationSpace, "observation");
    const reward = box(-Infinity, Infinity, [], "float64");
    this.observations.push({uid: this.observations.length + 1, name: "reward", space: reward});
    this.waiting = []; // called with the next frame
  }

  specs() {
    const entries = (number, specs) => specs.map((spec) => [number, message([1, spec.uid], [2, writeSpec(spec)])]);
    return message(...entries(1, this.actions), ...entries(2, this.observations));
  }

  // End the sequence, so that the next Step begins one.
  end() {
    this.running = false;
    clearInterval(this.timer);
    for (const call of [...this.interrupters.splice(0), ...this.waiting.splice(0)]) call();
  }

  async begin() {
    this.observation = await this.env.reset(this.seed);
    [this.seed, this.reward, this.state, this.running] = [undefined, 0, RUNNING, true];
    this.action = undefined;
    if (this.fps && this.session) this.timer = setInterval(() => this.tick(), 1000 / this.fps);
  }

  async advance(action) {
    const {observation, reward, terminated, truncated} = await this.env.step(action);
    this.observation = observation;
    this.reward += reward;
    this.state = terminated ? TERMINATED : truncated ? INTERRUPTED : RUNNING;
  }

  // A frame of the clock: the last action is repeated until there is a new one.
  tick() {
    if (this.busy || this.state !== RUNNING || this.action === undefined) return;
    this.busy = true;
    const frame = this.advance(this.action).finally(() => (this.busy = false));
    frame.catch(console.error);
    for (const call of this.waiting.splice(0)) call(frame);
  }

  async step(actions, wanted) {
    const unknown = wanted.filter((uid) => !this.observations[uid - 1]);
    if (unknown.length) throw new Refusal(INVALID_ARGUMENT, `there is no observation ${unknown}`);
    if (this.interrupters.length) {
      this.state = INTERRUPTED;
    } else if (!this.running) {
      await this.begin();
    } else {
      this.action = this.readActions(actions);
      if (!this.fps) await this.advance(this.action);
      else if (this.state === RUNNING) await new Promise((resolve) => this.waiting.push(resolve));
    }
    const answer = this.answer(wanted);
    if (this.state !== RUNNING) this.end();
    this.reward = 0;
    return answer;
  }

  readActions(actions) {
    const unknown = [...actions.keys()].filter((uid) => !this.actions[uid - 1]);
    if (unknown.length) throw new Refusal(INVALID_ARGUMENT, `there is no action ${unknown}`);
    const values = this.actions.map((spec) => [spec.key, readAction(actions.get(spec.uid), spec)]);
    return values[0][0] === undefined ? values[0][1] : Object.fromEntries(values);
  }

  answer(wanted) {
    const tensors = wanted.map((uid) => {
      const {key, space, name} = this.observations[uid - 1];
      const value = name === "reward" ? this.reward : key === undefined ? this.observation : this.observation[key];
      return [2, message([1, uid], [2, writeTensor(value, space, name)])];
    });
    return message([1, this.state], ...tensors);
  }
}

// One WebSocket: its requests are answered one at a time, in order.
class Session {
  constructor(page, socket) {
    this.page = page; // its worlds by name, and their limit
    this.socket = socket;
    this.world = null;
    this.last = Promise.resolve();
  }

  receive(data) {
    this.last = this.last.then(async () => {
      const answer = await this.answer(new Uint8Array(data));
      if (this.socket.readyState === WebSocket.OPEN) this.socket.send(answer);
    });
  }

  // A response has the field number of its request; an error has 16.
  async answer(data) {
    try {
      const [number, body] = [...fields(data)].at(-1) ?? [0];
      const {create, join, step, reset, resetWorld, leave, destroy} = this;
      const handle = [null, create, join, step, reset, resetWorld, leave, destroy][number];
      if (!handle) throw new Refusal(UNIMPLEMENTED, "a request that this page does not know");
      return message([number, (await handle.call(this, body)) ?? new Uint8Array()]);
    } catch (error) {
      if (!(error instanceof Refusal)) console.error(error);
      const text = error instanceof Refusal ? error.message : `the environment raised ${error}`;
      return message([16, message([1, error.code ?? INTERNAL], [2, text])]);
    }
  }

  create(body) {
    settingsOf(body, 1);
    const {worlds, most, make, fps} = this.page;
    if (worlds.size >= most) throw new Refusal(EXHAUSTED, `this page has ${most} worlds at most`);
    const world = new World(`world-${(this.page.made += 1)}`, this, make(), fps);
    worlds.set(world.name, world);
    return message([1, world.name]);
  }

  find(name) {
    const world = this.page.worlds.get(textOf(name));
    if (!world) throw new Refusal(NOT_FOUND, `there is no world ${JSON.stringify(textOf(name).slice(0, 80))}`);
    return world;
  }

  join(body) {
    if (this.world) throw new Refusal(FAILED_PRECONDITION, "a world is joined already; leave it first");
    const world = this.find(last(body, 1));
    settingsOf(body, 2);
    if (world.session) throw new Refusal(FAILED_PRECONDITION, `somebody else plays in ${world.name}`);
    world.session = this;
    this.world = world;
    return message([1, world.specs()]);
  }

  joined() {
    if (!this.world) throw new Refusal(FAILED_PRECONDITION, "no world is joined; send JoinWorld first");
    return this.world;
  }

  step(body) {
    const actions = tensorsOf(body, 1, (key) => Number(key ?? 0n));
    return this.joined().step(actions, integers(all(body, 2)));
  }

  reset(body) {
    const world = this.joined();
    world.seed = seedOf(body, 1);
    world.end();
    return message([1, world.specs()]);
  }

  async resetWorld(body) {
    const world = this.find(last(body, 1));
    const seed = seedOf(body, 2);
    // The next Step of another client reports that the sequence is over; until then nothing is reset.
    if (world.session && world.session !== this && world.running) {
      await new Promise((resolve) => world.interrupters.push(resolve));
    }
    world.seed = seed;
    world.end();
  }

  leave() {
    const {world} = this;
    this.world = null;
    if (!world) return;
    world.session = null;
    world.end();
    if (!world.owner) this.remove(world);
  }

  destroy(body) {
    const world = this.find(last(body, 1));
    if (world.session) throw new Refusal(FAILED_PRECONDITION, `the world ${world.name} is joined`);
    this.remove(world);
  }

  remove(world) {
    this.page.worlds.delete(world.name);
    world.end();
    world.env.close?.();
  }

  close() {
    this.leave();
    for (const world of this.page.worlds.values()) {
      if (world.owner === this) world.owner = null;
      if (!world.owner && !world.session) this.remove(world);
    }
  }
}

// Dial a trainer repeatedly, until `close()` of the returned object is called. Options:
//   name      the page's name for the trainer: letters, digits, dots and dashes; default: one that a reload keeps
//   token     the trainer's token
//   worlds    the most environments at a time, each made by a call of `make`; default 4
//   fps       frames per second of a world that does not wait for actions; default: each step waits for its action
//   onstatus  called with a text for people whenever the status changes
export function serve(url, make, {name = ownName(), token, worlds = 4, fps, onstatus = () => {}} = {}) {
  const page = {worlds: new Map(), most: worlds, made: 0, make, fps};
  const subprotocols = [SUBPROTOCOL];
  // In base64url without padding: scripts cannot set header fields, and a subprotocol allows few characters.
  const coded = btoa(token ?? "").replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  if (token) subprotocols.push(`bridge.token.${coded}`);
  const sockets = new Set();
  let sessions = 0;
  let pause = FIRST_PAUSE;
  let closed = false;
  const tell = (problem) => onstatus(problem ?? (sessions ? `plays in ${sessions} worlds` : "waiting for the trainer"));

  // A WebSocket carries one session, so there is always one more WebSocket than sessions.
  function dial() {
    const socket = new WebSocket(`${url.replace(/\/+$/, "")}${PATH}?name=${encodeURIComponent(name)}`, subprotocols);
    socket.binaryType = "arraybuffer";
    sockets.add(socket);
    let session = null;
    socket.onopen = () => tell();
    socket.onmessage = ({data}) => {
      if (!session) {
        session = new Session(page, socket);
        sessions += 1;
        pause = FIRST_PAUSE;
        tell();
        dial();
      }
      session.receive(data);
    };
    socket.onclose = ({code, reason}) => {
      sockets.delete(socket);
      if (session) {
        sessions -= 1;
        session.close();
      }
      tell(!session && reason ? `refused (${code}): ${reason}` : undefined);
      if (session || closed) return;
      setTimeout(() => closed || dial(), pause);
      pause = Math.min(2 * pause, LAST_PAUSE);
    };
  }
  dial();
  return {
    close() {
      closed = true;
      for (const socket of sockets) socket.close();
    },
  };
}

// The name of this tab, which a reload keeps.
function ownName() {
  return (sessionStorage.bridgeEnvName ??= `page-${Math.random().toString(36).slice(2, 10)}`);
}
