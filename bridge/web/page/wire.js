// The messages of dm_env_rpc, as far as the page needs them: protobuf, written and read by hand.
//
// A message is described by its fields: {name: [number, kind]}. Kinds: "int", "text", "bytes", "message", "packed" (integers),
// "doubles", "floats", and "map" (of keys to messages). `proto/bridge/pb/dm_env_rpc.proto` has the whole of them.

const text = new TextEncoder();
const untext = new TextDecoder();

export const PROPERTY_REQUEST = "type.googleapis.com/dm_env_rpc.v1.extensions.properties.PropertyRequest";

// Encoding

function varint(value, out) {
  let rest = BigInt.asUintN(64, BigInt(value));
  while (rest > 127n) {
    out.push(Number(rest & 127n) | 128);
    rest >>= 7n;
  }
  out.push(Number(rest));
}

function field(number, bytes, out) {
  varint((number << 3) | 2, out);
  varint(bytes.length, out);
  for (const byte of bytes) out.push(byte);
}

function message(...fields) {
  const out = [];
  for (const [number, value] of fields) {
    if (typeof value === "string") field(number, text.encode(value), out);
    else field(number, value, out);
  }
  return out;
}

function packed(values) {
  const out = [];
  for (const value of values) varint(value, out);
  return out;
}

function numbers(values, Kind) {
  return new Uint8Array(new Kind(values).buffer); // little-endian, as all systems with browsers are
}

// How tensors of each data type are encoded: the field number, and the bytes of the values.
const WRITE = {
  1: (values) => [1, numbers(values, Float32Array)],
  2: (values) => [2, numbers(values, Float64Array)],
  3: (values) => [3, numbers(values, Int8Array)],
  4: (values) => [4, packed(values)],
  5: (values) => [5, packed(values)],
  6: (values) => [6, numbers(values, Uint8Array)],
  7: (values) => [7, packed(values)],
  8: (values) => [8, packed(values)],
  9: (values) => [9, packed(values.map(Number))],
};

export function tensor(values, dtype, shape) {
  const [number, bytes] = WRITE[dtype](values);
  const fields = [[number, message([1, bytes])]];
  if (shape.length) fields.push([15, packed(shape)]);
  return message(...fields);
}

export function textTensor(value) {
  return message([10, message([1, value])]);
}

export function intTensor(values) {
  return tensor([values].flat(), 5, Array.isArray(values) ? [values.length] : []);
}

function settings(given) {
  return Object.entries(given).map(([name, value]) => [2, message([1, name], [2, value])]);
}

export const request = {
  create: (given = {}) => message([1, message(...Object.entries(given).map(([name, value]) => [1, message([1, name], [2, value])]))]),
  join: (world, given) => message([2, message([1, world], ...settings(given))]),
  step: (actions, wanted) => {
    const fields = [...actions].map(([uid, value]) => {
      const out = [];
      varint(8, out); // the key: field 1, a number
      varint(uid, out);
      field(2, value, out);
      return [1, out];
    });
    return message([3, message(...fields, [2, packed(wanted)])]);
  },
  reset: (given = {}) => message([4, message(...Object.entries(given).map(([name, value]) => [1, message([1, name], [2, value])]))]),
  leave: () => message([6, []]),
  property: (key) => message([15, message([1, PROPERTY_REQUEST], [2, message([1, message([1, key])])])]),
  write: (key, value) => message([15, message([1, PROPERTY_REQUEST], [2, message([2, message([1, key], [2, value])])])]),
};

// Decoding

export function* fields(bytes) {
  let at = 0;
  const number = () => {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = bytes[at++];
      if (byte === undefined) throw new RangeError("the message is cut off");
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return value;
    }
  };
  while (at < bytes.length) {
    const key = Number(number());
    const kind = key & 7;
    if (kind === 0) yield [key >> 3, number()];
    else if (kind === 2) {
      const size = Number(number());
      if (at + size > bytes.length) throw new RangeError("the message is cut off");
      yield [key >> 3, bytes.subarray(at, (at += size))];
    } else if (kind === 1) yield [key >> 3, bytes.subarray(at, (at += 8))];
    else if (kind === 5) yield [key >> 3, bytes.subarray(at, (at += 4))];
    else throw new RangeError(`a field of the kind ${kind}`);
  }
}

function get(bytes, wanted) {
  let found = null;
  for (const [number, value] of fields(bytes)) if (number === wanted) found = value;
  return found;
}

function all(bytes, wanted) {
  return [...fields(bytes)].filter(([number]) => number === wanted).map(([, value]) => value);
}

function integers(values) {
  const found = [];
  for (const value of values) {
    if (typeof value === "bigint") found.push(Number(BigInt.asIntN(64, value)));
    else {
      let number = 0n, shift = 0n;
      for (const byte of value) {
        number |= BigInt(byte & 127) << shift;
        shift += 7n;
        if (byte < 128) {
          found.push(Number(BigInt.asIntN(64, number)));
          number = shift = 0n;
        }
      }
    }
  }
  return found;
}

function floats(parts, Kind) {
  const size = parts.reduce((sum, part) => sum + part.length, 0);
  const joined = new Uint8Array(size);
  let at = 0;
  for (const part of parts) {
    joined.set(part, at);
    at += part.length;
  }
  return Array.from(new Kind(joined.buffer));
}

// The values of a tensor, flat; bytes are not converted.
export function values(bytes) {
  for (const [number, value] of fields(bytes)) {
    if (number > 11) continue;
    const parts = all(value, 1);
    if (number === 1) return floats(parts, Float32Array);
    if (number === 2) return floats(parts, Float64Array);
    if (number === 6) return parts.at(-1) ?? new Uint8Array();
    if (number === 3) return Array.from(new Int8Array(parts.at(-1) ?? []));
    if (number === 10) return parts.map((part) => untext.decode(part));
    return integers(parts);
  }
  return [];
}

function specs(bytes, which) {
  const found = new Map();
  for (const entry of all(bytes, which)) {
    const uid = Number(get(entry, 1) ?? 0n);
    const spec = get(entry, 2);
    found.set(untext.decode(get(spec, 1) ?? new Uint8Array()), {
      uid,
      dtype: Number(get(spec, 3) ?? 0n),
      shape: integers(all(spec, 2)),
    });
  }
  return found;
}

// A response as an object: {kind, ...}.
export function response(bytes) {
  for (const [number, body] of fields(bytes)) {
    if (number === 1) return {kind: "create", world: untext.decode(get(body, 1) ?? new Uint8Array())};
    if (number === 2) {
      const found = get(body, 1) ?? new Uint8Array();
      return {kind: "join", actions: specs(found, 1), observations: specs(found, 2)};
    }
    if (number === 3) {
      const observations = new Map(all(body, 2).map((entry) => [Number(get(entry, 1) ?? 0n), get(entry, 2)]));
      return {kind: "step", state: Number(get(body, 1) ?? 0n), observations};
    }
    if (number === 15) {
      const answer = get(get(body, 2), 1);
      return {kind: "property", value: answer ? get(answer, 1) : null};
    }
    if (number === 16) {
      const said = get(body, 2);
      return {kind: "error", code: Number(get(body, 1) ?? 0n), message: said ? untext.decode(said) : ""};
    }
    return {kind: "other", number};
  }
  return {kind: "other"};
}
