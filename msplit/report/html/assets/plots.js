// Curves: Observable Plot draws them, in the colours of the theme and as wide as there is room.

const PLOT_COLOURS = 8, PLOT_HEIGHT = 340, LEFT = 72, BELOW = 48;

const told = (value, digits = 4) => (+value.toPrecision(digits)).toLocaleString("en");

// Values that a logarithmic axis names: those given, else 1, 2 and 5 times powers of ten, as far as there is room for them.
function ticks([low, high], room, given) {
  const inside = (values) => values.filter((value) => value >= low && value <= high);
  const powers = d3.range(Math.floor(Math.log10(low)), Math.ceil(Math.log10(high)) + 1);
  const choices = [given, ...[[1, 2, 5], [1, 3], [1]].map((steps) => powers.flatMap((power) => steps.map((step) => +`${step}e${power}`)))];
  return choices.map(inside).find((values) => values.length > 1 && values.length <= room) ?? inside(d3.ticks(low, high, Math.min(room, 5)));
}

const spread = (values) => [Math.min(...values) / 1.08, Math.max(...values) * 1.08];

function draw(plot, host) {
  const { points, names } = plot, width = Math.max(host.clientWidth, 240), room = { x: (width - LEFT) / 64, y: (PLOT_HEIGHT - BELOW) / 44 };
  const x = spread(points.map((point) => point.x)), y = spread(points.flatMap((point) => [point.low, point.high]));
  const line = { x: "x", z: "line", stroke: "line" }, at = { x: ticks(x, room.x, plot.ticks), y: ticks(y, room.y, []) };
  const axis = { labelAnchor: "center", labelArrow: "none", text: (value) => told(value, 6) };
  const tip = (point) => `${point.line}\n${plot.x}: ${told(point.x)}\n${plot.y}: ${told(point.y)} (${told(point.low)} to ${told(point.high)})`;
  host.replaceChildren(make("h3", {}, plot.title), Plot.plot({
    width, height: PLOT_HEIGHT, marginLeft: LEFT, marginBottom: BELOW, marginTop: 12, marginRight: 28, className: "plot",
    ariaLabel: `${plot.title}: ${plot.y} over ${plot.x}`, style: { fontSize: "12px" },
    x: { type: "log", domain: x }, y: { type: "log", domain: y },
    color: { domain: names, range: d3.range(PLOT_COLOURS).map((number) => css(`--p${number}`)) }, symbol: { domain: names, legend: true },
    marks: [
      Plot.gridX(at.x), Plot.gridY(at.y), Plot.axisX(at.x, { ...axis, label: plot.x }), Plot.axisY(at.y, { ...axis, label: plot.y }),
      Plot.line(points, { ...line, y: "y", strokeWidth: 2 }), Plot.ruleX(points, { ...line, y1: "low", y2: "high" }),
      Plot.dot(points, { x: "x", y: "y", fill: "line", symbol: "line", r: 4.5 }),
      Plot.tip(points, Plot.pointer({ ...line, y: "y", title: tip })),
    ],
  }));
  // Its groups have names: they need a role to have them.
  for (const part of host.querySelectorAll("svg.plot, svg.plot [aria-label]")) part.setAttribute("role", part.tagName === "svg" ? "img" : "group");
}

async function begin() {
  const { plots } = await unpack(), hosts = plots.map(() => make("div", { class: "figure" }));
  by("plots").replaceChildren(...hosts);
  const drawAll = () => hosts.forEach((host, number) => draw(plots[number], host));
  let width = by("plots").clientWidth;
  new ResizeObserver(([{ contentRect }]) => { if (contentRect.width !== width) { width = contentRect.width; drawAll(); } }).observe(by("plots"));
  onThemeChange(drawAll);
  drawAll();
}

start(begin);
