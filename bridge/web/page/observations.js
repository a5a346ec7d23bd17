// The view of a world without pictures: its image observations, and the numbers of others.

import {state} from "./state.js";
import {values} from "./wire.js";

const UINT8 = 6;
const MOST = 64; // the most numbers that are drawn separately

const NO_PICTURES = "This world draws no pictures.";
const ASK_FOR_PICTURES = " Start its server with --web, or with --env-kwargs render_mode=rgb_array, to see it.";

// True if an error says that the environment does not render.
export function drawsNothing(error) {
  return error.code === 9 && /frames to render|render\(\)|render_mode/.test(error.message);
}

// True if an error says that the server cannot encode JPEG: it can encode PNG.
export function lacksJpeg(error) {
  return error.code === 9 && error.message.includes("frame=png");
}

function isImage({dtype, shape}) {
  const [height, width, depth] = shape;
  return dtype === UINT8 && height >= 8 && width >= 8 && (shape.length === 2 || (shape.length === 3 && (depth === 3 || depth === 1)));
}

function paintImage(canvas, data, [height, width, depth = 1]) {
  if (data.length !== height * width * depth) return;
  const image = new ImageData(width, height);
  for (let pixel = 0; pixel < height * width; pixel++) {
    for (let colour = 0; colour < 3; colour++) image.data[4 * pixel + colour] = data[depth * pixel + (depth === 3 ? colour : 0)];
    image.data[4 * pixel + 3] = 255;
  }
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, {width, height});
  canvas.classList.toggle("small", width <= 320);
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.dataset.pictures = String(Number(canvas.dataset.pictures ?? 0) + 1);
}

// A bar for each number, from the middle to the left or right, relative to the largest number so far.
export class Numbers {
  #most = new Map();

  // box: the element; named: [[name, numbers], …].
  show(box, named) {
    const rows = named.flatMap(([name, numbers]) => numbers.map((number, index) => [numbers.length > 1 ? `${name}[${index}]` : name, Number(number), number]));
    if (rows.length > MOST) {
      box.textContent = `${rows.length} numbers: ${rows.slice(0, MOST).map(([, number]) => number).join(", ")}, …`;
      return;
    }
    if (box.children.length !== rows.length) {
      box.replaceChildren(...rows.map(() => {
        const row = document.createElement("div");
        row.className = "number";
        const bar = document.createElement("meter");
        bar.ariaHidden = "true"; // the number next to it has the same information
        row.append(document.createElement("span"), bar, document.createElement("output"));
        return row;
      }));
    }
    rows.forEach(([name, number, given], position) => {
      const [label, bar, text] = box.children[position].children;
      const most = Math.max(this.#most.get(name) ?? 1e-6, Math.abs(number) || 0);
      this.#most.set(name, most);
      label.textContent = name;
      Object.assign(bar, {min: -most, max: most, value: number || 0, hidden: Number.isNaN(number)});
      text.textContent = Number.isInteger(number) || Number.isNaN(number) ? String(given) : number.toFixed(3); // it may be a text
    });
  }
}

// The observations of a joined world, on the canvas or as text in a box.
export class Observations {
  #specs;
  #numbers = new Numbers();
  #canvas;
  #panel;

  constructor(joined, canvas, panel) {
    this.#specs = [...joined.observations].filter(([name]) => name === "observation" || name.startsWith("observation."));
    this.#canvas = canvas;
    this.#panel = panel;
    this.image = this.#specs.find(([, spec]) => isImage(spec))?.[1] ?? null;
    const note = document.createElement("p");
    note.className = "note";
    const why = NO_PICTURES + (state.server.servers ? ASK_FOR_PICTURES : ""); // a server with its own page has enabled rendering already
    note.textContent = this.image ? `${why} Its observations are shown.`
      : this.#specs.length ? `${why} Here are the numbers that the agent sees.` : `${why} Spectators get no other observations.`;
    const box = document.createElement("div");
    box.className = "numbers";
    panel.className = this.image ? "bare" : "";
    panel.replaceChildren(note, box);
    panel.hidden = false;
  }

  get uids() {
    return this.#specs.map(([, spec]) => spec.uid);
  }

  show(answer) {
    if (this.image) {
      const tensor = answer.observations.get(this.image.uid);
      if (tensor) paintImage(this.#canvas, values(tensor), this.image.shape);
      return;
    }
    const named = this.#specs.filter(([, {uid}]) => answer.observations.has(uid))
      .map(([name, {uid}]) => [name.replace("observation.", ""), Array.from(values(answer.observations.get(uid)))]);
    this.#numbers.show(this.#panel.querySelector(".numbers"), named);
  }
}
