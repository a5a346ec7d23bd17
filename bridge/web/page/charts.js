// Small graphs, drawn on a canvas in the page's own colors.

function context(canvas) {
  const scale = window.devicePixelRatio || 1;
  const {width, height} = canvas.getBoundingClientRect();
  if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
  if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
  const drawing = canvas.getContext("2d");
  drawing.setTransform(scale, 0, 0, scale, 0, 0);
  drawing.clearRect(0, 0, width, height);
  return [drawing, width, height];
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// A line through the values, with its area filled; `limit` draws a dashed line.
export function line(canvas, values, {limit = null, least = null} = {}) {
  const [drawing, width, height] = context(canvas);
  if (values.length < 2) return;
  const low = least ?? Math.min(...values), high = Math.max(...values, limit ?? -Infinity);
  const span = high - low || 1;
  const x = (index) => (index / (values.length - 1)) * (width - 2) + 1;
  const y = (value) => height - 3 - ((value - low) / span) * (height - 6);
  drawing.beginPath();
  values.forEach((value, index) => (index ? drawing.lineTo(x(index), y(value)) : drawing.moveTo(x(0), y(value))));
  drawing.lineWidth = 1.75;
  drawing.lineJoin = "round";
  drawing.strokeStyle = color("--accent");
  drawing.stroke();
  drawing.lineTo(width - 1, height);
  drawing.lineTo(1, height);
  drawing.closePath();
  drawing.globalAlpha = 0.14;
  drawing.fillStyle = color("--accent");
  drawing.fill();
  drawing.globalAlpha = 1;
  if (limit !== null && limit <= high) {
    drawing.setLineDash([3, 4]);
    drawing.lineWidth = 1;
    drawing.strokeStyle = color("--faint");
    drawing.beginPath();
    drawing.moveTo(0, y(limit));
    drawing.lineTo(width, y(limit));
    drawing.stroke();
    drawing.setLineDash([]);
  }
}
