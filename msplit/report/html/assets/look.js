// What all pages need: their data, and numbers, names and colours as people read them.

const by = (id) => document.getElementById(id);

async function unpack() {
  const bytes = Uint8Array.from(atob(by("data").textContent), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// Draws the page, or says why it can not.
async function start(begin) {
  try {
    await begin();
    document.documentElement.dataset.ready = "true";
  } catch (problem) {
    by("failure").hidden = false;
    by("failure").textContent = typeof DecompressionStream === "undefined"
      ? "This browser is too old to unpack the report: Chrome 80, Firefox 113, Safari 16.4 or newer can."
      : `The report could not be drawn: ${problem.message}`;
    console.error(problem);
  }
}

function micros(value) {
  if (value < 100) return `${+value.toPrecision(3)} µs`;
  if (value < 1000) return `${value.toFixed(0)} µs`;
  if (value < 1e6) return `${+(value / 1e3).toPrecision(3)} ms`;
  return `${+(value / 1e6).toPrecision(3)} s`;
}

function scaled(value, units) {
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) { value /= 1000; unit++; }
  return `${+value.toPrecision(3)} ${units[unit]}`;
}

const size = (value) => scaled(value, ["B", "KB", "MB", "GB", "TB"]);
const operations = (value) => scaled(value, ["FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP"]);
const counted = (value) => value.toLocaleString("en");
const plural = (value, word, many = `${word}s`) => `${counted(value)} ${value === 1 ? word : many}`;

// A name in one line of a box, or in two that part at a slash, of at most so many characters.
function folded(name, width) {
  const lines = [name.replaceAll(" ", "\u00a0")];
  if (name.length > width) {
    const slashes = [...name].flatMap((char, at) => (char === "/" && at < name.length - 1 ? [at + 1] : [])).reverse();
    const at = slashes.find((slash) => slash <= width && name.length - slash <= width) ?? slashes[0] ?? 0;
    lines.splice(0, 1, ...(at ? [lines[0].slice(0, at), lines[0].slice(at)] : lines));
  }
  return lines.map((line) => shorten(line, width));
}

function shorten(name, width) {
  if (name.length <= width) return name;
  const head = Math.floor((width - 1) / 2);
  return `${name.slice(0, head)}…${name.slice(name.length - (width - 1 - head))}`;
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Stream 0, the default, is grey; the fifteen others take turns, and every mark carries its number too.
const slot = (stream) => (stream <= 0 ? 0 : 1 + ((stream - 1) % 15));
const colour = (stream) => (stream < 0 ? css("--edge") : css(`--s${slot(stream)}`));

// Black or white, whichever reads better on a colour (WCAG relative luminance).
function ink(hex) {
  const channel = (at) => {
    const value = parseInt(hex.slice(at, at + 2), 16) / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  };
  const luminance = 0.2126 * channel(1) + 0.7152 * channel(3) + 0.0722 * channel(5);
  return luminance > 0.179 ? "#000000" : "#ffffff";
}

// An element with attributes, listeners ("onclick") and children. Names come from files: they only ever become text.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(element.style, value);
    else element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function chip(stream) {
  const fill = colour(stream);
  return make("span", { class: "chip", style: { background: fill, color: ink(fill) } }, `stream ${stream}`);
}

// The wheel scrolls the page, as everywhere; with Ctrl or ⌘ it zooms. (Browsers report a pinch on a touchpad as that, too.)
const zooms = (event) => event.ctrlKey || event.metaKey;

const onThemeChange = (react) => matchMedia("(prefers-color-scheme: dark)").addEventListener("change", react);
