// QR codes of texts of up to 213 bytes: ISO/IEC 18004, bytes, error correction level M, versions 1 to 10, mask 0 to 7.

// Of each version: bytes for error correction of a block, then the data bytes of each block.
/** @type {[number, number[]][]} */
const BLOCKS = [
  [10, [16]], [16, [28]], [26, [44]], [18, [32, 32]], [24, [43, 43]], [16, [27, 27, 27, 27]], [18, [31, 31, 31, 31]],
  [22, [38, 38, 39, 39]], [22, [36, 36, 36, 37, 37]], [26, [43, 43, 43, 43, 44]],
];
// Of each version: the middle of its alignment patterns, in both directions.
const ALIGNMENTS = [[], [6, 18], [6, 22], [6, 26], [6, 30], [6, 34], [6, 22, 38], [6, 24, 42], [6, 26, 46], [6, 28, 50]];
const MASKS = [
  (row, column) => (row + column) % 2,
  (row) => row % 2,
  (row, column) => column % 3,
  (row, column) => (row + column) % 3,
  (row, column) => ((row >> 1) + Math.floor(column / 3)) % 2,
  (row, column) => ((row * column) % 2) + ((row * column) % 3),
  (row, column) => (((row * column) % 2) + ((row * column) % 3)) % 2,
  (row, column) => (((row + column) % 2) + ((row * column) % 3)) % 2,
];

// The field of 256 elements, x^8 + x^4 + x^3 + x^2 + 1.
const POWERS = [1];
for (let i = 1; i < 255; i++) POWERS.push((POWERS[i - 1] << 1) ^ (POWERS[i - 1] & 128 ? 0x11d : 0));
const LOGARITHMS = new Map(POWERS.map((value, power) => [value, power]));

function product(one, other) {
  return one && other ? POWERS[(LOGARITHMS.get(one) + LOGARITHMS.get(other)) % 255] : 0;
}

// The bytes for error correction: the remainder of the data by the generator (x - 1)(x - 2)(x - 4)…
function correction(data, count) {
  let generator = [1];
  for (let i = 0; i < count; i++) {
    const longer = [...generator, 0];
    generator.forEach((value, at) => (longer[at + 1] ^= product(value, POWERS[i])));
    generator = longer;
  }
  const rest = [...data, ...Array(count).fill(0)];
  for (let at = 0; at < data.length; at++) {
    const factor = rest[at];
    generator.forEach((value, offset) => (rest[at + offset] ^= product(value, factor)));
  }
  return rest.slice(data.length);
}

// All bytes of a code, data and correction, in the order in which they are drawn.
function codewords(bytes, version) {
  const [count, sizes] = BLOCKS[version - 1];
  const capacity = sizes.reduce((sum, size) => sum + size, 0);
  const bits = [0, 1, 0, 0]; // bytes follow
  const push = (value, length) => {
    for (let bit = length - 1; bit >= 0; bit--) bits.push((value >> bit) & 1);
  };
  push(bytes.length, version < 10 ? 8 : 16);
  for (const byte of bytes) push(byte, 8);
  push(0, Math.min(4, capacity * 8 - bits.length));
  push(0, (8 - (bits.length % 8)) % 8);
  for (let pad = 0xec; bits.length < capacity * 8; pad ^= 0xec ^ 0x11) push(pad, 8);
  const data = Array.from({length: capacity}, (_, at) => parseInt(bits.slice(at * 8, at * 8 + 8).join(""), 2));
  const blocks = sizes.map((size) => data.splice(0, size));
  const corrections = blocks.map((block) => correction(block, count));
  const interleaved = (parts, longest) => Array.from({length: longest}, (_, at) => parts.filter((part) => at < part.length).map((part) => part[at])).flat();
  return [...interleaved(blocks, sizes.at(-1)), ...interleaved(corrections, count)];
}

// The bits of a format or a version, with the remainder that corrects them.
function corrected(value, bits, generator) {
  const length = generator.toString(2).length - 1;
  let rest = value << length;
  for (let bit = bits - 1; bit >= 0; bit--) if (rest & (1 << (bit + length))) rest ^= generator << bit;
  return (value << length) | rest;
}

// The patterns that every code of a version has, as rows of 0 and 1; undefined: for data. Formats are left 0.
function patterns(version) {
  const size = 17 + 4 * version;
  const grid = Array.from({length: size}, () => Array(size));
  for (const [top, left] of [[0, 0], [0, size - 7], [size - 7, 0]]) {
    for (let row = -1; row < 8; row++) for (let column = -1; column < 8; column++) {
      const ring = Math.max(Math.abs(row - 3), Math.abs(column - 3));
      if (grid[top + row] && left + column >= 0 && left + column < size) grid[top + row][left + column] = Number(ring !== 2 && ring < 4);
    }
  }
  for (const row of ALIGNMENTS[version - 1]) for (const column of ALIGNMENTS[version - 1]) {
    if (grid[row][column] !== undefined) continue; // below the large patterns at the corners
    for (let y = -2; y < 3; y++) for (let x = -2; x < 3; x++) grid[row + y][column + x] = Number(Math.max(Math.abs(y), Math.abs(x)) !== 1);
  }
  for (let at = 8; at < size - 8; at++) grid[6][at] = grid[at][6] = (at + 1) % 2;
  for (let at = 0; at < 9; at++) {
    grid[8][at] ??= 0;
    grid[at][8] ??= 0;
    if (at < 8) grid[8][size - 1 - at] = grid[size - 1 - at][8] = 0;
  }
  grid[size - 8][8] = 1;
  if (version > 6) {
    const bits = corrected(version, 6, 0x1f25);
    for (let bit = 0; bit < 18; bit++) {
      const [near, far] = [Math.floor(bit / 3), size - 11 + (bit % 3)];
      grid[near][far] = grid[far][near] = (bits >> bit) & 1;
    }
  }
  return grid;
}

function drawn(fixed, words, mask) {
  const size = fixed.length;
  const grid = fixed.map((row) => [...row]);
  let bit = 0;
  for (let right = size - 1; right > 0; right -= 2) {
    if (right === 6) right = 5; // the column of the pattern that counts
    const upwards = ((right + 1) & 2) === 0;
    for (let step = 0; step < size; step++) for (const column of [right, right - 1]) {
      const row = upwards ? size - 1 - step : step;
      if (fixed[row][column] !== undefined) continue;
      const value = ((words[bit >> 3] ?? 0) >> (7 - (bit & 7))) & 1;
      grid[row][column] = value ^ Number(MASKS[mask](row, column) === 0);
      bit += 1;
    }
  }
  const format = corrected(mask, 5, 0x537) ^ 0x5412; // level M is 00
  for (let at = 0; at < 15; at++) {
    const value = (format >> at) & 1;
    if (at < 8) grid[8][size - 1 - at] = value;
    else grid[size - 15 + at][8] = value;
    if (at < 6) grid[at][8] = value;
    else if (at < 8) grid[at + 1][8] = value;
    else if (at === 8) grid[8][7] = value;
    else grid[8][14 - at] = value;
  }
  return grid;
}

// How hard a code is to read: long runs, blocks of one color, what looks like a corner, and more of one color.
function penalty(grid) {
  const size = grid.length;
  let sum = 0, dark = 0;
  for (const lines of [grid, grid.map((_, column) => grid.map((row) => row[column]))]) {
    for (const line of lines) {
      const text = line.join("");
      for (const [run] of text.matchAll(/0{5,}|1{5,}/g)) sum += run.length - 2;
      sum += 40 * [...text.matchAll(/(?=00001011101|10111010000)/g)].length;
    }
  }
  for (let row = 0; row < size; row++) for (let column = 0; column < size; column++) {
    dark += grid[row][column];
    const block = row && column ? grid[row][column] + grid[row - 1][column] + grid[row][column - 1] + grid[row - 1][column - 1] : 1;
    if (block % 4 === 0) sum += 3;
  }
  return sum + 10 * Math.floor(Math.abs((dark * 20) / size ** 2 - 10));
}

// The code of a text, rows of 0 and 1, or null where the text is too long.
export function qrCode(text) {
  const bytes = new TextEncoder().encode(text);
  const version = BLOCKS.findIndex(([, sizes], index) => bytes.length + (index < 9 ? 2 : 3) <= sizes.reduce((sum, size) => sum + size, 0)) + 1;
  if (!version) return null;
  const fixed = patterns(version);
  const words = codewords(bytes, version);
  const codes = MASKS.map((_, mask) => drawn(fixed, words, mask));
  return codes.reduce((best, code) => (penalty(code) < penalty(best) ? code : best));
}
