// Rates of measured kernels under the ceilings of their GPU: Observable Plot draws them, in the colours of the theme.

const BOUNDS = ["compute", "memory", "launch"];

function drawRoofline(kernels, host) {
  // Kernels that compute nothing have no place on a logarithmic axis: the table has them.
  const points = kernels.filter((kernel) => kernel.flops > 0);
  if (!points.length) return;
  const unique = (key) => [...new Set(points.map((point) => point[key]))].sort((one, other) => one - other);
  const peaks = unique("peak_flops_per_s"), speeds = unique("peak_bytes_per_s"), highest = peaks.at(-1);
  const x = [Math.min(...points.map((point) => point.intensity)) / 2, Math.max(...points.map((point) => point.intensity), highest / speeds[0]) * 2];
  const y = [Math.min(...points.map((point) => point.flops_per_s)) / 2, Math.max(...points.map((point) => point.flops_per_s), highest) * 2];
  const rate = (value) => `${operations(value)}/s`;
  // A roof rises with the memory's speed up to the peak, and is level from there on.
  const roofs = [
    ...speeds.map((speed) => ({ name: `${size(speed)}/s`, ends: [[Math.max(x[0], y[0] / speed), Math.max(x[0] * speed, y[0])], [highest / speed, highest]], left: true })),
    ...peaks.map((peak) => ({ name: rate(peak), ends: [[peak / speeds.at(-1), peak], [x[1], peak]], left: false })),
  ];
  const ends = roofs.flatMap((roof) => roof.ends.map(([at, up]) => ({ name: roof.name, x: at, y: up })));
  const names = roofs.map((roof) => { const [at, up] = roof.ends[roof.left ? 0 : 1]; return { ...roof, x: at, y: up }; });
  const width = Math.max(host.clientWidth, 240), room = Math.max(3, Math.floor(width / 90));
  const most = Math.max(...points.map((point) => point.time_us * point.steps));
  const tip = (point) => `${point.op}\n${micros(point.time_us)} alone, ${plural(point.steps, "step")}\n${rate(point.flops_per_s)}, ${size(point.bytes_per_s)}/s\n`
    + `${+point.intensity.toPrecision(3)} FLOP per byte\n${Math.round(100 * point.share)} % of the roof, bound by ${point.bound}`;
  const label = { fill: "currentColor", stroke: css("--bg"), strokeWidth: 4, text: "name", x: "x", y: "y", dy: -7 };
  host.replaceChildren(Plot.plot({
    width, height: 360, marginLeft: 96, marginBottom: 44, marginTop: 14, marginRight: 28, className: "plot",
    ariaLabel: "Roofline: operations per second over operations per byte", style: { fontSize: "12px" },
    x: { type: "log", domain: x, label: "FLOP per byte", labelAnchor: "center", labelArrow: "none", ticks: room, tickFormat: (value) => +value.toPrecision(3), grid: true },
    y: { type: "log", domain: y, label: null, ticks: 6, tickFormat: rate, grid: true }, r: { domain: [0, most], range: [2, 9] },
    color: { domain: BOUNDS, range: BOUNDS.map((_, number) => css(`--p${number}`)) }, symbol: { domain: BOUNDS, legend: true },
    marks: [
      Plot.line(ends, { x: "x", y: "y", z: "name", stroke: "currentColor", strokeWidth: 1.5 }),
      Plot.text(names.filter((name) => name.left), { ...label, textAnchor: "start", dx: 4 }),
      Plot.text(names.filter((name) => !name.left), { ...label, textAnchor: "end" }),
      Plot.dot(points, { x: "intensity", y: "flops_per_s", fill: "bound", symbol: "bound", r: (point) => point.time_us * point.steps, fillOpacity: .8 }),
      Plot.tip(points, Plot.pointer({ x: "intensity", y: "flops_per_s", stroke: "bound", title: tip })),
    ],
  }));
  for (const part of host.querySelectorAll("svg.plot, svg.plot [aria-label]")) part.setAttribute("role", part.tagName === "svg" ? "img" : "group");
}
